"""Chapter 22's exercises: a norm with its residual, a rotation to fix, gate and up in one tile, a step's time."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    drawn,
    jaxpr_of,
    normal,
    play_kernel,
    require_answers,
    require_close,
    run_kernel,
    speed,
    values_loaded,
    wide,
)

import cookbook

EPS = 1e-6
ROUNDED = 1.02 * 2.0**-8  # The error of one rounding to bfloat16, and a little for float32.
TILES = ((8, 2), (64, 16), (96, 8), (24, 12), (64, 64), (256, 32))  # Rows of each matrix, and of a piece.
STEPS = (  # weight_bytes, token_bytes, sequences, length, rate, layers, large, small, once, large_us, small_us.
    (2_500_000_000, 32_768, 64, 320, 3.35e12, 16, 5, 4, 8, 6.5, 2.0),
    (16_000_000_000, 131_072, 32, 1000, 4.8e12, 32, 8, 11, 3, 4.0, 1.5),
    (1_000_000_000, 8192, 1, 50, 2.0e12, 12, 5, 14, 5, 9.0, 2.5),
    (16_000_000_000, 131_072, 256, 4000, 3.35e12, 32, 6, 3, 0, 5.0, 1.0),
)


# Exercise 1: a norm with its residual ---------------------------------------------------------------------------------


@checker
def check_added_norm(answer) -> str:
    """`answer(x, residual, scale)` is a kernel: the norm of residual + x in bfloat16, and the sum in float32."""
    for rows, cols in ((3, 1024), (2, 2048), (2, _columns())):
        x, residual = normal(1, (rows, cols)), 2 * normal(2, (rows, cols)) + 0.5
        args = x, residual, normal(3, (cols,), jnp.bfloat16)
        _judge_added(f"with {cols} columns, ", _pair(run_kernel(answer, *args)), *args)
    if any(block.reads_back for (block, *_) in play_kernel(answer, *args)):
        raise NotYet("it stores a row and reads it back from GMEM: use the sum that is in registers.")
    if (loaded := values_loaded(jaxpr_of(answer, *args))) > 3 * cols:
        raise NotYet(
            f"a block loads {loaded / cols:.3g} rows; x, residual and scale are 3: load each once, and keep the sum"
        )
    zero = jnp.zeros((2, cols))
    y, _ = _pair(run_kernel(answer, zero, zero, args[2]))
    require_close(y, np.zeros(y.shape), 0, "a row of zeros (eps belongs under the root, beside the mean of squares)")
    small = 1e-3 * normal(4, (2, cols))  # The mean of squares is about eps.
    y, _ = _pair(run_kernel(answer, small, zero, args[2]))
    _judge_norm(
        "with values around 0.001 (eps is added to the mean of squares), the norm", y, *wide(small, zero, args[2])
    )
    y, _ = _pair(run_kernel(functools.partial(answer, eps=1e-4), small, zero, args[2]))
    _judge_norm("with eps = 1e-4, the norm", y, *wide(small, zero, args[2]), eps=1e-4)
    praise = "The sum stays in registers between the addition and the norm: nothing reads it back."
    ours = lambda x, residual, scale: cookbook.rms_norm(x, scale, residual=residual, out_dtype=jnp.bfloat16)
    of_size = jax.ShapeDtypeStruct((8192, 2048), jnp.float32)
    return praise + speed(answer, ours, of_size, of_size, jax.ShapeDtypeStruct((2048,), jnp.bfloat16))


def _columns() -> int:
    """A row's length that nobody knows beforehand; a thread loads 8 values at a time."""
    return drawn(lambda rng: 1024 * int(rng.integers(3, 7)), 1)[0]


def _pair(found):
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise NotYet("it must return two arrays: the norm, and the sum.")
    if [array.dtype for array in found] != [jnp.bfloat16, jnp.float32]:
        raise NotYet(f"its results are {found[0].dtype} and {found[1].dtype}: the norm is bfloat16, the sum float32.")
    return found


def _normed(total, scale=1.0, *, of=None, mean=np.mean, eps=EPS):
    """The norm of rows; `of` has the rows whose squares count, if these are others."""
    of = total if of is None else of
    return total / np.sqrt(mean(of * of, axis=-1, keepdims=True) + eps) * scale


def _judge_added(where, found, *args):
    """Raises NotYet unless `found` is the norm and the sum of these arrays."""
    (y, total), (x, residual, scale) = found, wide(*args)
    _judge_norm(where + "the norm", y, x, residual, scale)
    if np.array_equal(wide(total), wide((args[0] + args[1]).astype(jnp.bfloat16))):
        raise NotYet("the sum was rounded before it was stored. It goes on from layer to layer: keep it in float32.")
    likely = [(x, "total_gmem has x alone: it must have residual + x.")]
    require_close(total, x + residual, 1e-6, where + "the sum, which the next norm adds to", likely)


def _judge_norm(what, y, x, residual, scale, eps=EPS):
    """The tolerance is half of a step of bfloat16: y is rounded once."""
    total, exact = residual + x, _normed(residual + x, scale, eps=eps)
    rounded = wide(jnp.asarray(total, jnp.float32).astype(jnp.bfloat16))
    likely = (
        (_normed(x, scale), "this is the norm of x alone: add the residual before the squares."),
        (_normed(total, scale, of=x), "the root is that of x alone: the squares must be those of the sum."),
        (_normed(total), "the columns are not multiplied by scale."),
        (_normed(total, scale, mean=np.sum), "that is the root of the sum of squares: divide it by the columns."),
        (residual + _normed(x, scale), "x is normalised, and the residual added after it: add first."),
        (total * scale, "the sum is scaled and not divided by the root of its mean square."),
        (
            _normed(rounded, scale, eps=eps),
            "the sum was rounded before the norm: only y is rounded, when it is stored.",
        ),
    )
    require_close(y, exact, ROUNDED, what, likely)


# Exercise 2: a rotation to fix ----------------------------------------------------------------------------------------


@checker
def check_turned(answer) -> str:
    """`answer(q, cos, sin)` is a kernel: each head of q turned by the angles of its token."""
    for seed, shape in ((4, (128, 3, 64)), (5, (64, 2, 128)), (6, (64, 1, _head_size()))):
        q = normal(seed, shape, jnp.bfloat16)
        positions = np.random.default_rng(seed).integers(0, 500, shape[0])  # Each token is of another sequence.
        half = shape[2] // 2
        angles = positions[:, None] * 1000.0 ** (-np.arange(half) / half)
        cos, sin = (jnp.asarray(of(angles), jnp.float32) for of in (np.cos, np.sin))
        cos, sin = cos.at[7, 1].set(0), sin.at[7, 1].set(1)
        try:
            out = run_kernel(answer, q, cos, sin, copies={"store": 2})
        except NotYet as problem:
            if "copy_smem_to_gmem read-side operations" not in str(problem):
                raise
            raise NotYet("the kernel ends before its copies to GMEM do: wait for all of them.") from problem
        _judge_turned(out, q, cos, sin)
        blocks = itertools.chain(*play_kernel(answer, q, cos, sin))
        if any(block.stored or not block.count("store") for block in blocks):
            raise NotYet("a result must reach GMEM by TMA: store it in o_smem, commit it, and copy it from there.")
        if (loaded := values_loaded(jaxpr_of(answer, q, cos, sin))) > 64 * 4 * half:
            raise NotYet(f"a block loads {loaded // 64} values per token: each half, cos and sin once are {4 * half}.")
    return "Both halves are read before either is replaced, and TMA copies what the threads have committed."


def _head_size() -> int:
    """A head's size that nobody knows beforehand."""
    return drawn(lambda rng: 16 * int(rng.choice([2, 3, 5, 6, 7])), 1)[0]


def _judge_turned(out, *args):
    q, cos, sin = wide(*args)
    (a, b), c, s = np.split(q, 2, axis=2), cos[:, None], sin[:, None]
    join = lambda *halves: np.concatenate(halves, axis=2)
    first, second = a * c - b * s, b * c + a * s
    even, odd = q[..., ::2], q[..., 1::2]
    neighbours = np.stack([even * c - odd * s, odd * c + even * s], axis=-1).reshape(q.shape)
    if out.shape == q.shape and 0 < np.isnan(wide(out)).sum() <= q.shape[1]:
        raise NotYet("where cos is 0 a result is NaN: nothing needs to be divided by cos")
    likely = (
        (join(first, b * c + first * s), "the second half is made of the first half that was turned already: both "
         "halves need the values that were loaded"),
        (join(a * c + b * s, b * c - a * s), "each pair is turned the wrong way: which product has the minus?"),
        (join(a * c + b * s, second), "the first half adds the product that it must subtract"),
        (join(first, b * c - a * s), "the second half subtracts the product that it must add"),
        (join(second, first), "the two halves are in each other's place"),
        (join(a * c - a * s, b * c + b * s), "a value meets itself: its partner is in the other half"),
        (neighbours, "neighbouring values are paired; the partner of value i is value i + D / 2"),
        (q, "nothing is turned"),
    )  # fmt: skip
    require_close(out, join(first, second), ROUNDED, f"with heads of {q.shape[2]}", likely)


# Exercise 3: gate and up in one tile ----------------------------------------------------------------------------------


@checker
def check_source_row(answer) -> str:
    """`answer(row, hidden, piece)` is the row of the joined weight that lies at `row` of the reordered one."""

    def to(row, hidden, piece):
        which, i = divmod(row, hidden)
        return i // piece * 2 * piece + which * piece + i % piece

    likely = (
        (lambda row, hidden, piece: row, "That is the joined weight as it is: its first tile is of the gate alone."),
        (lambda row, hidden, piece: row % 2 * hidden + row // 2, "Rows of the two take turns one by one: it must be "
         "`piece` of the gate, then `piece` of up."),
        (lambda row, hidden, piece: row // piece % 2 * hidden + row % piece, "Every tile has the rows of the first: "
         "where do those of this tile begin?"),
        (lambda row, hidden, piece: row // (2 * piece) * piece + row % piece, "Both halves of a tile are rows of the "
         "gate: those of up begin at `hidden`."),
        (lambda row, hidden, piece: (_source_row(row, hidden, piece) + hidden) % (2 * hidden), "A tile begins with the "
         "gate, and the partners come after it."),
        (lambda row, hidden, piece: row // piece % 2 * hidden + row // (2 * piece) * 2 * piece + row % piece,
         "A tile has 2 * piece rows, but only `piece` of each matrix: so the next tile goes on after `piece` of them."),
        (to, "That is the other direction: the place to which a row of the joined weight goes."),
    )  # fmt: skip
    said = "Which tile is it in, at which place of the tile, and is that place of the gate or of up?"
    cases = [(row, *tile) for tile in TILES for row in range(2 * tile[0])]
    draw = lambda rng: (int(rng.integers(12)), 6 * int(rng.integers(1, 200)), 6)
    require_answers(answer, cases, _source_row, likely, said, draw=draw)
    return "A value of the gate and its partner are in one tile, `piece` columns apart: one thread can have both."


def _source_row(row: int, hidden: int, piece: int) -> int:
    tile, place = divmod(row, 2 * piece)
    return place // piece * hidden + tile * piece + place % piece


# Exercise 4: the time of a step ---------------------------------------------------------------------------------------


@checker
def check_step(answer) -> str:
    """`answer(weight_bytes, token_bytes, sequences, length, rate, layers, large, small, once, large_us, small_us)` is
    a step's ms."""
    names = tuple(inspect.signature(_step).parameters)[: len(STEPS[0])]

    def of(**changes):
        """The step with numbers that are others, each a function of the right ones."""

        def step(*case):
            right = dict(zip(names, case, strict=True))
            return _step(**right | {name: change(right) for name, change in changes.items()})

        return step

    likely = (
        (of(length=lambda of: of["length"] - 1), "Each sequence also writes the keys and values of its new token."),
        (of(sequences=lambda of: 1), "Each sequence has keys and values of its own."),
        (of(length=lambda of: 0), "Attention reads the keys and values of all tokens so far."),
        (of(token_bytes=lambda of: 0), "Attention reads keys and values as well."),
        (of(weight_bytes=lambda of: of["weight_bytes"] * of["sequences"]), "Sequences share the weights: a step reads "
         "them once."),
        (of(layers=lambda of: 1), "Each layer has that many kernels."),
        (dict(logits=0), "The product that gives the logits is a large kernel, too, once per step."),
        (of(once=lambda of: of["once"] * of["layers"]), "Some kernels are launched once per step, not in each layer."),
        (of(once=lambda of: 0), "The small kernels that a step has once cost as much."),
        (of(large_us=lambda of: 0), "A large kernel takes longer than its bytes: it starts and drains."),
        (of(small_us=lambda of: 0), "Small kernels cost time as well."),
        (of(large_us=lambda of: of["small_us"]), "A large kernel costs `large_us`, not as much as a small one."),
        (of(large_us=lambda of: of["small_us"], small_us=lambda of: of["large_us"]), "The two costs are swapped."),
        (of(large_us=lambda of: 0, small_us=lambda of: 0), "That is the bound: kernels cost time beyond it."),
        (dict(join=max), "The terms do not overlap in this model: add them."),
        (dict(unit=1.0), "That is in seconds."),
        (dict(unit=1e6), "That is in microseconds."),
    )  # fmt: skip
    said = "Count the bytes, count the kernels of both sizes, and mind the units: bytes per second, microseconds."
    require_answers(answer, STEPS, _step, likely, said, draw=_case)
    return "Bytes over the bandwidth, and a cost for each large and each small kernel: a first estimate of a step."


def _case(rng):
    weight_bytes, *sizes = rng.integers((10**9, 4096, 1, 20), (10**10, 10**5, 200, 3000)).tolist()
    numbers = rng.integers((4, 3, 2, 1), (60, 9, 30, 12)).tolist()
    return weight_bytes, *sizes, rng.uniform(1e12, 8e12), *numbers, rng.uniform(4, 9), rng.uniform(1, 3)


def _step(
    weight_bytes, token_bytes, sequences, length, rate, layers, large, small, once, large_us, small_us, *, logits=1,
    join=sum, unit=1e3,
):  # fmt: skip
    """Milliseconds of a step."""
    nbytes = weight_bytes + token_bytes * sequences * (length + 1)
    kernels_us = large_us * (layers * large + logits) + small_us * (layers * small + once)
    return float(unit * join((nbytes / rate, 1e-6 * kernels_us)))
