"""How the checkers of the exercises work: an answer is run with care, and judged in one sentence, never a traceback."""

import contextlib
import contextvars
import dataclasses
import functools
import io
import logging
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np

from cookbook import lab

SECONDS = 30  # An interpreted kernel that takes longer loops for ever: a wait for ever is found at once.


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of a checker, shown as the last line of a notebook cell."""

    passed: bool
    text: str

    def __bool__(self):
        return self.passed

    def __repr__(self):
        return f"{'Right.' if self.passed else 'Not yet:'} {self.text}"


class NotYet(Exception):
    """Raised with what is wrong with an answer, said to its author."""


def checker(check):
    """Makes `check(answer)`, which returns praise or raises, return a Verdict whatever the answer does."""

    @functools.wraps(check)
    def judged(answer) -> Verdict:
        try:
            return Verdict(True, check(answer))
        except NotYet as problem:
            return Verdict(False, str(problem))
        except Exception as error:  # The answer is anybody's code.
            return Verdict(False, f"{getattr(answer, '__name__', 'it')} raised {_first_line(error)}")

    return judged


def normal(seed: int, shape, dtype=np.float32):
    """Random normal values, the same on every machine, in no way symmetric in the axes."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def run_kernel(answer, *args):
    """The result of `answer(*args)`, interpreted with race detection.

    Raises NotYet if it launches no kernel, if a GPU's compiler would refuse it, if it races, fails or never ends.
    """
    try:
        lowered = jax.jit(lambda *args: answer(*args)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    except Exception as error:
        if ready_made := re.match(r"(cookbook\.\w+)\S* is a GPU kernel", str(error)):
            raise NotYet(
                f"{ready_made[1]} is the package's kernel: write one of your own, with plgpu.kernel"
            ) from error
        raise NotYet(f"it cannot be compiled for a GPU: {_first_line(error)}") from error
    if "mosaic_gpu" not in lowered:
        raise NotYet("the answer must be a kernel: call plgpu.kernel")
    if outside := _computed_outside(jax.make_jaxpr(lambda *args: answer(*args))(*args).jaxpr):
        raise NotYet(f"{outside} is computed outside of the kernel, by XLA: the kernel must do all of the work")
    out, races = _interpreted(answer, args)
    if races:
        raise NotYet(f"there is a race: {races[0]}. On a GPU the result may differ from run to run.")
    return out


KERNELS = {"core_map", "mpmd_map", "pallas_call", "run_state"}
# Operations that change a shape, a view or a dtype, and compute nothing.
MOVES = {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "slice", "squeeze", "transpose"}
REFS = {"empty_ref", "freeze", "get", "new_ref", "ref_get", "ref_set", "swap"}


def _computed_outside(jaxpr) -> str | None:
    """The first operation beside kernels that computes something, if there is one."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in KERNELS | MOVES | REFS:
            continue
        called = [getattr(value, "jaxpr", value) for value in equation.params.values()]  # Of a jitted function, say.
        called = [value for value in called if hasattr(value, "eqns")]
        if not called:
            return name
        if outside := next(filter(None, map(_computed_outside, called)), None):
            return outside
    return None


def require_close(out, exact, tolerance: float, what: str) -> None:
    """Raises NotYet, naming the first wrong element, if `out` is not `exact` (float64) within relative `tolerance`."""
    if out.shape != exact.shape:
        raise NotYet(f"{what}: the result has shape {out.shape}; it must be {exact.shape}")
    out, exact = np.asarray(out, np.float64), np.asarray(exact, np.float64)
    if (unset := np.isnan(out) & ~np.isnan(exact)).any():
        raise NotYet(f"{what}: {unset.sum()} of {out.size} elements were never written, {_first(unset)} is the first")
    wrong = np.abs(out - exact) > tolerance * np.maximum(np.abs(exact), np.sqrt(np.mean(exact**2)))
    if wrong.any():
        at = _first(wrong)
        raise NotYet(f"{what}: element {at} is {out[at]:.4g}; it must be {exact[at]:.4g}")


def _interpreted(answer, args):
    """(result, races). In a thread of its own, because nothing else can be done about a loop that never ends."""
    done = {}

    def run():
        try:
            with lab.interpret() as seen:
                out = jax.block_until_ready(answer(*args))
            done.update(out=out, races=seen.races)
        except Exception as error:
            done["error"] = error

    logging.disable(logging.ERROR)  # JAX logs a failing kernel's traceback; one sentence is enough here.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    with contextlib.redirect_stdout(io.StringIO()):  # `interpret` prints the race; the verdict will name it.
        thread.start()
        thread.join(SECONDS)
    logging.disable(logging.NOTSET)
    if not done:
        raise NotYet(
            f"the kernel has not ended after {SECONDS} s: is there a loop that never ends? "
            "Restart the notebook's kernel (Kernel, Restart) before you go on."
        )
    if "error" in done:
        if isinstance(done["error"], lab.Deadlock):
            raise NotYet(f"the kernel would never end: {' '.join(str(done['error']).split())}")
        if "Out-of-bounds" in str(done["error"]):
            raise NotYet("the kernel reaches beyond the end of the array")
        *_, cause = str(done["error"]).strip().splitlines() or [""]  # Before it, the interpreter's stack.
        is_callback = "CpuCallback" in str(done["error"])
        raise NotYet(f"the kernel raised {cause if is_callback else _first_line(done['error'])}")
    return done["out"], done["races"]


def _first(wrong) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
