"""matmul_blocked against float64, at its edges, and mutants of it that must not pass."""

import functools
import importlib
import inspect
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from tests.arrays import array

op = importlib.import_module("cookbook.gemm.rungs.matmul_blocked")  # `cookbook.matmul_blocked` may be the function.

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
SMALL = op.Config(16, 64, 8, 2)  # Quick to interpret, and a small product has several tiles and steps of it.


def operands(m, n, k, dtype=F32, seed=0):
    """Random normal; the mean of one is shifted, so that a term dropped or counted twice shows."""
    rng = np.random.default_rng(seed)
    return array(rng.normal(size=(m, k)) + 0.25, dtype), array(rng.normal(size=(k, n)), dtype)


def check(fn, m, n, k, dtype=F32, seed=0, gpu=None, **kwargs):
    """Also compiles it if `gpu` is named: each configuration and dtype once, and a shape with tails."""
    kernel = functools.partial(fn, **kwargs)
    return lab.check(kernel, op.matmul_blocked_reference, *operands(m, n, k, dtype, seed), gpu=gpu)


# One block and many; one step of K, fewer than the ring has stages, and more; tails in each dim, alone and together;
# the smallest sizes there are. Rows of both operands are multiples of 4 values, 16 bytes.
SHAPES = [
    (32, 64, 16),
    (64, 128, 112),
    (1, 64, 16),
    (32, 4, 16),
    (32, 64, 4),
    (50, 64, 16),
    (32, 100, 16),
    (32, 64, 36),
    (33, 68, 84),
]


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_shapes(m, n, k):
    check(op.matmul_blocked, m, n, k, gpu="h200" if m == 33 else None)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("m, n, k", [(33, 136, 88), (1, 8, 8)])
def test_dtypes(m, n, k, dtype):
    assert check(op.matmul_blocked, m, n, k, dtype).output.dtype == dtype


@pytest.mark.parametrize(
    "config, dtype",
    [
        (op.Config(), F32),
        (op.Config(), BF16),
        (op.Config(), F16),
        (op.Config(256, 64, 8, 2), F32),
        (op.Config(16, 192, 24, 3, 2), BF16),
        (op.Config(16, 64, 8, 1, 1), F32),
    ],
    ids=str,
)
def test_configs(config, dtype):
    """Slots are used more than once, none spills, and the shared memory is as priced."""
    m, n, k = config.tile_m + 8, config.tile_n + 8, (config.num_stages + 1) * config.tile_k
    check(op.matmul_blocked, m, n, k, dtype, config=config)
    compiled = lab.compile_for("h200", functools.partial(op.matmul_blocked, config=config), *operands(m, n, k, dtype))
    assert compiled.spill_bytes == 0 and compiled.remarks == ()
    assert compiled.smem_bytes == op.smem_bytes(config, jnp.dtype(dtype))


@pytest.mark.parametrize("seed", [1, 2])
def test_seeds(seed):
    check(op.matmul_blocked, 32, 64, 128, seed=seed)


def test_default_config_fills_the_gpu_and_grows_with_the_result():
    tiles = lambda m, n: (op.default_config(m, n, 64).tile_m, op.default_config(m, n, 64).tile_n)
    assert tiles(4096, 4096) == (128, 128) and tiles(64, 64) == (32, 64)
    for m, n in ((4096, 4096), (1024, 1024), (100_000, 8), (128, 8192)):
        tile_m, tile_n = tiles(m, n)
        assert -(-m // tile_m) * -(-n // tile_n) >= 132 or (tile_m, tile_n) == (32, 64)


def test_nothing_but_multiply_adds():
    """Nineteen in twenty instructions of the main loop are multiply-adds, which makes it fast."""
    a = jax.ShapeDtypeStruct((4096, 4096), F32)
    sass = lab.compile_for("h200", op.matmul_blocked, a, a).sass.splitlines()
    places = [i for i, line in enumerate(sass) if "FFMA" in line]
    tile = op.Config()
    assert len(places) == tile.tile_m * tile.tile_n // 128 * tile.tile_k
    assert len(places) >= 0.93 * (places[-1] - places[0])
    assert sum("LDS.128" in line for line in sass) == (tile.tile_m // 16 + 4 * tile.tile_n // 32) * tile.tile_k // 4


def rounding_error(k: int) -> float:
    """Largest relative error of a float32 sum of k random terms, added one after another.

    The roundings walk at random: 0.3 sqrt(k) units in the last place, on a GPU and in the interpreter, for k from 1024
    to 8192. A library that sums in several parts, as cuBLAS does where o is small, errs by less.
    """
    return 0.35 * k**0.5 * 2.0**-24


def test_the_error_is_that_of_one_sum():
    a, b = operands(32, 64, 1024)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    out = np.asarray(lab.run(op.matmul_blocked, a, b), np.float64)
    assert np.linalg.norm(out - exact) / np.linalg.norm(exact) <= rounding_error(1024)


def test_float32_keeps_its_bits():
    """Operands of 24 bits, which TF32 would round to 11: the products are exact here."""
    a = jnp.full((32, 64), 1 + 2.0**-12, F32)
    b = jnp.eye(64, dtype=F32)
    np.testing.assert_array_equal(lab.run(op.matmul_blocked, a, b), a)


def test_large_and_small_values_and_nan():
    a, b = operands(32, 64, 40)
    a = a.at[3, 5].set(jnp.nan).at[7].mul(1e30).at[8].mul(1e-30).at[9, 39].set(jnp.inf)
    out = np.asarray(lab.run(op.matmul_blocked, a, b))
    expected = np.asarray(op.matmul_blocked_reference(a, b))
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(expected))
    finite = np.isfinite(expected)
    sizes = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64))  # Sizes of each sum's terms.
    # A sum of 40 terms in float32 may be off by that many roundings of them; below 1e-37 there are no normal numbers.
    assert (np.abs(np.float64(out) - expected)[finite] <= 40 * 2.0**-24 * sizes[finite] + 1e-37).all()
    assert np.isnan(out[3]).all() and np.isfinite(out[:3]).all() and np.isinf(out[9]).all()


def test_empty():
    for m, n, k in ((0, 64, 64), (64, 0, 64), (64, 64, 0)):
        out = op.matmul_blocked(jnp.ones((m, k), F32), jnp.ones((k, n), F32))
        assert out.shape == (m, n) and not out.any()


@pytest.mark.slow
def test_jit_and_vmap():
    a, b = operands(33, 68, 40)
    a3, b3 = jnp.stack([a, 2 * a, -a]), jnp.stack([b, b, 3 * b])
    once = np.asarray(lab.run(jax.jit(op.matmul_blocked), a, b))
    np.testing.assert_array_equal(once, lab.run(op.matmul_blocked, a, b))
    batched = np.asarray(lab.run(jax.vmap(op.matmul_blocked), a3, b3))
    np.testing.assert_allclose(batched, jnp.matmul(a3, b3, precision="highest"), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(batched[0], once)
    shared = np.asarray(lab.run(jax.vmap(op.matmul_blocked, in_axes=(0, None)), a3, b))
    np.testing.assert_array_equal(shared[0], once)


def test_deterministic():
    a, b = operands(33, 68, 128)
    first = np.asarray(lab.run(op.matmul_blocked, a, b)).tobytes()
    assert all(np.asarray(lab.run(op.matmul_blocked, a, b)).tobytes() == first for _ in range(2))


def test_eager_calls_trace_once(monkeypatch):
    traced, kernel = [], op._kernel
    monkeypatch.setattr(op, "_kernel", lambda *args, **kwargs: traced.append(1) or kernel(*args, **kwargs))
    a, b = operands(32, 64, 44)
    lab.run(op.matmul_blocked, a, b)
    once = len(traced)
    lab.run(op.matmul_blocked, a, b)
    assert 0 < once == len(traced)


@pytest.mark.parametrize(
    "a, b, dtype, message",
    [
        ((64, 64), (72, 64), F32, r"share no K: 64 is not 72"),
        ((64, 62), (62, 64), F32, r"a row of a has 62 values, 248 bytes; .* pad it to 64"),
        ((64, 64), (64, 66), F32, r"a row of b has 66 values, 264 bytes; .* pad it to 68"),
        ((64, 60), (60, 64), BF16, r"a row of a has 60 values, 120 bytes; .* pad it to 64"),
        ((2, 64, 64), (2, 64, 64), F32, r"must both be matrices: use jax.vmap"),
        ((64, 64), (64,), F32, r"must both be matrices: use jax.vmap"),
        ((64, 64), (64, 64), jnp.int32, r"must both be float32, bfloat16 or float16"),
    ],
)
def test_errors_name_the_fix(a, b, dtype, message):
    with lab.interpret(), pytest.raises(ValueError, match=message):
        op.matmul_blocked(jnp.ones(a, dtype), jnp.ones(b, dtype))


def test_mixed_dtypes_are_an_error():
    with lab.interpret(), pytest.raises(ValueError, match="a.dtype=.*b.dtype=.*cast one"):
        op.matmul_blocked(jnp.ones((64, 64), F32), jnp.ones((64, 64), BF16))


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(tile_m=24), "tile_m = 24 must be a multiple of 16"),
        (dict(tile_n=320), "at most 256"),
        (dict(tile_k=12), "tile_k = 12 must be a multiple of 8"),
        (dict(tile_m=0), "tile_m = 0"),
        (dict(tile_m=128, tile_n=256), "spill the registers"),
        (dict(num_stages=0), "at least 1"),
    ],
)
def test_config_errors(config, message):
    with pytest.raises(ValueError, match=message):
        op.Config(**config)


def test_too_much_shared_memory_is_an_error_before_launch():
    a, b = operands(64, 64, 64)
    with lab.interpret(), pytest.raises(ValueError, match=r"bytes of shared memory for float32.* fewer stages"):
        op.matmul_blocked(a, b, config=op.Config(tile_k=32, num_stages=8))


def test_the_tile_that_config_rejects_spills(monkeypatch):
    """The compiler spills a tile that `TILE_MAX` rejects."""
    monkeypatch.setattr(op, "TILE_MAX", 128 * 192)
    a = jax.ShapeDtypeStruct((256, 256), F32)
    assert lab.compile_for("h200", functools.partial(op.matmul_blocked, config=op.Config(128, 192)), a, a).spill_bytes


# Mutants: the kernel with one line changed ----------------------------------------------------------------------------


@pytest.fixture
def mutant(monkeypatch):
    """Makes `matmul_blocked` of the module's text with `old` replaced by `new`."""

    def make(old: str, new: str):
        text = inspect.getsource(op)
        assert text.count(old) == 1, f"the module has changed: it has {old!r} {text.count(old)} times"
        module = types.ModuleType("mutant_of_matmul_blocked")
        module.__package__ = op.__package__
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text.replace(old, new), module.__name__, "exec"), module.__dict__)
        module.Config = op.Config  # Or it would refuse these tests' configurations.
        return module.matmul_blocked

    return make


def test_a_mutant_that_means_the_same_passes(no_gpu, mutant):
    check(mutant("TILE_MAX = 128 * 128", "TILE_MAX = 16384"), 33, 68, 84, config=SMALL)


@pytest.mark.parametrize(
    "old, new, found",
    [
        ("plgpu.barrier_wait(filled.at[stage])", "pass", "runs"),  # The barrier overflows; see below.
        ("plgpu.commit_smem()  # No thread reads the stage any longer.", "pass", "races"),
        ("plgpu.commit_smem()\n            # This is always", "# This is always", "races"),
        ("num_arrivals=2", "num_arrivals=1", "runs"),
        ("ahead = step + c.num_stages", "ahead = step + c.num_stages - 1", "runs"),
        ("pl.cdiv(depth, c.tile_k)", "depth // c.tile_k", "result"),
        ("pl.cdiv(m, config.tile_m)", "(m // config.tile_m)", "result"),
        ("jnp.where(ids == i, bits, 0)", "jnp.where(ids <= i, bits, 0)", "result"),
        ("columns[k % vec]", "columns[0]", "result"),
        ("b_smem.at[stage, k]", "b_smem.at[stage, 0]", "result"),
        ('"tile"), grid, 0,', '"tile"), grid[::-1], 0,', "result"),
        ("b_gmem.at[k, n]", "b_gmem.at[k, m]", "runs"),
    ],
    ids=str,
)  # fmt: skip
def test_mutants_are_caught(run_only, mutant, old, new, found):
    with pytest.raises(lab.CheckError, match=rf"(?m)^{found}: "):
        check(mutant(old, new), 33, 68, 84, config=SMALL)


def test_a_missing_wait_is_a_race_where_no_stage_is_used_twice(no_gpu, mutant):
    fn = mutant("plgpu.barrier_wait(filled.at[stage])", "pass")
    with pytest.raises(lab.CheckError, match=r"(?m)^races: "):
        check(fn, 16, 64, 16, config=SMALL)


# On the GPU alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("m, n, k", [(4096, 4096, 4096), (1000, 3000, 5000), (8, 8192, 8192), (40_000, 72, 64)])
def test_large_shapes(gpu, m, n, k, dtype):
    """As exact as cuBLAS, or as one float32 sum can be, and the same to the bit in every run."""
    a, b = operands(m, n, k, dtype)
    out = op.matmul_blocked(a, b)
    wide = [x.astype(F32) for x in (a, b)]
    with jax.enable_x64(True):
        exact = jnp.matmul(*(x.astype(jnp.float64) for x in wide))
        error = lambda x: float(jnp.linalg.norm(x.astype(jnp.float64) - exact) / jnp.linalg.norm(exact))
        peer = jnp.matmul(*wide, precision="highest").astype(dtype)
        assert error(out) <= max(1.5 * error(peer), rounding_error(k) if dtype is F32 else 0)
    assert all(jnp.array_equal(op.matmul_blocked(a, b), out) for _ in range(5))
