"""How a product is cut up: tiles as index arithmetic, shared memory as priced. No kernel runs here."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook.gemm import plan as core
from cookbook.gemm.dense.matmul import matmul
from cookbook.gemm.plan import Config, identity, plan_of
from tests.arrays import array
from tests.gemm.structures import SLOW, SMALL, STRUCTURES

BF16, F32, FP8 = (jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn))


def plan(m, n, k, config, transposed=(False, False), out_dtype=BF16, dtype=BF16, num_sms=132):
    return plan_of(m, n, k, (dtype, dtype), transposed, identity, out_dtype, config, num_sms)


def random_config(rng: random.Random) -> Config:
    while True:
        split_dim, split_k = rng.randrange(2), rng.choice((1, 1, 1, 2, 5, 8))
        clusters = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)) if split_k == 1 else ((1, 1),)
        cluster_m, cluster_n = rng.choice(clusters)
        tile_m, tile_n = rng.choice((64, 128, 256)), 8 * rng.randrange(1, 33)
        if tile_m == 64 and not split_dim or (tile_n % 16 and split_dim) or tile_m * tile_n > 128 * 256:
            continue
        splits = [split for split in (1, 2, 3, 4) if tile_n % (8 * (1 + split_dim) * split) == 0 and split_k == 1]
        return Config(
            tile_m, tile_n, split_dim=split_dim, cluster_m=cluster_m, cluster_n=cluster_n, split_k=split_k,
            tail_split=rng.choice(splits or [1]), grid_minor_dim=rng.randrange(2), grid_tile_width=rng.randrange(1, 9),
        )  # fmt: skip


def places(phase):
    """Where everything begins that a warpgroup stores of a phase: rows and columns."""
    tiles, c = phase.tiles, phase.config
    turns = [range(tiles.of_cluster(cluster)) for cluster in range(tiles.clusters)]
    indices = [cluster + turn * tiles.clusters for cluster, own in enumerate(turns) for turn in own]
    assert sorted(indices) == list(range(tiles.count)), "each tile belongs to one cluster"
    index, block_m, block_n, role = (
        x.ravel() for x in np.meshgrid(indices, range(c.cluster_m), range(c.cluster_n), range(core.COMPUTE))
    )
    place = jax.jit(jax.vmap(tiles.place))(*(array(x, jnp.int32) for x in (index, block_m, block_n)))
    starts = [np.asarray(x) for x in place]
    starts[c.split_dim] = starts[c.split_dim] + role * phase.compute_tile[c.split_dim]
    return starts


@pytest.mark.parametrize("seed", range(16))
def test_every_element_belongs_to_one_warpgroup_of_one_tile(seed):
    """Tiles begin at multiples of 64 rows and 8 columns, in which this counts; TMA cuts off what lies beyond."""
    rng = random.Random(seed)
    config, m, n = random_config(rng), rng.randrange(1, 2000), rng.randrange(1, 2000)
    whole = plan(m, n, 64, config, num_sms=rng.choice((4, 7, 30, 132)))
    count = np.zeros((-(-m // 64) + 64, -(-n // 8) + 512), int)
    for phase in whole.phases:
        rows, cols = phase.compute_tile
        assert rows % 64 == cols % 8 == 0
        for row, col in zip(*places(phase), strict=True):
            assert row % 64 == col % 8 == 0
            count[row // 64 : (row + rows) // 64, col // 8 : (col + cols) // 8] += 1
    assert (count[: -(-m // 64), : -(-n // 8)] == 1).all() and count.max() == 1


def test_a_tail_is_narrower_tiles_of_the_last_wave():
    tail = plan(1000, 192, 64, Config(128, 192, tail_split=3), num_sms=5)  # Eight tiles: a wave of five, and three.
    assert [(phase.tiles.count, phase.compute_tile) for phase in tail.phases] == [(5, (64, 192)), (9, (64, 64))]
    only = plan(250, 192, 64, Config(128, 192, tail_split=2), num_sms=5)  # Two tiles, fewer than SMs: no tail.
    assert [phase.tiles.count for phase in only.phases] == [2]


@pytest.mark.parametrize("split_k", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 64, 65, 500, 4096])
def test_parts_cover_k(k, split_k):
    """Part after part, step after step, without a gap, and no part is a step longer than it has to be."""
    tiles = plan(64, 64, k, Config(128, 64, split_k=split_k)).tiles
    covered = split_k * tiles.num_steps * tiles.tile_k
    assert k <= covered < k + split_k * tiles.tile_k


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_a_tile(seed):
    """The pieces of a slice are stored, the slices of the blocks that own them are the tile; TMA can write each."""
    rng = random.Random(100 + seed)
    config, out_dtype = random_config(rng), rng.choice((BF16, F32))
    (_, cols), unit = config.compute_tile, 32 // out_dtype.itemsize
    if cols // config.tail_split % unit:
        with pytest.raises(ValueError, match=f"multiple of {unit}, 32 bytes"):
            plan(2000, 2000, 64, config, out_dtype=out_dtype).store_piece  # noqa: B018
        return
    for phase in plan(2000, 2000, 64, config, out_dtype=out_dtype).phases:
        (rows, width), (height, piece) = phase.slice_tile, phase.store_piece
        assert phase.owners * width == phase.compute_tile[1] and piece * out_dtype.itemsize in (32, 64, 128)
        assert sorted(phase.store_pieces) == [(i, j) for i in range(0, rows, height) for j in range(0, width, piece)]
        assert rows % height == width % piece == 0


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in STRUCTURES])
def test_shared_memory_is_as_priced(name):
    _, transpose_b, config = STRUCTURES[name]
    m, n, k = 8192, 5000, 4096  # More tiles than SMs, with a tail.
    priced = plan(m, n, k, config, (False, not transpose_b), F32 if config.second_kernel else BF16)
    avals = [jax.ShapeDtypeStruct(s, BF16) for s in ((m, k), (n, k) if transpose_b else (k, n))]
    compiled = lab.compile_for("h200", functools.partial(matmul, transpose_b=transpose_b, config=config), *avals)
    nbytes = priced.smem_bytes(priced.num_stages)
    assert nbytes <= compiled.smem_bytes <= nbytes + 1024 and compiled.spill_bytes == 0


def test_stages_are_as_many_as_fit():
    for config in (Config(), Config(128, 8, swapped=True), Config(128, 192, split_k=4), Config(store_slots=4)):
        p = plan(512, 512, 4096, config)
        assert 2 <= p.num_stages <= core.STAGES_MAX and p.smem_bytes(p.num_stages) <= core._device.SMEM_BYTES_MAX
        assert p.num_stages == core.STAGES_MAX or p.smem_bytes(p.num_stages + 1) > core._device.SMEM_BYTES_MAX
    assert plan(512, 512, 4096, Config(num_stages=3)).num_stages == 3


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: Config(split_dim=2), "self.split_dim=2"),
        (lambda: Config(tile_m=64), "leaves 32 and 256"),
        (lambda: Config(tile_n=100), "self.tile_n=100"),
        (lambda: Config(tile_m=256, tile_n=256), "64 x 256"),
        (lambda: Config(64, 512, split_dim=1), "self.tile_n=512: at most 256|x self.tile_n=512"),
        (lambda: Config(cluster_m=3), "self.cluster_m=3"),
        (lambda: Config(cluster_m=4, cluster_n=2), "at most 4 blocks"),
        (lambda: Config(grid_minor_dim=2), "self.grid_minor_dim=2"),
        (lambda: Config(second_kernel=True), "self.split_k=1 makes none"),
        (lambda: Config(split_k=0), "self.split_k=0"),
        (lambda: Config(split_k=9), "self.split_k=9"),
        (lambda: Config(split_k=2, cluster_m=2), "self.cluster_m=2"),
        (lambda: Config(128, 200, tail_split=2), "self.tail_split=2 must cut self.tile_n=200"),
        (lambda: Config(tail_split=2, split_k=2), "be 1 with self.split_k=2"),
        (lambda: Config(num_stages=1), "self.num_stages=1"),
        (lambda: Config(store_slots=0), "self.store_slots=0"),
        (lambda: Config(grid_tile_width=0), "self.grid_tile_width=0"),
        (lambda: plan(8, 8, 8, Config(num_stages=9)).num_stages, "num_stages=9 .* bytes of shared memory"),
        (lambda: plan(8, 8, 8, Config(128, 96), (False, True)), "tile_n=96 leaves a warpgroup 96 rows"),
        (lambda: plan(8, 8, 8, Config(tail_split=2), (False, True)), "config.tail_split=2"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def test_a_configuration_is_a_key():
    assert len({SMALL, Config(64, 128, split_dim=1)}) == 1
