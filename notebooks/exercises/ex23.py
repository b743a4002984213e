"""Chapter 23's exercises: a soft cap, a gradient in place for any vocabulary, rows that count, a split vocabulary."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    KERNELS,
    NotYet,
    checker,
    drawn,
    equations,
    jaxpr_of,
    loads,
    normal,
    repeated,
    require_close,
    run_kernel,
    speed,
    values_loaded,
    wide,
)

import cookbook

TIMED = jax.ShapeDtypeStruct((8192, 131072), jnp.bfloat16)
IGNORED = -100
AXIS = "vocabulary"
PIECE, GROUP = 1024, 8  # Columns of a piece; pieces that a step of rung 1 loads.


# Exercise 1: a soft cap -----------------------------------------------------------------------------------------------


@checker
def check_capped(answer) -> str:
    """`answer(logits, labels, cap)` is a kernel: (m, l, the label's logit) of each row, of `cap * tanh(z / cap)`."""
    # Three steps of eight pieces, three of one, and two of eight.
    for cap, size, vocabulary in ((30.0, 20.0, 24576), (5.0, 3.0, 3072), (_cap(), 15.0, 16384)):
        logits = size * normal(1, (3, vocabulary), jnp.bfloat16)
        labels = jnp.asarray(np.argsort(np.asarray(logits, np.float32), axis=1)[[0, 1, 2], [-1, 900, -3]], jnp.int32)
        out = run_kernel(functools.partial(answer, cap=cap), logits, labels)
        _judge_capped(f"with a cap of {cap:.3g} and {vocabulary:,} columns, ", out, logits, labels, cap)
    _require_one_pass(functools.partial(answer, cap=30.0), 24576)
    rows = jnp.arange(TIMED.shape[0], dtype=jnp.int32)
    ours = functools.partial(cookbook.cross_entropy, reduction="none", logits_soft_cap=30.0, return_lse=True)
    return "One tanh per logit, where it is loaded, and no pass more." + speed(
        functools.partial(answer, cap=30.0), ours, TIMED, rows
    )


def _cap() -> float:
    """A cap that nobody knows beforehand."""
    return drawn(lambda rng: float(rng.uniform(2, 40)), 1)[0]


def _judge_capped(where: str, out, logits, labels, cap: float) -> None:
    if not isinstance(out, tuple | list) or len(out) != 3:
        raise NotYet("it must return three arrays: m, l, and the label's logit of each row")
    m_i, l_i, at_label = wide(*out)
    z = wide(logits)
    capped = cap * np.tanh(z / cap)
    of_label = lambda z: np.take_along_axis(z, wide(labels).astype(int)[:, None], 1)[:, 0]
    lse = lambda z: z.max(1) + np.log(np.exp(z - z.max(1, keepdims=True)).sum(1))
    with np.errstate(all="ignore"):
        found = m_i + np.log(l_i)
    pieces = capped.reshape(len(z), -1, math.gcd(GROUP, z.shape[1] // PIECE), PIECE)
    top = np.maximum.accumulate(pieces.max(2), 1)  # A maximum per place in a piece, after each step.
    unscaled = np.exp(pieces - top[:, :, None]).sum((1, 2)) * np.exp(top[:, -1] - capped.max(1, keepdims=True))
    likely = [
        (lse(z), "this is lse of the logits without the cap"),
        (capped.max(1) + lse(z) - z.max(1), "the maximum is capped, but the logits that are summed are not"),
        (capped.max(1) + np.log(np.exp(np.minimum(z, cap) - capped.max(1, keepdims=True)).sum(1)),
         "a soft cap is no minimum: it changes every logit"),
        (capped.max(1) + np.log(unscaled.sum(1)), "a sum is relative to the maximum so far: make it relative to the "
         "new one before a step adds to it"),
    ]  # fmt: skip
    require_close(found, lse(capped), 2e-3, f"{where}m + log(l)", likely)
    require_close(m_i, capped.max(1), 1e-3, f"{where}m, the row's largest capped logit")
    uncapped = [(of_label(z), "the sums are capped, and the label's logit is not: it must be the same z as in lse")]
    require_close(at_label, of_label(capped), 2e-3, f"{where}the label's logit", uncapped)


def _require_one_pass(answer, vocabulary: int) -> None:
    """Raises NotYet if a step loads fewer columns than rung 1's, if a logit is loaded or capped more than once, or if
    tanh is approximate."""
    avals = jax.ShapeDtypeStruct((3, vocabulary), jnp.bfloat16), jax.ShapeDtypeStruct((3,), jnp.int32)
    jaxpr = jaxpr_of(answer, *avals)
    if any(getattr(x.params.get("compiler_params"), "approx_math", False) for x in equations(jaxpr)):
        raise NotYet("approx_math=True compiles tanh to tanh.approx, which is good to only 2**-11: keep False")
    # Loads of a piece and of a whole step may stand in any loop; the largest loop is the pass over the row.
    steps = collections.Counter()
    for columns, times in loads(jaxpr):
        steps[times] += columns
    columns = max(steps.values(), default=0)
    if columns < GROUP * PIECE:
        raise NotYet(
            f"a step loads no more than {columns // PIECE * PIECE:,} columns, and rung 1's loads {GROUP * PIECE:,}: "
            f"keep its {GROUP} loads, which are in flight at once"
        )
    total = values_loaded(jaxpr)
    if total > vocabulary + PIECE:
        raise NotYet(f"{total / vocabulary:.1f} passes load the row: keep rung 1's single one")
    found = (pair for pair in repeated(jaxpr) if pair[0].primitive.name == "tanh")
    capped = sum(equation.outvars[0].aval.size * times for equation, times in found)
    if capped > vocabulary + PIECE:
        raise NotYet(f"{capped / vocabulary:.1f} tanh are computed per logit: cap a piece once, where it is loaded")


# Exercise 2: in place, for any vocabulary -----------------------------------------------------------------------------


@checker
def check_any_vocabulary(answer) -> str:
    """`answer(logits, labels, lse, weight)` is the gradient in the place of the logits, whose rows are a multiple of 8
    long."""
    for vocabulary in (2048 + 8 * 37, *_lengths(), 2048, 1024):
        logits, weight = 3 * normal(2, (3, vocabulary), jnp.bfloat16), jnp.asarray((0.5, 0.25, 0.7), jnp.float32)
        # The second label lies in the columns that two pieces share, if there are any, and the third in the last's own.
        labels = jnp.asarray((5, vocabulary - 1020, vocabulary - 3), jnp.int32)
        z = wide(logits)
        lse = np.log(np.exp(z).sum(1))
        args = logits, labels, jnp.asarray(lse, jnp.float32), weight
        _require_in_place(answer, args)
        exact = _gradient(z, labels, lse, weight)
        out = run_kernel(answer, *args)
        require_close(out, exact, 1e-2, f"with {vocabulary} columns", _likely_gradients(z, labels, lse, weight))
    _require_few_in_registers(answer)
    return "Every gradient is computed from logits, the shared columns' too." + speed(
        answer, lambda *args: cookbook.cross_entropy(args[0], args[1]), TIMED,
        jnp.arange(TIMED.shape[0], dtype=jnp.int32), *[jnp.ones(TIMED.shape[0])] * 2,
    )  # fmt: skip


def _lengths() -> list[int]:
    """Lengths of two, three and four pieces that nobody knows beforehand, of which the last two share columns."""
    return [1024 * body + drawn(lambda rng: 8 * int(rng.integers(1, 127)), 1)[0] for body in (1, 2, 3)]


def _gradient(z, labels, lse, weight):
    p = np.exp(z - lse[:, None])
    p[np.arange(len(z)), np.asarray(labels)] -= 1
    return p * wide(weight)[:, None]


def _likely_gradients(z, labels, lse, weight):
    """Wrong results of the columns that the last two pieces share."""
    exact, shared = _gradient(z, labels, lse, weight), slice(z.shape[1] - 1024, (z.shape[1] - 1) // 1024 * 1024)
    if shared.start >= shared.stop:
        return []
    again = z.copy()
    again[:, shared] = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)[:, shared]
    twice, unset = _gradient(again, labels, lse, weight), exact.copy()
    unset[:, shared.stop :] = z[:, shared.stop :]
    said = (
        f"columns {shared.start} to {shared.stop - 1} are wrong, which the last two pieces share; the others are right"
    )
    return [(twice, said), (unset, f"the columns from {shared.stop} on are still logits")]


def _require_in_place(answer, args) -> None:
    """Raises NotYet if a kernel has an output as large as the logits or reads them from another array, or if JAX's
    barriers are off."""
    for equation in equations(jaxpr_of(answer, *args)):
        if equation.primitive.name not in KERNELS - {"run_state"}:
            continue
        # Labels, statistics and weights are smaller than a piece per row.
        large = lambda variables: [x.aval for x in variables if getattr(x.aval, "size", 0) > PIECE * len(args[0])]
        if large(equation.outvars):
            raise NotYet(
                "the gradient has an array of its own, as large as the logits: keep it in their place, in a Ref"
            )
        if len(large(equation.invars)) > 1:
            raise NotYet(
                "the kernel reads the logits from one array and stores the gradient in another: it must load them "
                "from the Ref that it changes"
            )
        if getattr(equation.params.get("compiler_params"), "unsafe_no_auto_barriers", False):
            raise NotYet(
                "unsafe_no_auto_barriers=True takes JAX's barriers away: then a warp may store columns that another "
                "warp has not loaded yet"
            )


def _require_few_in_registers(answer) -> None:
    """Raises NotYet if the code holds a long row: in registers, or in as many lines as it has pieces."""
    numbers = jax.ShapeDtypeStruct((2,), jnp.float32)
    avals = jax.ShapeDtypeStruct((2, 32 * PIECE + 8), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    found = (x for x in equations(jaxpr_of(answer, *avals, numbers, numbers)) if x.primitive.name in ("load", "get"))
    pieces = sum(out.aval.size for equation in found for out in equation.outvars) // PIECE
    if pieces > GROUP:
        raise NotYet(
            f"outside of loops, and in one turn of each, the code loads {pieces} pieces of a row of 33: a whole row "
            "does not fit in registers, so keep the loop, and hold back the last piece alone"
        )


# Exercise 3: rows that count ------------------------------------------------------------------------------------------


@checker
def check_row_weights(answer) -> str:
    """`answer(labels, rows)` is (N,) float32, the weight of each row in the mean; blocks have `rows` rows."""
    draw = lambda rng: (np.where(rng.random(24) < 0.5, IGNORED, rng.integers(0, 50, 24)), 4)
    cases = [
        ("no row is ignored", np.arange(8), 4),
        ("three of eight rows are ignored", np.array([3, IGNORED, IGNORED, IGNORED, 0, 9, 2, 7]), 4),
        ("a block is ignored whole", np.array([IGNORED] * 4 + [1, 0, IGNORED, 5]), 4),
        ("all rows are ignored", np.full(8, IGNORED), 4),
        ("5,001 rows count", np.where(np.arange(5008) < 7, IGNORED, 1), 16),  # No 16-bit number is 5,001.
        *(("rows are ignored at random", *case) for case in drawn(draw, 4)),
    ]
    _require_traced(jax.jit(lambda labels: answer(labels, 4)), jnp.arange(8, dtype=jnp.int32))
    # Not under jit: there XLA may turn 0 / 0 into 0.
    given = [
        (what, labels, rows, np.asarray(answer(jnp.asarray(labels, jnp.int32), rows))) for what, labels, rows in cases
    ]
    for what, labels, rows, found in given:
        has_loss = (labels != IGNORED).astype(float)
        blocks = has_loss.reshape(-1, rows)
        counts = np.maximum(blocks.sum(1, keepdims=True), 1)
        exact = has_loss / max(has_loss.sum(), 1)
        if found.shape == exact.shape and not np.isfinite(found).all():
            raise NotYet(f"where {what}, a weight is {found[~np.isfinite(found)][0]}: a count of rows is 0")
        likely = [
            ((blocks / counts).reshape(-1) / len(blocks), "a row's weight depends on how the rows are cut into blocks"),
            (has_loss / len(labels), "the ignored rows count in the denominator"),
            (np.full(len(labels), 1 / max(has_loss.sum(), 1)), "ignored rows have a weight"),
        ]  # fmt: skip
        require_close(found, exact, 1e-6, f"where {what}", likely)
    return "Count first, then cut into blocks: every row weighs the same, whatever block it is in."


def _require_traced(jitted, labels) -> None:
    """Raises NotYet if `jax.jit` cannot trace the answer."""
    try:
        jitted.trace(labels)
    except jax.errors.JAXTypeError as error:
        raise NotYet(
            "jax.jit cannot trace it, and a training step is traced: compute with jnp, not with NumPy, float() or if"
        ) from error


# Exercise 4: a split vocabulary ---------------------------------------------------------------------------------------


@checker
def check_combined_loss(answer) -> str:
    """`answer(m_i, l_i, at_label, axis)` is (N,) the loss of each row, from a device's statistics of its columns."""
    for what, shift, parts in (
        ("four devices", 0, 4),
        ("one device", 0, 1),
        ("one device's logits larger by 200", 200 * (np.arange(60) // 15 == 1), 4),
        ("one row's logits larger by 200", 200 * (np.arange(5)[:, None] == 2), 4),
        ("logits near 10,000", 10000, 3),
        ("logits near -10,000", -10000, 2),
    ):
        z = np.asarray(4 * normal(7, (5, 60)), np.float64) + shift
        labels = np.array([59, 0, 31, 17, 44])
        shards = np.split(z, parts, axis=1)
        m_i = np.stack([shard.max(1) for shard in shards])
        l_i = np.stack([np.exp(shard - shard.max(1, keepdims=True)).sum(1) for shard in shards])
        width = 60 // parts
        at = z[np.arange(5), labels]
        at_label = np.stack([np.where(labels // width == i, at, 0) for i in range(parts)])
        run = jax.vmap(functools.partial(answer, axis=AXIS), axis_name=AXIS)
        found = np.asarray(run(*(jnp.asarray(x, jnp.float32) for x in (m_i, l_i, at_label))))
        if found.shape != (parts, 5):
            raise NotYet(f"with {what}, a device's result has shape {found.shape[1:]}; it must be (5,), one per row")
        top = m_i.max(0)
        lse = top + np.log((l_i * np.exp(m_i - top)).sum(0))
        exact = lse - at
        spread = lambda x, parts=parts: np.broadcast_to(x, (parts, 5))
        likely = [
            (spread(top + np.log(l_i.sum(0)) - at), "each l is relative to its own device's m: make them relative to "
             "the same maximum before they are added"),
            (lse - at_label, "a device subtracts its own label's logit, "
             "which is 0 where another one has it"),
            (spread(lse - at_label.max(0)), "a label's logit may be negative, "
             "and then the largest of the devices' is another's 0"),
            (m_i + np.log(l_i) - at, "this is lse of a device's own columns"),
            (m_i + np.log(l_i) - at_label, "nothing is combined: this is right if one device has all labels"),
        ]  # fmt: skip
        if not np.isfinite(found).all():
            raise NotYet(
                f"with {what}, there are infinities or NaN: subtract the largest of all devices' m of the same row "
                "before you take exponentials"
            )
        require_close(found, spread(exact), 1e-3, f"with {what}", likely)
    return "Three numbers per row cross NVLink, in place of the logits."
