"""Chapter 10's exercises: a lazy step, the merge of two results, sinks, and copies that race."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_close, run_kernel, wide

import cookbook

SLACKS = 8.0, 0.0, 3.0  # Exercise 1.


@checker
def check_step(answer) -> str:
    """Exercise 1: `answer(m, l, acc, x, v, slack)` is the state (m, l, acc) after a block with base-2 logits `x`; `m`
    moves only if a logit exceeds it by more than `slack`."""
    for slack, (name, x, v) in itertools.product(SLACKS, _logits()):
        exact = np.full(x.shape[1], -np.inf), np.zeros(x.shape[1]), np.zeros((x.shape[1], v.shape[2]))
        for block in range(len(x)):
            args = x[block], v[block], slack
            with np.errstate(all="ignore"):
                given = answer(*(part.copy() for part in exact), *(np.copy(arg) for arg in args))
                likely = [(said, _step(*exact, *args, **how)) for how, said in WRONG_STEPS]
            if not isinstance(given, tuple) or len(given) != 3 or given[0] is None:
                raise NotYet("lazy_step must return m, l and acc: write its body.")
            exact = _step(*exact, *args)
            for i, part in enumerate(("m", "l", "acc")):
                wrongs = [(state[i], said) for said, state in likely]
                what = f"{name}, slack {slack:g}, {part} after block {block}"
                require_close(np.asarray(given[i]), exact[i], 1e-3, what, wrongs)
    return "It scales only when it must, never overflows, and rows that see nothing stay empty."


WRONG_STEPS = (  # Keywords of wrong steps, and a sentence on each.
    (dict(scaled=(0, 1)), "what l held was relative to the old m."),
    (dict(scaled=(1, 0)), "what acc held was relative to the old m."),
    (dict(exp=np.exp), "is the base 2?"),
    (dict(nothing=np.nan), "a row that has seen nothing has m = -inf, and -inf - -inf is NaN."),
    (dict(divided=True), "acc is p v, not yet divided."),
    (dict(moves=lambda m, top, slack: np.where(top > m + SLACKS[0], top, m)), "slack is an argument, no constant."),
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
        "rows that see nothing in one part, in the other, or in both": (
            np.array([-np.inf, 1, -np.inf, 2, -np.inf]),
            np.array([-np.inf, -np.inf, 3, 1, 0]),
        ),
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
    """Exercise 3: `answer(q, k, v, sinks)` is out, with one more logit for each head, whose value is zero."""
    for sinks, batch, head_dim in (((5.0, -1.0), 1, 64), ((6.0, 8.0), 2, 128)):
        q, k, v = _operands(batch, len(sinks), head_dim, num_q=128, num_kv=256)
        if batch == 1:  # Where all logits are about -5, a sink of -1 takes a large share.
            q, k = q.at[:, :, 1].set(jnp.abs(q[:, :, 1])), k.at[:, :, 1].set(-jnp.abs(k[:, :, 1]))
        else:  # Here many a row's largest logit is above its sink.
            q = q.at[:, :, 1].multiply(3)
        out = run_kernel(answer, q, k, v, jnp.asarray(sinks, jnp.float32))
        without = np.full(len(sinks), -np.inf)
        likely = (
            (
                _attention(q, k, v, without),
                "that is attention without sinks: m_i and l_i must both hold the sink before the loop.",
            ),
            (
                _attention(q, k, v, np.asarray(sinks) / np.log2(np.e)),
                "the sink is a natural logit, and m_i has base 2: multiply it by LOG2E.",
            ),
        )
        require_close(out, _attention(q, k, v, np.asarray(sinks)), 0.02, f"sinks {sinks}, out", likely)
    large = [jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)] * 3 + [jax.ShapeDtypeStruct((16,), jnp.float32)]
    package = lambda q, k, v, sinks: cookbook.attention(q, k, v, sinks=sinks)
    return "A sink costs nothing: it is where the sums begin." + judge.speed(answer, package, *large)


@checker
def check_mended(answer) -> str:
    """Exercise 4: `answer(q, k, v)` is out, by a kernel that starts the next step's copies early."""
    undrained = "there is no step after the last one."
    for batch, heads, head_dim, num_kv in ((1, 1, 64, 256), (2, 2, 128, 640)):
        q, k, v = _operands(batch, heads, head_dim, num_q=64, num_kv=num_kv)
        try:
            out = run_kernel(answer, q, k, v, undrained=undrained)
        except NotYet as problem:
            if "reads the stage before its tiles have arrived" in str(problem):
                raise NotYet(RACE) from problem
            raise
        require_close(out, _attention(q, k, v, np.full(heads, -np.inf)), 0.02, "out")
        _require_early(answer, q, k, v)
    large = [jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)] * 3
    return "Each copy starts as soon as its tile is free, and not before." + judge.speed(
        answer, cookbook.attention, *large
    )


RACE = (
    "a product reads its tile of shared memory while the copy of the next step may already be arriving there: start "
    "each copy after the last line that reads the tile."
)


def _require_early(answer, *args) -> None:
    """Raises NotYet unless each step starts the next keys' copy right after the product that reads their tile, before
    the softmax, and the next values' copy right after theirs: nothing is waited for in between."""
    late = (
        "the result is right, but the next {} come too late to hide anything: their tile is free as soon as `{}` has "
        "returned. Start their copy there{}."
    )
    names = ("wgmma_ref", "copy_gmem_to_smem", "exp2")
    found = [e.primitive.name for e in judge.equations(judge.jaxpr_of(answer, *args)) if e.primitive.name in names]
    after = found[found.index("wgmma_ref") + 1 :] if "wgmma_ref" in found else []
    for block in (block for kernel in judge.play_kernel(answer, *args) for block in kernel if block.is_whole):
        started = "".join(event.kind[0] for event in block.events if event.kind in ("load", "wait", "product"))
        start, *between = started.split("p")  # Loads and waits before, between and after the products.
        steps = len(between) // 2
        if start.count("l") != 3 or started.count("l") != 1 + 2 * steps:
            raise NotYet(
                f"a block starts {start.count('l')} copies before its first product, and {started.count('l')} in all. "
                "Three come before it: queries, the first keys, the first values. Each step loads the next one's once."
            )
        if any(between[i][:1] != "l" for i in range(0, 2 * steps - 2, 2)) or after[:1] != ["copy_gmem_to_smem"]:
            raise NotYet(late.format("keys", "logits", ", before the softmax"))
        if any(between[i][:1] != "l" for i in range(1, 2 * steps - 1, 2)):
            raise NotYet(late.format("values", "add_product", ""))


def _operands(batch: int, heads: int, head_dim: int, num_q: int, num_kv: int) -> list[jax.Array]:
    """q, k and v."""
    shapes = ((batch, length, heads, head_dim) for length in (num_q, num_kv, num_kv))
    return [normal(seed, shape, jnp.bfloat16) for seed, shape in enumerate(shapes, 4)]


def _attention(q, k, v, sinks):
    """out in float64; `sinks` has a logit for each head, or -inf."""
    q, k, v = (x.swapaxes(1, 2) for x in wide(q, k, v))
    s = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    m = np.maximum(s.max(axis=-1), sinks[:, None])
    p = np.exp(s - m[..., None])
    total = p.sum(axis=-1) + np.exp(sinks[:, None] - m)
    return (p @ v / total[..., None]).swapaxes(1, 2)


def _logits():
    """(name, x (blocks, rows, keys), v (blocks, keys, values)), float64."""
    rng = np.random.default_rng(10)
    yield "few keys", 3 * rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 5, 7))
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
