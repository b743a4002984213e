"""The collectives on hosts with 2 and more GPUs. Elsewhere their own tests compile them."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook.nvlink.core import Config
from tests.nvlink.test_all_to_all import KINDS, ROWS, by_reference, numbered, sizes_of

pytestmark = pytest.mark.several_gpus
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SHAPES = [(8, 128), (8, 1), (16, 1021), (64, 7, 5), (1024, 4096)]  # Shards.
FEW_STAGES = Config(num_blocks=3, stage_bytes=65_536)


def sharded(mesh, fn, axis="x"):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=jax.P(axis), out_specs=jax.P(axis)))


def random(mesh, shape, dtype, seed=0, axis="x"):
    x = np.random.default_rng(seed).standard_normal((mesh.size * shape[0], *shape[1:])).astype(dtype)
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(axis)))


def added(x, n):
    """Sum of the devices' shards of `x`, in float32 and in the devices' order, for all owners."""
    first, *others = np.split(np.asarray(x).astype(np.float32), n)
    return functools.reduce(np.add, others, first).astype(x.dtype)


@pytest.mark.parametrize("config", [None, FEW_STAGES], ids=["default", "few stages"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_gather(mesh, shape, dtype, config):
    fn = sharded(mesh, lambda x: cookbook.all_gather(x, "x", config=config))
    for seed in range(3):
        x = random(mesh, shape, dtype, seed)
        out = np.asarray(fn(x)).reshape(mesh.size, *x.shape)
        for d in range(mesh.size):
            np.testing.assert_array_equal(out[d], np.asarray(x))


@pytest.mark.parametrize("config", [None, FEW_STAGES], ids=["default", "few stages"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reduce_scatter_is_equal_to_the_bit(mesh, shape, dtype, config):
    fn = sharded(mesh, lambda x: cookbook.reduce_scatter(x, "x", config=config))
    for seed in range(3):
        x = random(mesh, shape, dtype, seed)
        np.testing.assert_array_equal(np.asarray(fn(x)), added(x, mesh.size))


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_gradients_are_those_of_lax(mesh, op):
    peer = functools.partial(jax.lax.all_gather if op == "all_gather" else jax.lax.psum_scatter, tiled=True)
    gradient = lambda fn: sharded(mesh, jax.grad(lambda x: (fn(x, "x").astype(jnp.float32) ** 2).sum()))
    x = random(mesh, (16, 1021), jnp.float32)
    found, wanted = (np.asarray(gradient(fn)(x)) for fn in (getattr(cookbook, op), peer))
    # XLA adds in another order: up to eight float32 additions of values near 1 differ by a few times 1e-7.
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_many_calls_in_a_row_and_in_a_scan(mesh):
    """A signal left over by one call, or a buffer that is still written to, breaks a later one.

    The sum of n equal values, n a power of 2, divided by n is exact.
    """
    once = lambda x: cookbook.reduce_scatter(cookbook.all_gather(x, "x"), "x") * (1 / mesh.size)
    fn = sharded(mesh, lambda x: jax.lax.scan(lambda x, _: (once(x), None), x, length=50)[0])
    x = random(mesh, (256, 1024), jnp.float32)
    out = fn(x)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))
    again = jax.jit(fn, donate_argnums=0)
    for _ in range(20):
        out = again(out)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))


def _products(x):
    """Both products: x @ w @ w.T for a w of 256 columns on each device."""
    w = x[:, :256]
    y = cookbook.all_gather_matmul(x, w, "x")
    return (cookbook.matmul_reduce_scatter(y, w.T, "x") / (256 * jax.lax.axis_size("x"))).astype(x.dtype)


# Each gives an array like x, to which every device has contributed.
PROGRAMS = {
    "all_gather": lambda x: cookbook.all_gather(x, "x").reshape(-1, *x.shape).astype(jnp.float32).mean(0),
    "reduce_scatter": lambda x: cookbook.reduce_scatter(jnp.concatenate([x] * jax.lax.axis_size("x")), "x"),
    "all_to_all": lambda x: cookbook.all_to_all(x, "x"),
    "products": _products,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_buffers_of_one_device_may_move(mesh, program):
    """XLA records several kernels as a CUDA graph, and records them again when this device's buffers have moved. When a
    peer's have moved, it does not: a kernel that was recorded with their addresses would go on using the old ones."""

    def several(x):
        for _ in range(4):
            x = (PROGRAMS[program](x) * 0.5 + x).astype(x.dtype)
        return x

    x = random(mesh, (512, 512), jnp.bfloat16)
    fn = sharded(mesh, several).lower(x).compile()
    wanted = [np.asarray(fn(x)) for _ in range(3)][-1]
    for device in mesh.devices.flat:
        # Where this device's temporary buffers lay, now other arrays lie.
        size = fn.memory_analysis().temp_size_in_bytes
        taken = [jax.device_put(np.zeros(size, np.int8), device) for _ in range(3)]
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(fn(x)), wanted)
        assert all((np.asarray(array) == 0).all() for array in taken)


@pytest.mark.parametrize("axis", ["a", "b", ("a", "b"), ("b", "a")], ids=str)
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_mesh_of_two_axes(op, axis):
    if not lab.on_gpu() or jax.device_count() not in (4, 8):
        pytest.skip("needs a host with 4 or 8 Hopper or newer GPUs")
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = random(mesh, (64, 256), jnp.float32, axis=("a", "b"))
    peers = dict(
        all_gather=lambda x: jax.lax.all_gather(x, axis, tiled=True),
        reduce_scatter=lambda x: jax.lax.psum_scatter(x, axis, tiled=True),
    )
    ours = sharded(mesh, lambda x: getattr(cookbook, op)(x, axis), axis=("a", "b"))(x)
    wanted = sharded(mesh, peers[op], axis=("a", "b"))(x)
    # XLA adds in another order: up to eight float32 additions of values near 1 differ by a few times 1e-7.
    np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted), rtol=1e-5, atol=1e-5)


# All-to-all -----------------------------------------------------------------------------------------------------------

UNLIKE = Config(num_blocks=3, stage_bytes=16_384, num_stages=4)


def put(mesh, x, axis="x"):
    """`x`, one slice for each device, as the whole array."""
    return jax.device_put(x.reshape(-1, *x.shape[2:]), jax.NamedSharding(mesh, jax.P(axis)))


def poison(mesh, out, axis="x"):
    """Leaves memory of the size of `out` full of NaN, which the next result is likely to lie in."""
    where = jax.NamedSharding(mesh, jax.P(axis))
    jax.block_until_ready(
        [jax.jit(lambda: jnp.full(out.shape, jnp.nan, out.dtype), out_shardings=where)() for _ in "ab"]
    )


def exchange(mesh, axis="x", **how):
    fn = lambda x, sizes: cookbook.all_to_all(x, axis, send_sizes=sizes, **how)
    specs = jax.P(mesh.axis_names)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(specs, specs), out_specs=(specs, specs)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", [(8,), (16, 1), (24, 1021), (64, 7, 5), (1024, 4096)], ids=str)
def test_all_to_all_of_equal_parts(mesh, shape, dtype):
    ours = sharded(mesh, lambda x: cookbook.all_to_all(x, "x"))
    wanted = sharded(mesh, lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True))
    for seed in range(3):
        x = random(mesh, shape, dtype, seed)
        poison(mesh, x)
        np.testing.assert_array_equal(np.asarray(ours(x)), np.asarray(wanted(x)))


@pytest.mark.parametrize("config", [None, UNLIKE], ids=["default", "unlike"])
@pytest.mark.parametrize("capacity, values", [(1, 8), (7, 264), (ROWS, 1021), (3 * ROWS, 7168)])
def test_all_to_all_of_ragged_parts(mesh, capacity, values, config):
    """The same compiled program for all kinds of sizes, one right after the other."""
    n = mesh.size
    fn, x = exchange(mesh, capacity=capacity, config=config), numbered(n, ROWS, values)
    for kind in KINDS * 2:
        sizes = sizes_of(kind, n).astype(np.int32)
        wanted, counts = by_reference(jnp.asarray(x), jnp.asarray(sizes), capacity)
        poison(mesh, jax.ShapeDtypeStruct((n * capacity, values), jnp.float32))
        out, received = fn(put(mesh, x), put(mesh, sizes))
        np.testing.assert_array_equal(np.asarray(out).reshape(wanted.shape), np.asarray(wanted), err_msg=kind)
        np.testing.assert_array_equal(np.asarray(received).reshape(n, n), np.asarray(counts), err_msg=kind)


@pytest.mark.parametrize("capacity", [7, ROWS, 8 * ROWS])
def test_all_to_all_has_a_derivative(mesh, capacity):
    n, values = mesh.size, 264
    x, g = numbered(n, ROWS, values), numbered(n, capacity, values)
    fn = exchange(mesh, capacity=capacity)
    pull = jax.jit(lambda x, sizes, g: jax.vjp(lambda x: fn(x, sizes)[0], x)[1](g)[0])
    for kind in KINDS:
        sizes = sizes_of(kind, n).astype(np.int32)
        wanted = jax.vjp(lambda x, s=sizes: by_reference(x, jnp.asarray(s), capacity)[0], jnp.asarray(x))[1](g)[0]
        poison(mesh, jax.ShapeDtypeStruct((n * ROWS, values), jnp.float32))
        out = pull(put(mesh, x), put(mesh, sizes), put(mesh, g))
        np.testing.assert_array_equal(np.asarray(out).reshape(wanted.shape), np.asarray(wanted), err_msg=kind)


def test_many_exchanges_in_a_scan_and_with_donation(mesh):
    """Rows that are sent to the others and sent back are as they were."""
    n, rows, values = mesh.size, 256, 1024

    def there_and_back(x, sizes):
        out, received = cookbook.all_to_all(x, "x", send_sizes=sizes, capacity=n * rows)
        return cookbook.all_to_all(out, "x", send_sizes=received, capacity=rows)[0]

    def fn(x, sizes):
        """Sizes that are others in each step."""
        step = lambda carry, _: ((there_and_back(*carry), jnp.roll(carry[1], 1)), None)
        return jax.lax.scan(step, (x, sizes), length=50)[0][0]

    fn = jax.shard_map(fn, mesh=mesh, in_specs=(jax.P("x"), jax.P("x")), out_specs=jax.P("x"))
    sizes = sizes_of("random", n, rows).astype(np.int32)
    sizes[:, -1] += rows - sizes.sum(1)  # All rows are sent.
    x = numbered(n, rows, values)
    out, sizes, again = put(mesh, x), put(mesh, sizes), jax.jit(fn, donate_argnums=0)
    for _ in range(20):
        out = again(out, sizes)
    np.testing.assert_array_equal(np.asarray(out).reshape(x.shape), x)


@pytest.mark.parametrize("axis", ["a", "b", ("a", "b"), ("b", "a")], ids=str)
def test_all_to_all_on_a_mesh_of_two_axes(axis):
    if not lab.on_gpu() or jax.device_count() not in (4, 8):
        pytest.skip("needs a host with 4 or 8 Hopper or newer GPUs")
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs, n = jax.P(("a", "b")), mesh.size if isinstance(axis, tuple) else mesh.shape[axis]
    reference = importlib.import_module("cookbook.nvlink.all_to_all").all_to_all_reference
    x = put(mesh, numbered(mesh.size, ROWS, 264), ("a", "b"))
    sizes = np.resize(sizes_of("random", n), (mesh.size, n)).astype(np.int32)
    fn = lambda x, sizes: reference(x, axis, send_sizes=sizes, capacity=ROWS)
    wanted = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(specs, specs), out_specs=(specs, specs)))
    ours = exchange(mesh, axis, capacity=ROWS)(x, put(mesh, sizes, ("a", "b")))
    for out, exact in zip(ours, wanted(x, put(mesh, sizes, ("a", "b"))), strict=True):
        np.testing.assert_array_equal(np.asarray(out), np.asarray(exact))
