"""The matmul: every structure of its kernel, sizes on both sides of a tile, what is fused with it, JAX around it."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import _device
from cookbook.gemm import cost, kernel, plan
from tests.arrays import array
from tests.gemm.structures import SLOW, SMALL, STRUCTURES

module = importlib.import_module("cookbook.gemm.dense.matmul")
matmul, Config, reference = module.matmul, module.Config, module.matmul_reference


def operands(m, n, k, dtype=jnp.bfloat16, transpose_a=False, transpose_b=False):
    """Random normal; means are shifted, so that a term dropped or counted twice shows."""
    rng = np.random.default_rng(m * n + k)
    a, b = (array(rng.normal(size=shape) + 0.1, dtype) for shape in ((m, k), (k, n)))
    return a.T if transpose_a else a, b.T if transpose_b else b


def vector(size, dtype=jnp.float32):
    return array(np.random.default_rng(size).normal(size=size), dtype)


def check(m, n, k, *vectors, dtype=jnp.bfloat16, transpose_a=False, transpose_b=False, activation=None, gpu=None,
          fn=matmul, **kwargs):  # fmt: skip
    """Not compiled by default: `test_core.py` compiles every structure."""
    how = dict(transpose_a=transpose_a, transpose_b=transpose_b)
    fn = functools.partial(fn, activation=activation, **how, **kwargs)
    flip = lambda a, b, bias=None: reference(a.T if transpose_a else a, b.T if transpose_b else b, bias, activation)
    with_bias = lambda a, b, bias=None: fn(a, b, bias=bias)
    return lab.check(with_bias, flip, *operands(m, n, k, dtype, **how), *vectors, gpu=gpu)


# Sizes, structures, operands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m, n, k, dtype", [(1, 8, 8, jnp.bfloat16), (257, 72, 40, jnp.float16),
                                            (40, 520, 520, jnp.bfloat16)])  # fmt: skip
def test_any_size(m, n, k, dtype):
    check(m, n, k, dtype=dtype, gpu="h200")


# A GPU's tanh is not XLA's to the last bits of float32.
EPILOGUES = [("relu", None), (None, jnp.float32), (jnp.tanh, None), ("gelu", jnp.float32), ("silu", jnp.float16)]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in STRUCTURES])
def test_every_structure(name):
    """Each with a bias; activations and dtypes of the result take turns."""
    (m, n, k), transpose_b, config = STRUCTURES[name]
    activation, out_dtype = EPILOGUES[list(STRUCTURES).index(name) % len(EPILOGUES)]
    check(m, n, k, vector(n, jnp.bfloat16), transpose_b=transpose_b, config=config, activation=activation,
          out_dtype=out_dtype)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_configurations_that_may_be_chosen(seed):
    """Sizes, options and one of the candidates at random."""
    rng = np.random.default_rng(seed)
    transpose_a, transpose_b = (bool(flag) for flag in rng.integers(2, size=2))
    m, n, k = (int(size) for size in rng.integers(1, (300, 400, 500)))
    m, n, k = -(-m // 8) * 8 if transpose_a else m, n if transpose_b else -(-n // 8) * 8, -(-k // 8) * 8
    out_dtype = (jnp.bfloat16, jnp.float32)[seed % 2]
    itemsizes = 2, 2, jnp.dtype(out_dtype).itemsize
    candidates = cost.candidates(cost.Problem(m, n, k, (transpose_a, not transpose_b), itemsizes, num_sms=4))
    config = candidates[rng.integers(len(candidates))]
    check(m, n, k, vector(n), transpose_a=transpose_a, transpose_b=transpose_b, activation="relu", config=config,
          out_dtype=out_dtype)  # fmt: skip


@pytest.mark.parametrize(
    "shape, transpose_b", [((136, 200, 72), False), ((136, 200, 72), True), ((128, 128, 192), True)]
)
def test_transposed_operands(shape, transpose_b):
    """Sizes that are no whole tiles of the swizzle, which TMA cuts off or XLA pads, and others that are."""
    check(*shape, transpose_a=True, transpose_b=transpose_b, config=Config(128, 128), gpu="h200")


@pytest.mark.parametrize("transpose_a", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operands_in_each_others_place(transpose_a):
    """A bias, 32-bit results, which are stored from registers, and operands that TMA cuts off."""
    config = Config(64 if transpose_a else 128, 128, split_dim=int(transpose_a), swapped=True)
    check(136, 200, 72, vector(200), transpose_a=transpose_a, activation="relu", out_dtype=jnp.float32, config=config,
          gpu="h200")  # fmt: skip


@pytest.mark.parametrize(
    "m, n, k, how, config",
    [
        (128, 128, 64, dict(transpose_a=True), None),
        (128, 128, 64, dict(transpose_b=True), None),
        (130, 136, 72, dict(transpose_b=True), None),  # TMA cuts off rows along K, and o, at multiples of 16 bytes.
        (648, 584, 200, dict(), Config(swapped=True)),
        (648, 584, 200, dict(), None),
        (648, 584, 200, dict(transpose_a=True), Config(64, 128, split_dim=1)),
    ],
)
def test_no_operand_is_copied(m, n, k, how, config):
    with lab.interpret():
        jaxpr = str(jax.make_jaxpr(functools.partial(matmul, config=config, **how))(*operands(m, n, k, **how)))
    assert " transpose[" not in jaxpr and " pad[" not in jaxpr


# Epilogue -------------------------------------------------------------------------------------------------------------


def test_an_activation_holds_numbers_but_none_that_are_traced():
    a, b = operands(64, 64, 64)
    scaled = lambda s: functools.partial(matmul, activation=lambda x: x * s, config=SMALL)
    expected = lab.run(scaled(2.0), a, b)
    np.testing.assert_array_equal(lab.run(scaled(jnp.float32(2.0)), a, b), expected)
    for config in (SMALL, Config(64, 128, split_dim=1, split_k=2, second_kernel=True)):
        product = lambda a, b, s, config=config: matmul(a, b, activation=lambda x: x * s, config=config)
        loss = lambda *args, product=product: product(*args).astype(jnp.float32).sum()
        for transformed in (jax.jit(product), jax.grad(loss, (0, 2))):
            with pytest.raises(ValueError, match="holds a traced value"), lab.interpret():
                transformed(a, b, jnp.float32(2.0))


# Values ---------------------------------------------------------------------------------------------------------------


def test_nan_and_infinity_go_where_they_should():
    """Also those just beyond the end of a row, which a tail must not read."""
    a, b = operands(72, 72, 72)
    a, b = a.at[3, 5].set(jnp.nan).at[7, 1].set(jnp.inf), b.at[9, 11].set(-jnp.inf)
    wanted = reference(a, b)
    for config in (None, Config(64, 128, split_dim=1, split_k=2)):
        out = lab.run(functools.partial(matmul, config=config), a, b)
        np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(wanted))
        np.testing.assert_array_equal(jnp.isinf(out), jnp.isinf(wanted))


def test_huge_and_tiny_values():
    """Two problems of one program, which is compiled once; float32 holds their sums, and so does bfloat16."""
    a, b = operands(64, 64, 64)
    out = lab.run(lambda x, y: [matmul(a * s, b * s, config=SMALL) for s in (x, y)], 1e18, 1e-15)
    for result, scale in zip(out, (1e18, 1e-15), strict=True):
        wanted = np.asarray(reference(a * scale, b * scale), np.float64)
        assert np.linalg.norm(np.asarray(result, np.float64) - wanted) < 4e-3 * np.linalg.norm(wanted)


def test_empty():
    assert matmul(jnp.zeros((0, 8), jnp.bfloat16), jnp.zeros((8, 16), jnp.bfloat16)).shape == (0, 16)
    assert matmul(jnp.zeros((2, 0, 8), jnp.bfloat16), jnp.zeros((8, 16), jnp.bfloat16)).shape == (2, 0, 16)
    a, b = jnp.zeros((3, 0), jnp.float16), jnp.zeros((0, 8), jnp.float16)
    np.testing.assert_array_equal(
        matmul(a, b, bias=jnp.ones(8), activation=jnp.cos), jnp.full((3, 8), jnp.cos(1.0), jnp.float16)
    )


# Gradients ------------------------------------------------------------------------------------------------------------


def require_gradients(transpose_a, transpose_b):
    how = dict(transpose_a=transpose_a, transpose_b=transpose_b)
    a, b = operands(72, 136, 64, **how)
    bias, weights = vector(136), vector((72, 136), jnp.bfloat16).astype(jnp.float32)

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


def test_gradients():
    require_gradients(False, False)


@pytest.mark.slow
@pytest.mark.parametrize("transpose_a, transpose_b", [(True, False), (False, True), (True, True)])
def test_gradients_of_transposed_operands(transpose_a, transpose_b):
    require_gradients(transpose_a, transpose_b)


def test_gradient_where_rows_of_o_are_not_aligned():
    a, b = operands(16, 77, 64, transpose_b=True)
    d_a, d_b = lab.run(jax.grad(lambda a, b: matmul(a, b, transpose_b=True).astype(jnp.float32).sum(), (0, 1)), a, b)
    ones = np.ones((16, 77))
    np.testing.assert_allclose(np.asarray(d_a, np.float64), ones @ np.asarray(b, np.float64), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(np.asarray(d_b, np.float64), ones.T @ np.asarray(a, np.float64), rtol=1e-2, atol=1e-2)


# At home in JAX -------------------------------------------------------------------------------------------------------

small = functools.partial(matmul, config=SMALL)


def close(out, wanted):
    out, wanted = (np.asarray(x, np.float64) for x in (out, wanted))
    assert out.shape == wanted.shape and np.linalg.norm(out - wanted) < 5e-3 * np.linalg.norm(wanted)


def test_vmap_and_determinism():
    a, b = (jnp.stack([x, x]) for x in operands(128, 72, 40))
    out = lab.run(jax.vmap(small), a, b)
    assert (out[0] == out[1]).all()
    close(out[0], reference(a[0], b[0]))


def test_leading_dimensions():
    a, b = operands(72, 40, 64)
    out = lab.run(small, a.reshape(2, 3, 12, 64), b)
    close(out, reference(a, b).reshape(2, 3, 12, 40))


@pytest.mark.slow
def test_shard_map_with_gradients():
    """b and the bias are whole on every device: their gradients are summed over the mesh."""
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    rows, whole = jax.P("data"), jax.P()
    (a, b), bias = operands(64, 72, 40), vector(72)
    product = jax.shard_map(functools.partial(small_with_bias, small), mesh=mesh, in_specs=(rows, whole, whole),
                            out_specs=rows)  # fmt: skip
    loss = lambda fn: jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    plain = lambda a, b, bias: reference(a, b, bias)
    jax.tree.map(close, lab.run(loss(product), a, b, bias), loss(plain)(a, b, bias))


def small_with_bias(fn, a, b, bias):
    return fn(a, b, bias=bias)


def test_layers_in_a_scan_that_are_recomputed():
    def loss(x, layers):
        layer = jax.checkpoint(lambda x, w: (matmul(x, w), None))
        return jax.lax.scan(layer, x, layers)[0].astype(jnp.float32).sum()

    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (3, 256, 256))]
    assert lab.compile_for("h200", jax.jit(jax.grad(loss, (0, 1))), *avals).spill_bytes == 0


def test_compiles_under_x64_and_with_a_donated_operand():
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (256, 256)))
    with jax.enable_x64(True):
        bias = jax.ShapeDtypeStruct((256,), jnp.float64)
        for config in (None, Config(tile_n=128, split_k=2)):
            fn = lambda a, b, bias, config=config: matmul(a, b, bias=bias, config=config)
            assert lab.compile_for("h200", fn, a, b, bias).spill_bytes == 0
        gradient = jax.grad(lambda a, b: matmul(a, b).astype(jnp.float32).sum(), (0, 1))
        assert lab.compile_for("h200", gradient, a, b)
    assert lab.compile_for("h200", jax.jit(matmul, donate_argnums=0), a, b)


def test_sums_are_sent_without_a_fence():
    """`plgpu.async_store_smem` would wait for all memory before each send."""
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 512), (128, 512)))
    fn = functools.partial(matmul, transpose_b=True, config=Config(64, 64, split_dim=1, split_k=3))
    instructions = lab.compile_for("h200", fn, a, b).instructions
    assert any("STAS" in line for line in instructions)
    assert not any("MEMBAR" in line and "GPU" in line for line in instructions)


def test_options_of_any_scalar_type_and_lists():
    a, b = (np.asarray(x) for x in operands(64, 8, 16))  # NumPy's, with ml_dtypes' bfloat16.
    wanted = reference(jnp.asarray(a), jnp.asarray(b), jnp.arange(8.0))
    bias = [float(x) for x in range(8)]
    for flag in (np.bool_(True), jnp.array(True)):
        close(lab.run(functools.partial(small, bias=bias, transpose_b=flag, out_dtype="bfloat16"), a, b.T), wanted)


# Errors ---------------------------------------------------------------------------------------------------------------


def ones(*shape, dtype=jnp.bfloat16):
    return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: matmul(ones(8, 8), ones(16, 8)), "8 is not 16"),
        (lambda: matmul(ones(8, 9), ones(9, 8)), "pad it to 16"),
        (lambda: matmul(ones(2, 8, 8), ones(2, 8, 8)), "vmap"),
        (lambda: matmul(ones(2, 8, 8), ones(8, 8), transpose_a=True), "vmap"),
        (lambda: matmul(ones(8), ones(8, 8)), "must both be matrices"),
        (lambda: matmul(ones(8, 8), ones(8, 8, dtype=jnp.float16)), "cast one"),
        (lambda: matmul([["x"]], ones(8, 8)), "a=.*; must be an array"),
        (lambda: matmul(ones(8, 8), ones(8, 8), bias=ones(16)), r"bias.shape=\(16,\).*must be \(8,\)"),
        (lambda: matmul(ones(8, 8), ones(8, 8), bias=[1] * 8), "floating"),
        (lambda: matmul(ones(8, 8), ones(8, 8), bias=object()), "bias=.*; must be an array"),
        (lambda: matmul(ones(8, 8), ones(8, 8), out_dtype=jnp.int8), "out_dtype"),
        (lambda: matmul(ones(8, 8), ones(8, 8), activation="gilu"), "gilu"),
        (lambda: matmul(ones(8, 8), ones(8, 8), activation=jnp.cumsum), "not element-wise"),
        (lambda: matmul(ones(8, 8), ones(8, 8), activation=lambda x: x * jnp.arange(8.0)), "holds an array|iota"),
        (lambda: matmul(ones(8, 8), ones(8, 8), transpose_b="yes"), "transpose_b='yes'; must be one bool"),
        (lambda: jax.jit(matmul_transposed)(ones(8, 8), ones(8, 8), True), "transpose_b is traced"),
        (lambda: lab.run(functools.partial(matmul, config=Config(128, 96)), *operands(8, 8, 8)), "tile_n=96 leaves"),
        (lambda: lab.run(functools.partial(matmul, config=Config(num_stages=9)), *operands(8, 8, 8)), "num_stages=9"),
        (
            lambda: lab.run(functools.partial(matmul, transpose_b=True, config=Config(128, 8)), *operands(8, 8, 8)),
            "multiple of 16, 32 bytes",
        ),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def matmul_transposed(a, b, transpose_b):
    return matmul(a, b, transpose_b=transpose_b)


# Mutants --------------------------------------------------------------------------------------------------------------

FULL = (520, 264, 200)  # Each of four blocks has several tiles, each tile several steps.


def test_mutant_without_commit_smem_is_a_race(mutant):
    mutant(kernel, "plgpu", commit_smem=lambda: None)
    with lab.interpret() as seen:
        jax.block_until_ready(small(*operands(64, 128, 64)))
    assert seen.races_found


def free_twice(ring, count):
    for _ in range(2):
        plgpu.barrier_arrive(ring.freed.at[ring.slot(count)])


@pytest.mark.parametrize(
    "method, mutated",
    [("wait", _device.Ring.slot), ("acquire", _device.Ring.slot), ("release", free_twice), (None, None)],
)
def test_mutants_of_the_ring_are_caught(run_only, monkeypatch, found_if, method, mutated):
    """A slot read before it is full, refilled although nobody gave it back, given back twice."""
    if method:
        monkeypatch.setattr(_device.Ring, method, mutated)
    jax.clear_caches()
    with found_if(method is not None):
        check(*FULL, config=SMALL)
    jax.clear_caches()


@pytest.mark.parametrize("dropped", ["store", "parts"])
def test_mutants_that_do_not_wait_are_caught(run_only, mutant, dropped):
    """For a piece to have been read before its slot is written again; for the other parts' sums."""
    wait = plgpu.wait_smem_to_gmem

    def wait_for_writes_alone(left, wait_read_only=False):
        if not wait_read_only:
            wait(left)

    config = Config(64, 256, split_dim=1, store_slots=1)
    if dropped == "store":
        mutant(kernel, "plgpu", wait_smem_to_gmem=wait_for_writes_alone)
    else:
        mutant(kernel, "plgpu", barrier_wait=own_alone)
        config = Config(64, 128, split_dim=1, split_k=2)
    with pytest.raises(lab.CheckError, match="(?i)race|phase|result|NaN|not all copy_smem_to_gmem"):
        check(130, 520, 200, config=config)


def own_alone(barrier):
    """In place of `plgpu.barrier_wait` in `kernel.py`, where only `add_parts` waits itself."""


@pytest.mark.parametrize("dim", ["rows", "columns", "steps", None])
def test_mutants_that_drop_a_tail_are_caught(run_only, monkeypatch, found_if, dim):
    """The last tile, or the last step of K, where it is not full."""
    tiles = plan.Tiles
    if dim == "steps":
        steps = property(lambda self: max(1, self.k // (self.tile_k * self.config.split_k)))
        monkeypatch.setattr(tiles, "num_steps", steps)
    elif dim:
        at = ("rows", "columns").index(dim)
        whole, size = tiles.grid, ("m", "n")[at]

        def grid(self):
            full = list(whole.fget(self))
            full[at] = max(1, getattr(self, size) // self.cluster_tile[at])
            return tuple(full)

        monkeypatch.setattr(tiles, "grid", property(grid))
    jax.clear_caches()
    with found_if(dim is not None):
        check(72, 136, 72, config=SMALL)
    jax.clear_caches()


def test_mutant_that_forgets_the_narrow_tiles_is_caught(run_only, monkeypatch):
    monkeypatch.setattr(plan.Plan, "phases", property(lambda self: [self]))
    jax.clear_caches()
    (m, n, k), transpose_b, config = STRUCTURES["tail of thirds"]
    with pytest.raises(lab.CheckError):
        check(m, n, k, transpose_b=transpose_b, config=config)
    jax.clear_caches()


# On a GPU: about 25 kernels in all ------------------------------------------------------------------------------------


def on_gpu(config, m, n, k, runs, **how):
    """Equal to the bit in `runs` runs, and right."""
    a, b = operands(m, n, k, **how)
    fn = jax.jit(functools.partial(matmul, config=config, out_dtype=jnp.float32, **how))
    wanted = jax.jit(reference)(a.T if "transpose_a" in how else a, b.T if "transpose_b" in how else b)
    outs = [fn(a, b) for _ in range(runs)]
    assert float(jnp.linalg.norm(outs[0] - wanted) / jnp.linalg.norm(wanted)) < 1e-5, config
    assert all((out == outs[0]).all() for out in outs), config


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(num_stages=2),
        Config(cluster_m=2, cluster_n=2),
        Config(cluster_n=4),
        Config(128, 128, split_k=3),
        Config(128, 192, split_dim=0, cluster_m=4, swapped=True),
        Config(128, 192, swapped=True, tail_split=3),
    ],
    ids=str,
)
def test_wgmma_operands_live_long_enough(gpu, config):
    """The interpreter cannot see this: a slot refilled while a WGMMA still reads it. It shows in most runs."""
    on_gpu(config, 4096, 4096, 2048, runs=10)


@pytest.mark.parametrize("config", [Config(128, 64, split_k=8), Config(128, 128, split_k=2)], ids=str)
def test_parts_of_k_are_added_in_one_order(gpu, config):
    """Clusters on all SMs; a block that read another's sums too early would add what was there before."""
    on_gpu(config, 1024, 1024, 8192, runs=20)


@pytest.mark.parametrize("how", [dict(), dict(transpose_a=True), dict(transpose_b=True)], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 8), (136, 1000, 72), (1000, 520, 200)])
def test_ragged_sizes_on_the_gpu(gpu, shape, how):
    """The two views of a narrow tile, and multicast, which the interpreter does not model."""
    if shape[0] % 8 == 0 or "transpose_a" not in how:  # Otherwise rows of a would not be aligned.
        on_gpu(None, *shape, runs=2, **how)


@pytest.mark.parametrize(
    "config",
    [Config(64, 128, split_dim=1, cluster_m=2, cluster_n=2), Config(128, 96, tail_split=3, swapped=True),
     Config(128, 24, split_k=4, swapped=True)], ids=str)  # fmt: skip
def test_ragged_structures_on_the_gpu(gpu, config):
    on_gpu(config, 1000, 2504, 328, runs=2)
