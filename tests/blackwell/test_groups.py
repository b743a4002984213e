"""Blackwell's grouped product: index arithmetic beside gemm's, groups of every size interpreted, a grid compiled."""

import functools
import importlib
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook
import lab
from cookbook import _device, _host, blackwell
from cookbook.blackwell import cost, kernel, kernel_ragged
from cookbook.blackwell import plan as plans
from cookbook.blackwell.plan import Config, row_plan
from cookbook.gemm.grouped import kernel as hopper_kernel
from cookbook.gemm.grouped import plan as hopper
from cookbook.gemm.grouped import tables
from cookbook.gemm.plan import identity
from tests.arrays import array
from tests.blackwell.grid import RUNGS, SMALL, WIDTHS, of_rung
from tests.blackwell.test_compiled import verify
from tests.gemm.ragged import gradients, operands

module = importlib.import_module("cookbook.blackwell.ragged_dot")
ragged_dot, reference = blackwell.ragged_dot, module.ragged_dot_reference
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
B200 = _host.Target("NVIDIA B200", 148)
STATIC = [rung for rung in RUNGS if "launch control" not in rung]
GROUPS = [33, 0, 129, 64, 7, 66]  # Smaller than a tile, larger, and none; 299 rows.


@pytest.fixture
def interpreted(request):
    """On a B200 these kernels run as they are; nobody has tried."""
    if lab.on_gpu("b200"):
        return
    if jax.default_backend() == "gpu":
        pytest.skip("this machine's GPU is no Blackwell: a machine without any interprets these kernels")
    request.getfixturevalue("no_gpu")


def check(m, n, k, sizes, *, dtype=BF16, rows=None, gpu=None, transpose_rhs=False, activation=None, **kwargs):
    """Interpreted, with outputs that start as NaN, races found, beside float64. `n` columns of rhs."""
    how = dict(transpose_rhs=transpose_rhs, activation=activation)
    fn, of = functools.partial(ragged_dot, **how, **kwargs), functools.partial(reference, **how)
    return lab.check(fn, of, *operands(m, n, k, sizes, transpose_rhs, dtype, rows), gpu=gpu)


# Index arithmetic, in NumPy -------------------------------------------------------------------------------------------


def entries(plan, sizes, blocks):
    """(group, first row, end, column, steps) of the tile of each block, by cluster and turn."""
    sizes = array(sizes, jnp.int32)
    table = plan.tiles.read(jax.jit(plan.tiles.table_of)(sizes))
    count = int(table.count[1]) * plan.tiles.across
    look_up = jax.jit(lambda index, block: plan.tiles.look_up(table, index, block, 0))
    found = []
    for cluster in range(plan.tiles.clusters):
        turns = int(plan.tiles.num_tiles(table, cluster))
        assert turns == len(range(cluster, count, plan.tiles.clusters))
        for turn in range(turns):
            for block in range(blocks):
                tile = look_up(cluster + turn * plan.tiles.clusters, block)
                found.append((*map(int, (tile.group, tile.row, tile.end, tile.col, tile.steps)),))
    return found


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("sizes", [GROUPS, [0, 0, 200], [1] * 14, [299]], ids=str)
@pytest.mark.parametrize("two_ctas", [False, True])
def test_tiles_are_those_of_gemm(sizes, two_ctas):
    """A tile of as many rows and columns is looked up in the same place, in the same order, in pairs too."""
    m, n, k = 320, 200, 136
    sizes = sizes if sum(sizes) <= m else [size // 2 for size in sizes]
    pair = 1 + two_ctas
    ours = row_plan(m, n, k, len(sizes), BF16, True, identity, BF16, Config(tile_n=128, two_ctas=two_ctas),
                    _host.Target("any", 4))  # fmt: skip
    config = hopper.Config(128, 128, cluster_m=pair)
    theirs = hopper.row_plan(m, n, k, len(sizes), jnp.dtype(BF16), True, identity, BF16, config, 4)
    assert ours.tiles.clusters == theirs.tiles.clusters
    assert entries(ours, sizes, pair) == entries(theirs, sizes, pair)


def window(x, rows, cols):
    """x[start : start + size] along both axes, with zeros for what lies beyond, as TMA fills in."""
    (i, height), (j, width) = ((int(start), size) for start, size in (rows, cols))
    out = np.zeros((height, width))
    part = x[i : i + height, j : j + width]
    out[: part.shape[0], : part.shape[1]] = part
    return out


def slot(p, operand, x, at, block):
    """A block's tile of `operand` in shared memory, as its copies put it together: (rows, K)."""
    axis, tile = int(operand.transposed), np.full(operand.tile, np.nan)
    for piece in operand.pieces:
        whole = window(x, *p.source(operand, at, piece))
        mine = np.split(whole, p.config.cluster_m, axis)[block]  # CopyPartition.PARTITIONED(axis)
        i, j = (index * size for index, size in zip(piece, operand.piece, strict=True))
        tile[i : i + mine.shape[0], j : j + mine.shape[1]] = mine
    return tile.T if operand.transposed else tile


def execute(p, lhs, rhs, sizes):
    """o as the kernel computes it: clusters with the tiles they look up, blocks with their copies, one MMA for a pair
    and each of the gate and the up product, rows of a tile's group stored."""
    c, t, blocks = p.config, p.tiles, p.config.cluster_m
    table = t.read(jax.jit(t.table_of)(array(sizes, jnp.int32)))
    look_up = jax.jit(lambda index: t.look_up(table, index, 0, 0))
    out = np.full((t.m, t.n + c.tile_n), np.nan)
    for cluster in range(t.clusters):
        for turn in range(int(t.num_tiles(table, cluster))):
            tile = look_up(cluster + turn * t.clusters)
            row, col = int(tile.row), int(tile.col)
            acc = np.zeros((blocks * c.tile_m, p.acc_columns))
            for step in range(int(tile.steps)):
                k = p.k_start(step)
                a = np.concatenate([slot(p, p.a, lhs, p.a.at(row, k), block) for block in range(blocks)])
                for i in range(p.acc_columns // c.tile_n):
                    place = p.b.at(col + i * p.b.partner, k)
                    b = np.concatenate([slot(p, p.b, rhs[int(tile.group)], place, block) for block in range(blocks)])
                    acc[:, i * c.tile_n : (i + 1) * c.tile_n] += a @ b.T
            if p.b.partner:
                gate, up = np.split(acc, 2, axis=1)
                acc = gate / (1 + np.exp(-gate)) * up
            for block in range(blocks):
                first, end = row + block * c.tile_m, min(row + (block + 1) * c.tile_m, int(tile.end))
                if end > first:
                    mine = out[first:end, col : col + c.tile_n]
                    assert np.isnan(mine).all(), "stored twice"
                    mine[:] = acc[block * c.tile_m :][: end - first]
    return out[:, : t.n]


def product(lhs, rhs, sizes, is_gated=False):
    """The grouped product in float64, of rhs (G, K, N): one matrix after the other, and zeros."""
    out, start = np.zeros((lhs.shape[0], rhs.shape[2])), 0
    for matrix, size in zip(rhs, sizes, strict=True):
        out[start : start + size] = lhs[start : start + size] @ matrix
        start += size
    gate, up = np.split(out, 2, axis=1) if is_gated else (out, None)
    return gate / (1 + np.exp(-gate)) * up if is_gated else out


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("two_ctas", [False, True])
@pytest.mark.parametrize("sizes", [GROUPS, [256, 1], [0, 0]], ids=str)
def test_a_pair_multiplies_what_one_cta_does(sizes, two_ctas, transpose_rhs, is_gated):
    """The plan, carried out in NumPy, also where the interpreter has no product: that of a pair."""
    m, n, k, rng = 320, 136, 136, np.random.default_rng(sum(sizes))
    lhs, rhs = rng.normal(size=(m, k)), rng.normal(size=(len(sizes), k, n * (1 + is_gated)))
    given = rhs.swapaxes(1, 2) if transpose_rhs else np.asarray(module._padded(jnp.asarray(rhs), n), np.float64)
    p = row_plan(m, n, k, len(sizes), BF16, transpose_rhs, identity, BF16, Config(tile_n=128, two_ctas=two_ctas,
                 num_accumulators=1), _host.Target("any", 4), is_gated)  # fmt: skip
    # Padding goes through float32.
    np.testing.assert_allclose(execute(p, lhs, given, sizes), product(lhs, rhs, sizes, is_gated), atol=1e-3)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("broken", ["halves", "the same tile twice", "end", None])
def test_mutants_of_the_plan_are_caught(monkeypatch, broken):
    """Each block of a pair with the other's half of b; the gate's tile for the up product too; one row too many."""
    rng, sizes = np.random.default_rng(0), [100, 130, 70]
    lhs, rhs = rng.normal(size=(320, 136)), rng.normal(size=(3, 272, 136))
    p = row_plan(320, 136, 136, 3, BF16, True, identity, BF16, Config(tile_n=128, two_ctas=True), B200, True)
    if broken == "halves":
        real = slot
        swap = lambda p, operand, x, at, block: real(p, operand, x, at, 1 - block if operand is p.b else block)
        monkeypatch.setitem(globals(), "slot", swap)
    if broken == "the same tile twice":
        real_at = plans.Operand.at
        monkeypatch.setattr(plans.Operand, "at", lambda self, row, k: real_at(self, row % p.b.partner, k))
    if broken == "end":
        real_entry = tables.Scan.entry
        longer = lambda self, number: (*real_entry(self, number)[:2], real_entry(self, number)[2] + 1)
        monkeypatch.setattr(tables.Scan, "entry", longer)
    if broken == "end":
        with pytest.raises(AssertionError, match="stored twice"):
            execute(p, lhs, rhs, sizes)
        return
    out = execute(p, lhs, rhs, sizes)
    assert np.allclose(out, product(lhs, rhs.swapaxes(1, 2), sizes, True)) == (broken is None)


# Sizes and structures, interpreted ------------------------------------------------------------------------------------

SIZES = {
    "around a tile": [127, 1, 128, 0, 129],
    "around a piece": [0, 63, 64, 65, 1],
    "all in the last": [0, 0, 200],
    "all in the first": [200, 0, 0],
    "none": [0, 0, 0],
    "one group": [130],
    "ones": [1] * 9,
    "more than the kernel goes through": [0, 63, *[1] * tables.SCANNED_MAX],
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", SIZES)
def test_groups_of_every_size(name):
    """Rows beyond them hold NaN, and get zeros."""
    sizes = SIZES[name]
    check(sum(sizes) + 30, 72, 40, sizes, transpose_rhs=True, config=SMALL)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("m, n, k", [(1, 8, 8), (300, 200, 136), (299, 72, 520)])
def test_default_configurations(m, n, k):
    check(m, n, k, [1] if m == 1 else GROUPS, gpu="b200")


# (N of o, K), whether rhs is given as (G, N, K), the configuration, the activation.
STRUCTURES = {
    "plain": ((200, 136), False, SMALL, None),
    "wide": ((392, 72), True, Config(tile_n=256, num_stages=2), "relu"),
    "one accumulator": ((200, 72), True, Config(tile_n=64, num_accumulators=1), "silu"),
    "two store warpgroups": ((392, 72), False, Config(tile_n=128, epilogue_wgs=2), None),
    "one store slot": ((328, 72), True, Config(tile_n=128, store_slots=1), jnp.tanh),
    "an odd number of columns": ((75, 72), True, Config(tile_n=64, num_stages=3), "gelu"),
    "snake along N": ((392, 72), True, Config(tile_n=64, grid_minor_dim=1, grid_tile_width=2), None),
    "more stages than steps": ((72, 72), True, Config(tile_n=64, num_stages=6), None),
    "SwiGLU": ((200, 136), True, SMALL, "swiglu"),
    "SwiGLU, plain": ((200, 72), False, SMALL, "swiglu"),
    "SwiGLU, one accumulator": ((328, 72), True, Config(tile_n=256, num_accumulators=1), "swiglu"),
    "SwiGLU, two store warpgroups": ((136, 72), False, Config(tile_n=128, epilogue_wgs=2), "swiglu"),
    "SwiGLU, an odd number of columns": ((75, 72), True, Config(tile_n=64), "swiglu"),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure(name, out_dtype):
    (n, k), transpose_rhs, config, activation = STRUCTURES[name]
    cols = n * (2 if activation == "swiglu" else 1)
    check(330, cols, k, GROUPS, transpose_rhs=transpose_rhs, config=config, activation=activation,
          preferred_element_type=out_dtype)  # fmt: skip


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("rung", STATIC)
def test_every_rung(rung, activation):
    """More tiles than SMs, here or on a B200, with tails; the interpreter takes the rungs that it can run."""
    config, is_here = of_rung(rung, 128), lab.on_gpu("b200")
    if not is_here and config.two_ctas:
        pytest.skip("JAX's interpreter has no collective MMA")
    m, n, k, sizes = (4008, 1608, 520, [500, 0, 257, 2048, 1000]) if is_here else (330, 264, 72, GROUPS)
    check(m, n * (2 if activation else 1), k, sizes, transpose_rhs=True, config=config, activation=activation)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype, out", [(F16, None), (BF16, F16), (F16, BF16)])
def test_dtypes(dtype, out):
    check(150, 128, 72, [33, 0, 65], dtype=dtype, config=SMALL, preferred_element_type=out)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("transpose_rhs, is_gated", [*itertools.product((False, True), (False, True))])
def test_beside_numpy(transpose_rhs, is_gated):
    """In float64, by another hand than the reference's: one matrix after the other."""
    lhs, rhs, sizes = operands(330, 144, 72, GROUPS, transpose_rhs)
    how = dict(transpose_rhs=transpose_rhs, activation="swiglu" if is_gated else None)
    out = lab.run(functools.partial(ragged_dot, preferred_element_type=F32, **how), lhs, rhs, sizes)
    x, y = (np.asarray(x, np.float64) for x in (lhs, rhs))
    wanted = product(x, y.swapaxes(1, 2) if transpose_rhs else y, GROUPS, is_gated)
    np.testing.assert_allclose(out, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.usefixtures("interpreted")
def test_nan_stays_in_its_row_and_group():
    """Also where a tile reads rows of the next group, and columns of K beyond the end."""
    lhs, rhs, sizes = operands(200, 72, 72, [33, 65, 40])
    lhs, rhs = lhs.at[33, 5].set(jnp.nan), rhs.at[2, 71, 11].set(jnp.inf)
    out, wanted = lab.run(functools.partial(ragged_dot, config=SMALL), lhs, rhs, sizes), reference(lhs, rhs, sizes)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(wanted))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("sizes", [[10, -5, 2**31 - 1, 2**31 - 1, 7], [-(2**31)] * 3, [300, 1, 1], [0, 0, 201]])
def test_sizes_that_lie_are_clipped(sizes):
    m = 200
    ends = np.minimum(np.cumsum(np.clip(np.asarray(sizes, np.int64), 0, None)), m)
    honest = np.diff(ends, prepend=0)
    lhs, rhs, _ = operands(m, 128, 72, [40] * len(sizes), rows=m)
    small = jax.jit(functools.partial(ragged_dot, config=SMALL))  # Sizes that are not traced are refused.
    lies, truth = (lab.run(small, lhs, rhs, array(x, jnp.int32)) for x in (sizes, honest))
    assert (lies == truth).all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_group_offset(activation):
    """The groups of two shards add up to all of them."""
    args = operands(330, 128, 72, GROUPS)

    def shards(fn, lhs, rhs, sizes):
        how = dict(activation=activation)
        return tuple(fn(lhs, rhs[at : at + 3], sizes, group_offset=jnp.array([at]), **how) for at in (0, 3))

    one_number = lambda *args, group_offset, **how: reference(*args, group_offset=group_offset[0], **how)
    small = functools.partial(ragged_dot, config=SMALL)
    lab.check(functools.partial(shards, small), functools.partial(shards, one_number), *args, gpu=None)


@pytest.mark.parametrize("shape", [(64, 0, 8), (0, 8, 8), (64, 8, 0)])
def test_empty_arrays(shape):
    m, n, k = shape
    out = ragged_dot(jnp.ones((m, k), BF16), jnp.ones((2, k, n), BF16), jnp.zeros(2, jnp.int32))
    assert out.shape == (m, n) and not out.any()


# JAX around it --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("n, transpose_rhs, activation", [(72, True, None), (128, False, None), (75, True, None),
                                                          (128, False, "swiglu"), (72, True, "silu")])  # fmt: skip
def test_gradients(n, transpose_rhs, activation):
    """Rows of no group get none; NaN there gets into none."""
    lhs, rhs, sizes = operands(200, n, 72, [33, 0, 64, 66], transpose_rhs)
    cols = n // 2 if activation == "swiglu" else n
    weights = array(np.random.default_rng(0).normal(size=(200, cols)), F32)
    how = dict(transpose_rhs=transpose_rhs, activation=activation)
    clean = lambda lhs, *rest, **how: reference(jnp.nan_to_num(lhs), *rest, **how)
    fns = gradients(ragged_dot, weights, **how), gradients(clean, weights, **how)
    # With an activation there are three roundings to 16 bits: of the product that is kept, of its gradient, and of the
    # result.
    lab.check(*fns, lhs, rhs, sizes, gpu=None, tolerance=4e-3 if activation else None)


@pytest.mark.usefixtures("interpreted")
def test_gradients_of_a_shard():
    """Groups before its own, and after."""
    lhs, rhs, sizes = operands(200, 64, 72, [33, 20, 64, 66], rows=200)
    weights = array(np.random.default_rng(0).normal(size=(200, 64)), F32)
    grads = [gradients(fn, weights, group_offset=1) for fn in (ragged_dot, reference)]
    lab.check(*grads, lhs, rhs[:2], sizes, gpu=None)


def test_what_computes_the_gradients():
    """As the docstring says: this kernel that of lhs, XLA that of rhs. Nothing else is launched."""
    lhs, rhs, sizes = operands(64, 64, 64, [33, 31])
    loss = lambda lhs, rhs: ragged_dot(lhs, rhs, sizes).astype(F32).sum()
    with _host.building_for(B200):
        program = lambda argnum: str(jax.make_jaxpr(jax.grad(loss, argnum))(lhs, rhs))
        of_lhs, of_rhs = program(0), program(1)
    assert "ragged_dot_general" in of_rhs and of_lhs.count("blackwell_ragged_kernel") >= 2


@pytest.mark.usefixtures("interpreted")
def test_vmap():
    args = operands(130, 64, 72, [33, 0, 64])
    out = lab.run(jax.vmap(functools.partial(ragged_dot, config=SMALL)), *(jnp.stack([x, x]) for x in args))
    assert (out[0] == out[1]).all()
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out[0], reference(*args))), atol=0.2)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("how", [dict(n=128), dict(n=72, transpose_rhs=True),
                                 dict(n=128, activation="swiglu")], ids=str)  # fmt: skip
def test_no_operand_is_copied(how):
    how = dict(how)
    args = operands(130, how.pop("n"), 72, [33, 97], how.get("transpose_rhs", False))
    with lab.interpret():
        jaxpr = str(jax.make_jaxpr(functools.partial(ragged_dot, **how))(*args))
    assert " transpose[" not in jaxpr and " pad[" not in jaxpr and " concatenate[dimension=2" not in jaxpr


# Compiled for a B200, which nobody here has ---------------------------------------------------------------------------

M, N, K = 2000, 3000, 4096  # More tiles than a B200 has SMs, with tails.


# Groups that the kernel goes through, and more, which are tabulated: looking up takes fewer registers then.
EPILOGUES = ((None, 8), ("silu", 8), ("swiglu", 8), (None, 40))


# Every second one: a pair of any two of rung, width and epilogue is in it.
@pytest.mark.parametrize(
    "rung, width, activation, num_groups",
    [
        (rung, width, *epilogue)
        for (i, rung), (j, width), (k, epilogue) in itertools.product(*map(enumerate, (STATIC, WIDTHS, EPILOGUES)))
        if (i + j + k) % 2 == 0
    ],
)
def test_the_grid_compiles_without_spills(rung, width, activation, num_groups):
    """Every rung, with narrow and wide tiles. Results of 32 bits where two warpgroups share 64 columns."""
    is_gated, config = activation == "swiglu", of_rung(rung, width)
    out_dtype = F32 if width // config.epilogue_wgs < 64 else BF16
    if is_gated and 2 * width * config.num_accumulators > plans.TMEM_COLUMNS:
        config = Config(**RUNGS[rung] | dict(tile_n=width, num_accumulators=1))
    fn = functools.partial(ragged_dot, config=config, transpose_rhs=True, activation=activation,
                           preferred_element_type=out_dtype)  # fmt: skip
    avals = (M, K), (num_groups, N * (1 + is_gated), K), (num_groups,)
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(avals, (BF16, BF16, jnp.int32), strict=True)]
    plan = row_plan(M, N, K, num_groups, BF16, True, identity, out_dtype, config, B200, is_gated)
    verify(lab.compile_for("b200", fn, *avals), plan)


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("out_dtype", [BF16, F32])
def test_default_configurations_compile(out_dtype, activation):
    """Plain matrices, with a tail in each dimension; few rows per group, and many."""
    for m, n, k, num_groups in ((4000, 1544, 2056, 64), (16384, 4096, 1024, 8)):
        cols = n * (2 if activation == "swiglu" else 1)
        avals = (m, k), (num_groups, k, cols), (num_groups,)
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(avals, (F16, F16, jnp.int32), strict=True)]
        fn = functools.partial(ragged_dot, activation=activation, preferred_element_type=out_dtype)
        assert lab.compile_for("b200", fn, *avals).spill_bytes == 0


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("m, n, k, g", [(8192, 8192, 8192, 8), (65536, 1536, 2048, 128), (1, 8, 8, 1), (16, 77, 72, 4)])
def test_every_candidate_fits(m, n, k, g, transpose_rhs, is_gated):
    """And what is predicted is never faster than the roofline."""
    from lab import roofline

    n = n if transpose_rhs else -(-n // 8) * 8
    for out_dtype in (BF16, F32):
        p = module.problem(m, n, k, g, out_dtype=out_dtype, transpose_rhs=transpose_rhs, is_gated=is_gated)
        assert cost.candidates(p)
        for config in cost.to_try(p):
            made = row_plan(m, n, k, g, BF16, transpose_rhs, identity, out_dtype, config, B200, is_gated)
            assert made.num_stages >= 2 and made.store_piece
        nbytes = 2 * (m * k + min(g, m) * k * n * (1 + is_gated)) + jnp.dtype(out_dtype).itemsize * m * n
        least = roofline.bound(2 * m * n * k * (1 + is_gated), nbytes, "bf16", "b200")
        assert cost.predict(cost.best(p), p) > least.seconds * 1e6 * 0.99


def test_small_groups_take_one_block():
    """A pair's 256 rows are mostly another group's; large groups take pairs, as a plain product does."""
    assert not module.default_config(4096, 4096, 4096, 64, transpose_rhs=True).two_ctas
    assert module.default_config(65536, 4096, 4096, 8, transpose_rhs=True).two_ctas


# Errors ---------------------------------------------------------------------------------------------------------------


def ones(*shape, dtype=BF16):
    return jnp.ones(shape, dtype)


def configured(config, **how):
    return ragged_dot(ones(64, 64), ones(2, 64, 64), np.array([1, 2]), config=config, **how)


TWO = np.array([1, 2])


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: ragged_dot(ones(8, 8), ones(8, 8), TWO), r"cookbook.blackwell.ragged_dot: lhs.shape=\(8, 8\)"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 16, 8), TWO), "8 is not 16"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 12), TWO), "a row of rhs has 12 values"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8, dtype=F16), TWO), "cast one"),
        (lambda: ragged_dot(ones(8, 8), ones(3, 8, 8), TWO), "2 groups and there are 3 matrices: 3"),
        (lambda: ragged_dot(ones(8, 8), ones(3, 8, 8), TWO, group_offset=0), "at least 3"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8), TWO, group_offset=0.5), "must be one integer"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8), ones(2)), "integers"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8), [3, -1]), r"cookbook.blackwell.ragged_dot: .*\[1\]=-1; must be"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8), [3, 9]), r"group_sizes\[1\]=9; the group ends at row 12 of 8"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8), TWO, preferred_element_type=jnp.int8), "must be bfloat16"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 24), TWO, activation="swiglu"), "up product begin at column 12"),
        (lambda: ragged_dot(ones(8, 8), ones(2, 8, 8), TWO, activation="tan"), "activation"),
        (lambda: configured(hopper.Config()), "must be a cookbook.blackwell.ragged_dot.Config"),
        (lambda: configured(Config(schedule="dynamic")), "config.schedule='dynamic' must be 'static'"),
        (
            lambda: configured(Config(tile_n=96), transpose_rhs=True),
            "config.tile_n=96 must leave each .* a multiple of 64",
        ),
        (lambda: configured(Config(tile_n=64, epilogue_wgs=2)), "a row of a narrower piece begins where TMA can read"),
        (lambda: configured(Config(tile_n=64, epilogue_tile_n=32)), "epilogue_tile_n=32 must be 64 or None"),
        (lambda: configured(Config(), activation="swiglu"), "for the gate and for the up product, need 1024 columns"),
        (lambda: configured(Config(tile_n=96), preferred_element_type=F32), "tile_n=96 leaves a block 96 columns"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message), lab.interpret():
        fn()


def test_what_the_interpreter_lacks_is_said_by_name():
    with pytest.raises(RuntimeError, match="cookbook.blackwell.ragged_dot: config has two_ctas=True"), lab.interpret():
        configured(Config(tile_n=128, two_ctas=True))


def test_on_a_hopper(pretend_gpu):
    pretend_gpu("NVIDIA H200", "9.0")
    with pytest.raises(RuntimeError, match=r"H200 has 9.0\. For it there is cookbook.ragged_dot\. "):
        configured(None)


def test_it_is_called_as_hoppers_is():
    """By the same names, in the same order, with the same defaults; and refuses by the same function."""
    ours, theirs = (inspect.signature(fn).parameters for fn in (ragged_dot, cookbook.ragged_dot))
    assert [(x.name, x.kind, x.default) for x in ours.values()] == [
        (x.name, x.kind, x.default) for x in theirs.values()
    ]
    assert ragged_dot.check_group_sizes is cookbook.ragged_dot.check_group_sizes


# Mutants: each must be found ------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """Nothing that was traced of the right kernel is used for the wrong one, or the other way round."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("mutated", ["all rows", "no slot is waited for", None])
def test_mutants_of_the_stores_are_caught(run_only, fresh, monkeypatch, found_if, mutated):
    """All rows of a tile are stored, also the next group's; a piece without a row leaves fewer stores to wait for."""
    right = kernel_ragged.send_rows
    if mutated == "all rows":
        monkeypatch.setattr(kernel_ragged, "send_rows", lambda piece, o, left: plgpu.copy_smem_to_gmem(piece, o))
    if mutated == "no slot is waited for":
        alone = lambda piece, o, left: pl.when(left > 0)(lambda: right(piece, o, left))
        monkeypatch.setattr(kernel_ragged, "send_rows", alone)
    with found_if(mutated == "all rows"):
        check(300, 136, 72, [33, 0, 65, 130, 40], config=SMALL)


@pytest.mark.parametrize("rung", [1, 8, 32, 64])
def test_mutant_without_a_rung_is_caught(run_only, mutant, rung):
    copy = plgpu.copy_smem_to_gmem
    mutant(
        hopper_kernel, "plgpu", copy_smem_to_gmem=lambda a, b, **how: None if a.shape[0] == rung else copy(a, b, **how)
    )
    with pytest.raises(lab.CheckError):
        check(300, 72, 72, [33, 0, 65, 58, 105], config=SMALL)


@pytest.mark.parametrize("mutated", ["what was there before", None])
def test_mutant_that_stores_no_zeros_is_caught(run_only, mutant, found_if, mutated):
    """Rows of no group: a tile without products has in tensor memory what the tile before left."""
    if mutated:
        mutant(kernel_ragged, "jnp", where=lambda has_sums, values, zero: values)
    with found_if(mutated is not None):
        check(300, 72, 72, [33, 0, 65], config=SMALL)


MUTATED = [("group", -1), ("group", 1), ("start", 1), ("end", -1), ("end", 1)]


@pytest.mark.parametrize("field, value", MUTATED)
def test_mutants_of_the_table_are_caught(run_only, fresh, monkeypatch, field, value):
    right = tables.row_table

    def wrong(starts, ends, m, tile):
        table = right(starts, ends, m, tile)
        return table._replace(**{field: jnp.clip(getattr(table, field) + value, 0, m)})

    monkeypatch.setattr(hopper, "SCANNED_MAX", 0)
    monkeypatch.setattr(hopper, "row_table", wrong)
    with pytest.raises(lab.CheckError):
        check(200, 72, 72, [33, 0, 65, 40], config=SMALL)


@pytest.mark.parametrize("slot", ["alternates", "first"])
def test_mutant_whose_accumulators_do_not_alternate_is_caught(run_only, fresh, monkeypatch, found_if, slot):
    if slot == "first":
        monkeypatch.setattr(plans.Plan, "accumulator", lambda self, number: number * 0)
    with found_if(slot == "first"):
        check(392, 392, 72, GROUPS, config=SMALL)


@pytest.mark.parametrize("mutated", ["the same tile twice", "up and gate", "no up product", None])
def test_mutants_of_swiglu_are_caught(run_only, mutant, monkeypatch, fresh, found_if, mutated):
    if mutated == "the same tile twice":
        monkeypatch.setattr(plans, "partner_of", lambda n, transpose_rhs: 8)
    if mutated == "up and gate":
        right = plans.Plan.b_tiles
        monkeypatch.setattr(plans.Plan, "b_tiles", lambda self, slot: right(self, slot)[::-1])
    if mutated == "no up product":
        mutant(kernel_ragged, "jax", nn=type("nn", (), dict(sigmoid=lambda x: x * 0 + 1)))
    with found_if(mutated is not None):
        check(200, 256, 136, [33, 1, 65, 40], config=SMALL, activation="swiglu", transpose_rhs=True)


@pytest.mark.parametrize("name", ["wait_load_tmem", "commit_smem", None])
def test_mutants_that_do_not_wait_are_caught(run_only, mutant, found_if, name):
    if name:
        mutant(kernel_ragged, "plgpu", **{name: lambda: None})
    with found_if(name is not None):
        check(392, 392, 72, GROUPS, config=Config(tile_n=64, num_stages=2, store_slots=1))


def test_mutant_that_commits_no_product_is_caught(run_only, mutant):
    """An arrival that waits for no product: sums are stored too early, and slots are refilled too early."""
    mutant(kernel, "plgpu", tcgen05_commit_arrive=lambda barrier, collective_axis: plgpu.barrier_arrive(barrier))
    with pytest.raises(lab.CheckError):
        check(392, 392, 136, GROUPS, config=SMALL)


@pytest.mark.parametrize("method", ["wait", "acquire", None])
def test_mutants_of_the_ring_are_caught(run_only, fresh, monkeypatch, found_if, method):
    """A slot read before it is full, or refilled although it is still read."""
    if method:
        monkeypatch.setattr(_device.Ring, method, _device.Ring.slot)
    with found_if(method is not None):
        check(200, 72, 264, [33, 0, 65], config=SMALL)
