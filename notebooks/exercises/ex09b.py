"""Chapter 9b's exercises: the crossover, dequantized weights, float16 from a byte, exchanged operands."""

import math

import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide

CASES = (  # K, N, peak in FLOP/s, bandwidth in byte/s.
    (8192, 8192, 989e12, 4.8e12),
    (4096, 14336, 989e12, 3.35e12),
    (5120, 5120, 312e12, 2.0e12),
    (1024, 512, 2250e12, 8.0e12),
    (256, 128, 989e12, 4.8e12),  # So small that the rows themselves are the traffic: never bound by compute.
)
A_TILE = 64  # Rows of WGMMA's first operand.


@checker
def check_crossover(answer) -> str:
    """`answer(k, n, peak, bandwidth)` is the largest M whose product with int8 weights is memory-bound."""
    likely = (
        (dict(weight_bytes=2), "A weight is one byte."),
        (dict(row_bytes=0), "The rows of a and of the result cross memory too, 2 bytes per value."),
        (dict(row_bytes=1), "A value of a and of the result is 2 bytes."),
        (dict(flops=1), "A multiplication and an addition for each weight and row: 2 operations."),
    )
    said = (
        "Set the time of the operations equal to the time of all bytes, solve for M, and round down to a whole number "
        "of rows; where no M is bound by compute, it is math.inf."
    )
    require_answers(answer, CASES, _largest_m, likely, said, draw=_case)
    return "Up to there, memory is the bound."


@checker
def check_dequantise(answer) -> str:
    """`answer(w_q, scales)` is a kernel: int8 (K, N) times the scales of the columns, rounded once to bfloat16."""
    for k, n in ((64, 128), (128, 384)):
        w_q = jnp.asarray(np.random.default_rng(k).integers(-127, 128, (k, n)), jnp.int8)
        scales = jnp.asarray(np.exp2(np.random.default_rng(n).uniform(-9, 1, n)), jnp.float32)
        out = run_kernel(answer, w_q, scales)
        if out.dtype != jnp.bfloat16:
            raise NotYet(f"the result is {out.dtype}; it must be bfloat16")
        exact = wide(w_q) * wide(scales)
        require_close(out, exact, 5e-2, f"int8[{k},{n}]")
        once = wide(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16))
        if (twice := wide(out) != once).any():
            raise NotYet(f"{twice.mean():.0%} of the values were rounded twice: multiply in float32, then convert")
    return "One scale per column, one rounding."


@checker
def check_half(answer) -> str:
    """`answer(w_q)` is a kernel: int8 (K, N) as float16, made from bits: no integer is converted to a float."""
    for k, n in ((64, 128), (192, 64)):
        rng = np.random.default_rng(k)
        every = rng.permutation(np.resize(np.arange(-128, 128), k * n))
        w_q = jnp.asarray(every.reshape(k, n), jnp.int8)
        out = run_kernel(answer, w_q)
        if out.shape != w_q.shape or out.dtype != jnp.float16:
            raise NotYet(f"the result is {out.dtype} {out.shape}; it must be float16 {w_q.shape}")
        equations = list(judge.equations(judge.jaxpr_of(answer, w_q)))
        if any(_is_conversion(equation) for equation in equations):
            raise NotYet("integers are converted to floats by astype: place the bits, and subtract a float")
        if (num := sum(_is_float_arithmetic(equation) for equation in equations)) > 1:
            raise NotYet(f"{num} operations of floats are computed: one subtraction is enough")
        exact, flip = wide(w_q), "the byte with its top bit flipped is 128 + the integer"
        bare = wide(np.asarray(w_q).astype(np.int16).view(np.float16))
        likely = (
            (bare, "these are the bits of 16-bit integers, read as floats: put an exponent above the byte"),
            (exact + 128, f"every value is 128 too large: {flip}"),
            (exact + 1152, f"every value is 1152 too large: a unit of 0x6400 is 1, and {flip}"),
            (np.where(exact < 0, exact + 128, exact - 128), "the byte was read without a sign. Flip a bit"),
            (np.where(exact < 0, wide(out), exact), "only negative integers are wrong: their int16 has ones in its "
             "upper byte. Cut them off: & 0xFF"),
        )  # fmt: skip
        said = "the integers as float16 (which float has the bits that you place, and what is its unit?)"
        require_close(out, exact, 0, said, likely)
    return "All 256 integers, by operations on bits and one subtraction."


@checker
def check_few_rows(answer) -> str:
    """`answer(a, w_t, scales)` is a kernel: a @ w_t.T * scales of few rows, the weights WGMMA's first operand."""
    for rows, k, n in ((8, 192, 128), (24, 128, 64)):
        a = normal(rows, (rows, k), jnp.bfloat16)
        w_t = jnp.asarray(np.random.default_rng(k).integers(-127, 128, (n, k)), jnp.int8)
        scales = jnp.asarray(np.exp2(np.random.default_rng(n).uniform(-3, 3, n)), jnp.float32)
        _require_full_tiles(answer, rows, a, w_t, scales)
        out = run_kernel(answer, a, w_t, scales)
        sums = wide(a) @ wide(w_t).T
        likely = [(sums, "the sums are right, and the scales were not applied to them")]
        require_close(out, sums * wide(scales), 3e-2, f"{rows} rows, K = {k}, N = {n}", likely)
    return f"Tiles of 8 and of 24 rows are full; as A's rows they would fill {8 / A_TILE:.0%} and {24 / A_TILE:.0%}."


def _require_full_tiles(answer, rows: int, *args) -> None:
    """Raises NotYet if there is no product, or if its sums have another shape than (columns, rows)."""
    found = judge.equations(judge.jaxpr_of(answer, *args))
    tiles = [eqn.invars[0].aval.shape for eqn in found if eqn.primitive.name == "wgmma_ref"]
    if not tiles:
        raise NotYet("no product of the tensor cores is left: call plgpu.wgmma")
    for tile in tiles:
        if tile[0] % A_TILE:
            raise NotYet(
                f"a product of {rows} rows has sums of shape {tile}, and a GPU's compiler refuses it: WGMMA's first "
                f"operand has {A_TILE} rows or a multiple. Which operand has as many?"
            )
        if tile[-1] != rows:
            raise NotYet(
                f"a product of {rows} rows has sums of shape {tile}, so most of it is multiplied in vain. Make the "
                "weights the first operand: sums of shape (columns, rows)"
            )


def _is_conversion(equation) -> bool:
    """Whether integers become floats of the same value."""
    if equation.primitive.name != "convert_element_type":
        return False
    dtype = equation.invars[0].aval.dtype
    return jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(equation.params["new_dtype"], jnp.floating)


def _is_float_arithmetic(equation) -> bool:
    """Whether floats are added, subtracted, multiplied or divided."""
    if equation.primitive.name not in ("add", "sub", "mul", "div"):
        return False
    return jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)


def _case(rng):
    """K, N, peak and bandwidth whose M lies between two whole numbers, so that no rounding of floats decides it."""
    k, n, peak = (int(x) for x in rng.integers((2000, 2000, 10**14), (20_000, 20_000, 2 * 10**15)))
    m = int(rng.integers(20, 200)) + 0.37
    return k, n, float(peak), (k * n + 2 * m * (k + n)) * peak / (2 * m * k * n)


def _largest_m(k, n, peak, bandwidth, *, weight_bytes=1, row_bytes=2, flops=2):
    """The crossover, and with other keywords the likely wrong ones."""
    # flops * m * k * n / peak <= (weight_bytes * k * n + row_bytes * m * (k + n)) / bandwidth
    a_row = flops * k * n * bandwidth / peak - row_bytes * (k + n)
    return math.inf if a_row <= 0 else float(math.floor(weight_bytes * k * n / a_row))
