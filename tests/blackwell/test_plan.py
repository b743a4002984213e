"""Index arithmetic that the interpreter cannot run, as plain functions: which values the copies of a pair, hardware's
order of tiles and the scales bring together. NumPy executes the plan, and must find the product that the rungs find
that the interpreter can run."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cookbook._host import Target
from cookbook.blackwell import cost
from cookbook.blackwell import plan as plans
from cookbook.blackwell.matmul_mxfp8 import arrange, quantize_mxfp8
from cookbook.blackwell.plan import Config
from cookbook.gemm.plan import identity

BF16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn


def plan(m, n, k, config, transposed=(False, False), dtype=BF16, scaled=False, num_sms=4):
    return plans.plan_of(m, n, k, dtype, transposed, identity, BF16, config, Target("any", num_sms), scaled)


def window(x, rows, cols):
    """x[start : start + size] along both axes, with zeros for what lies beyond, as TMA fills in."""
    (i, height), (j, width) = rows, cols
    out = np.zeros((height, width))
    part = x[i : i + height, j : j + width]
    out[: part.shape[0], : part.shape[1]] = part
    return out


def slot(p, operand, x, at, block):
    """A block's tile of `operand` in shared memory, as its copies put it together: (rows, K)."""
    axis, blocks, tile = int(operand.transposed), p.config.cluster_m, np.full(operand.tile, np.nan)
    for piece in operand.pieces:
        rows, cols = p.source(operand, at, piece)
        whole = window(x, rows, cols)
        mine = np.split(whole, blocks, axis)[block]  # CopyPartition.PARTITIONED(axis)
        i, j = (index * size for index, size in zip(piece, operand.piece, strict=True))
        tile[i : i + mine.shape[0], j : j + mine.shape[1]] = mine
    return tile.T if operand.transposed else tile


def execute(p, a, b, order=None, apply_scales=lambda a, b, *where: (a, b)):
    """o as the kernel computes it: clusters with their tiles, blocks with their copies, one MMA for a pair.

    `order` says which cluster has which tiles, in which order; by default those of the static schedule.
    """
    t, c = p.tiles, p.config
    place = jax.jit(t.place)
    order = order or [range(i, t.count, t.clusters) for i in range(t.clusters)]
    out = np.full((t.m + 2 * c.tile_m * 2, t.n + c.tile_n), np.nan)
    for indices in order:
        for index in indices:
            row, col = map(int, place(index, 0, 0))
            acc = np.zeros(t.cluster_tile)
            for step in range(t.num_steps):
                k = p.k_start(step)
                halves = [
                    [slot(p, operand, x, operand.at(start, k), block) for block in range(c.cluster_m)]
                    for operand, x, start in ((p.a, a, row), (p.b, b, col))
                ]
                # Both blocks' rows of a, and both halves of b: the first block's half is the first columns of o.
                step_a, step_b = apply_scales(*(np.concatenate(half) for half in halves), row, col, step)
                acc += step_a @ step_b.T
            for block in range(c.cluster_m):
                i, j = map(int, place(index, block, 0))
                mine = out[i : i + c.tile_m, j : j + c.tile_n]
                assert np.isnan(mine).all(), "stored twice"
                mine[:] = acc[block * c.tile_m :][: c.tile_m]
    return out[: t.m, : t.n]


def operands(m, n, k, transposed):
    rng = np.random.default_rng(m * n + k)
    a, b = rng.normal(size=(m, k)), rng.normal(size=(n, k))
    return a @ b.T, *(x.T if lies else x for x, lies in zip((a, b), transposed, strict=True))


SIZES = [(300, 200, 136), (128, 77, 64), (1, 8, 8), (513, 600, 200)]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("two_ctas", [False, True])
@pytest.mark.parametrize("shape", SIZES)
def test_a_pair_multiplies_what_one_cta_does(shape, two_ctas, transposed):
    wanted, a, b = operands(*shape, transposed)
    p = plan(*shape, Config(tile_n=128, two_ctas=two_ctas), transposed)
    np.testing.assert_allclose(execute(p, a, b), wanted, atol=1e-9)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("two_ctas", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_tiles_in_any_order(seed, two_ctas):
    """Cluster launch control hands each tile to one cluster, whichever asks first."""
    rng, shape = random.Random(seed), (700, 300, 72)
    wanted, a, b = operands(*shape, (False, False))
    p = plan(*shape, Config(tile_n=64, two_ctas=two_ctas, schedule="dynamic", grid_minor_dim=seed % 2))
    assert p.clusters == p.tiles.count == np.prod(p.tiles.grid)  # A cluster a tile is launched, or cancelled.
    order = [[] for _ in range(3)]
    for index in range(p.clusters):
        rng.choice(order).append(index)
    np.testing.assert_allclose(execute(p, a, b, order), wanted, atol=1e-9)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("broken", ["halves", "k", None])
def test_mutants_of_the_plan_are_caught(monkeypatch, broken):
    """Each block of a pair with the other's half of b, and a step of K read twice."""
    if broken == "halves":
        real = slot
        swap = lambda p, operand, x, at, block: real(p, operand, x, at, 1 - block if operand is p.b else block)
        monkeypatch.setitem(globals(), "slot", swap)
    if broken == "k":
        monkeypatch.setattr(plans.Plan, "k_start", lambda self, step: min(step * 64, self.tiles.k - 64))
    wanted, a, b = operands(300, 200, 136, (False, False))
    out = execute(plan(300, 200, 136, Config(tile_n=128, two_ctas=True)), a, b)
    assert np.allclose(out, wanted) == (broken is None)


def test_accumulators_take_turns():
    for count in (1, 2):
        p = plan(300, 200, 64, Config(tile_n=64, num_accumulators=count))
        assert [p.accumulator(number) for number in range(5)] == [number % count for number in range(5)]
        assert p.tmem_columns == count * 64


# Scales ---------------------------------------------------------------------------------------------------------------


def read_as_the_tensor_cores_do(unit):
    """(128 rows, 4 scales) of a unit (32, 16), as PTX's tables on scale factors say: lane r % 32, and in it byte
    4 * (r // 32) + s, holds scale s of row r."""
    return np.array([[unit[r % 32, 4 * (r // 32) + s] for s in range(4)] for r in range(128)])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("width, two_ctas", [(192, False), (64, True), (224, True)])
@pytest.mark.parametrize("shape", [(300, 500, 416), (1, 8, 32)])
def test_scales_meet_their_values(shape, width, two_ctas):
    """Each step's units of scales, found as the kernel finds them, belong to the rows and blocks of that step."""
    (m, n, k), config = shape, Config(tile_n=width, two_ctas=two_ctas)
    rng = np.random.default_rng(k)
    x, y = (jnp.asarray(rng.normal(size=(rows, k)) * np.exp(rng.normal(size=(rows, 1)) * 3)) for rows in (m, n))
    (a, a_scales), (b, b_scales) = quantize_mxfp8(x), quantize_mxfp8(y)
    dequantized = lambda v, s: np.asarray(v, np.float64) * np.repeat(np.asarray(s, np.float64), 32, axis=1)
    p = plan(m, n, k, config, dtype=E4M3, scaled=True)
    units = [np.asarray(arrange(s, tile), np.float64) for s, tile in
             ((a_scales, config.tile_m), (b_scales, config.tile_n))]  # fmt: skip

    def apply_scales(step_a, step_b, row, col, step):
        counts, scaled = (config.cluster_m, p.scale_rows[1] // 128), []
        for values, source, first, count in zip((step_a, step_b), units, p.scales_at(row, col), counts, strict=True):
            # TMA fills in zero bits, 2**-127, beyond the last unit: there all values are zeros.
            rows = [
                source[u, step] if u < len(source) else np.full((32, 16), 2.0**-127)
                for u in range(first, first + count)
            ]
            scales = np.concatenate([read_as_the_tensor_cores_do(unit) for unit in rows])[: len(values)]
            scaled.append(values * np.repeat(scales, 32, axis=1))
        return scaled

    out = execute(p, np.asarray(a, np.float64), np.asarray(b, np.float64), apply_scales=apply_scales)
    np.testing.assert_allclose(out, dequantized(a, a_scales) @ dequantized(b, b_scales).T, rtol=1e-12)


@pytest.mark.parametrize("tile, width, columns", [(64, 1, 8), (128, 1, 8), (192, 2, 12), (256, 2, 12)])
def test_scales_take_columns_of_tensor_memory(tile, width, columns):
    p = plan(256, 512, 128, Config(tile_n=tile, num_accumulators=1), dtype=E4M3, scaled=True)
    assert p.scale_rows == (128, 128 * width) and p.tmem_columns == tile + columns


# Predicted configurations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (128, 4096, 14336), (1, 8, 32), (1000, 1000, 992)])
def test_every_candidate_fits(shape, plain, itemsize):
    if plain and itemsize == 1:
        return
    p = cost.Problem(*shape, plain, itemsize, 2)
    for config in cost.candidates(p):
        made = plan(*shape, config, (False, plain), E4M3 if itemsize == 1 else BF16, scaled=itemsize == 1)
        assert made.num_stages >= 3 and made.store_piece and cost.predict(config, p) > 0


def test_what_is_predicted():
    """A pair for large products, because shared memory bounds one CTA; and never faster than the roofline."""
    from lab import roofline

    large = cost.Problem(8192, 8192, 8192, True, 2, 2)
    assert cost.best(large).two_ctas and cost.best(large).tile_n == 256
    longest = lambda two_ctas: max((times := cost.step_times(Config(two_ctas=two_ctas), large)), key=times.get)
    assert longest(False) == "shared memory" and longest(True) == "tensor cores"
    one = [config for config in cost.candidates(large) if not config.two_ctas]
    assert min(cost.predict(config, large) for config in one) > 1.3 * cost.predict(cost.best(large), large)
    assert not cost.best(cost.Problem(8192, 8192, 8192, True, 2, 2, one_cta=True)).two_ctas
    for m, n, k in ((8192, 8192, 8192), (128, 4096, 14336), (1000, 1000, 992)):
        for itemsize, dtype in ((2, "bf16"), (1, "fp8")):
            p = cost.Problem(m, n, k, False, itemsize, 2)
            least = roofline.bound(2 * m * n * k, itemsize * k * (m + n) + 2 * m * n, dtype, "b200")
            assert cost.predict(cost.best(p), p) > least.seconds * 1e6 * 0.99
