"""The warp-specialized matmul: every role structure, sizes on both sides of a tile, and what it is fused with."""

import functools
import importlib
import inspect
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cookbook import lab

module = importlib.import_module("cookbook.gemm.matmul")
matmul, Config, reference = module.matmul, module.Config, module.matmul_reference
SMALL = Config(tile_m=64, tile_n=128, split_dim=1)  # The least that two warpgroups can share out.


def operands(m, n, k, dtype=jnp.bfloat16, transpose_a=False, transpose_b=False):
    rng = np.random.default_rng(m * n + k)
    a, b = (jnp.asarray(rng.normal(size=shape) + 0.1, dtype) for shape in ((m, k), (k, n)))
    return a.T if transpose_a else a, b.T if transpose_b else b


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("m, n, k", [(128, 256, 64), (1, 8, 8), (130, 136, 72), (257, 64, 40), (40, 520, 1032)])
def test_any_size(m, n, k, dtype):
    lab.check(matmul, reference, *operands(m, n, k, dtype))


@pytest.mark.parametrize("transpose_a, transpose_b", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("m, n, k", [(128, 192, 128), (136, 72, 200)])
def test_transposed_operands(m, n, k, transpose_a, transpose_b):
    how = dict(transpose_a=transpose_a, transpose_b=transpose_b)
    flip = lambda a, b: reference(a.T if transpose_a else a, b.T if transpose_b else b)
    lab.check(functools.partial(matmul, **how), flip, *operands(m, n, k, **how))


@pytest.mark.parametrize("transpose_a", [False, True])
def test_operands_in_each_others_place(transpose_a):
    """Bias and 32-bit results too; b is one that TMA cuts off, and so is a."""
    bias = jnp.asarray(np.random.default_rng(0).normal(size=200), jnp.bfloat16)
    a, b = operands(136, 200, 72, transpose_a=transpose_a)
    flip = lambda a, b, bias: reference(a.T if transpose_a else a, b, bias, "relu")
    for out_dtype in (jnp.bfloat16, jnp.float32):
        fn = functools.partial(matmul, transpose_a=transpose_a, out_dtype=out_dtype, config=Config(swapped=True))
        lab.check(lambda a, b, bias, fn=fn: fn(a, b, bias=bias, activation="relu"), flip, a, b, bias)


def test_a_ragged_b_is_not_copied():
    with lab.interpret():
        jaxpr = str(jax.make_jaxpr(matmul)(*operands(648, 584, 200))).split("core_map")[0]
    assert " pad[" not in jaxpr


def test_rows_of_o_that_are_not_aligned():
    """b is (N, K): its rows are aligned, those of o are not."""
    lab.check(functools.partial(matmul, transpose_b=True), lambda a, b: reference(a, b.T),
              *operands(70, 77, 72, transpose_b=True))  # fmt: skip


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", jnp.tanh, None])
def test_bias_activation_and_out_dtype(activation, split_k):
    bias = jnp.asarray(np.random.default_rng(0).normal(size=136), jnp.bfloat16)
    config = Config(tile_m=64, tile_n=128, split_dim=1, split_k=split_k)
    # A GPU's tanh is not XLA's to the last bits of float32.
    out_dtype = jnp.bfloat16 if activation is jnp.tanh else jnp.float32
    fn = functools.partial(matmul, activation=activation, out_dtype=out_dtype, config=config)
    lab.check(lambda a, b, bias: fn(a, b, bias=bias), lambda a, b, bias: reference(a, b, bias, activation),
              *operands(130, 136, 392), bias)  # fmt: skip


CONFIGS = [
    SMALL,
    Config(),
    Config(num_stages=2),
    Config(tile_n=128, num_stages=6),  # More stages than steps.
    Config(tile_n=128, num_stages=3, split_dim=1, grid_minor_dim=1, grid_tile_width=1),
    Config(tile_m=256, tile_n=128, split_dim=1),
    Config(cluster_dim=0),
    Config(cluster_dim=1, grid_tile_width=2),
    Config(tile_n=64, cluster_dim=0, num_stages=2),
    Config(tile_m=64, tile_n=128, split_dim=1, split_k=2),
    Config(tile_m=64, tile_n=128, split_dim=1, split_k=5, cluster_dim=1),  # The last part has no step of its own.
    Config(num_stages=3, store_slots=3),  # Pieces of a tile in two lots, the second smaller.
    Config(swapped=True),
    Config(tile_n=128, num_stages=5, store_slots=1, cluster_dim=0, swapped=True),
    Config(tile_n=64, split_k=2, swapped=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_role_structure(config):
    """More tiles than blocks, so that slots and barriers go on from tile to tile; tails in all three dimensions."""
    lab.check(functools.partial(matmul, config=config), reference, *operands(648, 584, 200))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_shared_memory_is_as_priced(config):
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 4096), (4096, 2048))]
    compiled = lab.compile_for("h200", functools.partial(matmul, config=config), *avals)
    assert config.smem_bytes <= compiled.smem_bytes <= config.smem_bytes + 1024 and compiled.spill_bytes == 0


@pytest.mark.parametrize(
    "m, n, k", [(8192, 8192, 8192), (64, 8192, 8192), (512, 512, 32768), (1, 8, 8), (1000, 77, 5000)]
)
def test_default_config(m, n, k):
    """Fits, and leaves no more parts of K idle than there are steps."""
    config = module.default_config(m, n, k)
    assert 1 <= config.split_k <= max(1, k // 64)


@pytest.mark.parametrize("transpose_a, transpose_b", [(False, False), (True, False), (False, True), (True, True)])
def test_gradients(transpose_a, transpose_b):
    how = dict(transpose_a=transpose_a, transpose_b=transpose_b)
    a, b = operands(72, 136, 64, **how)
    bias, weights = (jnp.asarray(np.random.default_rng(1).normal(size=size), jnp.float32) for size in (136, (72, 136)))
    weights = weights.astype(jnp.bfloat16).astype(jnp.float32)

    def grads(product):
        loss = lambda a, b, bias: jnp.sum(weights * product(a, b, bias).astype(jnp.float32))
        return jax.grad(loss, argnums=(0, 1, 2))(a, b, bias)

    flip = lambda a, b, bias: reference(a.T if transpose_a else a, b.T if transpose_b else b, bias, "silu")
    ours = lab.run(lambda: grads(lambda a, b, bias: matmul(a, b, bias=bias, activation="silu", config=SMALL, **how)))
    for ours_d, theirs_d in zip(ours, grads(flip), strict=True):
        assert ours_d.shape == theirs_d.shape and ours_d.dtype == theirs_d.dtype
        ours_d, theirs_d = (np.asarray(d, np.float64) for d in (ours_d, theirs_d))
        # Each of two roundings to bfloat16, of the gradient that is multiplied and of the result, errs by 1.7e-3.
        assert np.linalg.norm(ours_d - theirs_d) < 5e-3 * np.linalg.norm(theirs_d)


def test_gradient_where_rows_of_o_are_not_aligned():
    a, b = operands(16, 77, 64, transpose_b=True)
    d_a, d_b = lab.run(jax.grad(lambda a, b: matmul(a, b, transpose_b=True).astype(jnp.float32).sum(), (0, 1)), a, b)
    ones = np.ones((16, 77))
    np.testing.assert_allclose(np.asarray(d_a, np.float64), ones @ np.asarray(b, np.float64), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(np.asarray(d_b, np.float64), ones.T @ np.asarray(a, np.float64), rtol=1e-2, atol=1e-2)


def test_no_copy_of_a_transposed_operand():
    """The compiled program of aligned operands is the kernel and nothing else, transposed or not."""
    for how in (dict(transpose_a=True), dict(transpose_b=True)):
        a, b = operands(128, 128, 64, **how)
        with lab.interpret():
            jaxpr = jax.make_jaxpr(functools.partial(matmul, **how))(a, b)
        names = str(jaxpr)
        assert " transpose[" not in names.split("core_map")[0] and " pad[" not in names.split("core_map")[0]


def test_ragged_k_and_n_need_no_copy():
    """TMA cuts off rows along K, and rows of o, at any multiple of 16 bytes."""
    with lab.interpret():
        jaxpr = jax.make_jaxpr(functools.partial(matmul, transpose_b=True))(*operands(130, 136, 72, transpose_b=True))
    assert " pad[" not in str(jaxpr).split("core_map")[0]


def test_jit_vmap_and_determinism():
    a, b = (jnp.stack(x) for x in zip(*(operands(128, 72, 40) for _ in range(2)), strict=True))
    fn = functools.partial(matmul, config=SMALL)
    runs = [lab.run(jax.vmap(fn), a, b), lab.run(jax.jit(jax.vmap(fn)), a, b), lab.run(fn, a[0], b[0])[None]]
    assert all((run[0] == runs[0][0]).all() for run in runs)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    a, b = operands(64, 72, 40)
    rows, whole = jax.P("data"), jax.P()
    fn = jax.shard_map(functools.partial(matmul, config=SMALL), mesh=mesh, in_specs=(rows, whole), out_specs=rows,
                       check_vma=False)  # fmt: skip
    np.testing.assert_array_equal(lab.run(fn, a, b), lab.run(functools.partial(matmul, config=SMALL), a, b))


def test_nan_and_infinity_go_where_they_should():
    """Also those just beyond the end of a row, which a tail must not read."""
    a, b = operands(72, 72, 72)
    a, b = a.at[3, 5].set(jnp.nan).at[7, 1].set(jnp.inf), b.at[9, 11].set(-jnp.inf)
    out, wanted = lab.run(matmul, a, b), reference(a, b)
    np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(wanted))
    np.testing.assert_array_equal(jnp.isinf(out), jnp.isinf(wanted))


def test_huge_and_tiny_values():
    a, b = operands(64, 64, 64)
    lab.check(matmul, reference, a * 1e18, b * 1e18)
    lab.check(matmul, reference, a * 1e-15, b * 1e-15)


def test_empty():
    assert matmul(jnp.zeros((0, 8), jnp.bfloat16), jnp.zeros((8, 16), jnp.bfloat16)).shape == (0, 16)
    a, b = jnp.zeros((3, 0), jnp.float16), jnp.zeros((0, 8), jnp.float16)
    np.testing.assert_array_equal(
        matmul(a, b, bias=jnp.ones(8), activation=jnp.cos), jnp.full((3, 8), jnp.cos(1.0), jnp.float16)
    )


def ones(*shape, dtype=jnp.bfloat16):
    return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: matmul(ones(8, 8), ones(16, 8)), "8 is not 16"),
        (lambda: matmul(ones(8, 9), ones(9, 8)), "pad it to 16"),
        (lambda: matmul(ones(2, 8, 8), ones(8, 8)), "vmap"),
        (lambda: matmul(ones(8, 8), ones(8, 8, dtype=jnp.float16)), "cast one"),
        (lambda: matmul(ones(8, 8), ones(8, 8), bias=ones(16)), r"bias.shape=\(16,\).*must be \(8,\)"),
        (lambda: matmul(ones(8, 8), ones(8, 8), bias=ones(8, dtype=jnp.int32)), "floating"),
        (lambda: matmul(ones(8, 8), ones(8, 8), out_dtype=jnp.int8), "out_dtype"),
        (lambda: matmul(ones(8, 8), ones(8, 8), activation="gilu"), "gilu"),
        (lambda: Config(tile_m=64), "has halved one"),
        (lambda: Config(tile_n=96), "tile_n=96"),
        (lambda: Config(tile_m=256, tile_n=256), "64 x 256"),
        (lambda: Config(cluster_dim=2), "cluster_dim=2"),
        (lambda: Config(num_stages=1), "num_stages=1"),
        (lambda: Config(split_k=0), "split_k=0"),
        (lambda: Config(store_slots=0), "store_slots=0"),
        (lambda: Config(num_stages=5), "bytes of shared memory"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def test_wgmma_operands_live_long_enough(gpu):
    """What the interpreter can not see: a slot refilled while a WGMMA still reads it. It shows in most runs."""
    a, b = operands(4096, 4096, 4096)
    wanted = reference(a, b)
    for config in (
        Config(),
        Config(num_stages=2),
        Config(cluster_dim=0),
        Config(cluster_dim=1),
        Config(split_k=3),
        Config(swapped=True),
    ):
        fn = functools.partial(matmul, config=config, out_dtype=jnp.float32)
        runs = [fn(a, b) for _ in range(10)]
        assert float(jnp.abs(runs[0] - wanted).max()) < 1e-2
        assert all((run == runs[0]).all() for run in runs)


def test_ragged_sizes_on_the_gpu(gpu):
    """The two views of a narrow tile, and multicast, which the interpreter does not model."""
    for m, n, k in ((4000, 3000, 5000), (1, 8, 8), (130, 1000, 72), (1000, 520, 200)):
        for how in (dict(), dict(transpose_a=True), dict(transpose_b=True)):
            if m % 8 and "transpose_a" in how:
                continue  # Rows of a would not be aligned.
            flip = lambda a, b, how=how: reference(
                a.T if "transpose_a" in how else a, b.T if "transpose_b" in how else b
            )
            for config in (
                None,
                Config(),
                Config(cluster_dim=0),
                Config(cluster_dim=1),
                Config(cluster_dim=0, swapped=True),
            ):
                kernel = functools.partial(matmul, config=config, **how)
                lab.check(kernel, flip, *operands(m, n, k, **how), gpu=None)  # It is compiled to run.


def test_mutant_without_commit_smem_is_a_race(mutant):
    mutant(module, "plgpu", commit_smem=lambda: None)
    a, b = operands(64, 128, 64)
    with lab.interpret() as seen:
        jax.block_until_ready(matmul(a, b, config=SMALL))
    assert seen.races_found


@pytest.mark.parametrize("dim", ["rows", "steps"])
def test_mutant_that_drops_the_tail_is_caught(mutant, dim):
    """A last tile, or a last step of K, that is not full and is left out."""
    mutant(module, "pl", cdiv=lambda a, b: max(a // b, 1))
    with pytest.raises(lab.CheckError):
        fn = functools.partial(matmul, config=SMALL)
        lab.check(fn, reference, *(operands(72, 128, 64) if dim == "rows" else operands(64, 128, 72)))


@pytest.fixture
def rewritten(monkeypatch):
    """`rewritten(old, new)`: `matmul` of a copy of the module with this line changed."""

    def change(old: str, new: str):
        source = inspect.getsource(module)
        assert source.count(old) == 1
        copy = types.ModuleType("mutant_of_matmul")
        copy.__package__ = module.__package__
        monkeypatch.setitem(sys.modules, copy.__name__, copy)
        exec(compile(source.replace(old, new), copy.__name__, "exec"), copy.__dict__)
        return copy.matmul

    return change


@pytest.mark.parametrize(
    "tile_n, old, new",
    [
        (128, "pl.when(used)(lambda: plgpu.barrier_wait(freed.at[slot]))", "pass"),
        (128, "plgpu.barrier_wait(filled.at[slot])", "pass"),
        # Four pieces a tile, two at a time: with two, loads that come between hide the race from the interpreter.
        (256, "plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "pass"),
    ],
)
def test_mutants_are_caught(run_only, rewritten, tile_n, old, new):
    """A slot refilled although nobody gave it back, or read before it is full; a piece written over one that leaves."""
    config = Config(tile_m=64, tile_n=tile_n, split_dim=1)
    with pytest.raises(Exception, match=r"(?i)\brace|\bwait|\bphase"):
        lab.check(functools.partial(rewritten(old, new), config=config), reference, *operands(648, 640, 200))
