"""Chapter 10's exercises: a lazy step, the merge of two results, sinks, copies that race, and a window's blocks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, drawn, normal, require_close, run_kernel, wide

import cookbook

BLOCK_Q = 64  # Queries of a block.
SLACK = 8.0  # Exercise 1.
WINDOWS = [  # block_kv, num_kv, left: a window of less than a block, of a few, of exactly some, of everything.
    (block_kv, 1024, left) for block_kv, left in itertools.product((64, 128), (0, 1, 40, 64, 127, 191, 192, 300, 2000))
]


@checker
def check_step(answer) -> str:
    """Exercise 1: `answer(m, l, acc, x, v, slack)` is the state (m, l, acc) after a block with base-2 logits `x`; `m`
    moves only if a logit exceeds it by more than `slack`."""
    for name, x, v in _logits():
        exact = np.full(x.shape[1], -np.inf), np.zeros(x.shape[1]), np.zeros((x.shape[1], v.shape[2]))
        for block in range(len(x)):
            args = x[block], v[block], SLACK
            with np.errstate(all="ignore"):
                given = answer(*(part.copy() for part in exact), *(np.copy(arg) for arg in args))
                likely = [(said, _step(*exact, *args, **how)) for how, said in WRONG_STEPS]
            if not isinstance(given, tuple) or len(given) != 3 or given[0] is None:
                raise NotYet("lazy_step must return m, l and acc: write its body.")
            exact = _step(*exact, *args)
            for i, part in enumerate(("m", "l", "acc")):
                wrongs = [(state[i], said) for said, state in likely]
                require_close(np.asarray(given[i]), exact[i], 1e-3, f"{name}, {part} after block {block}", wrongs)
    return "It scales only when it must, never overflows, and rows that see nothing stay empty."


WRONG_STEPS = (  # Keywords of wrong steps, and a sentence on each.
    (dict(scaled=(0, 1)), "what l held was relative to the old m."),
    (dict(scaled=(1, 0)), "what acc held was relative to the old m."),
    (dict(exp=np.exp), "is the base 2?"),
    (dict(nothing=np.nan), "a row that has seen nothing has m = -inf, and -inf - -inf is NaN."),
    (dict(divided=True), "acc is p v, not yet divided."),
    (dict(moves=lambda m, top, slack: top), "m moves only to a logit that exceeds it by more than slack."),
    (dict(moves=lambda m, top, slack: np.maximum(m, top)), "m moves only to a logit that exceeds it by more than "
     "slack."),
)  # fmt: skip


def _step(
    m, l_i, acc, x, v, slack, *, scaled=(1, 1), exp=np.exp2, nothing=0.0, divided=False,
    moves=lambda m, top, slack: np.where(top > m + slack, top, m),
):  # fmt: skip
    """The state after a block; the keywords spoil it."""
    m_new = moves(m, x.max(axis=1), slack)
    shift = np.where(np.isneginf(m_new), nothing, m_new)
    p, alpha = exp(x - shift[:, None]), exp(m - shift)
    of_l, of_acc = (alpha if is_scaled else np.ones_like(alpha) for is_scaled in scaled)
    sums = p.sum(axis=1)
    return m_new, l_i * of_l + sums, acc * of_acc[:, None] + (p / sums[:, None] if divided else p) @ v


@checker
def check_merge(answer) -> str:
    """Exercise 2: `answer(out_a, lse_a, out_b, lse_b)` is the (out, lse) of all keys, from those of two parts."""
    rng = np.random.default_rng(20)
    cases = {
        "two parts of equal weight": (3.0, 3.0),
        "two parts": (1.0, -0.5),
        "large logits": (900.0, 899.0),
        "very different logits": (900.0, -900.0),
        "a first part that sees nothing": (-np.inf, 2.0),
        "a second part that sees nothing": (2.0, -np.inf),
        "two parts that see nothing": (-np.inf, -np.inf),
    }
    for name, lse_of in cases.items():
        out_a, out_b = rng.standard_normal((2, 5, 4))
        lse_a, lse_b = (lse + rng.standard_normal(5) * (name != "two parts of equal weight") for lse in lse_of)
        out_a, out_b = (np.where(np.isneginf(lse)[:, None], 0.0, o) for lse, o in ((lse_a, out_a), (lse_b, out_b)))
        parts = out_a, lse_a, out_b, lse_b
        with np.errstate(all="ignore"):
            given = answer(*(part.copy() for part in parts))
            (out, lse), base_2 = _merged(*parts), _merged(*parts, np.exp2, np.log2)
        if not isinstance(given, tuple) or len(given) != 2 or given[0] is None:
            raise NotYet("merge must return out and lse: write its body.")
        natural = "lse is a natural logarithm here: exp and log, not exp2 and log2."
        lses = (
            (base_2[1], natural),
            (np.maximum(lse_a, lse_b), "the two sums of exponentials add up; the larger is not all."),
            (lse_a + lse_b, "exponentials add up, not their logarithms."),
        )
        outs = (
            (base_2[0], natural),
            (_merged(out_a, lse_b, out_b, lse_a)[0], "each part's weight is its own exp(lse)."),
            ((out_a + out_b) / 2, "the parts have not the same weight: one may hold nearly all of the sum."),
            (out_a + out_b, "both parts are divided by their own sums already: weigh them."),
        )
        said = "exp(lse) may overflow, and where both parts are empty out is 0 and lse -inf"
        require_close(np.asarray(given[1]), lse, 1e-4, f"{name}, lse ({said})", lses)
        require_close(np.asarray(given[0]), out, 1e-4, f"{name}, out ({said})", outs)
    return "Keys may be split among as many blocks as you like, and merged in any order."


@checker
def check_sinks(answer) -> str:
    """Exercise 3: `answer(q, k, v, sinks)` is (out, lse), with one more logit for each head, whose value is zero."""
    q, k, v = (normal(seed, (1, length, 2, 64), jnp.bfloat16) for seed, length in ((1, 64), (2, 256), (3, 256)))
    for sinks in ((0.5, 3.0), (-4.0, 20.0)):
        out, lse = run_kernel(answer, q, k, v, jnp.asarray(sinks, jnp.float32))
        exact_out, exact_lse = _attention(q, k, v, np.asarray(sinks))
        without, natural = np.full(2, -np.inf), np.asarray(sinks) / np.log2(np.e)
        likely = (
            (_attention(q, k, v, without)[1], "that is attention without sinks: change m_i and l_i before the loop."),
            (_attention(q, k, v, natural)[1], "the sink is a natural logit, and m_i has base 2: multiply it by LOG2E."),
        )
        require_close(lse, exact_lse, 1e-3, f"sinks {sinks}, lse", likely)
        require_close(out, exact_out, 0.02, f"sinks {sinks}, out")
    large = [jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)] * 3 + [jax.ShapeDtypeStruct((16,), jnp.float32)]
    package = lambda q, k, v, sinks: cookbook.attention(q, k, v, sinks=sinks)
    return "A sink costs nothing: it is where the sums begin." + judge.speed(answer, package, *large)


@checker
def check_mended(answer) -> str:
    """Exercise 4: `answer(q, k, v)` is (out, lse), by a kernel that starts the next block's copies early."""
    q, k, v = (normal(seed, (1, length, 1, 64), jnp.bfloat16) for seed, length in ((4, 64), (5, 384), (6, 384)))
    out, lse = run_kernel(answer, q, k, v, undrained="there is no block after the last one.")
    exact_out, exact_lse = _attention(q, k, v, np.full(1, -np.inf))
    require_close(lse, exact_lse, 1e-3, "lse")
    require_close(out, exact_out, 0.02, "out")
    _require_early(answer, q, k, v)
    large = [jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)] * 3
    return "Each copy starts as soon as its slot is free, and not before." + judge.speed(
        answer, cookbook.attention, *large
    )


def _require_early(answer, *args) -> None:
    """Raises NotYet unless the next keys' copy starts between the product that reads their slot and the softmax."""
    steps = ("wgmma_ref", "copy_gmem_to_smem", "exp2")
    jaxpr = judge.jaxpr_of(answer, *args)
    found = [name for equation in judge.equations(jaxpr) if (name := equation.primitive.name) in steps]
    after = found[found.index("wgmma_ref") + 1 :] if "wgmma_ref" in found else []
    if after[:1] != ["copy_gmem_to_smem"]:
        raise NotYet(
            "the result is right, but the next keys come too late to hide anything: their slot is free as soon as "
            "`logits` has returned. Start their copy there, before the softmax."
        )


def _attention(q, k, v, sinks):
    """(out, lse) in float64; `sinks` has a logit for each head, or -inf."""
    q, k, v = (x.swapaxes(1, 2) for x in wide(q, k, v))
    s = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    m = np.maximum(s.max(axis=-1), sinks[:, None])
    p = np.exp(s - m[..., None])
    total = p.sum(axis=-1) + np.exp(sinks[:, None] - m)
    return (p @ v / total[..., None]).swapaxes(1, 2), m + np.log(total)


@checker
def check_ranges(answer) -> str:
    """Exercise 5: `answer(first_q, block_kv, num_kv, left)` gives the parts, (first, end, masked), that 64 queries from
    `first_q` on compute when query i sees keys i - left to i."""
    anything = lambda rng: (int(2 ** rng.integers(5, 9)), 512, int(rng.integers(0, 600)))
    for block_kv, num_kv, left in (*WINDOWS, *drawn(anything)):
        for first_q in range(0, num_kv, BLOCK_Q):
            where = f"for first_q = {first_q}, block_kv = {block_kv}, left = {left}"
            _judge_parts(_parts(answer(first_q, block_kv, num_kv, left), where), first_q, block_kv, left, where)
    try:
        jax.jit(lambda first_q: [part[:2] for part in answer(first_q, 128, 1024, 300)])(np.int32(64))
    except jax.errors.JAXTypeError as error:
        raise NotYet(
            "the blocks are right, but in the kernel first_q is known only when it runs: use jnp.maximum, jnp.minimum "
            "or jnp.clip in place of max, min, int or if."
        ) from error
    return "Nothing is loaded in vain, and nothing masked in vain."


def _logits():
    """(name, x (blocks, rows, keys), v (blocks, keys, values)), float64."""
    rng = np.random.default_rng(10)
    x, v = rng.standard_normal((4, 6, 8)), rng.standard_normal((4, 8, 3))
    yield "random logits", x, v
    yield "logits that grow", x + np.arange(4)[:, None, None] * 3, v
    yield "logits that fall", x - np.arange(4)[:, None, None] * 3, v
    yield "large logits", 4000 * x, v
    masked = x.copy()
    masked[:2, 0] = -np.inf  # This row sees nothing at first,
    masked[2:, 1] = -np.inf  # this one nothing any more,
    masked[:, 2] = -np.inf  # and this one nothing at all.
    masked[:, 3, ::2] = -np.inf
    yield "masked logits", masked, v


def _merged(out_a, lse_a, out_b, lse_b, exp=np.exp, log=np.log):
    """The right answer of exercise 2, and with another base a likely wrong one."""
    top = np.maximum(lse_a, lse_b)
    shift = np.where(np.isneginf(top), 0.0, top)
    a, b = exp(lse_a - shift), exp(lse_b - shift)
    with np.errstate(all="ignore"):
        out = np.where((a + b)[:, None] > 0, (out_a * a[:, None] + out_b * b[:, None]) / (a + b)[:, None], 0.0)
        return out, shift + log(a + b)


def _parts(given, where: str) -> dict[int, bool]:
    """Whether each block is masked."""
    try:
        parts = [(int(first), int(end), bool(masked)) for first, end, masked in given]
    except (TypeError, ValueError) as error:
        raise NotYet(f"{where}, the answer is {given!r}; it must be a list of (first, end, masked).") from error
    borders = [border for first, end, _ in parts for border in (first, end)]
    if borders != sorted(borders) or borders[1:-1:2] != borders[2::2]:
        raise NotYet(f"{where}, a part must end after it begins, and the next one begin there: {parts}.")
    return {block: masked for first, end, masked in parts for block in range(first, end)}


def _judge_parts(masked: dict, first_q: int, block_kv: int, left: int, where: str) -> None:
    """Raises NotYet unless the parts compute and mask what they must and nothing else."""
    i = np.arange(first_q, first_q + BLOCK_Q)[:, None]
    for block in sorted({*masked, *range((first_q + BLOCK_Q - 1) // block_kv + 1)}):
        j = block * block_kv + np.arange(block_kv)
        sees = (j <= i) & (j >= i - left) & (j >= 0)
        if sees.any() and block not in masked:
            raise NotYet(f"{where}, block {block} is left out, and some query sees some of its keys.")
        if not sees.any() and block in masked:
            raise NotYet(f"{where}, block {block} is computed, and no query sees any of its keys.")
        if sees.any() and masked[block] == sees.all():
            seen, is_masked = "all" if sees.all() else "not all", "masked" if masked[block] else "not masked"
            raise NotYet(f"{where}, block {block} is {is_masked}, and the queries see {seen} of its keys.")
