"""The products across GPUs: compiled for hosts with several GPUs, their order of tiles, what they refuse.

Their protocols are simulated in test_protocol.py, and their numbers are checked in test_interpreted.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook.nvlink import kernel_gather_matmul as gather
from cookbook.nvlink import matmul_core

OPS = {
    "all_gather_matmul": (jax.P("x"), jax.P(None, "x"), jax.P(None, "x")),
    "matmul_reduce_scatter": (jax.P(None, "x"), jax.P("x"), jax.P("x")),
}
each_op = pytest.mark.parametrize("op", OPS)


def on_axis(specs, axis):
    return [jax.P(*(axis if name else None for name in spec)) for spec in specs]


def compiled(op, n, m, k, cols, dtype=jnp.bfloat16, axis="x", devices=None, grad=False, **kwargs):
    """`op` for n devices, each with m rows of the result's shards, k values to sum and `cols` columns."""
    *ins, out = on_axis(OPS[op], axis)
    fn = lambda lhs, rhs: getattr(cookbook, op)(lhs, rhs, axis, **kwargs)
    if grad:
        fn, out = jax.grad(lambda *args, fn=fn: fn(*args).astype(jnp.float32).sum(), (0, 1)), tuple(ins)
    shapes = ((n * m, k), (k, n * cols)) if op == "all_gather_matmul" else ((n * m, n * k), (n * k, cols))
    fn = jax.shard_map(fn, in_specs=tuple(ins), out_specs=out)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return lab.compile_for("h200", fn, *args, devices=devices or n)


# Compiled -------------------------------------------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize("n, dtype", [(2, jnp.bfloat16), (4, jnp.float16), (8, jnp.bfloat16)])
def test_it_compiles_without_spills_or_multicast(op, n, dtype):
    code = compiled(op, n, 1024, 4096, 4096, dtype)
    assert code.spill_bytes == 0 and code.registers <= 168 and code.remarks == ()
    assert "multimem" not in code.ptx and "red.release.sys" in code.ptx and "fence.acquire.sys" in code.ptx
    assert code.ptx.count("setmaxnreg") == 2  # The same roles as those of a product on one GPU.
    assert code.ptx.count("cp.async.bulk.wait_group \t0") >= 1  # Signals follow stores that have ended, not only begun.


@each_op
@pytest.mark.parametrize("m, k, cols", [(8, 8, 8), (100, 200, 104), (264, 1000, 520), (1000, 72, 1032)], ids=str)
def test_sizes_that_tiles_do_not_divide_compile(op, m, k, cols):
    assert compiled(op, 4, m, k, cols).spill_bytes == 0


@each_op
@pytest.mark.parametrize(
    "fields",
    [dict(cluster_m=2), dict(tile_m=256, tile_n=128, cluster_n=2), dict(tile_m=64, tile_n=256, split_dim=1)],
    ids=str,
)
def test_every_tile_and_cluster_compiles(op, fields):
    code = compiled(op, 2, 1000, 512, 1024, config=getattr(cookbook, op).Config(**fields))
    assert code.spill_bytes == 0 and code.remarks == ()


@each_op
@pytest.mark.parametrize("axis, n", [("x", 4), ("y", 2), (("y", "x"), 8), (("x", "y"), 8)], ids=str)
def test_a_mesh_of_several_axes_compiles(op, axis, n):
    assert compiled(op, n, 256, 256, 256, axis=axis, devices=dict(y=2, x=4)).spill_bytes == 0


@pytest.mark.slow
@each_op
def test_the_derivative_of_one_is_the_other(op):
    code = compiled(op, 2, 512, 256, 384, grad=True)
    # Those of d_lhs and d_rhs; all_gather_matmul keeps no gathered rows, and gathers them again.
    assert len(code.kernels) == (3 if op == "all_gather_matmul" else 2) and code.spill_bytes == 0


@each_op
@pytest.mark.parametrize("m, k, cols", [(264, 1000, 520), (8, 24576, 64)], ids=str)
def test_no_descriptor_of_tma_has_the_address_of_a_peer(described_peers, op, m, k, cols):
    assert compiled(op, 4, m, k, cols).spill_bytes == 0 and not described_peers


def test_one_after_the_other_in_a_scan():
    def once(x, _):
        y = cookbook.all_gather_matmul(x, jnp.ones((256, 128), x.dtype), "x")
        return cookbook.matmul_reduce_scatter(y, jnp.ones((128, 256), x.dtype), "x"), None

    fn = jax.shard_map(lambda x: jax.lax.scan(once, x, length=3)[0], in_specs=jax.P("x"), out_specs=jax.P("x"))
    code = lab.compile_for("h200", fn, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), devices=2)
    assert len(code.kernels) == 2 and code.spill_bytes == 0


# Plans ----------------------------------------------------------------------------------------------------------------

SHAPES = [(128, 256, 64), (1000, 520, 72), (64, 1032, 4096), (300, 128, 1000), (3, 64, 40_000)]


def plan(m, n, k, num_shards, config, **fields):
    return matmul_core.plan_of(m, n, k, num_shards, jnp.dtype(jnp.bfloat16), False, config, 128, **fields)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("num_shards", [2, 3, 8])
@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize(
    "fields", [{}, dict(cluster_m=2), dict(cluster_n=2, grid_minor_dim=1), dict(tile_n=64)], ids=str
)
def test_every_value_of_every_shard_is_in_one_tile(m, n, k, num_shards, fields):
    c = matmul_core.Config(**fields)
    tiles = plan(m, n, k, num_shards, c).tiles
    seen = np.zeros((num_shards, m, n), int)
    for block_m, block_n in np.ndindex(c.cluster_m, c.cluster_n):
        look_up = jax.jit(jax.vmap(lambda index, at=(block_m, block_n): tiles.look_up(index, *at)))
        entries = [np.asarray(x) for x in look_up(np.arange(tiles.count))]
        for step, _, row, col in zip(*entries, strict=True):
            seen[step, row : row + c.tile_m, col : col + c.tile_n] += 1
        assert (np.diff(entries[0]) >= 0).all()
    assert (seen == 1).all()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("num_senders", [1, 3, 4])
@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("cluster_m", [1, 2])
def test_senders_send_every_value_to_every_peer_once_in_the_block_that_is_announced(m, n, k, cluster_m, num_senders):
    c = gather.Config(cluster_m=cluster_m, num_senders=num_senders)
    p = gather.Shard.of(plan(m, n, k, 3, c, first_cluster=-(-num_senders // cluster_m)), keeps_own=False)
    seen = np.zeros((3, m, k), int)
    (height, width), rows = p.piece, p.rows

    def source(sender, i):
        exists, (row, col) = p.source(sender, i)
        return *p.protocol.place(sender, i)[:2], exists, row.start, col.start

    each_round = jax.jit(jax.vmap(source, in_axes=(None, 0)))
    for sender in range(p.num_senders):
        sources = each_round(sender, np.arange(p.protocol.num_rounds))
        for step, block, exists, row, col in zip(*map(np.asarray, sources), strict=True):
            assert 0 <= row <= m - height and 0 <= col <= k - width
            if exists:
                seen[step, row : row + height, col : col + width] += 1
                assert row + height > block * rows and row < (block + 1) * rows
    # Values before the end may be sent twice.
    assert (seen[1:] >= 1).all() and (seen[1:, : m - height, : k - width] <= 1).all() and not seen[0].any()


def test_a_default_configuration_has_as_many_senders_as_the_product_hides():
    senders = [gather.default_config(2048, n, 4096, 4).num_senders for n in (16384, 4096, 512)]
    assert senders == sorted(senders) and senders[0] < senders[-1]  # A wide product takes as long as few need to send.


# Refusals -------------------------------------------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize(
    "lhs, rhs, dtype, message",
    [
        ((64, 64), (64, 64), jnp.float32, "lhs.dtype.*must both be bfloat16 or both float16: cast one"),
        ((64, 64), (72, 64), jnp.bfloat16, "share no K: 64 is not 72"),
        ((64, 60), (60, 64), jnp.bfloat16, "a row of lhs has 60 values.*pad it to 64"),
        ((64, 64), (64, 12), jnp.bfloat16, "a row of rhs has 12 values.*pad it to 16"),
        ((2, 64, 64), (64, 64), jnp.bfloat16, "must both be matrices"),
    ],
    ids=str,
)
def test_operands_that_it_cannot_multiply_are_refused(op, lhs, rhs, dtype, message):
    fn = jax.shard_map(lambda a, b: getattr(cookbook, op)(a, b, "x"), in_specs=(jax.P(), jax.P()), out_specs=jax.P("x"))
    with pytest.raises(ValueError, match=f"cookbook.{op}: .*{message}"):
        lab.compile_for("h200", fn, *(jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs, rhs)), devices=2)


@each_op
def test_an_axis_that_is_not_there_or_is_the_kernels_own_is_refused(op):
    args = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2
    for axis, message in (("z", "axis_name='z' is no axis"), ("role", "the mesh has an axis 'role'.*differently")):
        fn = lambda a, b, axis=axis: getattr(cookbook, op)(a, b, axis)
        fn = jax.shard_map(fn, in_specs=(jax.P(), jax.P()), out_specs=jax.P("x"))
        with pytest.raises(ValueError, match=message):
            lab.compile_for("h200", fn, *args, devices=dict(x=2, role=1) if axis == "role" else 2)


def test_rows_that_the_devices_do_not_divide_are_refused():
    fn = lambda a, b: cookbook.matmul_reduce_scatter(a, b, "x")
    fn = jax.shard_map(fn, in_specs=(jax.P(), jax.P()), out_specs=jax.P("x"))
    args = jax.ShapeDtypeStruct((6, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="its rows must be a multiple of the 4 devices.*pad them to 8"):
        lab.compile_for("h200", fn, *args, devices=4)


@each_op
@pytest.mark.parametrize("fields", [dict(split_k=2), dict(tail_split=2), dict(swapped=True)], ids=str)
def test_a_config_that_cuts_shards_differently_is_refused(op, fields):
    with pytest.raises(ValueError, match="must be 1, 1 and False in products across"):
        getattr(cookbook, op).Config(**fields)


def test_a_ring_without_room_for_two_pieces_of_a_sender_is_refused():
    """With one stage a sender would wait for a piece that nobody loads."""
    config = gather.Config(tile_m=128, tile_n=64, num_stages=2)
    with pytest.raises(ValueError, match="no room for two pieces of 32768: more stages or larger tiles"):
        compiled("all_gather_matmul", 2, 256, 4096, 256, config=config)


def test_a_config_without_senders_is_refused():
    with pytest.raises(ValueError, match="self.num_senders=0: must be from 1 to 64"):
        gather.Config(num_senders=0)


@each_op
def test_without_gpus_it_says_what_to_do(op):
    ins = OPS[op][:2]
    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    two = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = lambda a, b: getattr(cookbook, op)(a, b, "x")
    fn = jax.shard_map(fn, mesh=two, in_specs=ins, out_specs=jax.P("x"))
    with lab.interpret(), pytest.raises(RuntimeError, match="has no semaphores.*lab.compile_for.*devices=2"):
        jax.eval_shape(fn, x, x)
    if jax.default_backend() != "gpu":
        with pytest.raises(RuntimeError, match=r"JAX sees no GPU.*Run it on 2 GPUs.*import lab") as raised:
            jax.eval_shape(fn, x, x)
        assert "interpret" not in str(raised.value)  # The interpreter would refuse.


@each_op
def test_one_device_multiplies_alone(op):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in (0, 1))
    fn = lambda a, b: getattr(cookbook, op)(a, b, "x")
    with lab.interpret():
        out = jax.shard_map(fn, mesh=mesh, in_specs=(jax.P(), jax.P()), out_specs=jax.P("x"))(a, b)
    np.testing.assert_allclose(np.float32(out), np.float32(a @ b), rtol=2e-2, atol=2e-2)
