"""Grouped products: the table of tiles as plain arithmetic, groups of every size, structures, gradients, mutants."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook
import lab
from cookbook.gemm.grouped import arguments, kernel, kernel_transposed, tables
from cookbook.gemm.grouped import plan as plans
from cookbook.gemm.plan import Config
from tests.arrays import array
from tests.gemm.ragged import floats, gradients, operands, slow

forward, transposed = (inspect.getmodule(x) for x in (cookbook.ragged_dot, cookbook.ragged_dot_transposed))
ragged_dot, ragged_dot_transposed = forward.ragged_dot, transposed.ragged_dot_transposed
reference, transposed_reference = forward.ragged_dot_reference, transposed.ragged_dot_transposed_reference

SMALL = Config(64, 128, split_dim=1)
SIZES = {
    "around 64": [0, 63, 64, 65, 1],
    "around 128": [127, 1, 128, 0, 129],
    "all in the last": [0, 0, 200],
    "all in the first": [200, 0, 0],
    "none": [0, 0, 0],
    "one group": [130],
    "ones": [1] * 9,
    "more than the kernel goes through": [0, 63, *[1] * tables.SCANNED_MAX],
}


def check(m, n, k, sizes, *, transpose_rhs=False, dtype=jnp.bfloat16, gpu=None, **kwargs):
    fn = functools.partial(ragged_dot, transpose_rhs=transpose_rhs, **kwargs)
    of = functools.partial(reference, transpose_rhs=transpose_rhs)
    return lab.check(fn, of, *operands(m, n, k, sizes, transpose_rhs, dtype), gpu=gpu)


def check_transposed(m, k, n, sizes, *, dtype=jnp.bfloat16, gpu=None, **kwargs):
    lhs, rhs = (floats(m, cols, dtype=dtype, rows=sum(sizes)) for cols in (k, n))
    fn = functools.partial(ragged_dot_transposed, **kwargs)
    return lab.check(fn, transposed_reference, lhs, rhs, array(sizes, jnp.int32), gpu=gpu)


# The table ------------------------------------------------------------------------------------------------------------


def clipped(sizes, m):
    """Bounds of groups, as the docstring says: sizes below 0 are 0, and what goes beyond M is cut off."""
    ends = np.minimum(np.cumsum(np.clip(np.asarray(sizes, np.int64), 0, None)), m)
    return np.concatenate([[0], ends[:-1]]), ends


@functools.partial(jax.jit, static_argnums=(1, 2))
def tabulated(sizes, m, tile):
    """(first rows, ends, table) of groups."""
    starts, ends = tables.bounds(sizes, m)
    return starts, ends, tables.row_table(starts, ends, m, tile)


HOSTILE = [[10, -5, 2**31 - 1, 2**31 - 1, 7], [-(2**31)] * 3, [300, 1, 1], [0, 0, 201]]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("sizes", [*SIZES.values(), *HOSTILE], ids=str)
@pytest.mark.parametrize("tile", [8, 64, 256])
def test_every_row_belongs_to_one_entry_of_its_group(sizes, tile):
    m = 200 if min(sizes) < 0 or sum(sizes) > 400 else max(200, sum(sizes))
    starts, ends, table = jax.tree.map(np.asarray, tabulated(array(sizes, jnp.int32), m, tile))
    np.testing.assert_array_equal((starts, ends), clipped(sizes, m))
    assert 0 <= table.count[0] <= table.count[1] <= table.group.size
    owner = np.full(m, -1)
    for number, (group, start, end) in enumerate(zip(*table[1:], strict=True)):
        rows = slice(start, min(start + tile, end))
        if number < table.count[1]:
            assert (
                0 <= start < end <= m
                and (owner[rows] == -1).all()
                and (group < len(sizes)) == (number < table.count[0])
            )
            owner[rows] = group
    wanted = np.full(m, len(sizes) + 1)
    for group, (start, end) in enumerate(zip(*clipped(sizes, m), strict=True)):
        wanted[start:end] = group
    np.testing.assert_array_equal(owner, wanted)


def sizes_at_random(num_groups, m, count=40):
    """Sizes that share out M rows, or fewer; some empty, and some that lie."""
    rng = np.random.default_rng(num_groups)
    for _ in range(count):
        shares = rng.multinomial(rng.integers(0, m + 1), rng.dirichlet(np.full(num_groups, 0.5)))
        lies = rng.choice([0, -1, 1, m, m + 1, -(2**31), 2**31 - 1], num_groups)
        yield np.where(rng.random(num_groups) < rng.choice([0, 0.3, 1]), lies, shares).astype(np.int32)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("num_groups, m, tile", [(1, 200, 64), (3, 1, 8), (5, 300, 24), (8, 2000, 256), (12, 77, 8)])
def test_the_kernel_finds_the_entries_of_the_table(num_groups, m, tile):
    """Rows before all groups, which the table provides for, are there only with `group_offset`."""

    @functools.partial(jax.jit, static_argnums=1)
    def scan(sizes, num_entries):
        scan = tables.Scan.of(sizes, m, tile)
        return scan.count, scan.entry(jnp.arange(num_entries))

    for sizes in sizes_at_random(num_groups, m):
        _, _, table = jax.tree.map(np.asarray, tabulated(sizes, m, tile))
        scanned, (group, *rows) = scan(sizes, table.group.size)
        count = table.count[1]
        np.testing.assert_array_equal(scanned, table.count)
        np.testing.assert_array_equal(group[:count], np.minimum(table.group, num_groups)[:count])
        np.testing.assert_array_equal([x[:count] for x in rows], [x[:count] for x in table[2:]])


@pytest.mark.usefixtures("on_cpu")
def test_few_groups_need_no_table():
    tiles = lambda count: plans.RowTiles(64, 64, 64, 64, SMALL, 132, num_groups=count)
    sizes = lambda count: jnp.ones(count, jnp.int8)
    most = tables.SCANNED_MAX
    assert tiles(most).table_of(sizes(most)).dtype == jnp.int32
    for table in (tiles(most + 1).table_of(sizes(most + 1)), tiles(most).table_of(sizes(most), jnp.int32(0))):
        assert isinstance(table, tables.Table)


@pytest.mark.parametrize("config", [Config(), Config(256, 128), Config(128, 24, swapped=True)], ids=str)
def test_few_groups_spill_no_registers(config):
    count = tables.SCANNED_MAX
    shapes = (4096, 512), (count, 512, 1024)
    args = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes] + [jax.ShapeDtypeStruct((count,), jnp.int32)]
    assert lab.compile_for("h200", functools.partial(ragged_dot, config=config), *args).spill_bytes == 0


@pytest.mark.parametrize("offset", [-(2**31), -3, -1, 0, 2, 3, 4, 9, 2**31 - 1])
def test_a_shard_has_its_groups_alone(offset):
    """Rows before its groups are zeros too. Groups that do not exist, before the first or after the last, are empty."""
    sizes, m, count = [40, 0, 70, 30, 20], 200, 2
    starts, ends = tables.bounds(array(sizes, jnp.int32), m, jnp.int32(offset), count)
    edges = [0, *clipped(sizes, m)[1]]
    edge = lambda group: edges[min(max(group, 0), len(sizes))]
    np.testing.assert_array_equal(starts, [edge(offset + i) for i in range(count)])
    np.testing.assert_array_equal(ends, [edge(offset + i + 1) for i in range(count)])
    table = jax.tree.map(np.asarray, tables.row_table(starts, ends, m, 64))
    zeros = np.concatenate([np.arange(s, min(s + 64, e)) for g, s, e in zip(*table[1:], strict=True) if g >= count])
    outside = [row for row in range(m) if not starts[0] <= row < ends[-1]]
    assert set(outside) == {*zeros.tolist()} - {x for x in zeros.tolist() if starts[0] <= x < ends[-1]}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("num_sms", [4, 7, 132])
def test_every_tile_of_every_group_is_summed_once(num_sms):
    plan = plans.sum_plan(320, 512, 640, 5, jnp.dtype(jnp.bfloat16), jnp.bfloat16, Config(128, 128), num_sms)
    sizes = array([100, 0, 300, 40, 200], jnp.int32)
    table = tables.sum_table(*tables.bounds(sizes, 640))
    assert [int(sizes[g]) for g in table.group] == [300, 200, 100, 40, 0]
    tiles = plan.tiles
    turns, look_up = (
        jax.jit(functools.partial(tiles.num_tiles, table)),
        jax.jit(lambda index: tiles.look_up(table, index, 0, 0)),
    )
    seen = []
    for cluster in range(tiles.clusters):
        for turn in range(int(turns(cluster))):
            entry = look_up(turn * tiles.clusters + cluster)
            seen.append(tuple(int(x) for x in (entry.group, entry.row, entry.col)))
            first = int(entry.start) // 8 * 8
            assert int(entry.steps) == (-(-(int(entry.end) - first) // 64) if entry.end > entry.start else 0)
    assert sorted(seen) == [(g, row, col) for g in range(5) for row in range(0, 320, 128) for col in range(0, 512, 128)]


# Sizes and structures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("config", [SMALL, Config(128, 32, swapped=True)], ids=["rows first", "swapped"])
def test_groups_of_any_size(name, config):
    check(max(sum(SIZES[name]) + 70, 200), 128, 72, SIZES[name], config=config)


@pytest.mark.parametrize("name", SIZES)
def test_sums_of_groups_of_any_size(name):
    check_transposed(sum(SIZES[name]) + 16, 72, 136, SIZES[name], config=SMALL)


# (M, N, K), whether rhs is given as (G, N, K), the configuration.
STRUCTURES = {
    "a warpgroup's rows in two pieces": ((330, 256, 136), False, Config(256, 128)),
    "snake along N": ((330, 392, 72), True, Config(128, 128, grid_minor_dim=1, grid_tile_width=1, store_slots=1)),
    "clusters along the rows": ((330, 136, 72), True, Config(64, 128, split_dim=1, cluster_m=2, num_stages=2)),
    "clusters along the columns": ((330, 392, 72), True, Config(128, 64, cluster_n=2)),
    "columns that TMA cuts off": ((330, 200, 72), False, Config(128, 64)),
    "an odd number of columns": ((330, 75, 72), True, Config(128, 64)),
    "swapped, columns cut off": ((330, 200, 72), False, Config(128, 24, swapped=True)),
    "swapped clusters": ((330, 392, 200), False, Config(128, 64, swapped=True, cluster_m=2, cluster_n=2)),
    "swapped, wide": ((330, 384, 72), False, Config(256, 128, swapped=True, store_slots=3)),
}


SLOW = "snake along N", "clusters along the columns", "swapped, wide", "three blocks of columns"


@pytest.mark.parametrize("name", slow(STRUCTURES, SLOW))
def test_every_structure(name):
    (m, n, k), transpose_rhs, config = STRUCTURES[name]
    check(m, n, k, [33, 0, 129, 64, 7, 66], transpose_rhs=transpose_rhs, config=config, gpu="h200")


@pytest.mark.slow
@pytest.mark.parametrize("dtype, out", [(jnp.float16, None), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)])
def test_dtypes(dtype, out):
    check(150, 128, 72, [33, 0, 65], dtype=dtype, config=Config(128, 64), preferred_element_type=out)
    check_transposed(152, 128, 72, [33, 0, 65], dtype=dtype, config=Config(128, 64), preferred_element_type=out)


SUMS = {  # (M, K, N) and the configuration: whole tiles of the swizzle, then others, which TMA copies in pieces.
    "whole": ((304, 128, 192), Config(128, 192)),
    "three blocks of columns": ((304, 192, 128), Config(128, 192, cluster_m=2)),
    "clusters": ((304, 256, 256), Config(128, 128, cluster_n=2, grid_minor_dim=1)),
    "rows that are no multiple of 8": ((301, 128, 128), Config(128, 64)),
    "columns of lhs cut off": ((304, 72, 128), Config(128, 128)),
    "columns of rhs cut off": ((304, 128, 136), Config(256, 64)),
}


@pytest.mark.parametrize("name", slow(SUMS, SLOW))
def test_every_structure_of_sums(name):
    (m, k, n), config = SUMS[name]
    check_transposed(m, k, n, [33, 0, 129, 64, 7, 66], config=config, gpu="h200")


@pytest.mark.parametrize("shape", [(64, 0, 8), (0, 8, 8), (64, 8, 0)])
def test_empty_arrays(shape):
    m, n, k = shape
    out = ragged_dot(jnp.ones((m, k), jnp.bfloat16), jnp.ones((2, k, n), jnp.bfloat16), jnp.zeros(2, jnp.int32))
    assert out.shape == (m, n) and not out.any()
    out = ragged_dot_transposed(*(jnp.ones((m, x), jnp.bfloat16) for x in (k, n)), jnp.zeros(2, jnp.int32))
    assert out.shape == (2, k, n) and not out.any()


# Sizes that lie -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", slow(HOSTILE, HOSTILE[1:3]), ids=str)
def test_sizes_that_lie_are_clipped(sizes):
    m = 200
    starts, ends = clipped(sizes, m)
    honest = array(ends - starts, jnp.int32)
    lhs, rhs, _ = operands(m, 128, 72, [40] * len(sizes), rows=m)
    for fn, args in ((ragged_dot, (lhs, rhs)), (ragged_dot_transposed, (lhs, lhs))):
        small = jax.jit(functools.partial(fn, config=Config(128, 64)))  # Sizes that are not traced are refused.
        out = lab.run(small, *args, array(sizes, jnp.int32))
        assert (out == lab.run(small, *args, honest)).all()


@pytest.mark.parametrize(
    "sizes, message",
    [
        ([3, -1, 4], r"group_sizes\[1\]=-1; must be at"),
        ([8, 0, 7, 2], r"group_sizes\[2\]=7; the group ends at row 15 of 12"),
    ],
)
def test_the_host_names_the_group(sizes, message):
    lhs, rhs, _ = operands(12, 8, 8, [3] * len(sizes))
    for known in (sizes, np.asarray(sizes), jnp.asarray(sizes)):
        with pytest.raises(ValueError, match="cookbook.ragged_dot: " + message):
            ragged_dot(lhs, rhs, known)
        with pytest.raises(ValueError, match="cookbook.ragged_dot_transposed: " + message):
            jax.jit(lambda lhs, known=known: ragged_dot_transposed(lhs, lhs, known))(lhs)
    with pytest.raises(ValueError, match=message):
        ragged_dot.check_group_sizes(jnp.asarray(sizes), 12)
    ragged_dot.check_group_sizes([3, 9], 12)


# Shards and gradients -------------------------------------------------------------------------------------------------


def test_group_offset():
    """The groups of two shards add up to all of them."""
    args = operands(330, 128, 72, [33, 0, 129, 64, 7, 66])
    small = functools.partial(ragged_dot, config=Config(128, 64))

    def shard(lhs, rhs, sizes, fn):
        return tuple(fn(lhs, rhs[at : at + 3], sizes, group_offset=jnp.array([at])) for at in (0, 3))

    whole = functools.partial(shard, fn=lambda *args, group_offset: reference(*args, group_offset=group_offset[0]))
    lab.check(functools.partial(shard, fn=small), whole, *args, gpu=None)


@pytest.mark.parametrize("case", slow([(128, False), (72, True), (75, True), (200, False)], [(72, True), (128, False)]))
def test_gradients(case):
    """Rows of no group get none; NaN there gets into none."""
    n, transpose_rhs = case
    lhs, rhs, sizes = operands(200, n, 72, [33, 0, 64, 66], transpose_rhs)
    weights = array(np.random.default_rng(0).normal(size=(200, n)), jnp.float32)
    clean = lambda fn: lambda lhs, rhs, sizes: fn(jnp.nan_to_num(lhs), rhs, sizes)
    how = dict(transpose_rhs=transpose_rhs)
    lab.check(
        gradients(ragged_dot, weights, **how), clean(gradients(reference, weights, **how)), lhs, rhs, sizes, gpu=None
    )


@pytest.mark.slow
def test_gradients_of_a_shard():
    lhs, rhs, sizes = operands(200, 64, 72, [33, 0, 64, 66], rows=200)
    weights = array(np.random.default_rng(0).normal(size=(200, 64)), jnp.float32)
    grads = [gradients(fn, weights, group_offset=1) for fn in (ragged_dot, reference)]
    lab.check(*grads, lhs, rhs[:2], sizes, gpu=None)


def test_vmap_and_determinism():
    args = operands(130, 64, 72, [33, 0, 64])
    out = lab.run(jax.vmap(functools.partial(ragged_dot, config=Config(128, 64))), *(jnp.stack([x, x]) for x in args))
    assert (out[0] == out[1]).all()
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out[0], reference(*args))), atol=0.2)


@pytest.mark.slow
def test_shard_map_with_experts_sharded():
    """Each device has some of the matrices, and all rows: partial results are summed over the mesh."""
    mesh = jax.make_mesh((1,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    lhs, rhs, sizes = operands(130, 64, 72, [33, 0, 64], rows=130)

    def local(fn, lhs, rhs, sizes):
        offset = jax.lax.axis_index("expert") * rhs.shape[0]
        return jax.lax.psum(fn(lhs, rhs, sizes, group_offset=offset), "expert")

    def product(fn):
        specs = jax.P(), jax.P("expert"), jax.P()
        return jax.shard_map(functools.partial(local, fn), mesh=mesh, in_specs=specs, out_specs=jax.P())

    weights = array(np.random.default_rng(0).normal(size=(130, 64)), jnp.float32)
    found = lab.run(jax.jit(gradients(product(ragged_dot), weights)), lhs, rhs, sizes)
    wanted = gradients(reference, weights)
    for x, y in zip(found, wanted(lhs, rhs, sizes), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) < 5e-3 * np.linalg.norm(y)


# Errors ---------------------------------------------------------------------------------------------------------------


def ones(*shape, dtype=jnp.bfloat16):
    return jnp.ones(shape, dtype)


TWO = np.array([1, 2])


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: ragged_dot(ones(8, 8), ones(8, 8), TWO), r"lhs.shape=\(8, 8\), rhs.shape=\(8, 8\)"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 16, 8), TWO), "8 is not 16"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 12), TWO), "a row of rhs has 12 values"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8, dtype=jnp.float16), TWO), "cast one"),
        (lambda: ragged_dot(ones(8, 8), ones(3, 8, 8), TWO), "2 groups and there are 3 matrices: 3"),
        (lambda: ragged_dot(ones(8, 8), ones(3, 8, 8), TWO, group_offset=0), "at least 3"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8), TWO, group_offset=0.5), "must be one integer"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8), ones(2)), "integers"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8), TWO, preferred_element_type=jnp.int8), "must be bfloat16"),
        (lambda: arguments.check_groups("ragged_dot", jnp.zeros(14, jnp.int32), None, 2**27, 14), "below 2"),
        (lambda: configured(split_k=2), "split_k=2"),
        (lambda: configured(128, 64, swapped=True, preferred_element_type=jnp.float32), "not float32"),
        (lambda: configured(128, 96), "tile_n leaves a warpgroup 96 columns"),
        (lambda: configured(128, 128), "must be 64, because N"),
        (lambda: configured(128, 32, transpose_rhs=True), "multiple of 128 bytes"),
        (lambda: ragged_dot_transposed(ones(8, 8), ones(16, 8), TWO), "must be"),
        (lambda: ragged_dot_transposed(ones(8, 8), ones(8, 8), TWO, group_offset=1), "num_groups=None"),
        (lambda: configured(swapped=True, fn=ragged_dot_transposed), "swapped"),
        (lambda: configured(128, 128, fn=ragged_dot_transposed), "tile_n=128 leaves a warpgroup 128 of 8"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def configured(*tile, fn=ragged_dot, transpose_rhs=False, preferred_element_type=None, **fields):
    rhs = ones(8, 8) if fn is ragged_dot_transposed else ones(2, 8, 8)
    how = {} if fn is ragged_dot_transposed else dict(transpose_rhs=transpose_rhs)
    how |= dict(config=Config(*tile, **fields), preferred_element_type=preferred_element_type)
    lab.run(functools.partial(fn, **how), ones(8, 8), rhs, jnp.asarray(TWO))


# Mutants --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, Config(128, 32, swapped=True)], ids=["rows first", "swapped"])
def test_mutant_that_stores_all_rows_of_a_tile_is_caught(run_only, monkeypatch, config):
    """The next group's rows are written by two tiles: a race, or a wrong result."""
    monkeypatch.setattr(kernel, "send_rows", lambda piece, target, left: plgpu.copy_smem_to_gmem(piece, target))
    jax.clear_caches()
    with pytest.raises(lab.CheckError):
        check(200, 128, 72, [33, 0, 65, 40], config=config)
    jax.clear_caches()


@pytest.mark.parametrize("rung", [1, 8, 32])
def test_mutant_without_a_rung_is_caught(run_only, mutant, rung):
    copy = plgpu.copy_smem_to_gmem
    mutant(kernel, "plgpu", copy_smem_to_gmem=lambda a, b, **how: None if a.shape[0] == rung else copy(a, b, **how))
    with pytest.raises(lab.CheckError):
        check(200, 128, 72, [33, 0, 65, 58], config=SMALL)


MUTATED = [("group", -1), ("group", 1), ("start", 1), ("end", -1), ("end", 1)]


@pytest.mark.parametrize("field, value", MUTATED)
def test_mutants_of_the_table_are_caught(run_only, monkeypatch, field, value):
    right = tables.row_table

    def wrong(starts, ends, m, tile):
        table = right(starts, ends, m, tile)
        return table._replace(**{field: jnp.clip(getattr(table, field) + value, 0, m)})

    monkeypatch.setattr(plans, "SCANNED_MAX", 0)
    monkeypatch.setattr(plans, "row_table", wrong)
    with pytest.raises(lab.CheckError):
        check(200, 128, 72, [33, 0, 65, 40], config=SMALL)


@pytest.mark.parametrize("field, value", MUTATED)
def test_mutants_of_what_the_kernel_finds_are_caught(run_only, monkeypatch, field, value):
    right = tables.Scan.entry

    def wrong(scan, number):
        entry = tables.Table(None, *right(scan, number))
        return entry._replace(**{field: jnp.clip(getattr(entry, field) + value, 0, scan.m)})[1:]

    monkeypatch.setattr(tables.Scan, "entry", wrong)
    jax.clear_caches()
    with pytest.raises(lab.CheckError):
        check(200, 128, 72, [33, 0, 65, 40], config=SMALL)
    jax.clear_caches()


@pytest.mark.parametrize("mutated", ["no mask", "multiplied by zero", "no barrier", "last row", None])
def test_mutants_of_the_mask_are_caught(run_only, monkeypatch, mutant, found_if, mutated):
    if mutated == "no mask":
        monkeypatch.setattr(kernel_transposed, "mask", lambda *_: None)
    elif mutated == "multiplied by zero":
        mutant(kernel_transposed, "jnp", where=lambda inside, x, zero: x * inside.astype(x.dtype))
    elif mutated == "no barrier":
        mutant(kernel_transposed, "plgpu", barrier_wait=lambda _: None, barrier_arrive=lambda _: None)
    elif mutated:
        right = tables.sum_table
        shorter = lambda *bounds: right(*bounds)._replace(end=right(*bounds).end - 1)
        monkeypatch.setattr(transposed, "sum_table", shorter)
    jax.clear_caches()
    with found_if(mutated is not None):  # Whether a barrier is missed depends on which thread is late: several chances.
        for sizes in ([33, 1, 65, 40], [7, 70, 50, 60], [100, 3, 30, 20]):
            check_transposed(200, 128, 128, sizes, config=Config(128, 128))
    jax.clear_caches()


def test_mutant_that_waits_for_no_slot_is_caught(run_only, monkeypatch):
    """A piece of which no row was stored leaves fewer stores to wait for."""
    right = kernel.send_rows
    with_rows_alone = lambda piece, o, left: pl.when(left > 0)(lambda: right(piece, o, left))
    monkeypatch.setattr(kernel, "send_rows", with_rows_alone)
    jax.clear_caches()
    with pytest.raises(lab.CheckError):
        for sizes in ([70, 70, 40], [65, 127, 1]):
            check(200, 256, 72, sizes, config=Config(256, 128, store_slots=2))


# On a GPU -------------------------------------------------------------------------------------------------------------


def on_gpu(fn, of, *args, runs=10):
    outs = [fn(*args) for _ in range(runs)]
    wanted = of(*args)
    assert float(jnp.linalg.norm(outs[0] - wanted) / jnp.linalg.norm(wanted)) < 1e-4
    assert all((out == outs[0]).all() for out in outs)


@pytest.mark.parametrize(
    "config, transpose_rhs",
    [(Config(), False), (Config(cluster_n=2), True), (Config(128, 128, cluster_m=2), True), (Config(256, 128), False)],
    ids=str,
)
@pytest.mark.parametrize("n", [1024, 1000])
def test_right_in_every_run_on_the_gpu(gpu, config, transpose_rhs, n):
    if n % 64 and not transpose_rhs:
        config = Config(256, 64)
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(4000, rng.dirichlet(np.full(13, 0.5)))
    args = operands(4096, n, 1024, sizes.tolist(), transpose_rhs)
    how = dict(transpose_rhs=transpose_rhs)
    fn = jax.jit(functools.partial(ragged_dot, config=config, preferred_element_type=jnp.float32, **how))
    on_gpu(fn, jax.jit(functools.partial(reference, **how)), *args)


@pytest.mark.parametrize("config", [Config(), Config(cluster_m=2, num_stages=2), Config(128, 192)], ids=str)
def test_sums_are_right_in_every_run_on_the_gpu(gpu, config):
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(4000, rng.dirichlet(np.full(13, 0.5)))
    lhs, rhs = (floats(4096, cols, rows=4000) for cols in (512, 768))
    fn = jax.jit(functools.partial(ragged_dot_transposed, config=config, preferred_element_type=jnp.float32))
    on_gpu(fn, jax.jit(transposed_reference), lhs, rhs, array(sizes, jnp.int32))
