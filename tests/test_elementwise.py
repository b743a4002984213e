"""`fuse` and `add`: lengths around the warpgroup (128) and the tile (1024), where tails and padding change."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lab
from cookbook import add, elementwise, fuse
from tests.arrays import array
from tests.lowering import lowered

LENGTHS = (1, 5, 127, 128, 129, 1000, 1024, 1025, 3001)


def normal(seed, shape, dtype=jnp.float32):
    return array(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("n", LENGTHS)
def test_add_of_any_length(n):
    dtype = (jnp.bfloat16, jnp.float32, jnp.float16)[LENGTHS.index(n) % 3]
    gpu = "h200" if n in (129, 3001) else None  # The others are the same kernels.
    lab.check(add, elementwise.add_reference, normal(0, n, dtype), normal(1, n, dtype), gpu=gpu)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", jnp.tanh])
def test_activation(activation):
    x, y = normal(0, (3, 7, 41), jnp.bfloat16), normal(1, (3, 7, 41), jnp.bfloat16)
    fused = lambda x, y: add(x, y, activation=activation)
    plain = getattr(jax.nn, activation) if isinstance(activation, str) else activation
    lab.check(fused, lambda x, y: plain(elementwise.add_reference(x, y)), x, y)


def test_tile_and_many_blocks():
    x, y = normal(0, 128 * 9 + 3), normal(1, 128 * 9 + 3)
    config = elementwise.Config(tile=256)
    lab.check(lambda x, y: add(x, y, config=config), elementwise.add_reference, x, y)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Affine:
    weight: jax.Array
    bias: jax.Array


def test_fuse_of_pytrees():
    """A dataclass in, a dict out, dtypes mixed: as the function itself would give."""

    def fn(params, x):
        y = params.weight * x + params.bias
        return {"y": jax.nn.silu(y), "clipped": jnp.clip(y, -1, 1).astype(jnp.bfloat16)}

    args = Affine(normal(0, (5, 60), jnp.bfloat16), normal(1, (5, 60))), normal(2, (5, 60), jnp.bfloat16)
    out, wanted = lab.run(fuse(fn), *args), fn(*args)
    assert jax.tree.structure(out) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(wanted), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        # One bfloat16 rounding of the inputs' product in `wanted`, none in the kernel: 2**-8.
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2e-2, atol=2e-2)


# Mosaic GPU does not lower these; `_numerics` writes them out. XLA's float32 is the yardstick of `lab.check`.
FUNCTIONS = {
    "cbrt": jnp.cbrt,
    "ceil": jnp.ceil,
    "cosh": jnp.cosh,
    "elu": jax.nn.elu,
    "erf": jax.lax.erf,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "fmod": lambda x: jnp.fmod(x, 0.3),
    "gelu exact": lambda x: jax.nn.gelu(x, approximate=False),
    "isfinite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "mish": jax.nn.mish,
    "negative power": lambda x: (jnp.abs(x) + 0.1) ** -2,
    "pow": lambda x: jnp.power(jnp.abs(x), 1.7),
    "relu6": jax.nn.relu6,
    "sinh": jnp.sinh,
    "softplus": jax.nn.softplus,
    "tan": lambda x: jnp.tan(jnp.sin(x)),  # Near its poles no float32 tangent is good to 1e-6.
}


EVERY = lambda x: {name: fn(x[name]) for name, fn in FUNCTIONS.items()}  # One kernel in place of one for each.


def each(seed):
    return {name: 2 * normal(seed + i, 300) for i, name in enumerate(FUNCTIONS)}


def test_fuse_of_any_jnp_function():
    # These formulas are good to a few float32 roundings, XLA's to one or two; what is stored in 16 bits has neither.
    lab.check(fuse(EVERY), EVERY, each(0), tolerance=1e-6)


def test_gradient_of_any_jnp_function():
    gradient = lambda fn: lambda x, dy: jax.vjp(fn, x)[1](dy)[0]
    lab.check(gradient(fuse(EVERY)), gradient(EVERY), each(0), each(100), tolerance=2e-6)


@pytest.mark.parametrize(
    "name, x",
    [("log1p", [0.0, -0.0, jnp.inf, 1e-30]), ("expm1", [0.0, jnp.inf, -jnp.inf, 1e-30, 100.0]),
     ("erf", [0.0, jnp.inf, -jnp.inf, jnp.nan]), ("cbrt", [0.0, jnp.inf, -8.0]), ("floor", [-0.5, jnp.inf, jnp.nan]),
     ("sinh", [0.0, 100.0, -100.0]), ("isfinite", [jnp.nan, jnp.inf, 1.0])],
)  # fmt: skip
def test_special_values(name, x):
    x = array(x, jnp.float32)
    np.testing.assert_allclose(lab.run(fuse(FUNCTIONS[name]), x), FUNCTIONS[name](x), rtol=1e-6)


def test_fuse_of_power_and_remainder_signs():
    x = array([-2.0, -2.0, -2.0, 0.0, 2.0, 3.0], jnp.float32)
    y = array([3.0, 2.0, 0.5, 0.0, -1.0, jnp.inf], jnp.float32)
    np.testing.assert_allclose(lab.run(fuse(jnp.power), x, y), jnp.power(x, y), rtol=1e-6)
    np.testing.assert_allclose(lab.run(fuse(jax.lax.rem), x, y + 1.5), jax.lax.rem(x, y + 1.5), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.int32])
def test_integers(dtype):
    x = array(np.random.default_rng(0).integers(0, 50, 200), dtype)
    np.testing.assert_array_equal(lab.run(add, x, x), x + x)


def test_empty():
    out = fuse(lambda x: {"a": x.astype(jnp.bfloat16)})(jnp.zeros((3, 0)))
    assert out["a"].shape == (3, 0) and out["a"].dtype == jnp.bfloat16


def test_jit_vmap_and_determinism():
    x, y = normal(0, (3, 260)), normal(1, (3, 260))
    runs = [lab.run(jax.jit(add), x, y), lab.run(jax.vmap(add), x, y), lab.run(add, x, y)]
    assert all((run == x + y).all() for run in runs)


@pytest.mark.skipif(not lab.on_gpu(), reason="only on a GPU does XLA hand a kernel a slice as it lies")
def test_a_slice_that_begins_anywhere():
    """As the README says: without the barrier the call is refused, by Mosaic, which wants multiples of 256 bytes."""
    x = normal(0, (4000,))
    part = lambda x: jax.lax.optimization_barrier(x[33:2081])
    assert (jax.jit(lambda x: add(part(x), part(x)))(x) == 2 * x[33:2081]).all()


# At home in JAX -------------------------------------------------------------------------------------------------------


def test_gradient_of_pytrees():
    """Gradients of 16 and 32 bits, of an integer, and of a function with an integer result."""

    def fn(params, x, i):
        y = params.weight * x + params.bias * i
        return {"y": jax.nn.silu(y), "sign": jnp.sign(i)}

    args = (
        Affine(normal(0, (5, 60), jnp.bfloat16), normal(1, (5, 60))),
        normal(2, (5, 60)),
        jnp.arange(300).reshape(5, 60),
    )
    loss = lambda fn: lambda *args: jnp.sum(jnp.sin(fn(*args)["y"]))
    gradient = lambda fn: jax.grad(loss(fn), argnums=(0, 1, 2), allow_int=True)
    got, wanted = lab.run(gradient(fuse(fn)), *args), gradient(fn)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for g, w in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(wanted[:2]), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(np.float32(g), np.float32(w), rtol=1e-2, atol=1e-2)
    assert got[2].dtype == wanted[2].dtype == jax.dtypes.float0


def test_gradient_of_add_under_every_transformation():
    """Second derivatives, jit, vmap and shard_map with its defaults."""
    x, y = normal(0, (4, 130)), normal(1, (4, 130))
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    gelu = lambda x, y: jax.nn.gelu(x + y)

    def second(fn):
        fn = jax.shard_map(jax.vmap(fn), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
        return jax.jit(
            jax.grad(lambda x, y: jnp.sum(jax.grad(lambda x, y: jnp.sum(fn(x, y) ** 2), 1)(x, y) ** 2), (0, 1))
        )

    got = lab.run(second(lambda x, y: add(x, y, activation="gelu")), x, y)
    for g, w in zip(got, second(gelu)(x, y), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_checkpoint_scan_and_donation():
    step = jax.checkpoint(lambda x, _: (add(x, x, activation="silu"), None))
    x = normal(0, (3, 100))
    lab.compile_for("h200", jax.grad(lambda x: jnp.sum(jax.lax.scan(step, x, length=2)[0])), x)
    wanted = x + x
    np.testing.assert_array_equal(lab.run(jax.jit(lambda x: add(x, x), donate_argnums=0), x), wanted)


def test_x64():
    x = normal(0, 3001, jnp.bfloat16)
    with jax.enable_x64(True):
        fn = fuse(lambda x: jax.nn.gelu(x) * 2.5 + jnp.pi)
        out = lab.run(fn, x)
        lab.compile_for("h200", lambda x: jax.vjp(fn, x)[1](x), x)
    assert out.dtype == jnp.bfloat16


def test_what_a_function_holds():
    x, number = normal(0, 300), jnp.float32(3.0)
    np.testing.assert_array_equal(lab.run(lambda x: add(x, x, activation=lambda v: v * number), x), 6 * x)
    lab.compile_for("h200", lambda x: add(x, x, activation=lambda v: v * number), x)
    for held, message in ((jnp.ones(300), "make it an argument"), (jnp.ones(1), r"array of shape \(1,\)")):
        with pytest.raises(ValueError, match=message), lab.interpret():
            add(x, x, activation=lambda v, held=held: v * held)
    with pytest.raises(ValueError, match="holds a traced value"), lab.interpret():
        jax.jit(lambda x, s: add(x, x, activation=lambda v: v * s))(x, number)


def test_array_likes():
    np.testing.assert_array_equal(lab.run(lambda: add(np.float32([1, 2]), jnp.array([3.0, 4.0]))), [4.0, 6.0])
    assert lab.run(lambda: add(1.0, 2)) == 3.0
    with pytest.raises(ValueError, match="cookbook.add: y=.*must be an array"):
        add(jnp.ones(3), "three")


def test_keywords_are_arguments():
    x = normal(0, 300)
    np.testing.assert_array_equal(lab.run(lambda: fuse(lambda x, y: x - y)(x, y=2 * x)), -x)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: add(None, jnp.ones(3)), "cookbook.add: x=None; must be an array"),
        (lambda: add(jnp.ones(3), jnp.ones(3), config=4), "config=4; must be a cookbook.add.Config"),
        (lambda: fuse(jnp.tanh, config=dict(tile=128)), "must be a cookbook.fuse.Config"),
        (lambda: fuse(3), "cookbook.fuse: fn=3; must be a function"),
    ],
)
def test_errors_name_the_argument(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize("shape", [(2**31 + 2**20,), (2**21 + 1, 2**12 + 1)], ids=str)
def test_offsets_beyond_32_bits(shape):
    """No product of 32 bits becomes an address, in whole tiles and after them."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert not re.findall(r"(?:mul\.wide|cvt\.s64)\.s32.*", lab.compile_for("h200", add, x, x).ptx)


def test_lengths_lower():
    """Every length up to 2,100 and some beyond, of arrays of each width: each kind of tile and of tail once."""
    rng, seen = np.random.default_rng(0), set()
    dtypes = [jnp.dtype(name) for name in ("int8", "bfloat16", "float32")]
    for n in [*range(1, 2101), *map(int, 2 ** rng.uniform(11, 31, 300))]:
        for pair in itertools.product(dtypes, dtypes):
            tile = elementwise.default_config(n, max(dtype.itemsize for dtype in pair)).tile
            kind = pair, tile, n < tile, n % tile > 0
            if kind not in seen:
                seen.add(kind)
                lowered(lambda x, y: add(x, y, activation="relu"), *(jax.ShapeDtypeStruct((n,), t) for t in pair))


@pytest.mark.parametrize(
    "fn, args, message",
    [
        (add, ((3,), (4,)), "must have one shape"),
        (lambda x, y: add(x, y, activation="gilu"), ((3,), (3,)), "gilu"),
        (fuse(lambda x: x - x.mean()), ((300,),), "not element-wise"),
        (fuse(jnp.cumsum), ((300,),), "not element-wise"),
        (fuse(jnp.sort), ((300,),), "not element-wise"),
        (fuse(lambda x: x[:3]), ((300,),), "not element-wise"),
        (fuse(jnp.arcsin), ((300,),), "asin"),
        (fuse(lambda x: jax.lax.fori_loop(0, 3, lambda _, v: v + 1, x)), ((300,),), "loop"),
    ],
)
def test_errors_name_the_rule(fn, args, message):
    with pytest.raises(ValueError, match=message), lab.interpret():
        fn(*(jnp.ones(shape) for shape in args))


def test_unsupported_dtype():
    with pytest.raises(ValueError, match="bool"):
        add(jnp.ones(3, bool), jnp.ones(3, bool))
    with pytest.raises(ValueError, match="128"):
        elementwise.Config(tile=100)


def test_without_a_gpu_it_says_what_to_do():
    if lab.on_gpu():
        pytest.skip("there is a GPU, so the kernel runs")
    with pytest.raises(RuntimeError, match="lab.interpret"):
        add(jnp.ones(3), jnp.ones(3))


@pytest.mark.parametrize("left", ["dropped", "one piece short"])
def test_wrong_tail_is_caught(mutant, left):
    """Mutants: the leftovers are not computed at all, or without their last, shifted piece."""
    short = (lambda a, b: 0) if left == "dropped" else (lambda a, b: a // b)
    mutant(elementwise, "pl", cdiv=short)
    with pytest.raises(lab.CheckError):
        lab.check(add, elementwise.add_reference, normal(0, 1324), normal(1, 1324), gpu=None)
