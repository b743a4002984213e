"""The pipelined matmul: sizes on both sides of a tile, of the swizzle's tile (8 x 64) and of WGMMA's 64 rows."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import matmul_pipelined
from tests.arrays import array

module = importlib.import_module("cookbook.gemm.rungs.matmul_pipelined")
Config, reference = module.Config, module.matmul_reference
SMALL = Config(tile_m=64, tile_n=64)


def operands(m, n, k, dtype=jnp.bfloat16, transpose_a=False, transpose_b=False):
    rng = np.random.default_rng(m * n + k)
    a, b = (array(rng.normal(size=shape) + 0.1, dtype) for shape in ((m, k), (k, n)))
    return a.T if transpose_a else a, b.T if transpose_b else b


@pytest.mark.parametrize(
    "m, n, k", [(130, 136, 72), (128, 128, 64), (1, 8, 8), (200, 328, 136), (64, 192, 512), (257, 64, 40)]
)
def test_any_size(m, n, k):
    lab.check(matmul_pipelined, reference, *operands(m, n, k), gpu="h200" if m == 130 else None)


def test_float16():
    lab.check(matmul_pipelined, reference, *operands(130, 136, 72, jnp.float16))


@pytest.mark.parametrize("transpose_a, transpose_b", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("m, n, k", [(136, 72, 200), pytest.param(128, 192, 128, marks=pytest.mark.slow)])
def test_transposed_operands(m, n, k, transpose_a, transpose_b):
    how = dict(transpose_a=transpose_a, transpose_b=transpose_b)
    flip = lambda a, b: reference(a.T if transpose_a else a, b.T if transpose_b else b)
    lab.check(functools.partial(matmul_pipelined, **how), flip, *operands(m, n, k, **how))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", jnp.tanh])
def test_activation_and_out_dtype(activation):
    fn = functools.partial(matmul_pipelined, activation=activation, out_dtype=jnp.float32)
    lab.check(fn, lambda a, b: reference(a, b, activation), *operands(130, 136, 72))


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        Config(tile_n=192, num_stages=4, grid_tile_width=16),
        Config(tile_m=64, tile_n=256, num_stages=2, delay_release=0),
        Config(tile_m=256, tile_n=64, tile_k=128, num_stages=2, grid_minor_dim=1, grid_tile_width=1),
        Config(num_stages=1, delay_release=0),
        Config(num_stages=6),  # More stages than steps.
    ],
)
def test_every_kind_of_config(config):
    lab.check(functools.partial(matmul_pipelined, config=config), reference, *operands(264, 264, 200))


def test_no_copy_of_a_transposed_operand():
    """The compiled program of aligned operands is the kernel and nothing else, transposed or not."""
    a, b = operands(128, 128, 64, transpose_a=True, transpose_b=True)
    fn = functools.partial(matmul_pipelined, transpose_a=True, transpose_b=True)
    with lab.interpret():
        launched = jax.make_jaxpr(fn)(a, b).eqns[-1]
    outside = {eqn.primitive.name for eqn in launched.params["jaxpr"].eqns}
    assert outside and not outside & {"transpose", "pad", "copy"}


def test_jit_vmap_and_determinism():
    a, b = (jnp.stack(x) for x in zip(*(operands(128, 72, 40) for _ in range(2)), strict=True))
    fn = functools.partial(matmul_pipelined, config=SMALL)
    runs = [lab.run(jax.vmap(fn), a, b), lab.run(jax.jit(jax.vmap(fn)), a, b), lab.run(fn, a[0], b[0])[None]]
    assert all((run[0] == runs[0][0]).all() for run in runs)


def test_nan_and_infinity_go_where_they_should():
    a, b = operands(72, 72, 72)
    a, b = a.at[3, 5].set(jnp.nan).at[7, 1].set(jnp.inf), b.at[9, 11].set(-jnp.inf)
    out, wanted = lab.run(matmul_pipelined, a, b), reference(a, b)
    np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(wanted))
    np.testing.assert_array_equal(jnp.isinf(out), jnp.isinf(wanted))


def test_huge_and_tiny_values():
    a, b = operands(64, 64, 64)
    lab.check(matmul_pipelined, reference, a * 1e18, b * 1e18, gpu=None)
    lab.check(matmul_pipelined, reference, a * 1e-15, b * 1e-15, gpu=None)


def test_empty():
    assert matmul_pipelined(jnp.zeros((0, 8), jnp.bfloat16), jnp.zeros((8, 16), jnp.bfloat16)).shape == (0, 16)
    out = matmul_pipelined(jnp.zeros((3, 0), jnp.float16), jnp.zeros((0, 8), jnp.float16), activation=jnp.cos)
    np.testing.assert_array_equal(out, jnp.ones((3, 8)))


def ones(*shape, dtype=jnp.bfloat16):
    return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: matmul_pipelined(ones(8, 8), ones(16, 8)), "8 is not 16"),
        (lambda: matmul_pipelined(ones(8, 9), ones(9, 8)), "pad it to 16"),
        (lambda: matmul_pipelined(ones(8, 8), ones(8, 12)), "multiple of 16 bytes"),
        (lambda: matmul_pipelined(ones(2, 8, 8), ones(8, 8)), "vmap"),
        (lambda: matmul_pipelined(ones(8, 8), ones(8, 8, dtype=jnp.float16)), "cast one"),
        (lambda: matmul_pipelined(ones(8, 8, dtype=jnp.float32), ones(8, 8, dtype=jnp.float32)), "bfloat16"),
        (lambda: matmul_pipelined(ones(8, 8), ones(8, 8), out_dtype=jnp.int8), "out_dtype"),
        (lambda: matmul_pipelined(ones(8, 8), ones(8, 8), activation="gilu"), "gilu"),
        (lambda: Config(tile_m=32), "tile_m=32"),
        (lambda: Config(tile_m=128, tile_n=256), "128 x 192"),
        (lambda: Config(num_stages=2, delay_release=2), "delay_release=2"),
        (lambda: Config(num_stages=8), "bytes of shared memory"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def test_shared_memory_is_as_priced():
    a, b = (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16) for _ in range(2))
    for config in (Config(), Config(tile_n=192, num_stages=4)):
        compiled = lab.compile_for("h200", functools.partial(matmul_pipelined, config=config), a, b)
        assert config.smem_bytes <= compiled.smem_bytes <= config.smem_bytes + 1024 and compiled.spill_bytes == 0


def test_wgmma_operands_live_long_enough(gpu):
    """A slot refilled while a WGMMA still reads it, which the interpreter cannot see, shows in most runs."""
    a, b = operands(4096, 4096, 4096)
    wanted = reference(a, b)
    for num_stages in (1, 2, 3, 4):
        for delay_release in range(min(num_stages, 2)):
            fn = functools.partial(
                matmul_pipelined,
                config=Config(num_stages=num_stages, delay_release=delay_release),
                out_dtype=jnp.float32,
            )
            runs = [fn(a, b) for _ in range(10)]
            assert float(jnp.abs(runs[0] - wanted).max()) < 1e-2
            assert all((run == runs[0]).all() for run in runs)


def test_mutant_without_commit_smem_is_a_race(mutant):
    mutant(module, "plgpu", commit_smem=lambda: None)
    a, b = operands(64, 64, 64)
    with lab.interpret() as seen:
        jax.block_until_ready(matmul_pipelined(a, b, config=SMALL))
    assert seen.races_found


@pytest.mark.parametrize("dim", ["rows", "steps"])
def test_mutant_that_drops_the_tail_is_caught(mutant, dim):
    """A last tile, or a last step of K, that is not full and is left out."""
    mutant(module, "pl", cdiv=lambda a, b: max(a // b, 1))
    with pytest.raises(lab.CheckError):
        lab.check(matmul_pipelined, reference, *(operands(136, 64, 64) if dim == "rows" else operands(64, 64, 72)))
