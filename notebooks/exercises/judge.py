"""How the checkers of the exercises work: an answer is run with care, and judged in one sentence, never a traceback."""

import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import functools
import inspect
import io
import itertools
import logging
import math
import operator
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
from exercises import order

import lab
from cookbook import _host

# The package's kernels refuse to be traced for it outside of the interpreter, and are no answers.
NONE_OF_THE_PACKAGE = _host.Target("nothing", num_sms=1, interpreted=True)
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
    """Makes `check(answer)`, which returns praise or raises, return a Verdict whatever the answer does.

    A cell that starts empty ends in `check_double(globals().get("double"))`. While nothing is written there the verdict
    is the first sentence of the checker's docstring, which says what `answer(x)` must do.
    """

    @functools.wraps(check)
    def judged(answer) -> Verdict:
        if answer is None:
            name = check.__name__.removeprefix("check_")
            task = " ".join(check.__doc__.replace("`answer(", f"`{name}(").split())
            return Verdict(False, f"there is no `{name}` yet. Write it above the last line. {task}")
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
            why = "is there a loop that never ends, or is the machine busy?"
            return Verdict(False, f"{name} has not ended after {SECONDS} s: {why}")

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


def wide(*arrays):
    """The arrays in float64; one alone is not in a list."""
    found = [np.asarray(x, np.float64) for x in arrays]
    return found if len(found) > 1 else found[0]


def drawn(make, times: int = 8) -> list:
    """Cases that nobody knows beforehand, from `make(rng)`: a constant or a table of the others is wrong there."""
    rng = np.random.default_rng()
    return [make(rng) for _ in range(times)]


# Answers that are functions of numbers --------------------------------------------------------------------------------


def require_answers(answer, cases, right, likely=(), otherwise="", *, draw=None) -> None:
    """Raises NotYet unless `answer(*case)` is `right(*case)` in each of the cases.

    Args:
      likely: pairs of a wrong answer, or of the keywords with which `right` gives it, and of what is said if it
        explains everything that `answer` gives.
      otherwise: what is said of all others.
      draw: `draw(rng)` is one more case, a new one each time.
    """
    name, given, names = getattr(answer, "__name__", "it"), [], inspect.signature(right).parameters
    # So many that a constant is also wrong where the answers are yes and no: of eight, it is right once in 256 times.
    for case in (*cases, *(drawn(draw, 24) if draw else ())):
        before = copy.deepcopy(case)
        got, want = answer(*case), right(*copy.deepcopy(before))
        where = "for " + ", ".join(f"{key} = {_shown(x)}" for key, x in zip(names, before, strict=False))
        if got is None and want is not None:
            raise NotYet(f"{name} returns None {where}: write its body.")
        if _listed(case) != _listed(before):
            raise NotYet(f"{where}, {name} changes what it is given.")
        try:
            given.append((before, where, _formed(got, want), want))
        except (TypeError, ValueError) as error:
            raise NotYet(f"{where}, {name} gives {got!r}; it must be {_form(want)}.") from error
    for _, where, got, want in given:
        if not _is_same(got, want):
            wrongs = ((functools.partial(right, **wrong) if isinstance(wrong, dict) else wrong, text)
                      for wrong, text in likely)  # fmt: skip
            explains = lambda wrong: all(_is_same(got, wrong(*copy.deepcopy(case))) for case, _, got, _ in given)
            said = next((text for wrong, text in wrongs if explains(wrong)), otherwise)
            raise NotYet(f"{where}, {name} gives {_shown(got)}, and {_shown(want)} is right. {said}".strip())


def _shown(x) -> str:
    """One line for a number or for many."""
    text = " ".join(str(x).split())
    return text if len(text) < 100 else f"{text[:96]} ..."


def _listed(x):
    """Arrays as lists, so that values can be compared."""
    return [_listed(y) for y in x] if isinstance(x, tuple | list) else getattr(x, "tolist", lambda: x)()


def _form(want) -> str:
    if isinstance(want, tuple):
        return f"{len(want)} values: ({', '.join(map(_form, want))})"
    if isinstance(want, list):
        return "a list" + (f", each of them {_form(want[0])}" if want else "")
    names = (bool, "True or False"), (int, "a whole number"), (float, "a number"), (str, "a text")
    return next((name for kind, name in names if isinstance(want, kind)), repr(want))


def _formed(got, want):
    """`got` in the form of `want`. Raises TypeError or ValueError if it has another."""
    if isinstance(want, tuple | list):
        got = list(itertools.islice(got, 100_000))
        if isinstance(want, tuple) and len(got) != len(want):
            raise ValueError
        likes = want if isinstance(want, tuple) else itertools.repeat(want[0] if want else None)
        return type(want)(_formed(x, like) for x, like in zip(got, likes, strict=False))
    if want is None or got is None or isinstance(want, slice):
        return got
    if isinstance(got, bool | np.bool_) != isinstance(want, bool) or isinstance(got, str) != isinstance(want, str):
        raise TypeError
    return {bool: bool, int: operator.index, str: str}.get(type(want), float)(got)


def _is_same(got, want) -> bool:
    if isinstance(want, tuple | list):
        return len(got) == len(want) and all(map(_is_same, got, want))
    if got is None or want is None or isinstance(want, slice | str):
        return got == want
    return got == want or math.isclose(got, want, rel_tol=1e-6)


# Answers that are kernels ---------------------------------------------------------------------------------------------


def run_kernel(
    answer, *args, stand_ins=contextlib.nullcontext, launches=1, in_flight=None, copies=None, as_it_lies=False,
    report_first=False, undrained=None,
):  # fmt: skip
    """The result of `answer(*args)`, interpreted with race detection, after its order has been judged.

    Args:
      answer: a function that launches a kernel.
      args: its arguments.
      stand_ins: `stand_ins()` is a context in which it is interpreted: it puts something in the place of what the
        interpreter lacks.
      launches: how many kernels it must launch, or None if any number is right.
      in_flight: how many stages of a ring must be loaded or worked on at once, if the exercise asks for a ring.
      copies: the most copies that one block may start, if their number is the point: {"load": 2}, {"store": 1}.
      as_it_lies: whether XLA may change no shape, dtype or order of an array before or after the kernel either.
      report_first: whether the interpreter's report of races comes before what is said of the order, which names the
        remedy: for exercises on reading a report.
      undrained: what is said where a barrier completes more often than somebody waits for it.

    Raises NotYet if it launches no kernel, if a GPU's compiler would refuse it, if it races, fails or never ends, and
    for what the checks below do.
    """
    jaxpr = _compilable(answer, args, as_it_lies)
    played = order.play(jaxpr, args)
    checks = functools.partial(_require_all, played, launches, in_flight, copies or {})
    if not report_first:
        checks()
    try:
        with stand_ins():
            out, races = _interpreted(answer, args)
    except NotYet as problem:
        if undrained and "observed" in str(problem):
            raise NotYet(f"a barrier has a completion that nobody waits for: {undrained}") from None
        raise
    if undrained:
        require_drained(played, undrained)
    if races:
        raise NotYet(f"there is a race: {races[0]}. On a GPU the result may differ from run to run.")
    if report_first:
        checks()
    return out


def _compilable(answer, args, as_it_lies: bool = False):
    """The traced program of `answer(*args)`. Raises NotYet if it launches no kernel, if a GPU's compiler would refuse
    it, or if XLA computes something outside of it."""
    try:
        with _host.building_for(NONE_OF_THE_PACKAGE):
            traced = jax.jit(lambda *args: answer(*args)).trace(*args)
            jaxpr = traced.jaxpr.jaxpr
            outside = None
            if KERNELS & {equation.primitive.name for equation in equations(jaxpr)}:
                outside = _computed_outside(jaxpr, frozenset() if as_it_lies else MOVES)
            # Last, and only where it can still decide: lowering takes longer than all else.
            lowered = "" if outside else traced.lower(lowering_platforms=("cuda",)).as_text()
    except NotYet:  # Raised by the kernel that a checker puts around an answer.
        raise
    except Exception as error:
        if ready_made := re.match(r"(cookbook\.\w+)\S* is built for", str(error)):
            raise NotYet(
                f"{ready_made[1]} is the package's kernel: write one of your own, with plgpu.kernel"
            ) from error
        known = (said for part, said in MISTAKES.items() if part in str(error))
        raise NotYet(next(known, f"it cannot be compiled for a GPU: {_first_line(error)}")) from error
    if outside:
        raise NotYet(f"{outside} is computed outside of the kernel, by XLA: the kernel must do all of the work")
    if "mosaic_gpu" not in lowered:
        if not jax.tree.leaves(traced.out_info):  # The kernel may be there, but nothing uses its result.
            raise NotYet("it returns no array: return what the kernel returns")
        raise NotYet("the answer must be a kernel: call plgpu.kernel")
    return traced.jaxpr


def _require_all(played, launches, in_flight, copies) -> None:
    require_launches(played, launches)
    require_order(played)
    require_rings(played, in_flight)
    for kind, most in copies.items():
        require_copies(played, kind, most)


def require_order_of(answer, *avals, launches=1, in_flight=None) -> list[list[order.Block]]:
    """Judges a kernel as run_kernel does before it runs it, at a shape that would take too long to run: a ring
    refills no stage where K is short. Returns the kernels, played."""
    played = order.play(_compilable(answer, avals), avals)
    _require_all(played, launches, in_flight, {})
    return played


# The checks of a kernel's order. `played` is `play_kernel(answer, *args)`, as run_kernel has it.


def play_kernel(answer, *args) -> list[list[order.Block]]:
    """Each kernel that `answer(*args)` launches, played: its first, a middle and its last block, with what they start
    in which order (`Block.events`), for an exercise's own checks. Arrays of floats may be a `jax.ShapeDtypeStruct`."""
    with _host.building_for(NONE_OF_THE_PACKAGE):
        return order.play(jax.jit(lambda *args: answer(*args)).trace(*args).jaxpr, args)


def require_launches(played, num: int | None = 1) -> None:
    """Raises NotYet unless there are `num` kernels (None: any number)."""
    if num is not None and len(played) != num:
        raise NotYet(
            f"the answer launches {len(played)} kernels, and {num} {'is' if num == 1 else 'are'} asked for: what one "
            "kernel leaves for the next crosses memory twice"
        )


def require_order(played) -> None:
    """Raises NotYet if a GPU may do something too early that the interpreter does in time: a product reads a tile
    before its copy has arrived or before `commit_smem`; a stage is given back or loaded again while a product reads it
    (`wgmma_wait` too large for `delay_release`, `barrier_arrive` before `wgmma_wait`); a copy to GMEM starts before
    `commit_smem`, or its tile is overwritten before `wait_smem_to_gmem`."""
    for block in _blocks(played):
        if block.fault:
            raise NotYet(block.fault)


def require_loads_together(played) -> None:
    """Raises NotYet if a block waits for its first load from global memory before it has started the others."""
    for block in _blocks(played):
        loads = [event for event in block.events if event.kind == "load"]
        if any(loads[0].end & other.known for other in loads[1:]):
            raise NotYet("the second load starts only after a wait: start both first, so that they run at once")


def require_rings(played, in_flight: int | None = None) -> None:
    """Raises NotYet if an array with stages is used as if it had fewer: copies are waited for one by one. With
    `in_flight`, also if no array in shared memory has so many stages loaded or worked on at once."""
    for block in filter(lambda block: block.is_whole, _blocks(played)):
        for ring in block.rings:
            stages = len(ring.stages)
            if ring.is_idle or (ring.most >= stages and ring.later > 1):
                continue
            used = min(ring.most, max(ring.later, 1))
            raise NotYet(
                f"a ring of {stages} stages is used as if it had {used}: each copy is waited for before the next one "
                "has started. Start the copies of later steps first, as many as there are stages, and then wait for "
                "this step's"
            )
        loads = max((ring.loads for ring in block.rings), default=in_flight)  # A block may have few steps.
        if in_flight and max((ring.most for ring in block.rings), default=1) < min(in_flight, loads):
            raise NotYet(
                "this is no ring: nothing is loaded while a step is computed. Have "
                f"{in_flight} stages in use at once: start the copy of a later step before you wait for this one's"
            )


def require_drained(played, remedy: str) -> None:
    """Raises NotYet with `remedy` if a barrier completes more often than any warpgroup waits for it. Some versions of
    the interpreter find that, others do not."""
    if any(block.is_left_over for block in _blocks(played)):
        raise NotYet(f"a barrier has a completion that nobody waits for: {remedy}")


def require_copies(played, kind: str, most: int) -> None:
    """Raises NotYet if one block starts more than `most` copies of `kind`: "load" (to shared memory) or "store"."""
    for block in _blocks(played):
        if (count := block.count(kind)) > most:
            what = {"load": "copies to shared memory", "store": "copies to GMEM"}[kind]
            raise NotYet(
                f"a block starts {count} {what}, and {most} would do: TMA copies a whole tile at once, so copy each "
                "tile once, and no rows one by one"
            )


def require_turns(played, products: int, early: bool = False) -> None:
    """Raises NotYet unless the warpgroups that multiply take turns, of at most `products` products each: the first
    products of two warpgroups are ordered by barriers, and who comes first waits for the other before it goes on. If
    `early`, also where a turn is passed on only when its products have ended."""
    for block in _blocks(played):
        by_wg = collections.defaultdict(list)
        for event in block.events:
            if event.kind == "product":
                by_wg[event.wg].append(event)
        for pair in itertools.combinations(by_wg.values(), 2):
            first, second = pair if pair[0][0].start & pair[1][0].known else pair[::-1]
            if not first[0].start & second[0].known:
                raise NotYet(
                    "the warpgroups take no turns: no barrier orders their first products, so both may start theirs, "
                    "and then both are at their softmax, at the same time"
                )
            if (alone := sum(not second[0].start & event.known for event in first)) > products:
                raise NotYet(
                    f"warpgroup {first[0].wg} starts {alone} products in its first turn: pass the turn on after those "
                    f"of one step, {products} at most, so that the others multiply during its softmax"
                )
            if early and first[0].end & second[0].known:
                raise NotYet(
                    f"warpgroup {first[0].wg} keeps its turn until its products have ended: pass the turn on when you "
                    "have started them, before you wait for them, and so before the softmax"
                )


def _blocks(played):
    return itertools.chain.from_iterable(played)


def require_staged(answer, *args, loads: int) -> None:
    """Raises NotYet unless the kernel has `loads` copies to shared memory or more, and reads its inputs by no other
    way."""
    found = list(equations(jaxpr_of(answer, *args)))
    if sum(equation.primitive.name == "copy_gmem_to_smem" for equation in found) < loads:
        raise NotYet("what it reads must still be copied to shared memory: keep the copies, and fix what orders them")
    if any(equation.primitive.name in ("get", "load") and "gmem" in str(equation.invars[0].aval) for equation in found):
        raise NotYet("it reads an input in global memory: keep the copies, and use what they bring to shared memory")


def jaxpr_of(answer, *args):
    """The program of `answer(*args)`. Raises NotYet if it launches no kernel."""
    jaxpr = jax.make_jaxpr(lambda *args: answer(*args))(*args).jaxpr
    if not KERNELS & {equation.primitive.name for equation in equations(jaxpr)}:
        raise NotYet("the answer must be a kernel: call plgpu.kernel")
    return jaxpr


def equations(jaxpr):
    """Every equation of a jaxpr and of those inside of it, in their order."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from equations(inner)


def repeated(jaxpr, times: float = 1):
    """Every equation of a jaxpr and of those inside of it, and how often it runs: as often as the loops around it, inf
    in a loop of unknown length."""
    for equation in jaxpr.eqns:
        yield equation, times
        loops = math.inf if equation.primitive.name == "while" else 1
        if equation.primitive.name == "scan":
            loops = equation.params["length"]
        values = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
        for inner in (getattr(value, "jaxpr", value) for value in values):
            if hasattr(inner, "eqns"):
                yield from repeated(inner, times * loops)


def loads(jaxpr) -> list[tuple[int, float]]:
    """(values, how often) of each load of a block from global memory, to registers or to shared memory."""
    found = []
    for equation, times in repeated(jaxpr):
        name = equation.primitive.name
        if name in ("get", "load") and "gmem" in str(equation.invars[0].aval):
            found.append((math.prod(equation.outvars[0].aval.shape), times))
        elif name == "copy_gmem_to_smem":
            found.append((math.prod(equation.invars[1].aval.shape), times))
    return found


def values_loaded(jaxpr) -> int:
    """Values that a block loads from global memory."""
    total = sum(values * times for values, times in loads(jaxpr))
    if total == math.inf:
        raise NotYet("it loads in a loop of unknown length: load each value once, in loops of known length")
    return total


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


MISTAKES = {  # A part of JAX's message, and what its author has probably done.
    "is not a valid JAX type": "it returns no array: call what plgpu.kernel(...) returns with the inputs",
    "'AbstractRef' object has no attribute": "a ref is used as if it were an array: read it with [...] first",
}
KERNELS = {"core_map", "mpmd_map", "pallas_call", "run_state"}
# Operations that change a shape, a view or a dtype, and compute nothing.
MOVES = {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "slice", "squeeze", "transpose"}
REFS = {"empty_ref", "freeze", "get", "new_ref", "ref_get", "ref_set", "swap"}


def _computed_outside(jaxpr, moves=MOVES) -> str | None:
    """The first operation beside kernels and `moves`, if there is one."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in KERNELS | moves | REFS:
            continue
        called = [getattr(value, "jaxpr", value) for value in equation.params.values()]  # As a jitted function has.
        called = [value for value in called if hasattr(value, "eqns")]
        if not called:
            return name
        if outside := next(filter(None, (_computed_outside(inner, moves) for inner in called)), None):
            return outside
    return None


def require_close(out, exact, tolerance: float, what: str, likely=()) -> None:
    """Raises NotYet, naming the first wrong element, if `out` is not `exact` (float64) within relative `tolerance`.
    Where `exact` is NaN or infinite, `out` must be the same. `likely` has pairs of a wrong result, and what is said of
    it."""
    if out.shape != exact.shape:
        raise NotYet(f"{what}: the result has shape {out.shape}; it must be {exact.shape}")
    out, exact = wide(out, exact)
    wrong = _differ(out, exact, tolerance)
    if not wrong.any():
        return
    for other, said in likely:
        if other.shape == out.shape and not _differ(out, wide(other), max(tolerance, 1e-3)).any():
            raise NotYet(f"{what}: {said}")
    if (unset := np.isnan(out) & ~np.isnan(exact)).any():
        raise NotYet(f"{what}: {unset.sum()} of {out.size} elements were never written, {_first(unset)} is the first")
    at = _first(wrong)
    raise NotYet(f"{what}: element {at} is {out[at]:.4g}; it must be {exact[at]:.4g}")


def _differ(out, exact, tolerance: float):
    """Where `out` is not `exact`."""
    is_finite = np.isfinite(exact)
    size = np.sqrt(np.mean(exact[is_finite] ** 2)) if is_finite.any() else 0.0
    with np.errstate(invalid="ignore"):
        close = np.abs(out - exact) <= tolerance * np.maximum(np.abs(exact), size)
    return ~np.where(is_finite, close, (out == exact) | (np.isnan(out) & np.isnan(exact)))


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
