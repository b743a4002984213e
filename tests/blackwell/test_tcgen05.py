"""Blackwell's matmul in the interpreter: one CTA, sizes on both sides of a tile, JAX around it."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import _device, blackwell
from cookbook.blackwell import kernel
from cookbook.blackwell import plan as plans
from cookbook.blackwell.plan import Config
from tests.arrays import array
from tests.blackwell.grid import RUNGS, SLOW, SMALL, STRUCTURES, of_rung

module = importlib.import_module("cookbook.blackwell.matmul")
matmul, reference = blackwell.matmul, module.matmul_reference


@pytest.fixture(autouse=True)
def on_a_blackwell_or_interpreted(request):
    """On a B200 these kernels run as they are; nobody has tried."""
    if lab.on_gpu("b200"):
        return
    if jax.default_backend() == "gpu":
        pytest.skip("this machine's GPU is no Blackwell: a machine without any interprets these kernels")
    request.getfixturevalue("no_gpu")


def operands(m, n, k, dtype=jnp.bfloat16, transpose_a=False, transpose_b=False):
    """Random normal; means are shifted, so that a term dropped or counted twice shows."""
    rng = np.random.default_rng(m * n + k)
    a, b = (array(rng.normal(size=shape) + 0.1, dtype) for shape in ((m, k), (k, n)))
    return a.T if transpose_a else a, b.T if transpose_b else b


def vector(size, dtype=jnp.float32):
    return array(np.random.default_rng(size).normal(size=size), dtype)


def check(m, n, k, *vectors, dtype=jnp.bfloat16, transpose_a=False, transpose_b=False, activation=None, gpu=None,
          **kwargs):  # fmt: skip
    """Interpreted, races found, beside float64. Not compiled by default: `test_compiled.py` compiles all structures."""
    how = dict(transpose_a=transpose_a, transpose_b=transpose_b)
    fn = functools.partial(matmul, activation=activation, **how, **kwargs)
    flip = lambda a, b, bias=None: reference(a.T if transpose_a else a, b.T if transpose_b else b, bias, activation)
    with_bias = lambda a, b, bias=None: fn(a, b, bias=bias)
    return lab.check(with_bias, flip, *operands(m, n, k, dtype, **how), *vectors, gpu=gpu)


# Sizes, structures, operands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m, n, k, dtype", [(1, 8, 8, jnp.bfloat16), (257, 72, 40, jnp.float16),
                                            (40, 520, 520, jnp.bfloat16)])  # fmt: skip
def test_any_size(m, n, k, dtype):
    check(m, n, k, dtype=dtype, gpu="b200")


EPILOGUES = [("relu", None), (None, jnp.float32), (jnp.tanh, None), ("gelu", jnp.float32), ("silu", jnp.float16)]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in STRUCTURES])
def test_every_structure(name):
    """Each with a bias; activations and dtypes of the result take turns."""
    (m, n, k), transpose_b, config = STRUCTURES[name]
    activation, out_dtype = EPILOGUES[list(STRUCTURES).index(name) % len(EPILOGUES)]
    check(m, n, k, vector(n, jnp.bfloat16), transpose_b=transpose_b, config=config, activation=activation,
          out_dtype=out_dtype)  # fmt: skip


@pytest.mark.parametrize("width", [64, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung(rung, width):
    """More tiles than SMs, here or on a B200, with tails; the interpreter takes the rungs that it can run."""
    config, is_here = of_rung(rung, width), lab.on_gpu("b200")
    if not is_here and (config.two_ctas or config.is_dynamic):
        pytest.skip("JAX's interpreter has no collective MMA and no cluster launch control")
    check(*((4008, 3080, 520) if is_here else (392, 2 * width + 72, 136)), config=config, transpose_b=True)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_few_rows_as_the_transposed_product(transpose_b):
    """As the docstring says: tiles as narrow as 16 columns."""
    a, b = operands(12, 264, 136, transpose_b=transpose_b)
    swapped = lambda a, b: matmul(b, a, transpose_a=not transpose_b, transpose_b=True, config=Config(tile_n=16)).T
    lab.check(swapped, lambda a, b: reference(a, b.T if transpose_b else b), a, b, gpu="b200")


@pytest.mark.parametrize("shape, transpose_b", [((136, 200, 72), False), ((128, 128, 192), True)])
def test_transposed_operands(shape, transpose_b):
    """Sizes that are no whole tiles of the swizzle, which XLA pads, and others that are."""
    check(*shape, transpose_a=True, transpose_b=transpose_b, config=SMALL, gpu="b200")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_problems(seed):
    rng = np.random.default_rng(seed)
    transpose_a, transpose_b = (bool(flag) for flag in rng.integers(2, size=2))
    m, n, k = (int(size) for size in rng.integers(1, (400, 400, 300)))
    m, n, k = -(-m // 8) * 8 if transpose_a else m, n if transpose_b else -(-n // 8) * 8, -(-k // 8) * 8
    check(m, n, k, vector(n), transpose_a=transpose_a, transpose_b=transpose_b, activation="relu",
          out_dtype=(jnp.bfloat16, jnp.float32)[seed % 2])  # fmt: skip


@pytest.mark.parametrize("m, n, k, how", [(130, 128, 72, dict()), (130, 136, 72, dict(transpose_b=True)),
                                          (128, 128, 64, dict(transpose_a=True))])  # fmt: skip
def test_no_operand_is_copied(m, n, k, how):
    with lab.interpret():
        jaxpr = str(jax.make_jaxpr(functools.partial(matmul, **how))(*operands(m, n, k, **how)))
    assert " transpose[" not in jaxpr and " pad[" not in jaxpr


# Values ---------------------------------------------------------------------------------------------------------------


def test_nan_and_infinity_go_where_they_should():
    """Also those just beyond the end of a row, which a tail must not read."""
    a, b = operands(136, 72, 72)
    a, b = a.at[3, 5].set(jnp.nan).at[7, 1].set(jnp.inf), b.at[9, 11].set(-jnp.inf)
    out, wanted = lab.run(functools.partial(matmul, config=SMALL), a, b), reference(a, b)
    np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(wanted))
    np.testing.assert_array_equal(jnp.isinf(out), jnp.isinf(wanted))


def test_empty():
    bf16 = functools.partial(jnp.zeros, dtype=jnp.bfloat16)
    assert matmul(bf16((0, 16)), bf16((16, 8))).shape == (0, 8)
    np.testing.assert_array_equal(matmul(bf16((3, 0)), bf16((0, 8)), bias=jnp.ones(8), activation="relu"), 1)


# JAX around it --------------------------------------------------------------------------------------------------------


def close(out, wanted):
    out, wanted = (np.asarray(x, np.float64) for x in (out, wanted))
    assert out.shape == wanted.shape and np.linalg.norm(out - wanted) < 1e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("how", [dict(), dict(transpose_a=True), dict(transpose_b=True)], ids=str)
def test_gradients(how):
    """With an N that is no multiple of 8 where b allows it."""
    m, n, k = 72, 77 if "transpose_b" in how else 72, 40
    args = *operands(m, n, k, **how), vector(n)
    weights = vector(m * n).reshape(m, n)
    loss = lambda fn: lambda a, b, bias: jnp.sum(weights * fn(a, b, bias).astype(jnp.float32) ** 2)
    ours = loss(
        lambda a, b, bias: matmul(a, b, bias=bias, activation="relu", out_dtype=jnp.float32, config=SMALL, **how)
    )
    flip = lambda x, name: x.T if name in how else x
    exact = loss(lambda a, b, bias: reference(flip(a, "transpose_a"), flip(b, "transpose_b"), bias, "relu"))
    found, wanted = lab.run(jax.grad(ours, (0, 1, 2)), *args), jax.grad(exact, (0, 1, 2))(*args)
    for mine, other in zip(found, wanted, strict=True):
        close(mine, other)


def test_vmap_and_leading_axes():
    a, b = operands(2 * 40, 72, 72)
    batch, wanted = a.reshape(2, 40, 72), reference(a, b).reshape(2, 40, 72)
    small = functools.partial(matmul, config=SMALL)
    close(lab.run(small, batch, b), wanted)
    close(lab.run(jax.vmap(small, (0, None)), batch, b), wanted)


def test_compiles_under_x64():
    avals = [jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)] * 2
    with jax.enable_x64(True):
        for config in (None, Config(schedule="dynamic")):
            assert lab.compile_for("b200", functools.partial(matmul, config=config), *avals).spill_bytes == 0


# Errors ---------------------------------------------------------------------------------------------------------------

ONES = jnp.ones((64, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: matmul(jnp.ones((64, 32), jnp.bfloat16), ONES), "cookbook.blackwell.matmul: .* 32 is not 64"),
        (lambda: matmul(ONES[:, :60], ONES[:60]), "multiple of 16 bytes: pad it to 64"),
        (lambda: matmul(ONES, ONES.astype(jnp.float16)), "must both be bfloat16 or both float16"),
        (lambda: matmul(ONES, ONES, bias=jnp.ones(3)), r"must be \(64,\), N"),
        (lambda: matmul(ONES, ONES, out_dtype=jnp.int32), "out_dtype"),
        (lambda: matmul(ONES, ONES, activation="tan"), "activation"),
        (lambda: matmul(ONES, ONES, config=Config(tile_n=96)), "tile_n=96 leaves a block 96 columns"),
        (lambda: matmul(ONES, ONES, config=Config(tile_n=64, epilogue_tile_n=48)), "epilogue_tile_n=48 must be one of"),
        (lambda: matmul(ONES, ONES, config=Config(num_stages=9)), "num_stages=9 .* bytes of shared memory"),
        (lambda: Config(tile_m=64), "self.tile_m=64 must be 128"),
        (lambda: Config(tile_n=200), "self.tile_n=200 must be a multiple of 16"),
        (lambda: Config(tile_n=48, two_ctas=True), "self.tile_n=48 must be a multiple of 32"),
        (lambda: Config(tile_n=512), "at most 256"),
        (lambda: Config(num_accumulators=3), "self.num_accumulators=3 must be 1 or 2"),
        (lambda: Config(schedule="launch"), "self.schedule='launch' must be one of"),
        (lambda: Config(num_stages=1), "self.num_stages=1 must be at least 2"),
        (lambda: Config(epilogue_wgs=3), "self.epilogue_wgs=3"),
        (lambda: Config(grid_minor_dim=2), "self.grid_minor_dim=2"),
        (lambda: Config(store_slots=0), "self.store_slots=0"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message), lab.interpret():
        fn()


@pytest.mark.parametrize(
    "config, message",
    [
        (Config(two_ctas=True), "two_ctas=True.* no collective MMA"),
        (Config(schedule="dynamic"), 'schedule="dynamic".* no cluster launch control'),
    ],
)
def test_what_the_interpreter_lacks_is_said_by_name(config, message):
    with pytest.raises(RuntimeError, match=message), lab.interpret():
        matmul(ONES, ONES, config=config)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what to do without one")
def test_without_a_gpu_or_the_interpreter():
    with pytest.raises(RuntimeError, match=r'JAX sees no GPU.*lab.interpret.*compile_for\("b200", cookbook.blackwell'):
        matmul(ONES, ONES)


@pytest.mark.parametrize("op, instead", [("matmul", "matmul"), ("matmul_mxfp8", "matmul_fp8")])
def test_on_a_hopper(pretend_gpu, op, instead):
    values, scales = blackwell.quantize_mxfp8(ONES)
    args = (ONES, ONES) if op == "matmul" else (values, scales, values, scales)
    pretend_gpu("NVIDIA H200", "9.0")
    with pytest.raises(RuntimeError, match=rf"H200 has 9.0\. For it there is cookbook.{instead}\. "):
        getattr(blackwell, op)(*args)


def test_compiled_for_a_hopper():
    with pytest.raises(ValueError, match="tcgen05|tmem"):
        lab.compile_for("h200", matmul, ONES, ONES)


# Mutants: each must be found ------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """Nothing that was traced of the right kernel is used for the wrong one, or the other way round."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("slot", ["alternates", "first"])
def test_mutant_whose_accumulators_do_not_alternate_is_caught(run_only, fresh, monkeypatch, found_if, slot):
    if slot == "first":
        monkeypatch.setattr(plans.Plan, "accumulator", lambda self, number: number * 0)
    with found_if(slot == "first"):
        check(392, 392, 72, config=SMALL)


@pytest.mark.parametrize("dim", ["rows", "columns", "steps", None])
def test_mutants_that_drop_a_tail_are_caught(run_only, fresh, monkeypatch, found_if, dim):
    """The last tile, or the last step of K, where it is not full."""
    if dim == "steps":
        monkeypatch.setattr(plans.Tiles, "num_steps", property(lambda self: max(1, self.k // self.tile_k)))
    elif dim:
        at = ("rows", "columns").index(dim)
        whole, size = plans.Tiles.grid, ("m", "n")[at]

        def grid(self):
            full = list(whole.fget(self))
            full[at] = max(1, getattr(self, size) // self.cluster_tile[at])
            return tuple(full)

        monkeypatch.setattr(plans.Tiles, "grid", property(grid))
    with found_if(dim is not None):
        check(136, 136, 72, config=SMALL)


@pytest.mark.parametrize("tail", ["zeros", "read twice"])
def test_mutant_that_does_not_mask_the_tail_of_k_is_caught(run_only, fresh, monkeypatch, found_if, tail):
    if tail == "read twice":
        monkeypatch.setattr(plans.Plan, "k_start", lambda self, step: jnp.minimum(step * 64, self.tiles.k - 64))
    with found_if(tail == "read twice"):
        check(136, 136, 72, config=SMALL)


def wait_for_writes_alone(left, wait_read_only=False, wait=plgpu.wait_smem_to_gmem):
    if not wait_read_only:
        wait(left)


@pytest.mark.parametrize("name", ["wait_load_tmem", "commit_smem", "wait_smem_to_gmem", "tcgen05_commit_arrive", None])
def test_mutants_that_do_not_wait_are_caught(run_only, mutant, found_if, name):
    """The commit is replaced by an arrival that waits for no product: the sums are stored too early."""
    changed = dict.fromkeys(["wait_load_tmem", "commit_smem"], lambda: None)
    changed |= dict(wait_smem_to_gmem=wait_for_writes_alone)
    changed |= dict(tcgen05_commit_arrive=lambda barrier, collective_axis: plgpu.barrier_arrive(barrier))
    if name:
        mutant(kernel, "plgpu", **{name: changed[name]})
    with found_if(name is not None):
        check(392, 392, 72, config=Config(tile_n=64, num_stages=2, store_slots=1))


@pytest.mark.parametrize("method", ["wait", "acquire", None])
def test_mutants_of_the_ring_are_caught(run_only, fresh, monkeypatch, found_if, method):
    """A slot read before it is full, or refilled although it is still read."""
    if method:
        monkeypatch.setattr(_device.Ring, method, _device.Ring.slot)
    with found_if(method is not None):
        check(136, 136, 264, config=SMALL)
