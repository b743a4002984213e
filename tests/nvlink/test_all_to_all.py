"""All-to-all over NVLink: where its rows go, worked out without a GPU; compiled for several GPUs; what it refuses.

Its protocol is simulated in test_protocol.py: the interpreter has no semaphores.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook.nvlink import copies, segments
from cookbook.nvlink.core import Config

op = importlib.import_module("cookbook.nvlink.all_to_all")
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SHARDED = jax.P("x")
ROWS = 40
KINDS = ["equal", "random", "skewed", "zeros", "to one", "from one", "negative", "too many", "none left"]


def sizes_of(kind, n, rows=ROWS):
    """Sizes that each of `n` devices, a row of the matrix, asks to send to each."""
    rng, every = np.random.default_rng(n), np.full((n, n), rows // n)
    if kind == "random":
        return np.diff(np.sort(rng.integers(0, rows + 1, (n, n))), prepend=0)
    if kind == "skewed":
        return np.array([rng.permutation([rows - 3 * (n - 1)] + [3] * (n - 1)) for _ in range(n)])
    if kind == "zeros":
        return every * rng.integers(0, 2, (n, n))
    if kind == "to one":
        return rows * (np.arange(n) == n - 1) * np.ones((n, 1), int)
    if kind == "from one":
        return every * (np.arange(n)[:, None] == 1)
    if kind == "negative":
        return every * rng.choice([-1, 1], (n, n))
    if kind == "too many":
        return every + rng.integers(0, rows, (n, n))
    return every * 0 if kind == "none left" else every


@functools.partial(jax.jit, static_argnames="capacity")
def by_reference(x, sizes, capacity):
    """The reference on all devices, each a slice of these arrays."""
    one = lambda x, sizes: op.all_to_all_reference(x, "x", send_sizes=sizes, capacity=capacity)
    return jax.vmap(one, axis_name="x")(x, sizes)


@functools.partial(jax.jit, static_argnames="capacity")
def of_reference(x, sizes, capacity, g):
    """The gradients of x on all devices, of those of the results."""
    return jax.vjp(lambda x: by_reference(x, sizes, capacity)[0], x)[1](g)[0]


def numbered(n, rows, values):
    return np.arange(1, n * rows * values + 1, dtype=np.float32).reshape(n, rows, values)


# Where rows go --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("capacity", [0, 7, ROWS, 8 * ROWS])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_reference_puts_rows_in_the_order_of_their_senders(n, kind, capacity):
    x, sizes = numbered(n, ROWS, 1), sizes_of(kind, n)
    out, received = by_reference(jnp.asarray(x), jnp.asarray(sizes), capacity)
    for d in range(n):
        sent = []
        for q in range(n):
            wanted = np.maximum(sizes[q], 0)
            start = min(ROWS, wanted[:d].sum())
            sent.append(x[q, start : start + wanted[d]])
        wanted = np.concatenate([*sent, np.zeros((capacity, 1))])[:capacity]
        np.testing.assert_array_equal(out[d], wanted)
        assert received[d].sum() == min(capacity, sum(map(len, sent)))


ROUNDS_MAX = 128  # No block has more in these tests.


@functools.partial(jax.jit, static_argnames=("plan", "is_transposed"))
def pieces_of(plan, sizes, is_transposed):
    """For each warpgroup, of all devices, blocks and rounds: whether there is such a round, and its piece."""
    d, block, t = np.ix_(range(plan.n), range(plan.num_blocks), range(ROUNDS_MAX))
    found = []
    for role in segments.routes(plan, lambda q, p: sizes[q, p], d, is_transposed):
        shares = plan.shares(role, block)
        found.append((shares.num_rounds, jnp.broadcast_arrays(t < shares.num_rounds, d, *shares.piece(t))))
    return found


def copied(plan, x, sizes, is_transposed):
    """Results, which held NaN before, after the pieces of all blocks of all devices, in a random order."""
    n = plan.n
    result_rows, x_rows = (plan.rows, plan.capacity) if is_transposed else (plan.capacity, plan.rows)
    out = np.full((n, result_rows * plan.parts, plan.width), np.nan, np.float32)
    units = x.reshape(n, x_rows * plan.parts, plan.width)
    units = np.concatenate([units, np.zeros_like(out)], axis=1)  # TMA finds zeros beyond an array's end.
    pieces = []
    for wg, (num_rounds, found) in enumerate(pieces_of(plan, jnp.asarray(sizes), is_transposed)):
        assert np.max(num_rounds) <= ROUNDS_MAX
        exists, *fields = map(np.asarray, found)
        found = [*zip(*(field[exists] for field in fields), strict=True)]
        assert all((peer == d) == (wg == copies.KEEPS) for d, peer, *_ in found)
        pieces += found
    for q, peer, source, target, size, _ in np.random.default_rng(0).permutation(pieces):
        assert size in plan.pieces and 0 <= target <= out.shape[1] - size and source >= 0
        out[peer, target : target + size] = units[q, source : source + size]
    return out.reshape(n, result_rows, -1)


cut = jax.jit(segments.cut, static_argnames="room")
CASES = [*((n, kind, 2 * ROWS, 24) for n in (2, 8) for kind in KINDS)]
CASES += [(3, kind, capacity, 520) for kind in ("random", "skewed") for capacity in (1, 7, ROWS, 1000)]
CASES += [(n, "random", ROWS, 8) for n in (4, 5, 6, 7)]  # 2, 3 and 8 are above.


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("n, kind, capacity, values", CASES, ids=str)
def test_pieces_write_every_row_of_the_results_and_of_the_way_back(n, kind, capacity, values):
    config = Config(num_blocks=3, stage_bytes=16_384)
    plan = segments.plan(n, ROWS, capacity, values, jnp.dtype(jnp.float32), config)
    assert plan.values == values
    x, asked = numbered(n, ROWS, values), jnp.asarray(sizes_of(kind, n))
    sizes = np.array([cut(row, ROWS) for row in asked])
    out, received = by_reference(jnp.asarray(x), asked, capacity)
    np.testing.assert_array_equal(copied(plan, x, sizes, False), out)
    for d in range(n):
        np.testing.assert_array_equal(received[d], cut(jnp.asarray(sizes[:, d]), capacity))
    g = numbered(n, capacity, values)
    np.testing.assert_array_equal(copied(plan, g, sizes, True), of_reference(x, asked, capacity, g))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("n", [2, 4, 7])
def test_pieces_of_equal_parts_write_what_lax_writes(n):
    plan = segments.plan(n, 6 * n, 6 * n, 264, jnp.dtype(jnp.float32), Config(num_blocks=4))
    x = numbered(n, 6 * n, 264)
    wanted = jax.vmap(lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True), axis_name="x")(x)
    np.testing.assert_array_equal(copied(plan, x, np.full((n, n), 6), False), wanted)


@pytest.mark.parametrize("values", [1, 8, 100, 256, 264, 1000, 1021, 2048, 7168, 8072, 16_384])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("rows", [1, 64, 32_768])
def test_a_plan_fits_tma(values, dtype, rows):
    dtype, config = jnp.dtype(dtype), Config()
    plan = segments.plan(4, rows, 2 * rows, values, dtype, config)
    assert values <= plan.values <= math.ceil(values / 256) * 256 and plan.width <= 256
    assert plan.width * dtype.itemsize % 16 == 0 and all(size <= 256 for size in plan.pieces)
    assert 2 * plan.pieces[0] * plan.width * dtype.itemsize <= config.stage_bytes
    assert plan.pieces[-1] <= plan.parts  # A segment is no shorter than its smallest piece.
    if values % 128 == 0:
        assert plan.values == values


def test_devices_and_blocks_begin_with_different_peers():
    plan = segments.plan(8, 4096, 4096, 1024, jnp.dtype(jnp.bfloat16), Config())
    firsts = set()
    for d in range(8):
        to_peers, _ = segments.routes(plan, lambda q, p: 512, d, False)
        by_block = [int(plan.shares(to_peers, block).piece(0)[0]) for block in range(7)]
        assert sorted(by_block) == [p for p in range(8) if p != d]
        firsts.add(by_block[0])
    assert len(firsts) == 8


# Compiled -------------------------------------------------------------------------------------------------------------


def ragged(capacity=None, axis="x", **how):
    return lambda x, sizes: cookbook.all_to_all(x, axis, send_sizes=sizes, capacity=capacity, **how)


def compiled(n, shape, dtype=jnp.bfloat16, *, axis="x", fn=None, devices=None, **how):
    """The ragged exchange on x that has `shape` on each of `n` devices."""
    fn = jax.shard_map(fn or ragged(axis=axis, **how), in_specs=jax.P(axis), out_specs=jax.P(axis))
    x = jax.ShapeDtypeStruct((n * shape[0], *shape[1:]), dtype)
    return lab.compile_for("h200", fn, x, jax.ShapeDtypeStruct((n * n,), jnp.int32), devices=devices or n)


def compiled_equal(n, shape, dtype=jnp.bfloat16, **how):
    fn = jax.shard_map(lambda x: cookbook.all_to_all(x, "x", **how), in_specs=SHARDED, out_specs=SHARDED)
    return lab.compile_for("h200", fn, jax.ShapeDtypeStruct((n * shape[0], *shape[1:]), dtype), devices=n)


@pytest.mark.parametrize("n, dtype", zip([2, 4, 8], DTYPES, strict=True))
@pytest.mark.parametrize("build", [compiled, compiled_equal])
def test_it_compiles_without_spills_or_multicast(build, n, dtype, described_peers):
    code = build(n, (4096, 7168), dtype)
    assert not described_peers
    assert code.spill_bytes == 0 and code.registers <= 168 and code.remarks == ()
    assert "multimem" not in code.ptx and "red.release.sys" in code.ptx and "fence.acquire.sys" in code.ptx
    assert "cp.async.bulk.global.shared" in code.ptx  # Stores to peers are in bulk, not word by word.
    assert "ld.global.nc" not in code.ptx  # Sizes that have come are not read through a cache of constants.
    assert "cp.async.bulk.tensor.2d.shared" in code.ptx  # Zeros come from where TMA finds no array.


@pytest.mark.parametrize("shape", [(4,), (4, 1), (12, 7, 5), (4, 1021), (64, 8072), (8, 32_768)], ids=str)
@pytest.mark.parametrize("build", [compiled, compiled_equal])
def test_shapes_compile(build, shape):
    assert build(4, shape).spill_bytes == 0


@pytest.mark.parametrize("axis, n", [("x", 4), ("y", 2), (("y", "x"), 8), (("x", "y"), 8)], ids=str)
def test_a_mesh_of_several_axes_compiles(axis, n):
    assert compiled(n, (64, 256), axis=axis, devices=dict(y=2, x=4)).spill_bytes == 0


@pytest.mark.slow
def test_it_compiles_in_a_scan_and_with_its_derivatives():
    there = lambda x, sizes: ragged(96)(x, sizes)[0]

    def back_and_forth(x, sizes):
        return jax.lax.scan(lambda x, _: (there(x, sizes)[:64], None), x, length=3)[0]

    assert len(compiled(2, (64, 256), fn=back_and_forth).kernels) == 1
    gradient = lambda x, sizes: jax.grad(lambda x: jnp.sum(jnp.square(there(x, sizes).astype(jnp.float32))))(x)
    assert len(compiled(2, (64, 256), fn=gradient).kernels) == 2
    twice = lambda x, sizes: jax.grad(lambda x: jnp.sum(gradient(x, sizes).astype(jnp.float32)))(x)
    assert compiled(2, (64, 256), fn=twice).spill_bytes == 0
    equal = lambda x: jax.grad(lambda x: jnp.sum(jnp.square(cookbook.all_to_all(x, "x"))))(x)
    fn = jax.shard_map(equal, in_specs=SHARDED, out_specs=SHARDED)
    assert lab.compile_for("h200", fn, jax.ShapeDtypeStruct((64, 256), jnp.float32), devices=2).spill_bytes == 0


def test_arrays_that_all_devices_have_alike_compile():
    """The results differ between devices all the same, and shard_map knows it."""
    fn = jax.shard_map(ragged(), in_specs=jax.P(), out_specs=SHARDED)
    avals = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    assert lab.compile_for("h200", fn, *avals, devices=2).spill_bytes == 0
    gradient = jax.grad(lambda x, sizes: fn(x, sizes)[0].astype(jnp.float32).sum())
    assert lab.compile_for("h200", gradient, *avals, devices=2).spill_bytes == 0


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how, fix",
    [
        (dict(capacity=5), "capacity=5 goes with send_sizes: equal parts always fit. Drop it"),
        (dict(send_sizes=jnp.ones(3, jnp.int32)), r"send_sizes is int32\[3\]; it must be 2 integers"),
        (dict(send_sizes=jnp.ones(2)), r"send_sizes is float32\[2\]; it must be 2 integers"),
        (dict(send_sizes=jnp.ones(2, jnp.int32), capacity=-1), "capacity=-1; it must be 0 or more"),
        (dict(send_sizes=jnp.ones(2, jnp.int32), capacity=1.5), "capacity=1.5; must be one int"),
        (dict(config=Config(stage_bytes=512)), "must be at least 1024 for rows of 256 values"),
    ],
    ids=str,
)
def test_bad_input_is_refused(how, fix):
    with pytest.raises(ValueError, match=fix):
        compiled_equal(2, (64, 256), **how)


def test_a_leading_axis_that_the_devices_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"must be a multiple of the 4 devices.*pad it to 8.*or pass send_sizes"):
        compiled_equal(4, (6, 256))


def test_without_a_gpu_it_says_what_to_do():
    two = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(lambda x: cookbook.all_to_all(x, "x"), mesh=two, in_specs=SHARDED, out_specs=SHARDED)
    with lab.interpret(), pytest.raises(RuntimeError, match="has no semaphores.*lab.compile_for.*devices=2"):
        jax.eval_shape(fn, jax.ShapeDtypeStruct((8, 8), jnp.float32))


@pytest.mark.parametrize("rows, capacity", [(6, None), (6, 2), (6, 9), (0, 3), (6, 0)])
def test_one_device_keeps_its_rows(rows, capacity):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shard = lambda fn: jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED))
    x = jnp.asarray(np.arange(rows * 3.0, dtype=np.float32).reshape(rows, 3) + 1)
    with lab.interpret():
        out, received = shard(lambda x: ragged(capacity)(x, [4]))(x)
        np.testing.assert_array_equal(shard(lambda x: cookbook.all_to_all(x, "x"))(x), x)
    capacity = rows if capacity is None else capacity
    kept = min(4, rows, capacity)
    np.testing.assert_array_equal(out, np.concatenate([x[:kept], np.zeros((capacity - kept, 3))]))
    assert received.tolist() == [kept]
