"""The mixture-of-experts layer: its routing as arithmetic, the layer, its gradients, shards, errors, mutants."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook.gemm.dense.split_rows import scales_shape, split_rows_reference
from cookbook.gemm.experts import kernel_route
from cookbook.gemm.grouped import tables
from tests.arrays import array
from tests.lowering import lowered

module = importlib.import_module("cookbook.gemm.experts.moe")
routing = importlib.import_module("cookbook.gemm.experts.route")
moe, reference = module.moe, module.moe_reference


def normal(rng, *shape, scale=1.0):
    return array(scale * rng.normal(size=shape), jnp.bfloat16)


def operands(tokens=70, experts=6, hidden=72, inner=64):
    rng = np.random.default_rng(0)
    logits = array(rng.normal(size=(tokens, experts)), jnp.float32)
    gate_up, down = (normal(rng, experts, *s, scale=s[0] ** -0.5) for s in ((hidden, 2 * inner), (inner, hidden)))
    return normal(rng, tokens, hidden), logits, gate_up, down


# Routing --------------------------------------------------------------------------------------------------------------

LOGITS = {
    "random": np.random.default_rng(0).normal(size=(140, 16)),
    "one block": np.random.default_rng(0).normal(size=(64, 5)),
    "all the same": np.zeros((150, 8)),
    "the same experts": np.zeros((130, 1)) + np.arange(9),
    "not finite": np.where(np.random.default_rng(1).uniform(size=(100, 8)) < 0.3, np.nan, -np.inf),
}


TILES = 8, 24  # The products' tiles have so many rows.


@pytest.mark.parametrize("name, top_k", list(zip(LOGITS, (5, 3, 1, 3, 5), strict=True)))
@pytest.mark.parametrize("few", [True, 0, 10**4], ids=("kernel", "blocks", "comparisons"))
def test_every_choice_has_a_row_of_its_expert(monkeypatch, few, name, top_k):
    if few is not True:  # `top_k`, and counts in blocks of tokens, or all rows compared.
        monkeypatch.setattr(kernel_route, "fits", lambda *_: False)
        monkeypatch.setattr(routing, "FEW", few)
    logits = array(LOGITS[name], jnp.float32)
    with lab.interpret() as seen:
        found = jax.tree.map(np.asarray, routing.route(logits, top_k, tiles=TILES if few is True else ()))
    assert not seen.races_found
    weights, rows, sources, groups, of_rows, _ = found
    experts = np.asarray(jax.lax.top_k(logits, top_k)[1])
    np.testing.assert_array_equal(tables.sizes_of(groups), np.bincount(experts.ravel(), minlength=logits.shape[1]))
    # Rows in the order of the experts, and of the tokens within each.
    order = np.argsort(experts.ravel(), kind="stable")
    np.testing.assert_array_equal(sources, order)
    np.testing.assert_array_equal(of_rows, experts.ravel()[order])
    np.testing.assert_array_equal(rows.ravel()[order], np.arange(order.size))
    if np.isfinite(LOGITS[name]).all():
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    for tile in TILES if few is True else ():
        table = groups.tables[tile]
        wanted = tables.row_table(*tables.bounds(jnp.asarray(groups.sizes), order.size), order.size, tile)
        np.testing.assert_array_equal(table.after, wanted.after)
        for entries, column in zip(table[1:], wanted[1:], strict=True):  # Later entries are never read.
            np.testing.assert_array_equal(entries[: table.after[-1]], column[: table.after[-1]])


@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_of_what_is_not_finite(renormalize):
    logits = np.where(np.eye(24, 6, dtype=bool), np.inf, np.random.default_rng(3).normal(size=(24, 6)))
    logits[10:] = np.where(np.arange(6) % 5 == 0, -np.inf, logits[10:])
    logits[20, 3], logits[21] = np.nan, -np.inf
    fns = (lambda x, fn=fn: fn(x, 4, renormalize).weights for fn in (routing.route, routing.route_reference))
    with lab.interpret():
        np.testing.assert_allclose(*(fn(array(logits, jnp.float32)) for fn in fns), rtol=1e-5)


@pytest.mark.parametrize(
    "tokens, experts, top_k",
    [(64, 32, 4), pytest.param(256, 128, 8, marks=pytest.mark.slow)],
)
def test_the_route_compiles_for_an_h200(tokens, experts, top_k):
    routed = lambda logits: module.route(logits, top_k, tiles=TILES)
    compiled = lab.compile_for("h200", routed, jax.ShapeDtypeStruct((tokens, experts), jnp.float32))
    assert compiled.spill_bytes == 0 and "MEMBAR" not in compiled.sass


def test_split_tokens_are_copied_with_both_scales_of_each_row():
    """Row m's scale is scales[0, m] and scales[1, m - 1]; experts' rows begin at odd places, too."""
    rng = np.random.default_rng(2)
    x = array(rng.normal(size=(37, 160)) * 2.0 ** rng.integers(-20, 20, size=(37, 1)), jnp.bfloat16)
    logits, split = array(rng.normal(size=(37, 5)), jnp.float32), split_rows_reference(x)
    with lab.interpret() as seen:
        found = jax.tree.map(np.asarray, routing.route(logits, 2, tiles=TILES, x=split))
    assert not seen.races_found and any(np.cumsum(found.group_sizes.sizes)[:-1] % 2)
    tokens, num = found.sources // 2, found.sources.size
    as_bytes = lambda halves: np.asarray(halves).view(np.uint8)
    np.testing.assert_array_equal(as_bytes(found.copies.halves), as_bytes(split.halves)[tokens])
    scales = np.asarray(split.scales)[0, tokens]
    assert found.copies.scales.shape == scales_shape(num)
    np.testing.assert_array_equal(found.copies.scales[0, :num], scales)
    np.testing.assert_array_equal(found.copies.scales[1, : num - 1], scales[1:])


def test_rows_of_any_length_lower():
    """TMA copies at most 256 pieces along an axis: rows of 257 are left to `copy_rows`."""
    for hidden in (2048, 2056):
        shapes = (64, hidden), (64, 32), (32, hidden, 32), (32, 16, hidden)
        avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        text = lowered(functools.partial(moe, top_k=4), *avals).as_text()
        assert ("copy_rows" in text) == (hidden == 2056)


def test_the_route_lowers_for_any_number_of_experts():
    for experts in (1, 40):
        lowered(lambda logits: module.route(logits, 1), jax.ShapeDtypeStruct((3 * experts, experts), jnp.float32))


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_of_weights(renormalize):
    logits = array(LOGITS["random"][:40], jnp.float32)

    def wanted(logits):
        weights = jax.nn.softmax(logits)
        chosen, experts = jax.lax.top_k(weights, 3)
        return chosen / chosen.sum(1, keepdims=True) if renormalize else chosen

    found = lambda logits: module.route(logits, 3, renormalize).weights
    scale = array(np.random.default_rng(2).normal(size=(40, 3)), jnp.float32)
    for value in (lambda fn: fn(logits), lambda fn: jax.grad(lambda x: (fn(x) * scale).sum())(logits)):
        with lab.interpret():
            np.testing.assert_allclose(value(found), value(wanted), rtol=1e-5, atol=1e-6)


# The layer ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k, renormalize", [(2, True), (3, False)])
def test_layer(top_k, renormalize):
    how = dict(top_k=top_k, renormalize=renormalize)
    # Inner values are rounded to 16 bits, and the rows that are summed.
    fns = (functools.partial(fn, **how) for fn in (moe, reference))
    lab.check(*fns, *operands(), tolerance=4e-3, gpu="h200" if renormalize else None)


@pytest.mark.slow
def test_leading_axes_and_an_expert_without_tokens():
    x, logits, *weights = operands(12)
    logits = logits.at[:, 2].set(-100)
    out = lab.run(functools.partial(moe, top_k=2), x.reshape(3, 4, -1), logits.reshape(3, 4, -1), *weights)
    wanted = reference(x, logits, *weights, 2)
    np.testing.assert_allclose(np.asarray(out, np.float32).reshape(12, -1), wanted, atol=0.05)
    assert moe(x[:0], logits[:0], *weights, top_k=2).shape == (0, 72)


def test_biases_and_the_clamped_swiglu():
    """Against NumPy in float64; the limit cuts many values. The first two experts are on another device, as it were."""
    args, rng = operands(24, 6, 72, 64), np.random.default_rng(3)
    biases = tuple(array(rng.normal(size=(6, n)), jnp.float32) for n in (128, 72))

    def with_biases(fn, x, logits, *of_experts):
        gate_up, down, b_gate_up, b_down = (w[2:] for w in of_experts)
        how = dict(top_k=3, swiglu_limit=1.0, group_offset=2, b_gate_up=b_gate_up, b_down=b_down)
        return fn(x, logits, gate_up, down, **how)

    found = lab.run(functools.partial(with_biases, moe), *args, *biases)
    x, logits, gate_up, down, b_gate_up, b_down = (np.asarray(a, np.float64) for a in (*args, *biases))
    wanted = np.zeros_like(x)
    for t in range(len(x)):
        chosen = np.argsort(-logits[t])[:3]
        share = np.exp(logits[t, chosen])
        for weight, e in zip(share / share.sum(), chosen, strict=True):
            if e < 2:
                continue
            values = x[t] @ gate_up[e] + b_gate_up[e]
            gate, up = np.minimum(values[:64], 1), np.maximum(np.minimum(values[64:], 1), -1)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            wanted[t] += weight * (inner @ down[e] + b_down[e])
    exact = with_biases(reference, *(a.astype(jnp.float32) for a in args), *biases)
    for out, limit in ((found, 4e-3), (exact, 1e-5)):
        assert np.linalg.norm(np.float64(out) - wanted) < limit * np.linalg.norm(wanted)


@pytest.mark.parametrize("offset", [None, 1])
def test_gradients_of_biases(offset):
    """XLA's own gradient would add the rows up one by one."""
    rng, sizes = np.random.default_rng(0), jnp.array([3, 0, 5, 2])
    bias, rows, scale = (array(rng.normal(size=(n, 6)), jnp.float32) for n in (4 if offset is None else 2, 10, 10))
    start = offset or 0
    number = np.repeat(np.arange(4), sizes) - start
    padded = lambda bias: jnp.pad(bias, ((start, 4 - start - len(bias)), (0, 0)))[number + start]
    fns = (
        lambda rows, bias: module.biased(rows, bias, np.repeat(np.arange(4), sizes), offset),
        lambda rows, bias: rows + padded(bias),
    )
    for wrt in (0, 1):
        found, wanted = (jax.grad(lambda *args, fn=fn: (fn(*args) * scale).sum(), wrt)(rows, bias) for fn in fns)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(*(fn(rows, bias) for fn in fns))


def gradients(fn, args):
    scale = array(np.random.default_rng(1).normal(size=args[0].shape), jnp.float32)
    return jax.grad(lambda *args: (fn(*args, top_k=2) * scale).sum(), (0, 1, 2, 3))


@pytest.mark.slow
def test_gradients():
    args = operands()
    # Roundings to 16 bits: of both products and of their gradients.
    lab.check(*(gradients(fn, args) for fn in (moe, reference)), *args, tolerance=7e-3, gpu=None)


@pytest.mark.slow
def test_a_token_of_nan_stays_alone():
    x, *rest = operands()
    out = lab.run(functools.partial(moe, top_k=2), x.at[5].set(jnp.nan), *rest)
    assert jnp.isnan(out[5]).all() and not jnp.isnan(jnp.delete(out, 5, axis=0)).any()


@pytest.mark.slow
def test_shard_map_with_experts_sharded():
    """Gradients too; each device has some of the experts."""
    mesh = jax.make_mesh((1,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    args = operands()

    def local(x, logits, gate_up, down, top_k):
        offset = jax.lax.axis_index("expert") * down.shape[0]
        return jax.lax.psum(moe(x, logits, gate_up, down, top_k=top_k, group_offset=offset), "expert")

    specs = jax.P(), jax.P(), jax.P("expert"), jax.P("expert")
    sharded = lambda *args, top_k: jax.shard_map(
        functools.partial(local, top_k=top_k), mesh=mesh, in_specs=specs, out_specs=jax.P()
    )(*args)
    found = lab.run(jax.jit(gradients(sharded, args)), *args)
    for x, y in zip(found, gradients(reference, args)(*args), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) < 1e-2 * np.linalg.norm(y)


@pytest.mark.slow
def test_shards_add_up():
    x, logits, gate_up, down = operands()
    shard = lambda fn, at: functools.partial(fn, top_k=3, group_offset=at)
    whole = lambda fn: (
        lambda x, logits, gate_up, down: tuple(
            shard(fn, at)(x, logits, gate_up[at : at + 3], down[at : at + 3]) for at in (0, 3)
        )
    )
    lab.check(whole(moe), whole(reference), x, logits, gate_up, down, tolerance=4e-3, gpu=None)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=jnp.ones((4, 16))), "cast them"),
        (dict(router_logits=jnp.ones((3, 5))), r"must be \(4,\) \+ \(E,\)"),
        (dict(w_gate_up=jnp.ones((5, 16, 24), jnp.bfloat16)), r"\(E, 16, 2I\)"),
        (dict(router_logits=jnp.ones((4, 6))), "or say group_offset"),
        (dict(router_logits=jnp.ones((4, 4)), group_offset=0), "4 experts and there are weights of 5"),
        (dict(top_k=6), "from 1 to 5"),
        (dict(top_k=1.5), "one int"),
        (dict(b_gate_up=jnp.ones((5, 8))), r"b_gate_up is \(5, 8\), float32; must be \(5, 16\) floats"),
        (dict(b_down=jnp.ones((5, 16), jnp.int32)), r"b_down is .*int32; must be \(5, 16\) floats"),
        (dict(swiglu_limit=0.0), "swiglu_limit=0.0; must be above 0"),
    ],
)
def test_errors_name_the_rule(change, message):
    args = dict(x=jnp.ones((4, 16), jnp.bfloat16), router_logits=jnp.ones((4, 5)), top_k=2)
    args |= dict(w_gate_up=jnp.ones((5, 16, 16), jnp.bfloat16), w_down=jnp.ones((5, 8, 16), jnp.bfloat16)) | change
    with pytest.raises(ValueError, match=message):
        moe(**args)


@pytest.mark.parametrize("mutated", ["another row", "another token", "weights in order of experts", None])
def test_mutants_of_the_routing_are_caught(run_only, monkeypatch, found_if, mutated):
    right = module.route

    def wrong(*args):
        r = right(*args)
        if mutated == "another row":
            return r._replace(rows=jnp.roll(r.rows, 1, 0))
        if mutated == "another token":
            return r._replace(sources=jnp.roll(r.sources, 1))
        return r._replace(weights=r.weights[:, ::-1]) if mutated else r

    monkeypatch.setattr(module, "route", wrong)
    with found_if(mutated is not None):
        args = operands()
        made, tolerance = (functools.partial(fn, top_k=2) for fn in (moe, reference)), 4e-3
        # Gradients alone ask whose a row is; their roundings are those of test_gradients.
        if mutated == "another token":
            made, tolerance = (gradients(fn, args) for fn in (moe, reference)), 7e-3
        lab.check(*made, *args, tolerance=tolerance, gpu=None)


@pytest.mark.parametrize("tokens, experts, top_k", [(1000, 128, 8), (64, 128, 8), (4096, 8, 2)])
def test_right_in_every_run_on_the_gpu(gpu, tokens, experts, top_k):
    args = operands(tokens, experts, 512, 256)
    fn = jax.jit(functools.partial(moe, top_k=top_k))
    outs, wanted = [fn(*args) for _ in range(10)], jax.jit(functools.partial(reference, top_k=top_k))(*args)
    assert float(jnp.linalg.norm(outs[0] - wanted) / jnp.linalg.norm(wanted)) < 5e-3
    assert all((out == outs[0]).all() for out in outs)
