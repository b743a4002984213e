"""All-gather and reduce-scatter over NVLink: compiled for hosts with several GPUs, their plans, what they refuse.

Their protocols are simulated in test_protocol.py: the interpreter has no semaphores.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook.nvlink import core, kernel_scatter
from cookbook.nvlink.core import Config

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SHARDED = jax.P("x")
OPS = {"all_gather": cookbook.all_gather, "reduce_scatter": cookbook.reduce_scatter}


def compiled(op, n, shape, dtype=jnp.bfloat16, axis="x", devices=None, **kwargs):
    """`op` on shards that all have `shape`."""
    fn = jax.shard_map(lambda x: OPS[op](x, axis, **kwargs), in_specs=jax.P(axis), out_specs=jax.P(axis))
    whole = jax.ShapeDtypeStruct((n * shape[0], *shape[1:]), dtype)
    return lab.compile_for("h200", fn, whole, devices=devices or n)


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n, dtype", zip([2, 4, 8], DTYPES, strict=True))
def test_it_compiles_without_spills_or_multicast(op, n, dtype):
    code = compiled(op, n, (n * 512, 1024), dtype)
    assert code.spill_bytes == 0 and code.registers <= 168 and code.remarks == ()
    assert "multimem" not in code.ptx and "red.release.sys" in code.ptx and "fence.acquire.sys" in code.ptx
    # Copies from peers and to them are TMA's, not word by word, and to addresses that the kernel reads when it runs.
    copies = {"all_gather": "cp.async.bulk.global.shared", "reduce_scatter": "cp.async.bulk.shared::cta.global"}
    others = {"all_gather": "cp.async.bulk.tensor.2d.global", "reduce_scatter": "cp.async.bulk.tensor"}
    assert copies[op] in code.ptx and others[op] not in code.ptx


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(4,), (4, 1), (12, 7, 5), (4, 1023), (400, 1021)], ids=str)
def test_shapes_that_need_padding_compile_and_no_descriptor_of_tma_has_the_address_of_a_peer(
    op, shape, described_peers
):
    assert compiled(op, 4, shape).spill_bytes == 0 and not described_peers


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis, n", [("x", 4), ("y", 2), (("y", "x"), 8), (("x", "y"), 8)], ids=str)
def test_a_mesh_of_several_axes_compiles(op, axis, n):
    assert compiled(op, n, (64, 256), axis=axis, devices=dict(y=2, x=4)).spill_bytes == 0


def test_it_compiles_in_a_scan_and_one_after_the_other():
    once = lambda x, _: (cookbook.reduce_scatter(cookbook.all_gather(x, "x"), "x"), None)
    fn = jax.shard_map(lambda x: jax.lax.scan(once, x, length=3)[0], in_specs=SHARDED, out_specs=SHARDED)
    code = lab.compile_for("h200", fn, jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), devices=2)
    assert len(code.kernels) == 2 and code.spill_bytes == 0


# Plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("rows", [4, 8, 64, 100, 1000, 65_536])
@pytest.mark.parametrize("pieces_a_stage", [1, "n"])
def test_every_row_is_in_a_piece_of_one_block_or_in_two_pieces(n, rows, pieces_a_stage):
    plan = core.plan(n, rows, jnp.dtype(jnp.bfloat16), Config(), n if pieces_a_stage == "n" else 1)
    seen = np.zeros(rows, int)
    pieces = 0
    for block in range(plan.num_blocks):
        for i in range(plan.num_rounds(block)):
            start = int(plan.piece(block, i).start)
            seen[start : start + plan.piece_rows] += 1
            pieces += 1
    assert pieces == plan.num_pieces and (seen >= 1).all() and (seen[: -plan.piece_rows] <= 2).all()
    assert plan.num_blocks <= 16 and plan.piece_rows % core.ROW_MULTIPLE == 0 and plan.piece_rows <= rows
    rows_at_once = kernel_scatter._rows_at_once(plan, jnp.dtype(jnp.bfloat16))
    assert plan.piece_rows % rows_at_once == 0


@pytest.mark.parametrize("shape", [(12,), (12, 7, 5), (24, 512)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_come_back_from_matrices(shape, count):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    matrices = core.as_matrices(x, count)
    assert matrices.shape[0] == count and matrices.shape[1] % core.ROW_MULTIPLE == 0
    np.testing.assert_array_equal(core.from_matrices(matrices, shape), x)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_the_derivative_of_one_is_the_other(op):
    """It compiles to the same code. Tests on hosts with several GPUs compare the values."""
    fn = jax.shard_map(lambda x, g: jax.vjp(lambda x: OPS[op](x, "x"), x)[1](g)[0], in_specs=SHARDED, out_specs=SHARDED)
    other, rows, result_rows = ("reduce_scatter", 12, 24) if op == "all_gather" else ("all_gather", 24, 12)
    x, g = (jax.ShapeDtypeStruct((2 * size, 40), jnp.bfloat16) for size in (rows, result_rows))
    code = lambda found: [line for line in found.ptx.splitlines() if line.startswith("\t") and line[1:2] != "."]
    assert code(lab.compile_for("h200", fn, x, g, devices=2)) == code(compiled(other, 2, (result_rows, 40)))


@pytest.mark.parametrize("op", OPS)
def test_a_dtype_or_a_scalar_is_refused(op):
    with pytest.raises(ValueError, match=f"cookbook.{op}: x.dtype.*must be float32, bfloat16 or float16: cast it"):
        compiled(op, 2, (64, 256), jnp.int32)
    with pytest.raises(ValueError, match="x is a scalar; it must have an axis"):
        fn = jax.shard_map(lambda x: OPS[op](x[0], "x"), in_specs=SHARDED, out_specs=SHARDED)
        lab.compile_for("h200", fn, jax.ShapeDtypeStruct((2,), jnp.float32), devices=2)


@pytest.mark.parametrize("op", OPS)
def test_an_axis_that_is_not_there_is_refused(op):
    with pytest.raises(ValueError, match="axis_name='z' is no axis of a mesh here.*inside jax.shard_map"):
        fn = jax.shard_map(lambda x: OPS[op](x, "z"), in_specs=SHARDED, out_specs=SHARDED)
        lab.compile_for("h200", fn, jax.ShapeDtypeStruct((64, 256), jnp.float32), devices=2)
    with pytest.raises(ValueError, match="is no axis of a mesh here"):
        lab.compile_for("h200", lambda x: OPS[op](x, "x"), jax.ShapeDtypeStruct((64, 256), jnp.float32))


def test_a_leading_axis_that_the_devices_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"the leading axis must be a multiple of the 4 devices.*pad it to 8"):
        compiled("reduce_scatter", 4, (6, 256))


@pytest.mark.parametrize("op", OPS)
def test_without_a_gpu_it_says_what_to_do(op):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(lambda x: OPS[op](x, "x"), mesh=mesh, in_specs=SHARDED, out_specs=SHARDED)
    if jax.default_backend() != "gpu":
        with pytest.raises(RuntimeError, match="is a GPU kernel and JAX sees no GPU"):
            fn(jnp.ones((8, 8)))
    with lab.interpret():
        np.testing.assert_array_equal(fn(jnp.ones((8, 8))), jnp.ones((8, 8)))  # One device sends nothing.
    two = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(lambda x: OPS[op](x, "x"), mesh=two, in_specs=SHARDED, out_specs=SHARDED)
    with lab.interpret(), pytest.raises(RuntimeError, match="has no semaphores.*lab.compile_for.*devices=2"):
        jax.eval_shape(fn, jax.ShapeDtypeStruct((8, 8), jnp.float32))


@pytest.mark.parametrize(
    "fields, fix",
    [
        (dict(num_blocks=0), "must be from 1 to 132"),
        (dict(num_stages=2), "must be 3 or more"),
        (dict(stage_bytes=100_000), "their product must be at most"),
    ],
    ids=str,
)
def test_a_config_that_cannot_run_is_refused(fields, fix):
    with pytest.raises(ValueError, match=fix):
        Config(**fields)


def test_a_stage_too_small_for_a_piece_of_each_device_is_refused():
    with pytest.raises(ValueError, match="must be at least 8192 for 4 devices"):
        compiled("reduce_scatter", 4, (64, 256), config=Config(stage_bytes=4096))
