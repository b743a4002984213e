"""matmul_wgmma against float64, at its edges, and mutants of it that must not pass."""

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

op = importlib.import_module("cookbook.gemm.rungs.matmul_wgmma")  # `cookbook.matmul_wgmma` is the function.

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def operands(m, n, k, dtype=BF16, transpose_a=False, transpose_b=False, seed=0):
    """Random normal; the mean of one is shifted, so that a term dropped or counted twice shows."""
    rng = np.random.default_rng(seed)
    a, b = (rng.normal(size=size) for size in ((k, m) if transpose_a else (m, k), (n, k) if transpose_b else (k, n)))
    return array(a + 0.25, dtype), array(b, dtype)


def check(fn, m, n, k, dtype=BF16, transpose_a=False, transpose_b=False, seed=0, gpu=None, **kwargs):
    """Also compiles it if `gpu` is named: each configuration, dtype and order of operands, and a shape with tails."""
    how = dict(transpose_a=transpose_a, transpose_b=transpose_b)
    a, b = operands(m, n, k, dtype, **how, seed=seed)
    # Tensor cores cut digits off where they add; float32 on a CPU, which lab.check measures by, rounds.
    tolerance = 1e-5 if kwargs.get("out_dtype") is F32 else None
    kernel, reference = functools.partial(fn, **how, **kwargs), functools.partial(op.matmul_wgmma_reference, **how)
    return lab.check(kernel, reference, a, b, tolerance=tolerance, gpu=gpu)


# One block and many; one step of K, fewer than the ring has slots, and more; tails in each dim, alone and together;
# the smallest sizes there are. Rows of both operands are multiples of 8 values.
SHAPES = [
    (128, 128, 64),
    (256, 128, 448),
    (1, 64, 64),
    (64, 8, 64),
    (64, 64, 8),
    (200, 128, 64),
    (128, 200, 64),
    (128, 64, 136),
    (129, 72, 200),
]


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_shapes(m, n, k):
    check(op.matmul_wgmma, m, n, k, gpu="h200" if m == 129 else None)


@pytest.mark.parametrize("transpose_a, transpose_b", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("m, n, k", [(136, 72, 200), pytest.param(128, 192, 320, marks=pytest.mark.slow)])
def test_transposed_operands(m, n, k, transpose_a, transpose_b):
    check(op.matmul_wgmma, m, n, k, transpose_a=transpose_a, transpose_b=transpose_b, gpu="h200")


def test_a_transposed_operand_frees_the_other_dim():
    """Rows of `a` are now of m values, so that k may be odd; rows of `b` are of k or n values."""
    check(op.matmul_wgmma, 72, 40, 33, transpose_a=True)
    check(op.matmul_wgmma, 33, 35, 72, transpose_b=True)


@pytest.mark.parametrize("dtype, out_dtype", [(BF16, F32), (F16, None), (F16, BF16), (BF16, F16)])
def test_dtypes(dtype, out_dtype):
    report = check(op.matmul_wgmma, 72, 136, 128, dtype, out_dtype=out_dtype, gpu="h200")
    assert report.output.dtype == (out_dtype or dtype)


@pytest.mark.parametrize(
    "config",
    [
        op.Config(64, 64, 64, 2),
        op.Config(64, 256, 64, 2),
        op.Config(192, 128, 64, 4),
        op.Config(64, 64, 192, 3),
    ],
    ids=str,
)
def test_configs(config):
    """Every slot is used more than once, none spills, and the shared memory is as priced."""
    shape, how = (256, 256, config.tile_k * 5), dict(config=config, out_dtype=F32)
    check(op.matmul_wgmma, *shape, **how)
    compiled = lab.compile_for("h200", functools.partial(op.matmul_wgmma, **how), *operands(*shape))
    assert compiled.spill_bytes == 0 and compiled.remarks == ()
    assert compiled.smem_bytes == config.smem_bytes


@pytest.mark.parametrize("seed", [1, 2])
def test_seeds(seed):
    check(op.matmul_wgmma, 64, 64, 512, seed=seed)


def test_the_error_is_that_of_the_peer():
    a, b = operands(128, 128, 1024)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    error = lambda out: np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact)
    assert error(lab.run(op.matmul_wgmma, a, b)) <= 1.5 * error(jnp.matmul(a, b))


def test_large_and_small_values_and_nan():
    a, b = operands(128, 64, 128)
    a = a.at[3, 5].set(jnp.nan).at[7].mul(1e30).at[8].mul(1e-30).at[9, 0].set(jnp.inf)
    out = np.asarray(lab.run(op.matmul_wgmma, a, b), np.float32)
    expected = np.asarray(op.matmul_wgmma_reference(a, b).astype(BF16), np.float32)
    np.testing.assert_allclose(out, expected, rtol=0.02)
    assert np.isnan(out[3]).all() and np.isfinite(out[:3]).all() and np.isinf(out[9]).all()


def test_empty():
    for m, n, k in ((0, 64, 64), (64, 0, 64), (64, 64, 0)):
        out = op.matmul_wgmma(jnp.ones((m, k), BF16), jnp.ones((k, n), BF16))
        assert out.shape == (m, n) and not out.any()


def test_jit_and_vmap():
    a, b = operands(72, 64, 128)
    a3, b3 = jnp.stack([a, 2 * a, -a]), jnp.stack([b, b, 3 * b])
    once = np.asarray(lab.run(jax.jit(op.matmul_wgmma), a, b))
    np.testing.assert_array_equal(once, lab.run(op.matmul_wgmma, a, b))
    batched = np.asarray(lab.run(jax.vmap(op.matmul_wgmma), a3, b3), np.float32)
    expected = jnp.matmul(a3.astype(F32), b3.astype(F32), precision="highest")
    np.testing.assert_allclose(batched, expected, rtol=0.01, atol=0.2)
    np.testing.assert_array_equal(batched[0], once.astype(np.float32))
    shared = np.asarray(lab.run(jax.vmap(op.matmul_wgmma, in_axes=(0, None)), a3, b))
    np.testing.assert_array_equal(shared[0], once)


def test_deterministic():
    a, b = operands(200, 136, 640)
    first = np.asarray(lab.run(op.matmul_wgmma, a, b)).tobytes()
    assert all(np.asarray(lab.run(op.matmul_wgmma, a, b)).tobytes() == first for _ in range(2))


def test_eager_calls_trace_once(monkeypatch):
    traced, kernel = [], op._kernel
    monkeypatch.setattr(op, "_kernel", lambda *args, **kwargs: traced.append(1) or kernel(*args, **kwargs))
    a, b = operands(64, 64, 72, seed=7)
    lab.run(op.matmul_wgmma, a, b)
    once = len(traced)
    lab.run(op.matmul_wgmma, a, b)
    assert 0 < once == len(traced)


@pytest.mark.parametrize(
    "a, b, kwargs, message",
    [
        ((64, 64), (72, 64), {}, r"share no K: 64 is not 72"),
        ((72, 64), (64, 64), dict(transpose_a=True, transpose_b=True), r"share no K: 72 is not 64"),
        ((64, 60), (60, 64), {}, r"a row of a has 60 values, 120 bytes; .* pad it to 64"),
        ((64, 64), (64, 60), {}, r"a row of b has 60 values"),
        ((60, 64), (60, 64), dict(transpose_a=True, out_dtype=jnp.int32), r"out_dtype.*must be"),
        ((2, 64, 64), (2, 64, 64), {}, r"must both be matrices: use jax.vmap"),
    ],
)
def test_errors_name_the_fix(a, b, kwargs, message):
    with lab.interpret(), pytest.raises(ValueError, match=message):
        op.matmul_wgmma(jnp.ones(a, BF16), jnp.ones(b, BF16), **kwargs)


def test_dtype_errors():
    with lab.interpret(), pytest.raises(ValueError, match="both be bfloat16 or both float16"):
        op.matmul_wgmma(jnp.ones((64, 64), BF16), jnp.ones((64, 64), F16))
    with lab.interpret(), pytest.raises(ValueError, match="both be bfloat16 or both float16"):
        op.matmul_wgmma(jnp.ones((64, 64), F32), jnp.ones((64, 64), F32))


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(tile_m=96), "must be 64, 128, 192 or 256"),
        (dict(tile_m=128, tile_n=256), "spills the registers"),
        (dict(num_stages=1), "at least 2"),
        (dict(num_stages=8), "shared memory"),
    ],
)
def test_config_errors(config, message):
    with pytest.raises(ValueError, match=message):
        op.Config(**config)


def test_the_tile_that_config_rejects_spills(monkeypatch):
    """The compiler spills a tile that `TILE_MAX` rejects."""
    monkeypatch.setattr(op, "TILE_MAX", 128 * 256)
    fn = functools.partial(op.matmul_wgmma, config=op.Config(128, 256, 64, 2))
    a = jax.ShapeDtypeStruct((256, 256), BF16)
    compiled = lab.compile_for("h200", fn, a, a)
    assert compiled.spill_bytes > 0 and "serialized" in compiled.remarks[0]


# Mutants: the kernel with one line changed ----------------------------------------------------------------------------


@pytest.fixture
def mutant(monkeypatch):
    """Makes `matmul_wgmma` of the module's text with `old` replaced by `new`."""

    def make(old: str, new: str):
        text = inspect.getsource(op)
        assert text.count(old) == 1, f"the module has changed: it has {old!r} {text.count(old)} times"
        module = types.ModuleType("mutant_of_matmul_wgmma")
        module.__package__ = op.__package__
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text.replace(old, new), module.__name__, "exec"), module.__dict__)
        return module.matmul_wgmma

    return make


def test_a_mutant_that_means_the_same_passes(no_gpu, mutant):
    check(mutant("TILE_MAX = 128 * 192", "TILE_MAX = 192 * 128"), 64, 64, 200)


@pytest.mark.parametrize(
    "old, new, k, found",
    [
        # Does not wait for its tiles: seen where a slot is used again, or by a plain read beside the WGMMA.
        ("plgpu.barrier_wait(loaded.at[slot])", "pass", 392, "runs"),
        ("plgpu.barrier_wait(loaded.at[slot])", "a_smem[slot]", 64, "races"),
        # TMA may copy what the registers have not written yet; the block may end while it does.
        ("plgpu.commit_smem()", "pass", 64, "races"),
        ("plgpu.wait_smem_to_gmem(0)", "pass", 64, "runs"),
        # Another step's tile; a step that is loaded twice while another is not; a slot that is one too far.
        ("a, b = a_smem.at[slot]", "a, b = a_smem.at[0]", 392, "races|result"),
        ("lambda: load(step + ahead)", "lambda: load(step + ahead - 1)", 392, "runs"),
        ("b_smem.at[slot], loaded", "b_smem.at[lax.rem(slot + 1, 3)], loaded", 392, "races|result"),
        ("num_arrivals=2", "num_arrivals=1", 392, "races|result|runs"),  # Waits for one of the two copies.
        ("pl.cdiv(sizes[2], config.tile_k)", "sizes[2] // config.tile_k", 392, "result"),  # No tail of K.
    ],
)
def test_mutants_are_caught(run_only, mutant, old, new, k, found):
    with pytest.raises(lab.CheckError, match=found):
        check(mutant(old, new), 128, 128, k)


@pytest.mark.parametrize(
    "old, new, k",
    [
        ("plgpu.wgmma_wait(IN_FLIGHT)", "plgpu.wgmma_wait(IN_FLIGHT + 1)", 448),  # Refilled while it is multiplied.
        ("plgpu.barrier_wait(loaded.at[slot])", "pass", 64),  # Multiplied before it has arrived.
    ],
)
def test_the_interpreter_looks_for_no_races_of_wgmma(no_gpu, mutant, old, new, k):
    """Why the next test needs a GPU, and why the chapter says so. If this fails, JAX has learned it: rewrite both."""
    check(mutant(old, new), 128, 128, k)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_wgmma_has_read_a_slot_before_it_is_refilled(gpu, num_stages):
    """Twenty runs, deep enough that every slot is refilled hundreds of times."""
    a, b = operands(2048, 2048, 8192)
    fn = jax.jit(functools.partial(op.matmul_wgmma, config=op.Config(num_stages=num_stages), out_dtype=F32))
    exact = jnp.matmul(a, b, preferred_element_type=F32)
    first = fn(a, b)
    assert jnp.linalg.norm(first - exact) <= 1e-4 * jnp.linalg.norm(exact)  # One overwritten tile costs more.
    assert all((fn(a, b) == first).all() for _ in range(20))
