"""One case: drawn, run twice, and compared with NumPy in float64; without a GPU also lowered or compiled for one."""

import dataclasses
import json
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import lab
from cookbook import _host
from lab import checking

H200 = _host.Target("h200", num_sms=132)
F32 = 2.0**-23
STEP = 2.0**-10  # Half the width of a central difference, as a share of the values' size.


@dataclasses.dataclass(frozen=True)
class Op:
    """How an op is fuzzed. `reference` shares no code with the package: it gets and returns NumPy arrays."""

    draw: Callable  # (Draw) -> a case: what JSON can hold.
    arrays: Callable  # (case, Values) -> the operands by name.
    call: Callable  # (case, **operands) -> arrays, inside `jax.jit`.
    reference: Callable  # (case, **operands, floats as float64) -> for each result (exact, slack).
    refuses: Callable = lambda case: None  # (case) -> the words of the ValueError that a stated rule demands, or None.
    gradients: tuple[str, ...] = ()  # Operands in which it is differentiable.


class Draw:
    """Draws the parts of a case. On a GPU sizes are `large`; interpreted ones are small, or a `share` of that."""

    def __init__(self, rng: np.random.Generator, large: bool = False, share: float = 1.0):
        self.rng, self.large, self.share = rng, large, share

    def choice(self, *options):
        return options[self.rng.integers(len(options))]

    def sometimes(self, share: float = 0.5) -> bool:
        return bool(self.rng.random() < share)

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def size(self, most: int, unit: int = 1, zero: float = 0.02, large: int = 8) -> int:
        """Often at an edge: 0 or one unit, a power of 2, a unit beside it, or 3, 5 or 7 times one; otherwise any. On a
        GPU `large` times."""
        most = max(1, int(most * self.share * (large if self.large else 1)) // unit)
        if self.sometimes(zero):
            return 0
        power = 2 ** self.number(0, int(math.log2(most)))
        odd = self.choice(3, 5, 7) * 2 ** self.number(0, int(math.log2(max(1, most // 7))))
        count = self.choice(1, power, power - 1, power + 1, odd, odd, *[self.number(1, most)] * 4)
        return unit * min(max(count, 1), most)


class Values:
    """Arrays of random values, the same for the same seed."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def __call__(self, shape, dtype="float32", kind: str = "normal", scale: float = 1.0):
        """`kind`: normal, zeros, huge, tiny, or the name of a value that a few of the normal ones become."""
        dtype = jnp.dtype(dtype)
        if jnp.issubdtype(dtype, jnp.integer):
            info = jnp.iinfo(dtype)
            low, high = (info.min, info.max) if kind == "huge" else (max(-100, info.min), 100)
            return self.rng.integers(low, high, shape, endpoint=True, dtype=np.int64).astype(dtype)
        x = np.asarray(self.rng.standard_normal(shape) * scale)
        if kind in ("huge", "tiny"):
            power = {2: 6, 4: 30}[dtype.itemsize] if dtype != jnp.bfloat16 else 30
            x = x * 2.0 ** (power if kind == "huge" else -power)
        elif kind == "zeros":
            x = x * 0.0
        elif kind in ("nan", "inf", "-inf", "infs") and x.size:
            special = [math.inf, -math.inf] if kind == "infs" else [float(kind)]
            np.put(x, self.rng.integers(x.size, size=2), special)
        elif kind == "-inf rows" and x.size:
            x[..., self.rng.integers(x.shape[-1]) :] = -math.inf  # And a row of nothing else:
            x.reshape(-1, x.shape[-1])[self.rng.integers(x.size // x.shape[-1])] = -math.inf
        with np.errstate(over="ignore"):
            return x.astype(dtype)


def text(op: str, case: dict) -> str:
    return f"{op} {json.dumps(case)}"


def operands(op: Op, case: dict) -> dict:
    return op.arrays(case, Values(case["seed"]))


def run(op: Op, case: dict, compiles: bool = False) -> str | None:
    """The fault of a case, in words; None if nothing is, "refused" if its ValueError is one that a rule demands.

    Without a GPU the case is lowered for an H200 too, or compiled: the interpreter takes layouts that Mosaic refuses. A
    case that is `lowered_only` is too large to be interpreted.
    """
    given = operands(op, case)
    call, given_as = _seen_through(op, case, given)
    rule, runs = op.refuses(case), lab.on_gpu() or not case.get("lowered_only")
    try:
        _for_an_h200(call, given_as, compiles and "devices" not in case)
        outs = _twice(call, given_as) if runs else []
    except ValueError as error:
        if rule and rule in str(error):
            return "refused"
        return f"refused, and no rule says so: {error}" if not rule else f"says not {rule!r}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[-600:]}"
    if isinstance(outs, str):
        return outs
    if rule:
        return f"was not refused; its rule: {rule}"
    if not runs:
        return _gradients(op, case, given, compiles) if case.get("grad") else None
    with np.errstate(all="ignore"):
        wanted = op.reference(case, **{name: _exact(x) for name, x in given.items()})
    if len(outs) != len(wanted):
        return f"{len(outs)} results in place of {len(wanted)}"
    faults = [compare(out, *want) for out, want in zip(outs, wanted, strict=True)]
    if fault := next(filter(None, faults), None):
        return f"result {faults.index(fault)} of {len(faults)}: {fault}"
    return _gradients(op, case, given, compiles) if case.get("grad") else None


def _for_an_h200(fn, arrays, compiles: bool):
    """Lowers `fn` of these arrays for an H200, where there is no GPU that compiles it anyway, or compiles it."""
    if lab.on_gpu():
        return
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    with _host.building_for(H200):
        lowered = jax.jit(lambda arrays: fn(arrays)).trace(avals).lower(lowering_platforms=("cuda",))
    if compiles and "mosaic_gpu" in lowered.as_text():  # Without values no kernel is launched.
        lab.compile_for("h200", fn, avals)


def _exact(x):
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _seen_through(op: Op, case: dict, given: dict):
    """A function of arrays and these: with `view` the op's operands are slices or transposes, made in the same jit."""
    view = case.get("view")

    def lead(x):  # XLA hands a kernel a slice as it lies, which has to begin at a multiple of 256 bytes.
        row = x[0].nbytes if x.ndim and x.size else 0
        return 256 // math.gcd(256, row) if row else 0

    def hidden(x):
        if view == "slice" and lead(x):
            return np.concatenate([x[:1]] * lead(x) + [x])
        return x.T.copy() if view == "transpose" else x

    def shown(name, x):
        if view == "slice" and lead(given[name]):
            return x[lead(given[name]) :]
        return x.T if view == "transpose" else x

    def call(arrays):
        return tuple(op.call(case, **{name: shown(name, x) for name, x in arrays.items()}))

    return call, {name: hidden(x) for name, x in given.items()}


def _twice(call, arrays):
    """The results, or what is wrong with a second run or a race."""
    arrays = jax.tree.map(jnp.asarray, arrays)
    fn = jax.jit(call)
    if lab.on_gpu():
        compiled = fn.lower(arrays).compile()  # Before memory is poisoned.
        first, second = (checking._run_poisoned(compiled, (arrays,)) for _ in range(2))
    else:
        with lab.interpret() as seen:
            first, second = (jax.block_until_ready(fn(arrays)) for _ in range(2))
        if seen.races_found:
            return f"race: {seen.races[0]}"
    if any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in zip(first, second, strict=True)):
        return "two runs of the same case differ"
    return [np.asarray(x) for x in first]


def compare(out: np.ndarray, exact: np.ndarray, slack) -> str | None:
    """The fault of `out`, in words, or None. It may be off by a rounding and by `slack`."""
    if out.shape != exact.shape:
        return f"shape {out.shape} in place of {exact.shape}"
    if not jnp.issubdtype(out.dtype, jnp.floating):
        wrong = out != exact
        return _first(wrong, out, exact, wrong * 0.0) if wrong.any() else None
    info = jnp.finfo(out.dtype)
    largest = float(info.max)
    with np.errstate(all="ignore"):
        found, size = out.astype(np.float64), np.abs(exact)
        limit = (
            float(info.eps) * size
            + np.broadcast_to(slack, exact.shape)
            + max(float(info.tiny) * float(info.eps), 2.4e-38)
        )
        limit = np.where(np.isfinite(limit), limit, 0.0)
        overflows = np.isfinite(exact) & (size + limit >= largest)
        right = np.abs(found - exact) <= limit
        right |= (found == exact) | (np.isnan(found) & np.isnan(exact))
        right |= overflows & (np.sign(found) == np.sign(exact)) & (np.abs(found) >= largest - limit)
    return None if right.all() else _first(~right, found, exact, limit)


def _first(wrong, out, exact, limit) -> str:
    at = tuple(map(int, np.argwhere(wrong)[0]))
    return (
        f"{wrong.sum()} of {wrong.size} are wrong; {list(at)} is {float(out[at]):.7g} in place of "
        f"{float(exact[at]):.7g}, further than {float(limit[at]):.1e}"
    )


def _gradients(op: Op, case: dict, given: dict, compiles: bool) -> str | None:
    """The derivative along random directions, beside central differences of the float64 reference."""
    names = [name for name in op.gradients if name in given and given[name].size]
    rng, cotangents = np.random.default_rng(case["seed"] + 1), []
    values = lambda arrays: [out for out, _ in op.reference(case, **arrays)]
    exact = {name: _exact(x) for name, x in given.items()}

    def gradients(arrays):
        fn = lambda *xs: tuple(op.call(case, **{**arrays, **dict(zip(names, xs, strict=True))}))
        outs, pull = jax.vjp(fn, *(arrays[name] for name in names))
        finite = lambda ct, out: jnp.where(jnp.isfinite(out), jnp.asarray(ct, out.dtype), 0)
        return pull(tuple(map(finite, cotangents or outs, outs)))

    try:
        _for_an_h200(gradients, given, compiles and "devices" not in case)
        if case.get("lowered_only") and not lab.on_gpu():
            return None
        with np.errstate(all="ignore"):
            cotangents += [rng.standard_normal(out.shape) for out in values(exact)]
        found = _twice(gradients, given)
    except Exception as error:
        return f"gradient: {type(error).__name__}: {str(error).strip()[-600:]}"
    if isinstance(found, str):
        return f"gradient: {found}"

    def along(arrays):  # The lse of a row without a key is -inf, and has no derivative.
        pairs = zip(values(arrays), cotangents, strict=True)
        return sum((np.where(np.isfinite(y), y, 0.0) * ct).sum() for y, ct in pairs)

    for name, gradient in zip(names, found, strict=True):
        gradient = gradient.astype(np.float64)
        if not np.isfinite(gradient).all():
            return f"gradient of {name}: {np.sum(~np.isfinite(gradient))} of {gradient.size} are NaN or infinite"
        typical = np.sqrt(np.mean(gradient**2))
        for share in (1.0, 0.1, 1 / gradient.size):
            direction = rng.standard_normal(gradient.shape) * (rng.random(gradient.shape) <= share)
            finite = exact[name][np.isfinite(exact[name])]  # A sink may be -inf.
            h = STEP * ((np.sqrt(np.mean(finite**2)) if finite.size else 0.0) or 1.0)
            with np.errstate(all="ignore"):
                ends = [along(exact | {name: exact[name] + sign * h * direction}) for sign in (1, -1)]
            wanted, got = (ends[0] - ends[1]) / (2 * h), float((gradient * direction).sum())
            norm = np.linalg.norm(direction)
            limit = 0.05 * (np.linalg.norm(gradient[direction != 0]) + typical) * norm + 1e-3 * norm
            if not abs(got - wanted) <= limit:
                return f"gradient of {name}: {got:.5g} along a direction in place of {wanted:.5g}, limit {limit:.1e}"
    return None
