"""Chapter 12's exercises: delta, a number for each column of a tile, a kernel of dq, and the queries that see keys."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    normal,
    play_kernel,
    require_close,
    require_order,
    require_rings,
    run_kernel,
    wide,
)
from exercises.memory import overlap
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import _device
from cookbook.attn.core import LOG2E

TILE = 64  # Keys of a tile.
WINDOWS = [  # block, num_q, left, right: less than a block, several, exactly some, everything; and too few queries.
    (block, num_q, left, right)
    for block, num_q in ((64, 512), (128, 512), (64, 192), (128, 128), (96, 288))
    for left, right in itertools.product((0, 1, 63, 64, 130, 2000), (0, 1, 64, 65, 2000))
]


@checker
def check_delta(answer) -> str:
    """`answer(q, k, v, out, do, lse, d_lse)` is sum(out * do) - d_lse, (B, N, T)."""
    for shape in ((2, 6, 3, 4), (1, 5, 2, 8)):  # B, T, N, head_dim.
        _check_delta_of(answer, shape)
    return "One number for each query, and no key has been touched."


def _check_delta_of(answer, shape) -> None:
    batch, length, heads, _ = shape
    rng = np.random.default_rng(12)
    q, k, v, out, do = rng.standard_normal((5, *shape))
    lse, d_lse = rng.standard_normal((2, batch, heads, length))
    lse[-1, 1, 3], out[-1, 3, 1] = -np.inf, 0.0  # This query sees nothing.
    given = answer(*(x.copy() for x in (q, k, v, out, do, lse, d_lse)))
    if given is None:
        raise NotYet("delta returns None: write its body.")
    sums = lambda a, b: np.einsum("btnh,btnh->bnt", a, b)
    likely = (
        (sums(out, do), "the gradient that comes through lse is missing: d_lse."),
        (sums(out, do) + d_lse, "ds is p (dp - delta), and lse adds p d_lse to it: which sign has d_lse in delta?"),
        (sums(out, out) - d_lse, "that is out with itself; dp comes of do."),
        (sums(do, do) - d_lse, "that is do with itself; the sum over the keys is in out."),
        (sums(v, do) - d_lse, "v is a key's, delta a query's: the sum over the keys of p v is out."),
        (sums(q, do) - d_lse, "q is the wrong tensor: delta is the sum over the keys of p dp, and dp = do v^T."),
        (sums(out, do) * 0.5 - d_lse, "delta is not scaled: the scale belongs to s, not to p."),
        (d_lse - sums(out, do), "the sign is the other one."),
    )
    said = f"delta of q {shape}: the sum over the keys of p_ij dp_ij, with dp = do v^T; what is the sum of p_ij v_j?"
    require_close(np.asarray(given), sums(out, do) - d_lse, 1e-4, said, likely)


@checker
def check_weights(answer) -> str:
    """`answer(s_ref, lse_ref, bias_ref)` is exp2(s + bias of its row - lse of its column)."""
    for keys, queries in ((64, 64), (64, 128), (128, 64)):
        s, lse, bias = normal(1, (keys, queries)), normal(2, (queries,)), normal(3, (keys,))
        lse = lse.at[5].set(jnp.inf)  # This query sees nothing.
        if keys != queries:  # Large logits have a large lse.
            s, lse = s.at[:, 3].add(200.0), lse.at[3].add(200.0)
        try:
            out = run_kernel(_in_kernel(answer), s, lse, bias)
        except NotYet as problem:
            if "possible set of layouts" in str(problem):
                raise NotYet(
                    "no layout serves all of it. A number for each row is loaded with plgpu.Layout.WGMMA.reduce(1) and "
                    "spread along [0], one for each column with reduce(0) and along [1]."
                ) from problem
            raise
        s, lse, bias = wide(s, lse, bias)
        exact = np.exp2(s + bias[:, None] - lse)
        require_close(out, exact, 1e-4, f"{keys} keys and {queries} queries", _wrong_weights(s, lse, bias))
    return "A key's number lies along the rows, reduce(1); a query's along the columns, reduce(0)."


@checker
def check_query_blocks(answer) -> str:
    """`answer(first_k, block, num_q, left, right)` is (first, end) of the blocks of queries that see one of
    the 64 keys from `first_k` on."""
    for window in WINDOWS:
        for first_k in (*range(0, 640, TILE), 100):
            _require_blocks(answer(first_k, *window), first_k, *window)
    window = (128, 512, 130, 1)
    try:
        traced = jax.jit(lambda first_k: answer(first_k, *window))
        found = [(first_k, traced(np.int32(first_k))) for first_k in (0, 64, 576)]
    except jax.errors.JAXTypeError as error:
        raise NotYet(
            "the blocks are right, but in the kernel first_k is known only when it runs: use jnp.maximum, jnp.minimum "
            "or jnp.clip in place of max, min, int or if."
        ) from error
    for first_k, given in found:
        _require_blocks(given, first_k, *window, "when it is traced, ")
    return "Left and right, exchanged: a key is seen by queries j - right to j + left."


def _require_blocks(given, first_k, block, num_q, left, right, when="") -> None:
    """Raises NotYet unless `given` is (first, end) of the blocks in which a query sees one of the keys."""
    where = f"{when}for first_k = {first_k}, block = {block}, num_q = {num_q}, left = {left}, right = {right}"
    try:
        first, end = given
        whole = int(first), int(end)
    except (TypeError, ValueError) as error:
        raise NotYet(f"{where}, the answer is {given!r}; it must be (first, end).") from error
    try:
        first, end = operator.index(first), operator.index(end)
    except TypeError as error:
        raise NotYet(
            f"{where}, the answer is {whole} in floating point, and a loop takes whole numbers: divide with //."
        ) from error
    i, j = np.arange(num_q)[:, None], first_k + np.arange(TILE)
    sees = ((j >= i - left) & (j <= i + right)).any(axis=1)
    wanted = sorted(set(np.flatnonzero(sees) // block))
    if end < first:
        raise NotYet(f"{where}, the end, {end}, lies before {first}: with no block at all they are equal.")
    if missing := set(wanted) - set(range(first, end)):
        raise NotYet(f"{where}, block {min(missing)} is left out, and queries of it see some of the keys.")
    if more := set(range(first, end)) - set(wanted):
        raise NotYet(f"{where}, block {min(more)} is computed, and none of its queries sees any of the keys.")


@checker
def check_dq(answer) -> str:
    """`answer(q, k, v, do, lse, delta)` is a kernel: dq, of tiles of 64 queries that go through the keys."""
    shapes = ((1, 128, 2, 64, 256), (2, 64, 1, 128, 320))  # Batch, queries, heads, head_dim, keys.
    for i, (batch, num_q, heads, head_dim, num_kv) in enumerate(shapes):
        queries, keys = (batch, num_q, heads, head_dim), (batch, num_kv, heads, head_dim)
        q, k, v, do = (normal(seed, x, jnp.bfloat16) for seed, x in enumerate((queries, keys, keys, queries), 1))
        lse, delta, exact = _exact_dq(q, k, v, do)
        operands = q, k, v, do, lse.at[0, 0, 3].set(jnp.inf), delta  # This query sees nothing.
        exact[0, 3, 0] = 0.0
        found = run_kernel(answer, *operands)
        said = "dq (is ds = p (dp - delta), is dq scaled, and does each query use its own lse and delta?)"
        if i:
            said = (
                "dq for other numbers of keys, a head_dim of 128 and two batches (do steps, scale and b follow them?)"
            )
        require_close(found, exact, 0.02, said, _wrong_dq(q, k, v, do, lse, delta) if not i else ())
        _require_steps(answer, operands, num_kv // TILE, num_stages=2)
        _require_steps(functools.partial(answer, num_stages=3), operands, num_kv // TILE, num_stages=3)
        if not i:
            _require_float32(found, *operands)
            said = "dq with block_kv = 128 (do the shape of the weights, the steps and their rows follow it?)"
            require_close(run_kernel(functools.partial(answer, block_kv=128), *operands), exact, 0.02, said)
    return "The same steps as for keys, with the operands exchanged: rows are queries, and lse needs no ring."


def _require_steps(answer, operands, steps: int, num_stages: int) -> None:
    """Raises NotYet unless a block loads and stores each element once, keeps as many stages in use as the ring has, and
    starts three products a step."""
    played = play_kernel(answer, *operands)
    where = f"with num_stages = {num_stages}"
    try:
        require_order(played)
        require_rings(played)
    except NotYet as problem:
        raise NotYet(f"{where}, {problem}") from problem
    for block in filter(lambda block: block.is_whole, played[0]):
        if block.count("load") > 2 + 2 * steps:
            raise NotYet("a block loads something twice: leave the loads as they are")
        if any(len(ring.stages) < num_stages for ring in block.rings if ring.loads > 2):
            raise NotYet(
                f"{where}, keys or values go through fewer stages: leave the ring as it is, and take the stage from "
                "ring.wait"
            )
        for (memory, box), (other, its_box) in itertools.combinations(block.fetched, 2):
            if memory is other and overlap(box, its_box):
                raise NotYet("a block loads the same lse or delta more than once: load both before the loop")
        stored = block.stored + [event.box for event in block.events if event.kind == "store" and event.box]
        if any(overlap(*pair) for pair in itertools.combinations(stored, 2)):
            raise NotYet("a block stores the same part of dq more than once: store it after the loop")
        if (products := block.count("product")) > 3 * steps:
            raise NotYet(f"a block starts {products} products in {steps} steps: a step has three, for s, dp and dq")


def _require_float32(found, q, k, v, do, lse, delta) -> None:
    """Raises NotYet if more than ds and the result is rounded to bfloat16. The scale of heads of 64 is a power of 2, so
    that it may be anywhere."""
    scale, dtype = q.shape[3] ** -0.5, q.dtype
    q, k, v, do, lse, delta = (np.asarray(x, np.float64) for x in (q, k, v, do, lse, delta))
    q, k, v, do = (x.swapaxes(1, 2) for x in (q, k, v, do))
    p = np.exp2(q @ k.swapaxes(2, 3) * (scale * LOG2E) - lse[..., None])
    ds = p * (do @ v.swapaxes(2, 3) - delta[..., None])
    dq = (wide(jnp.asarray(ds, dtype)) @ k * scale).swapaxes(1, 2)
    if (share := np.mean(wide(jnp.asarray(dq, dtype)) != wide(found))) > 0.02:
        raise NotYet(
            f"{share:.0%} of dq is not what one rounding gives: ds is rounded for its product, and dq once, after the "
            "loop. Keep all else in float32"
        )


def _exact_dq(q, k, v, do):
    """(lse in base 2, delta, dq), the first two (B, N, T) in float32 for the kernel."""
    q, k, v, do = (x.swapaxes(1, 2) for x in wide(q, k, v, do))
    s = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    lse = np.logaddexp.reduce(s, axis=3)
    p, dp = np.exp(s - lse[..., None]), do @ v.swapaxes(2, 3)
    delta = (p * dp).sum(axis=3)
    dq = p * (dp - delta[..., None]) @ k / np.sqrt(q.shape[3])
    return jnp.asarray(lse / np.log(2), jnp.float32), jnp.asarray(delta, jnp.float32), dq.swapaxes(1, 2)


def _wrong_dq(q, k, v, do, lse, delta):
    """(what comes of a likely mistake, what to say of it)."""
    q, k, v, do, lse, delta = wide(q, k, v, do, lse, delta)
    q, k, v, do = (x.swapaxes(1, 2) for x in (q, k, v, do))
    lse[0, 0, 3] = np.inf
    p = np.exp2(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]) / np.log(2) - lse[..., None])
    dp, scale = do @ v.swapaxes(2, 3), q.shape[3] ** -0.5
    ds = p * (dp - delta[..., None])
    yield (ds @ k).swapaxes(1, 2), "dq is not scaled."
    yield (p * dp @ k * scale).swapaxes(1, 2), "delta is missing in ds."
    yield (p * (dp + delta[..., None]) @ k * scale).swapaxes(1, 2), "delta is subtracted."
    yield (ds @ v * scale).swapaxes(1, 2), "dq is ds k, not ds v."


def _in_kernel(answer):
    """A kernel that stores what `answer` makes of references to its arguments, which lie in memory."""

    def kernel(s, lse, bias):
        def body(s_ref, lse_ref, bias_ref, out_ref):
            given = answer(s_ref, lse_ref, bias_ref)
            if given is None:
                raise NotYet("weights returns None: write its body.")
            if given.shape != s.shape:
                raise NotYet(f"the weights have the shape {given.shape}; they must have that of s, {s.shape}.")
            _device.store(out_ref, plgpu.layout_cast(given, plgpu.Layout.WGMMA))

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(s.shape, s.dtype))(s, lse, bias)

    return kernel


def _wrong_weights(s, lse, bias):
    """(what comes of a likely mistake, what to say of it)."""
    with np.errstate(all="ignore"):
        yield np.exp2(s - lse), "the bias is missing."
        yield np.exp2(s + bias[:, None]), "lse is missing."
        yield np.exp2(s - bias[:, None] - lse), "the bias is added to the logits."
        yield np.exp(s + bias[:, None] - lse), "everything is in base 2: exp2."
        narrow = (np.exp2(x.astype(np.float32)) for x in (s, bias[:, None], -lse))
        yield functools.reduce(np.multiply, narrow), "the exponential of a large logit is infinite: first subtract lse."
        if s.shape[0] == s.shape[1]:
            yield np.exp2(s + bias - lse[:, None]), "lse is a query's, and queries are the columns here, not the rows."
            yield np.exp2(s + bias - lse), "the bias is a key's, and keys are the rows here."
            yield np.exp2(s + bias[:, None] - lse[:, None]), "lse is a query's, and queries are the columns here."
