"""All-gather and reduce-scatter on hosts with 2 and more GPUs. Elsewhere test_collectives.py compiles them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
from cookbook import lab
from cookbook.nvlink.core import Config

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SHAPES = [(8, 128), (8, 1), (16, 1021), (64, 7, 5), (1024, 4096)]  # Shards.
FEW_SLOTS = Config(num_blocks=3, stage_bytes=65_536, num_slots=2)


@pytest.fixture(params=[2, 4, 8])
def mesh(request):
    if not lab.on_gpu() or jax.device_count() < request.param:
        pytest.skip(f"needs {request.param} Hopper or newer GPUs")
    if jax.device_count() > request.param:
        pytest.skip("a kernel reaches the GPUs of a mesh of all devices: a larger case tests this host")
    return jax.make_mesh((request.param,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(mesh, fn, axis="x"):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=jax.P(axis), out_specs=jax.P(axis)))


def random(mesh, shape, dtype, seed=0, axis="x"):
    x = np.random.default_rng(seed).standard_normal((mesh.size * shape[0], *shape[1:])).astype(dtype)
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(axis)))


def added(x, n):
    """Sum of the devices' shards of `x`, in float32 and in the devices' order, for all owners."""
    first, *others = np.split(np.asarray(x).astype(np.float32), n)
    return functools.reduce(np.add, others, first).astype(x.dtype)


@pytest.mark.parametrize("config", [None, FEW_SLOTS], ids=["default", "few slots"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_gather(mesh, shape, dtype, config):
    fn = sharded(mesh, lambda x: cookbook.all_gather(x, "x", config=config))
    for seed in range(3):
        x = random(mesh, shape, dtype, seed)
        out = np.asarray(fn(x)).reshape(mesh.size, *x.shape)
        for d in range(mesh.size):
            np.testing.assert_array_equal(out[d], np.asarray(x))


@pytest.mark.parametrize("config", [None, FEW_SLOTS], ids=["default", "few slots"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reduce_scatter_is_equal_to_the_bit(mesh, shape, dtype, config):
    fn = sharded(mesh, lambda x: cookbook.reduce_scatter(x, "x", config=config))
    for seed in range(3):
        x = random(mesh, shape, dtype, seed)
        np.testing.assert_array_equal(np.asarray(fn(x)), added(x, mesh.size))


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
