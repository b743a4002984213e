"""How the checkers of the exercises work: an answer is run with care, and judged in one sentence, never a traceback."""

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import io
import logging
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np

from cookbook import _mgpu, lab

# The package's kernels refuse to be traced for it outside of the interpreter, and are no answers.
NONE_OF_THE_PACKAGE = _mgpu.Target("nothing", num_sms=1, interpreted=True)
SECONDS = 20  # An answer that takes longer loops for ever: a wait for ever is found at once.


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


class OutOfTime(BaseException):
    """Raised in the thread of an answer that does not end. No `except Exception` of the answer catches it."""


def checker(check):
    """Makes `check(answer)`, which returns praise or raises, return a Verdict whatever the answer does."""

    @functools.wraps(check)
    def judged(answer) -> Verdict:
        name = getattr(answer, "__name__", "it")

        def judge() -> Verdict:
            try:
                return Verdict(True, check(answer))
            except NotYet as problem:
                return Verdict(False, str(problem))
            except Exception as error:  # The answer is anybody's code.
                return Verdict(False, f"{name} raised {_first_line(error)}")

        try:
            return _in_time(judge)
        except OutOfTime:
            return Verdict(False, f"{name} has not ended after {SECONDS} s: is there a loop that never ends?")

    return judged


def _in_time(fn):
    """`fn()`, in a thread of its own that is stopped after `SECONDS`. Raises OutOfTime."""
    done = []

    def run():
        with contextlib.suppress(OutOfTime):
            done.append(fn())

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(SECONDS)
    if not done:
        _stop(thread)
        raise OutOfTime
    return done[0]


def _stop(thread, tries: int = 30):
    """Raises OutOfTime at the thread's next line of Python, until it ends: in a callback of JAX's C++ an exception is
    lost, and the loop would go on for as long as the process. A thread that waits in C goes on."""
    for _ in range(tries):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(OutOfTime))
        thread.join(0.1)
        if not thread.is_alive():
            return


def normal(seed: int, shape, dtype=np.float32):
    """Random normal values, the same on every machine, in no way symmetric in the axes."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def drawn(make, times: int = 8) -> list:
    """Cases that nobody knows beforehand, from `make(rng)`: a constant or a table of the others is wrong there."""
    rng = np.random.default_rng()
    return [make(rng) for _ in range(times)]


def run_kernel(answer, *args, stand_ins=contextlib.nullcontext):
    """The result of `answer(*args)`, interpreted with race detection.

    `stand_ins()` is a context in which it is interpreted: it puts something in the place of what the interpreter lacks.

    Raises NotYet if it launches no kernel, if a GPU's compiler would refuse it, if it races, fails or never ends.
    """
    try:
        with _mgpu.building_for(NONE_OF_THE_PACKAGE):
            lowered = jax.jit(lambda *args: answer(*args)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    except Exception as error:
        if ready_made := re.match(r"(cookbook\.\w+)\S* is built for", str(error)):
            raise NotYet(
                f"{ready_made[1]} is the package's kernel: write one of your own, with plgpu.kernel"
            ) from error
        raise NotYet(f"it cannot be compiled for a GPU: {_first_line(error)}") from error
    if "mosaic_gpu" not in lowered:
        raise NotYet("the answer must be a kernel: call plgpu.kernel")
    if outside := _computed_outside(jax.make_jaxpr(lambda *args: answer(*args))(*args).jaxpr):
        raise NotYet(f"{outside} is computed outside of the kernel, by XLA: the kernel must do all of the work")
    with stand_ins():
        out, races = _interpreted(answer, args)
    if races:
        raise NotYet(f"there is a race: {races[0]}. On a GPU the result may differ from run to run.")
    return out


def speed(answer, package_kernel, *avals) -> str:
    """How long `answer` takes beside the package's kernel: the end of a verdict on a GPU, empty without one.

    Args:
      answer: a kernel that was found right.
      package_kernel: the package's kernel of the same arguments.
      avals: arguments large enough to time; a ShapeDtypeStruct is filled with random normal values.
    """
    if not lab.on_gpu():
        return ""
    keys = jax.random.split(jax.random.key(0), len(avals))
    args = [
        jax.random.normal(key, aval.shape, aval.dtype) if isinstance(aval, jax.ShapeDtypeStruct) else aval
        for key, aval in zip(keys, avals, strict=True)
    ]
    yours, ours = (lab.measure(lambda *args, fn=fn: fn(*args), *args).median_ms for fn in (answer, package_kernel))
    return f" On this GPU it takes {yours:.3g} ms; the package's kernel takes {ours:.3g} ms."


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
        called = [getattr(value, "jaxpr", value) for value in equation.params.values()]  # As a jitted function has.
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
    """(result, races)."""
    logging.disable(logging.ERROR)  # JAX logs a failing kernel's traceback; one sentence is enough here.
    try:
        # `interpret` prints the race; the verdict will name it.
        with contextlib.redirect_stdout(io.StringIO()), lab.interpret() as seen:
            return jax.block_until_ready(answer(*args)), seen.races
    except lab.Deadlock as error:
        raise NotYet(f"the kernel would never end: {' '.join(str(error).split())}") from error
    except Exception as error:
        if "Out-of-bounds" in str(error):
            raise NotYet("the kernel reaches beyond the end of the array") from error
        *_, cause = str(error).strip().splitlines() or [""]  # Before it, the interpreter's stack.
        is_callback = "CpuCallback" in str(error)
        raise NotYet(f"the kernel raised {cause if is_callback else _first_line(error)}") from error
    finally:
        logging.disable(logging.NOTSET)


def _first(wrong) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
