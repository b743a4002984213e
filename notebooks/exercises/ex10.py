"""Chapter 10's exercises: a lazy step, the merge of two results, sinks, copies that race, and a window's blocks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, drawn

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
        state = np.full(x.shape[1], -np.inf), np.zeros(x.shape[1]), np.zeros((x.shape[1], v.shape[2]))
        for block in range(len(x)):
            before, where = state[0], f"{name}, after block {block}"
            with np.errstate(all="ignore"):
                state = answer(*(part.copy() for part in state), x[block].copy(), v[block].copy(), SLACK)
            if state is None or (isinstance(state, tuple) and any(part is None for part in state)):
                raise NotYet("lazy_step returns None: write its body, and return m, l and acc.")
            state = tuple(np.asarray(part, np.float64) for part in state)
            shapes = [part.shape for part in state]
            wanted = [x.shape[1:2], x.shape[1:2], (x.shape[1], v.shape[2])]
            if shapes != wanted:
                raise NotYet(f"the shapes of (m, l, acc) are {shapes}; they must stay {wanted}.")
            _judge_state(state, x[: block + 1], v[: block + 1], where, block)
            _judge_moves(before, state[0], x[block].max(axis=1), where)
    return "It scales only when it must, never overflows, and rows that see nothing stay empty."


def _judge_moves(before, after, top, where: str) -> None:
    """Raises NotYet unless `m` moved in the rows, and only in those, whose largest logit is too far above it."""
    must = (top > before + SLACK) & ~np.isneginf(top)
    near = lambda x, y: np.isclose(x, y, rtol=1e-6, atol=1e-3) | (x == y)
    if (wrong := ~must & ~near(after, before)).any():
        row = int(np.argmax(wrong))
        raise NotYet(
            f"{where}, m of row {row} moves from {before[row]:.1f} to {after[row]:.1f}; no logit exceeds it by more "
            f"than slack = {SLACK:g}, so it must stay."
        )
    if (must & ~near(after, top)).any():
        raise NotYet(f"{where}, a logit exceeds m by more than slack, and m is not the largest logit after it.")


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
        if given is None or (isinstance(given, tuple) and any(part is None for part in given)):
            raise NotYet("merge returns None: write its body, and return out and lse.")
        out, lse = (np.asarray(part, np.float64) for part in given)
        _judge_merge(out, lse, parts, name)
    return "Keys may be split among as many blocks as you like, and merged in any order."


@checker
def check_sinks(answer) -> str:
    """Exercise 3: `answer(q, k, v, sinks)` is (out, lse), with one more logit for each head, whose value is zero."""
    q, k, v = (judge.normal(seed, (1, length, 2, 64), jnp.bfloat16) for seed, length in ((1, 64), (2, 256), (3, 256)))
    for sinks in ((0.5, 3.0), (-4.0, 20.0)):
        out, lse = judge.run_kernel(answer, q, k, v, jnp.asarray(sinks, jnp.float32))
        exact_out, exact_lse = _attention(q, k, v, np.asarray(sinks))
        if np.isnan(np.asarray(lse)).any():
            raise NotYet(f"sinks {sinks}: there is a NaN: with a sink, m is finite and l positive from the start.")
        if np.allclose(lse, _attention(q, k, v, np.full(2, -np.inf))[1], atol=1e-3):
            raise NotYet(f"sinks {sinks}: lse is that of attention without sinks: change m_i and l_i before the loop.")
        if np.allclose(lse, _attention(q, k, v, np.asarray(sinks) / np.log2(np.e))[1], atol=1e-3):
            raise NotYet(f"sinks {sinks}: the sink is a natural logit, and m_i has base 2: multiply it by LOG2E.")
        judge.require_close(lse, exact_lse, 1e-3, f"sinks {sinks}, lse")
        judge.require_close(out, exact_out, 0.02, f"sinks {sinks}, out")
    large = [jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)] * 3 + [jax.ShapeDtypeStruct((16,), jnp.float32)]
    package = lambda q, k, v, sinks: cookbook.attention(q, k, v, sinks=sinks)
    return "A sink costs nothing: it is where the sums begin." + judge.speed(answer, package, *large)


@checker
def check_mended(answer) -> str:
    """Exercise 4: `answer(q, k, v)` is (out, lse), by a kernel that starts the next block's copies early."""
    q, k, v = (judge.normal(seed, (1, length, 1, 64), jnp.bfloat16) for seed, length in ((4, 64), (5, 384), (6, 384)))
    try:
        out, lse = judge.run_kernel(answer, q, k, v)
    except NotYet as problem:
        if "only observed barrier" in str(problem):
            raise NotYet("a copy is left that nobody waits for: there is no block after the last one.") from None
        raise
    exact_out, exact_lse = _attention(q, k, v, np.full(1, -np.inf))
    judge.require_close(lse, exact_lse, 1e-3, "lse")
    judge.require_close(out, exact_out, 0.02, "out")
    _require_early(answer, q, k, v)
    large = [jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)] * 3
    return "Each copy starts as soon as its slot is free, and not before." + judge.speed(
        answer, cookbook.attention, *large
    )


def _require_early(answer, *args) -> None:
    """Raises NotYet unless the next keys' copy starts between the product that reads their slot and the softmax."""
    steps = ("wgmma_ref", "copy_gmem_to_smem", "exp2")
    jaxpr = jax.make_jaxpr(lambda *args: answer(*args))(*args).jaxpr
    found = [name for equation in judge.equations(jaxpr) if (name := equation.primitive.name) in steps]
    after = found[found.index("wgmma_ref") + 1 :] if "wgmma_ref" in found else []
    if after[:1] != ["copy_gmem_to_smem"]:
        raise NotYet(
            "the result is right, but the next keys come too late to hide anything: their slot is free as soon as "
            "`logits` has returned. Start their copy there, before the softmax."
        )


def _attention(q, k, v, sinks):
    """(out, lse) in float64; `sinks` has a logit for each head, or -inf."""
    q, k, v = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v))
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


def _judge_state(state, x, v, where: str, block: int) -> None:
    """Raises NotYet unless acc / l is the output and m + log2 l the logarithm of the blocks so far."""
    m, l_i, acc = state
    x, v = np.concatenate(list(x), axis=1), np.concatenate(list(v))
    out, lse = _softmax(x, v)
    empty = np.isneginf(lse)
    if np.isnan(l_i).any() or np.isnan(acc).any():
        raise NotYet(f"{where}, there is a NaN: a row that has seen nothing has m = -inf, and -inf - -inf is NaN.")
    if not (np.isfinite(l_i).all() and np.isfinite(acc).all()):
        raise NotYet(f"{where}, something is infinite: subtract the largest logit so far, and no exponent is above 0.")
    if (l_i[empty] != 0).any() or (acc[empty] != 0).any():
        raise NotYet(f"{where}, a row that has seen nothing has a sum: with what do you replace m = -inf?")
    with np.errstate(all="ignore"):
        lse_given, out_given = m + np.log2(l_i), acc / l_i[:, None]
    if not np.allclose(lse_given[~empty], lse[~empty], rtol=1e-6, atol=1e-3):
        if block == 0:
            raise NotYet(f"{where}, m + log2(l) is not log2 of the sum of 2^x: is the base 2?")
        raise NotYet(f"{where}, m + log2(l) is wrong: what l held was relative to the old m.")
    if not np.allclose(out_given[~empty], out[~empty], rtol=1e-3, atol=1e-3):
        if block == 0:
            raise NotYet(f"{where}, l is right and acc / l is not: acc is p v, not yet divided.")
        raise NotYet(f"{where}, l is right and acc / l is not: what acc held was relative to the old m.")


def _softmax(x, v):
    """(out, lse in base 2) at once."""
    with np.errstate(all="ignore"):
        m = x.max(axis=1)
        p = np.exp2(x - np.where(np.isneginf(m), 0.0, m)[:, None])
        total = p.sum(axis=1)
        return np.where(total[:, None] > 0, p @ v / total[:, None], 0.0), m + np.log2(total)


def _merged(out_a, lse_a, out_b, lse_b, exp=np.exp, log=np.log):
    """The right answer of exercise 2, and with another base a likely wrong one."""
    top = np.maximum(lse_a, lse_b)
    shift = np.where(np.isneginf(top), 0.0, top)
    a, b = exp(lse_a - shift), exp(lse_b - shift)
    with np.errstate(all="ignore"):
        out = np.where((a + b)[:, None] > 0, (out_a * a[:, None] + out_b * b[:, None]) / (a + b)[:, None], 0.0)
        return out, shift + log(a + b)


def _judge_merge(out, lse, parts, name: str) -> None:
    exact_out, exact_lse = _merged(*parts)
    if out.shape != exact_out.shape or lse.shape != exact_lse.shape:
        raise NotYet(f"out and lse have shapes {out.shape} and {lse.shape}; they must keep those of the parts.")
    close = lambda x, y: np.allclose(x, y, rtol=1e-4, atol=1e-4)  # An answer in float32 is right too.
    if close(out, exact_out) and close(lse, exact_lse):
        return
    if np.isnan(out).any() or np.isnan(lse).any():
        if np.isneginf(exact_lse).all():
            raise NotYet(f"{name}: there is a NaN. Both weights are 0 there: out must be 0, and lse -inf.")
        raise NotYet(f"{name}: there is a NaN. Does exp(lse) overflow? Subtract the larger lse first.")
    if not np.isfinite(lse[np.isfinite(exact_lse)]).all():
        raise NotYet(f"{name}: lse is infinite. Subtract the larger lse first, and no exponent is above 0.")
    out_a, lse_a, out_b, lse_b = parts
    base_2 = _merged(*parts, np.exp2, np.log2)
    natural = "lse is a natural logarithm here: exp and log, not exp2 and log2."
    wrong_outs = (
        (base_2[0], natural),
        (_merged(out_a, lse_b, out_b, lse_a)[0], "each part's weight is its own exp(lse)."),
        ((out_a + out_b) / 2, "the parts have not the same weight: one may hold nearly all of the sum."),
        (out_a + out_b, "both parts are divided by their own sums already: weigh them."),
    )
    wrong_lses = (
        (base_2[1], natural),
        (np.maximum(lse_a, lse_b), "the two sums of exponentials add up; the larger is not all."),
        (lse_a + lse_b, "exponentials add up, not their logarithms."),
    )
    for given, exact, wrongs in ((out, exact_out, wrong_outs), (lse, exact_lse, wrong_lses)):
        for wrong, hint in wrongs:
            if close(given, wrong) and not close(given, exact):
                raise NotYet(f"{name}: {hint}")
    what = "lse is right, out is not" if close(lse, exact_lse) else "lse is not the logarithm of both sums together"
    raise NotYet(f"{name}: {what}. A part's weight is exp(lse), as a share of both.")


def _parts(given, where: str) -> list[tuple[int, int, bool]]:
    if given is None:
        raise NotYet("window_ranges returns None: write its body.")
    try:
        parts = [(int(first), int(end), bool(masked)) for first, end, masked in given]
    except (TypeError, ValueError) as error:
        raise NotYet(f"{where}, the answer is {given!r}; it must be a list of (first, end, masked).") from error
    if not parts:
        raise NotYet(f"{where}, there is no part at all; an empty one is (first, first, masked).")
    for (first, end, _), after in itertools.zip_longest(parts, parts[1:]):
        if end < first:
            raise NotYet(f"{where}, a part ends before it begins: {parts}. Clip it, or its blocks come twice.")
        if after is not None and after[0] != end:
            raise NotYet(f"{where}, each part must begin where the one before ends: {parts}.")
    return parts


def _judge_parts(parts, first_q: int, block_kv: int, left: int, where: str) -> None:
    """Raises NotYet unless the parts compute and mask what they must and nothing else."""
    masked = {block: mask for first, end, mask in parts for block in range(first, end)}
    i = np.arange(first_q, first_q + BLOCK_Q)[:, None]
    last = max([*masked, (first_q + BLOCK_Q - 1) // block_kv])
    for block in range(min([*masked, 0]), last + 1):
        if block in masked and block < 0:
            raise NotYet(f"{where}, block {block} is computed: there is nothing before block 0.")
        j = block * block_kv + np.arange(block_kv)
        sees = (j <= i) & (j >= i - left)
        if sees.any() and block not in masked:
            raise NotYet(f"{where}, block {block} is left out, and some query sees some of its keys.")
        if not sees.any() and block in masked:
            raise NotYet(f"{where}, block {block} is computed, and no query sees any of its keys.")
        if sees.any() and not sees.all() and not masked[block]:
            raise NotYet(f"{where}, block {block} is not masked, and some query must not see some of its keys.")
        if sees.all() and masked[block]:
            raise NotYet(f"{where}, block {block} is masked, and every query sees all of its keys.")
