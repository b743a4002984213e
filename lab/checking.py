"""One call that says whether a kernel is right, and what that verdict does not cover."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

from cookbook import _device

from . import interpreter, results
from .compiling import Compiled, compile_for, name_of
from .toolchain import ToolchainMissing

GPU_RUNS = 5  # A race that shows at all shows in a few runs: a WGMMA operand overwritten in flight, in 20 of 20.
ON_CPU_MAX = 2**18  # Elements of the largest argument whose reference the CPU computes, and which it interprets.
_WIDTH = 98  # Columns of the printed table.


class CheckError(AssertionError):
    """Names what `check` found wrong."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of the table. `verdict` is "ok", "FAILED", or "-" for a fact that is neither right nor wrong."""

    name: str
    verdict: str
    text: str


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Result of `check`: `items` are the lines that it printed."""

    name: str
    items: tuple[Item, ...]
    output: object = dataclasses.field(repr=False)  # The kernel's result; None where it did not run.
    compiled: Compiled | None = dataclasses.field(repr=False)

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(f"{item.name}: {item.text}" for item in self.items if item.verdict == "FAILED")

    def __str__(self) -> str:
        lines = [f"check {self.name}"]
        for item in self.items:
            words, start = item.text.split(), f"  {item.name:<13} {item.verdict:<6} "
            for word in words:
                if len(start) + len(word) > _WIDTH:
                    lines.append(start.rstrip())
                    start = " " * 23
                start += word + " "
            lines.append(start.rstrip())
        return "\n".join(lines)

    def _ipython_display_(self):
        """Nothing: `check` has printed the table, and a notebook would show it again below."""


def check(
    fn, reference, *args, tolerance: float | tuple | None = None, gpu: str | None = "h200", is_ordered: bool = True
) -> CheckReport:
    """Runs `fn(*args)`, compares it with `reference(*args)` at float64, and compiles it; prints a table.

    It runs on the GPU where there is one, no older than `gpu`, with outputs in memory freed full of NaN, which the
    allocator is likely, not certain, to hand out again. It runs in the interpreter too, with outputs that start as NaN:
    that finds its races. (On a GPU host it leaves that out for arguments of more than `ON_CPU_MAX` elements.)

    The error of each output is its relative Frobenius distance from the float64 reference. It may be 1.5 times that of
    the reference computed at the arguments' own dtypes and rounded to the output's, and never needs to be less than a
    quarter of the output dtype's epsilon or 4 of float32's. No element may be off by more than ten times that share of
    the largest. Integers must be equal. NaN and infinities must be where the reference has them. The CPU computes the
    references of small arguments, on a GPU host too.

    Args:
      fn: launches at least one `plgpu.kernel`.
      reference: a `jnp` function of the same arguments and the same output pytree, that computes in at least float32
        (`jnp.promote_types(x.dtype, jnp.float32)`) so that it is exact enough when given float64.
      args: arrays, or pytrees of them.
      tolerance: an error limit that replaces the above; a tuple has one for each output, None for the above.
      gpu: what to compile for, "h200" or "b200". None: nothing is compiled, and the table says so. That suits a shape
        more of a kernel that has been compiled already.
      is_ordered: whether runs of the same input must be equal to the bit. False: for sums that blocks of a grid add up
        in memory, in any order.

    Raises:
      CheckError: something failed; the table says what, and so does the message.

    A kernel that deadlocks fails its check when interpreted; on a GPU it hangs, and this call with it: give cells and
    tests a timeout.
    """
    items, out = _run(fn, args, gpu, is_ordered)
    if out is not None:
        items += _compare(out, reference, args, tolerance)
    compile_items, compiled = _compile(fn, args, gpu)
    items += compile_items
    unseen = "whether WGMMA's operands have arrived, and how long it reads them; "
    if gpu == "b200":  # The interpreter does see that of tcgen05.
        unseen = ""
    items.append(Item("not seen", "-", unseen + "races between the blocks of a grid; wrong multicasts; other shapes"))
    leaves = ", ".join(_aval(leaf) for leaf in jax.tree.leaves(args))
    report = CheckReport(f"{name_of(fn)}({leaves})", tuple(items), out, compiled)
    print(report)
    if report.failed:
        raise CheckError(f"{name_of(fn)} failed its check.\n" + "\n".join(report.failed))
    return report


def _run(fn, args, gpu: str | None = None, is_ordered: bool = True) -> tuple[list[Item], object]:
    """Runs the kernel. Returns what to say of that and of races, and the output, None if there is none."""
    jitted = jax.jit(lambda *args: fn(*args))  # A jit of its own: nothing traced earlier, for another place, is reused.
    is_on_gpu = interpreter.on_gpu(gpu or "h200")
    try:
        if is_on_gpu:
            # Compiled first: what compiling allocates could take the poisoned memory from the outputs.
            compiled = jitted.lower(*args).compile()
            outs = [_run_poisoned(compiled, args) for _ in range(GPU_RUNS)]
            where = jax.devices()[0].device_kind
        else:
            with interpreter._interpret() as seen:
                outs = [jax.block_until_ready(jitted(*args))]
            where = "the GPU interpreter, on a CPU"
    except Exception as error:
        return [Item("runs", "FAILED", _brief(error))], None
    items = [Item("runs", "ok", where)]
    if not is_on_gpu:
        return items + _races(seen.races), outs[0]
    if all(_bits(out) == _bits(outs[0]) for out in outs[1:]):  # As those of a race may be.
        return items + _races_at_home(fn, args, f"{GPU_RUNS} equal runs"), outs[0]
    if is_ordered:
        items.append(Item("races", "FAILED", f"{GPU_RUNS} runs of the same input differ"))
        return items + [item for item in _races_at_home(fn, args, "") if item.verdict == "FAILED"], outs[0]
    return items + _races_at_home(fn, args, f"{GPU_RUNS} runs differ"), outs[0]


def _races(found: tuple[str, ...], and_runs: str = "") -> list[Item]:
    if found:
        return [Item("races", "FAILED", race) for race in found]
    return [Item("races", "ok", "none among the warpgroups, copies and barriers of a block or cluster" + and_runs)]


def _races_at_home(fn, args, runs: str) -> list[Item]:
    """Races that the interpreter finds, on the CPU of a GPU host; not in tests, which look for them without a GPU."""
    cpu = _cpu()
    if not _is_small(args):
        text = f"not checked: the interpreter takes long for arrays of more than {ON_CPU_MAX:,} elements; {runs}"
        return [Item("races", "-", text)]
    if cpu is None or not results.measuring():
        return [Item("races", "-", f"not checked, which the interpreter does; {runs}")]
    try:
        with jax.default_device(cpu), interpreter._interpret() as seen:
            jax.block_until_ready(jax.jit(lambda *args: fn(*args))(*jax.device_put(args, cpu)))
    except Exception as error:
        return [Item("races", "FAILED", f"in the interpreter: {_brief(error)}")]
    return _races(seen.races, f"; {runs} on the GPU")


def _is_small(args) -> bool:
    return all(np.size(leaf) <= ON_CPU_MAX for leaf in jax.tree.leaves(args))


def _cpu():
    """The CPU as a device of JAX's; None where JAX_PLATFORMS names the GPU alone."""
    with contextlib.suppress(RuntimeError):
        return jax.devices("cpu")[0]
    return None


def _run_poisoned(compiled, args):
    """Runs where memory just freed is full of NaN, so that an output left unwritten shows."""
    poison = [
        np.full(leaf.shape, np.nan if jnp.issubdtype(leaf.dtype, jnp.inexact) else 85, leaf.dtype)
        for leaf in jax.tree.leaves(compiled.out_info)
    ]
    poison = jax.block_until_ready(jax.device_put(poison))  # Filled on the host: there nothing is compiled.
    del poison
    return jax.block_until_ready(compiled(*args))


def _bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def _compare(out, reference, args, tolerance) -> list[Item]:
    """One line for each output leaf."""
    limits = tolerance if isinstance(tolerance, tuple) else (tolerance,) * len(jax.tree.leaves(out))
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, _compute(reference, jax.tree.map(_to_float64, args)))
    if jax.tree.structure(out) != jax.tree.structure(exact):
        found, wanted = jax.tree.structure(out), jax.tree.structure(exact)
        return [Item("result", "FAILED", f"the kernel returns {found}, the reference {wanted}")]
    # The reference at the arguments' own dtypes, where an error of its own decides.
    rounded = _compute(reference, args) if None in limits else exact
    leaves = [jax.tree.leaves(tree) for tree in (out, exact, rounded)]
    return [_compare_leaf(*leaf) for leaf in zip(*leaves, limits, strict=True)]


def _compute(reference, args):
    """`reference(*args)`, compiled as a whole, which is quicker than each operation by itself. The CPU computes a small
    one: XLA compiles sooner for it."""
    if jax.default_backend() == "gpu" and _is_small(args) and (cpu := _cpu()) is not None:
        args = jax.device_put(args, cpu)
    try:
        return jax.jit(reference)(*args)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return reference(*args)  # It is NumPy's, or looks at values.


def _compare_leaf(out, exact: np.ndarray, rounded, tolerance) -> Item:
    name, dtype = _aval(out), out.dtype
    if out.shape != exact.shape:
        return Item("result", "FAILED", f"{name} has not the shape {exact.shape} of the reference's")
    if not jnp.issubdtype(dtype, jnp.inexact):
        wrong = np.asarray(out) != exact
        if wrong.any():
            return Item("result", "FAILED", f"{name}: {wrong.sum()} elements differ, {_first(wrong, out, exact)}")
        return Item("result", "ok", f"{name} equals the reference")
    with np.errstate(over="ignore", invalid="ignore"):  # Too large a value is infinite in `shown`.
        rounded, shown = np.asarray(rounded).astype(dtype), exact.astype(np.float32).astype(dtype)
    out, rounded, shown = (np.asarray(x, np.float64) for x in (out, rounded, shown))
    wrong = ~((np.isfinite(out) & np.isfinite(shown)) | (out == shown) | (np.isnan(out) & np.isnan(shown)))
    if wrong.any():
        unduly = wrong & np.isfinite(shown)
        text = "are NaN or infinite and should not be (never written, or made of what lies beyond the input?)"
        if not unduly.any():
            text, unduly = "are not NaN or infinite as the reference is", wrong
        return Item(
            "result", "FAILED", f"{name}: {unduly.sum()} of {out.size} elements {text}: {_first(unduly, out, shown)}"
        )
    finite = np.isfinite(shown)
    out, rounded, exact = (np.where(finite, x, 0.0) for x in (out, rounded, exact))
    scale, largest = np.linalg.norm(exact) or 1.0, np.abs(exact).max(initial=0.0) or 1.0
    error = np.linalg.norm(out - exact) / scale
    if tolerance is None:
        floor = max(float(jnp.finfo(dtype).eps) / 4, 4 * float(jnp.finfo(jnp.float32).eps))
        tolerance = max(1.5 * np.linalg.norm(rounded - exact) / scale, floor)
    if not error <= tolerance:
        worst = np.abs(out - exact) == np.abs(out - exact).max()
        text = f"{name}: error {error:.1e} exceeds {tolerance:.1e}; at worst {_first(worst, out, exact)}"
        return Item("result", "FAILED", text)
    wrong = np.abs(out - exact) > 10 * tolerance * largest
    if wrong.any():
        text = f"{name}: {wrong.sum()} of {wrong.size} elements are far off, {_first(wrong, out, exact)}"
        return Item("result", "FAILED", text)
    return Item("result", "ok", f"{name}: error {error:.1e}, limit {tolerance:.1e}")


def _compile(fn, args, gpu: str | None) -> tuple[list[Item], Compiled | None]:
    """The compiler's facts, a line each, and the compiled kernel, if there is one."""
    if gpu is None:
        return [Item("compiles", "-", "not tried: gpu=None")], None
    try:
        compiled = compile_for(gpu, fn, *args)
    except ToolchainMissing as error:
        return [Item("compiles", "-", f"not tried: {error}")], None
    except Exception as error:
        return [Item("compiles", "FAILED", f"{gpu}: {_brief(error)}")], None
    spill = f"{compiled.spill_bytes} bytes spilled" if compiled.spill_bytes else "no spill"
    items = [
        Item("compiles", "ok", f"{gpu}: {compiled.registers} registers per thread, {spill}"),
        Item("shared memory", "ok", f"{compiled.smem_bytes:,} of {_device.SMEM_BYTES_MAX:,} bytes per block"),
    ]
    return items + [Item("ptxas remarks", "-", remark) for remark in compiled.remarks], compiled


def _to_float64(leaf):
    return jax.device_put(np.asarray(leaf, np.float64)) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf


def _first(wrong: np.ndarray, out, exact) -> str:
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{list(index)} is {float(out[index]):.4g} in place of {float(exact[index]):.4g}"


def _aval(leaf) -> str:
    return jax.typeof(leaf).str_short(short_dtypes=True)


def _brief(error: Exception) -> str:
    """The first lines of a message. JAX appends its stack to some; of an interpreted kernel it shows a stack first."""
    message = f"{type(error).__name__}: {str(error).strip()}"
    return re.split(r"\n(?=\w+(?:Error|Exception): )", message)[-1][:1000]
