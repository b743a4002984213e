"""Chapter 23b's exercises: a norm with a gate, bytes of an 8-bit norm, a convolution of packed sequences, its state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    drawn,
    equations,
    jaxpr_of,
    normal,
    require_answers,
    require_close,
    run_kernel,
    speed,
    values_loaded,
    wide,
)

import cookbook

HEADS = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
TILE, WIDTH = 512, 4  # Columns of a block; rows that the convolution weights.


# Exercise 1: a norm with a gate ---------------------------------------------------------------------------------------


@checker
def check_gated_norm(answer) -> str:
    """`answer(x, gate, scale)` is a kernel, the norm of each row of x, times `silu(gate)`; it reads each value once."""
    for columns in (2048, 1024):
        x, gate = (size * normal(seed, (4, columns), jnp.bfloat16) for seed, size in ((1, 0.5), (2, 2.0)))
        # The last columns are large, and two rows so small that eps counts.
        x = x.at[:, -128:].multiply(8).at[2].multiply(1e-4).at[3].set(0)
        scale = jnp.asarray(1 + 0.3 * np.asarray(normal(3, columns)), jnp.bfloat16)
        out = run_kernel(answer, x, gate, scale)
        t, z, s = wide(x, gate, scale)
        share = 1 / (1 + np.exp(-z))
        norm = functools.partial(_norm, scale=s)
        likely = [
            (norm(t), "this is the norm without the gate"),
            (norm(t * z * share), "the gate is multiplied before the norm, so the mean of squares counts it; it must "
             "come after"),
            (norm(t) * share, "this multiplies by the sigmoid of the gate; silu(z) is z times that"),
            (norm(t) * z, "this multiplies by the gate itself, without silu"),
            (norm(z) * t * share, "the gate is normalised, and x is the factor: it is the other way round"),
            (norm(t, eps=0.0) * z * share, "eps is missing: rows of small values, or of zeros, need it"),
        ]  # fmt: skip
        for row, what in ((slice(0, 2), ""), (slice(2, 3), ", a row of small values"), (slice(3, 4), ", zeros")):
            of_row = [(wrong[row], said) for wrong, said in likely]
            exact = norm(t) * z * share
            require_close(out[row], exact[row], 2e-2, f"with rows of {columns:,}{what}", of_row)
        loaded = values_loaded(jaxpr_of(answer, x, gate, scale))
        if loaded > 3 * columns:
            raise NotYet(
                f"it is right, but a block loads {loaded:,} values; a row of x, of the gate and of the scale are "
                f"{3 * columns:,}: load each once"
            )
    ours = lambda x, gate, scale: cookbook.group_norm(x, scale, gate=gate, eps=1e-6)
    return "Three arrays cross HBM, and the gate's row waits in registers beside that of x." + speed(
        answer, ours, HEADS, HEADS, jnp.ones(HEADS.shape[1], jnp.bfloat16)
    )


def _norm(t, scale, eps=1e-6):
    return t / np.sqrt(np.maximum(np.mean(t * t, axis=1, keepdims=True) + eps, 1e-30)) * scale


# Exercise 2: bytes of a norm with an 8-bit result ---------------------------------------------------------------------


def _row_bytes(columns, bits, fits, again=True, factor=True, total=True, wide=False, arrays_again=2):
    inputs = 2 * columns * (2 if fits or not again else 2 + arrays_again)
    y = columns * (2 if wide else bits // 8) + (4 if bits == 8 and factor else 0)
    return inputs + 2 * columns * total + y


@checker
def check_row_bytes(answer) -> str:
    """`answer(columns, bits, fits)` is the bytes of a row that rung 4 moves: `bits` of a value of y are 8 or 16."""
    cases = [(4096, 8, True), (4096, 16, True), (32768, 8, False), (32768, 16, False), (1000, 8, True)]
    likely = [
        (dict(again=False), "A row that does not fit in registers has to be read once more, x and residual."),
        (dict(factor=False), "A row of 8-bit numbers has a factor, of 4 bytes."),
        (dict(total=False), "The sum is written too: it is the next residual."),
        (dict(wide=True), "A value of y has 8 bits, which is one byte."),
        (dict(arrays_again=1), "x and residual are read again, and not their rounded sum."),
    ]
    draw = lambda rng: (8 * int(rng.integers(20, 5000)), int(rng.choice([8, 16])), bool(rng.integers(2)))
    require_answers(answer, cases, _row_bytes, likely, draw=draw)
    return "An 8-bit result saves one byte of eight per value; a row that does not fit costs four."


# Exercise 3: packed sequences -----------------------------------------------------------------------------------------


@checker
def check_packed_conv(answer) -> str:
    """`answer(x, w, first_of)` is a kernel, the convolution of sequences that lie one after the other; it reads each
    row once per block, besides the rows before its first."""
    _judge_packed(answer, "with sequences of 15, 2, 15 and 16", [15, 2, 15, 16])
    # The NaN is in the rows before the second part, which begins with another sequence's second row.
    _judge_packed(answer, "with sequences of 15, 17 and 16", [15, 17, 16], nan=14)
    _judge_packed(answer, "with sequences of 1 to 8", lengths := _lengths(), 80, 3 * TILE, nan=lengths[0] - 1)
    return "A row stays in the window for three more rows, or until its sequence ends." + speed(
        lambda x, w: answer(x, w, jnp.arange(len(x), dtype=jnp.int32) // 4096 * 4096),
        lambda x, w: cookbook.causal_conv1d(x[None], w.T, activation="silu"),
        jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((WIDTH, 4096), jnp.bfloat16),
    )  # fmt: skip


def _lengths() -> list[int]:
    """Lengths that nobody knows beforehand."""
    return drawn(lambda rng: [int(n) for n in rng.integers(1, 9, 40)], 1)[0]


def _judge_packed(answer, where: str, sizes, length=48, columns=2 * TILE, nan: int | None = None) -> None:
    """`nan`: the last row of a sequence, which no other may see."""
    starts = np.cumsum([0, *sizes])
    first_of, rows = np.repeat(starts[:-1], sizes)[:length], np.arange(length)
    x, w = normal(4, (length, columns), jnp.bfloat16), normal(5, (WIDTH, columns), jnp.bfloat16)
    x = x if nan is None else x.at[nan].set(jnp.nan)
    args = x, w, jnp.asarray(first_of, jnp.int32)
    out = run_kernel(answer, *args)
    part = rows // 16 * 16  # The first row of the part that a row is in.
    exact = _conv(x, w, first_of)
    if nan is not None and out.shape == exact.shape and np.isnan(wide(out)[nan + 1 :]).any():
        raise NotYet(
            f"{where}, a NaN in the last row of a sequence reaches the next one: 0 times NaN is NaN, so choose with "
            "keep_if instead of multiplying"
        )
    likely = [
        (_conv(x, w, 0 * rows), "rows of the sequence before count in the sums of the next one"),
        (_conv(x, w, first_of[part]), "the rows before a part are right, but inside of a part a sequence sees the one "
         "before"),
        (_conv(x, w, np.where(first_of < part, 0, first_of)), "inside of a part it is right, but the rows before the "
         "part may be of another sequence"),
        (_conv(x, w, np.maximum(first_of, part)), "each part begins as if a sequence began: the rows before it are "
         "missing"),
    ]  # fmt: skip
    require_close(out, exact, 2e-2, where, likely)
    loaded = values_loaded(jaxpr_of(answer, *args))
    most = (16 + WIDTH - 1 + WIDTH) * TILE + 4 * 16 * WIDTH
    if loaded > most:
        raise NotYet(
            f"it is right, but a block loads {loaded // TILE} rows of x and w; 16 rows, the {WIDTH - 1} before them "
            f"and {WIDTH} of weights are {16 + 2 * WIDTH - 1}: keep the last rows in registers, and "
            "parts of 16 rows"
        )


def _conv(x, w, first_of):
    """The convolution in float64; rows before `first_of` of a row are zeros to it."""
    x, w = wide(x, w)
    rows, z = np.arange(len(x)), 0
    for j in range(WIDTH):
        row = rows - (WIDTH - 1) + j
        z = z + w[j] * np.where((row >= first_of)[:, None], x[np.maximum(row, 0)], 0)
    return z / (1 + np.exp(-z))


# Exercise 4: the state at the end -------------------------------------------------------------------------------------


@checker
def check_final_state(answer) -> str:
    """`answer(x, state)` is the last 3 rows of `state` with `x` below it, and copies no more of x than it needs."""
    for length in (7, 3, 2, 1, 0, 40):
        x, state = normal(6, (length, 5)), normal(7, (WIDTH - 1, 5))
        found = np.asarray(answer(x, state))
        if found.dtype != np.float32:
            raise NotYet(f"the result is {found.dtype}; it must be float32, as x and state are")
        both = np.concatenate([np.asarray(state), np.asarray(x)])
        exact, where = both[-(WIDTH - 1) :], f"after {length} rows"
        zeros = np.concatenate([np.zeros_like(state), np.asarray(x)])[-(WIDTH - 1) :]
        likely = [
            (zeros, "a sequence shorter than the state keeps rows of the state that it began with, not zeros"),
            (exact[::-1], "the latest row must be the last one"),
            (np.asarray(state), "this is the state that it began with"),
            (both[: WIDTH - 1], "these are the first rows; the last are wanted"),
        ]
        require_close(found, exact, 0, where, likely)
    avals = jax.ShapeDtypeStruct((4096, 5), jnp.float32), jax.ShapeDtypeStruct((WIDTH - 1, 5), jnp.float32)
    for equation in equations(jax.make_jaxpr(answer)(*avals).jaxpr):
        if equation.primitive.name in ("scan", "while"):
            raise NotYet("as it is written, it goes through the rows in a loop: take the last rows of x, and no others")
        rows = max(getattr(out.aval, "size", 0) for out in equation.outvars) // 5
        if rows > 2 * WIDTH:
            raise NotYet(
                f"as it is written, it makes an array of {rows:,} rows to keep {WIDTH - 1}: take the last rows of x "
                "first"
            )
    return "The state is three rows per sequence, however long the sequence was."
