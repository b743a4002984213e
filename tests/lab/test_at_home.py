"""Interpreted kernels inside JAX's transformations, under its options, and on several devices."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import effects
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import _device, _host

pytestmark = pytest.mark.usefixtures("no_gpu")
X = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)


def square(x):
    """x squared, 256 values, by two blocks."""

    def body(x_gmem, o_gmem):
        where = pl.ds(jax.lax.axis_index("block") * 128, 128)

        @pl.loop(0, 1)
        def _(i):
            _device.store(o_gmem.at[where], x_gmem[where] * x_gmem[where])

    _host.require_target("square")
    return _host.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(2,), grid_names=("block",))(x)


@jax.custom_vjp
def op(x):
    return square(x)


op.defvjp(lambda x: (square(x), x), lambda x, g: (2 * x * g,))


def product(a):
    """a @ a.T of (64, 64), on the tensor cores."""

    def body(a_gmem, o_gmem, a_smem, loaded):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(acc):
            @pl.loop(0, 2)
            def _(i):
                plgpu.wgmma(acc, a_smem, a_smem.T)
                plgpu.wgmma_wait(0)

            return acc[...]

        o_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))

    scratch = [plgpu.SMEM((64, 64), jnp.bfloat16), plgpu.Barrier()]
    return _host.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32), scratch_types=scratch)(a)


def test_in_checkpoint():
    loss = lambda x: jax.checkpoint(op)(x).sum()
    with lab.interpret():
        np.testing.assert_array_equal(jax.grad(loss)(X[0]), 2 * X[0])


def test_in_branches_of_a_batch():
    """JAX runs all branches then. A callback of the program's own is refused as before."""
    with lab.interpret():
        out = jax.vmap(lambda p, x: jax.lax.cond(p, op, jnp.negative, x))(np.array([True, False, True]), X)
        np.testing.assert_array_equal(out, np.where(np.array([True, False, True])[:, None], X * X, -X))
        says = lambda x: jax.experimental.io_callback(lambda x: x, x, x, ordered=True)
        with pytest.raises(NotImplementedError, match="IO effect not supported in vmap-of-cond"):
            jax.vmap(lambda p, x: jax.lax.cond(p, says, jnp.negative, x))(np.array([True, False, True]), X)


def test_in_a_batch_with_a_name():
    fn = jax.vmap(lambda x: op(x) + jax.lax.axis_index("i"), axis_name="i")
    with lab.interpret():
        np.testing.assert_array_equal(fn(X), X * X + np.arange(3, dtype=np.float32)[:, None])


def test_under_options():
    """Arrays of the interpreter are none of the program's transfers, and its loops have 32 bits."""
    a = jax.device_put(jnp.arange(4096, dtype=jnp.bfloat16).reshape(64, 64) / 64)
    wanted = 2 * np.float32(a) @ np.float32(a).T
    with lab.interpret(), jax.enable_x64(True), jax.transfer_guard("disallow"):
        out = jax.jit(product)(a)
    np.testing.assert_array_equal(out, wanted)


def test_leaves_jax_as_it_was():
    before = set(effects.remat_allowed_effects._effect_types)
    with pytest.raises(ZeroDivisionError), lab.interpret():
        assert before < effects.remat_allowed_effects._effect_types
        raise ZeroDivisionError
    assert before == effects.remat_allowed_effects._effect_types


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a thread that interprets nothing runs on the GPU")
def test_in_a_pool():
    with lab.interpret(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        for call in (pool.submit(op, X[0]), pool.submit(jax.jit(op), X[0])):
            with pytest.raises(RuntimeError, match="cookbook.square: another thread interprets.*Call the op in the"):
                call.result()
        np.testing.assert_array_equal(op(X[0]), X[0] * X[0])


SEVERAL = """
import jax, jax.numpy as jnp, numpy as np
jnp.ones(3).block_until_ready()  # JAX has started: its threads are few.
from jax.experimental import io_callback
from jax.experimental.pallas import mosaic_gpu as plgpu
import lab
from cookbook import _device, _host
from test_at_home import op, product

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
shared = lambda fn: jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
a = jnp.arange(4 * 4096, dtype=jnp.bfloat16).reshape(256, 64) / 64

def stuck(x):
    def body(x_gmem, o_gmem, barrier):
        plgpu.barrier_wait(barrier)
        o_gmem[...] = x_gmem[...]
    return _host.kernel(body, out_type=jax.typeof(x), scratch_types=[plgpu.Barrier()])(x)

with lab.interpret():
    np.testing.assert_array_equal(shared(op)(x), x * x)
    np.testing.assert_array_equal(
        shared(product)(a), np.concatenate([2 * np.float32(b) @ np.float32(b).T for b in np.split(np.array(a), 4)])
    )
try:
    with lab.interpret():
        jax.block_until_ready(shared(stuck)(x))
except lab.Deadlock as error:
    assert "every warpgroup waits" in str(error), error
else:
    raise AssertionError("did not wait")
jax.jit(lambda: io_callback(lambda: None, None, ordered=True))()
jax.effects_barrier()  # No old error.
with lab.interpret():
    np.testing.assert_array_equal(shared(op)(x), x * x)
try:
    with _host.interpreting():
        shared(op)(x)
except RuntimeError as error:
    assert "cookbook.square: JAX's interpreter knows one device, and the mesh has 4: interpret inside" in str(error)
else:
    raise AssertionError("ran without taking turns")
print("passed")
"""


def test_on_several_devices():
    """In a process of its own, which has four. Those that fail leave nothing behind."""
    here = pathlib.Path(__file__).parent
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    env = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", PYTHONPATH=f"{here.parent.parent}:{here}")
    env.pop("PJRT_NPROC", None)
    ran = subprocess.run([sys.executable, "-c", SEVERAL], env=env, timeout=240, capture_output=True, text=True)
    assert ran.stdout.endswith("passed\n"), ran.stderr[-3000:]
