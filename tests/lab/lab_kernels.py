"""Small kernels, right and wrong, for the tests of `lab`."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import _device, _host

ROWS = 64  # Rows of a block.


def add_one_reference(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) + 1


def _tiles(body, x, out_type=None):
    """Launches `body(x_smem, x_gmem, o_gmem, rows, barrier)` for every 64 rows of `x`."""

    def kernel(x_gmem, o_gmem, x_smem, barrier):
        body(x_smem, x_gmem, o_gmem, pl.ds(jax.lax.axis_index("i") * ROWS, ROWS), barrier)

    return plgpu.kernel(
        kernel,
        out_type=out_type or jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // ROWS,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((ROWS, x.shape[1]), x.dtype), plgpu.Barrier()],
        compiler_params=lab.compiler_params(),
    )(x)


def add_one(x):
    """x + 1, x of shape (64 n, 128 m)."""

    def body(x_smem, x_gmem, o_gmem, rows, barrier):
        with jax.named_scope("load"):
            plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, barrier)
            plgpu.barrier_wait(barrier)
        with jax.named_scope("compute"):
            x_smem[...] = x_smem[...] + 1
            plgpu.commit_smem()
        with jax.named_scope("store"):
            plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[rows])
            plgpu.wait_smem_to_gmem(0)

    return _tiles(body, x)


def no_wait(x):
    """`add_one` that reads before the copy has arrived. Interpreted, its result is right all the same."""

    def body(x_smem, x_gmem, o_gmem, rows, barrier):
        plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, barrier)
        o_gmem[rows] = x_smem[...] + 1
        plgpu.barrier_wait(barrier)

    return _tiles(body, x)


def half_written(x):
    """`add_one` that stores the first half of each tile."""

    def body(x_smem, x_gmem, o_gmem, rows, barrier):
        plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, barrier)
        plgpu.barrier_wait(barrier)
        x_smem[...] = x_smem[...] + 1
        plgpu.commit_smem()
        half = pl.ds(jax.lax.axis_index("i") * ROWS, ROWS // 2)
        plgpu.copy_smem_to_gmem(x_smem.at[: ROWS // 2], o_gmem.at[half])
        plgpu.wait_smem_to_gmem(0)

    return _tiles(body, x)


def matmul(a, b, tile_m=128, tile_n=128, tile_k=64):
    """a @ b by WGMMA, one warpgroup, two stages. A tile of 128x256 does not fit into its registers."""
    (m, k), n = a.shape, b.shape[1]

    def kernel(a_gmem, b_gmem, o_gmem, o_smem):
        i, j = jax.lax.axis_index("m"), jax.lax.axis_index("n")

        def accumulate(acc):
            def step(_, a_smem, b_smem):
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(1)

            plgpu.emit_pipeline(
                step,
                grid=(k // tile_k,),
                in_specs=[
                    plgpu.BlockSpec((tile_m, tile_k), lambda s: (i, s), delay_release=1),
                    plgpu.BlockSpec((tile_k, tile_n), lambda s: (s, j), delay_release=1),
                ],
                max_concurrent_steps=2,
            )(a_gmem, b_gmem)
            return acc[...]

        o_smem[...] = pl.run_scoped(accumulate, plgpu.ACC((tile_m, tile_n), jnp.float32)).astype(a.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(i * tile_m, tile_m), pl.ds(j * tile_n, tile_n)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        scratch_types=[plgpu.SMEM((tile_m, tile_n), a.dtype)],
    )(a, b)


def num_sms_built_for(x):
    """A kernel that writes the number of SMs that it was built for."""
    num_sms = _host.require_target("num_sms_built_for").num_sms

    def kernel(x_gmem, o_gmem):
        o_gmem[...] = jnp.full(x.shape, num_sms, x.dtype)

    return plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def blackwell_matmul(a, b):
    """a @ b of one tile by tcgen05, which Hopper has not: a and b of shape (128, 128), f16."""

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc_tmem, loaded, done):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.tcgen05_mma(acc_tmem, a_smem, b_smem, done, accumulate=False)
        plgpu.barrier_wait(done)
        o_smem[...] = plgpu.async_load_tmem(acc_tmem).astype(a.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((128, 128), a.dtype)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128, 128), a.dtype),
        scratch_types=[
            tile,
            tile,
            tile,
            plgpu.TMEM((128, 128), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )(a, b)


def out_of_bounds(x):
    """Fails while it runs, not while it is traced: it reads outside of its input."""

    def kernel(x_gmem, o_gmem):
        o_gmem[0] = x_gmem[x_gmem[0, 0].astype(jnp.int32) + 1_000_000, 0]

    return plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct((1,), x.dtype))(x)


def shifted(x, axis_name="x"):
    """Inside `jax.shard_map`: the shard of the device before this one on the mesh's axis."""

    def kernel(x_gmem, o_gmem, arrived):
        count = jax.lax.axis_size(axis_name)
        peer = {axis_name: jax.lax.rem(jax.lax.axis_index(axis_name) + 1, jnp.int32(count))}
        plgpu.remote_ref(o_gmem, peer)[...] = x_gmem[...]
        pl.semaphore_signal(arrived, device_id=peer)
        pl.semaphore_wait(arrived)

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _host.kernel(kernel, out_type=out_type, scratch_types=[plgpu.SemaphoreType.REGULAR])(x)


def sum_of_tiles(x, *, fence: bool):
    """The sum of x[i], of shape (n, 64, 128): a memory warpgroup copies them to two slots, which the other gives back
    right after it has loaded a tile; with `fence` when the tile has arrived."""

    def kernel(x_gmem, o_gmem, x_smem, filled, freed):
        ring, num, wg = _device.Ring(filled, freed, 2), x.shape[0], jax.lax.axis_index("wg")

        @pl.when(wg == 1)
        def _():
            @pl.loop(0, num)
            def _(i):
                slot = ring.acquire(i)
                plgpu.copy_gmem_to_smem(x_gmem.at[i], x_smem.at[slot], filled.at[slot])

            ring.drain(num)

        @pl.when(wg == 0)
        def _():
            def add(i, total):
                tile = plgpu.load(x_smem.at[ring.wait(i)], layout=plgpu.Layout.WGMMA)
                if fence:
                    plgpu.commit_smem()
                ring.release(i)
                return total + tile

            zeros = plgpu.layout_cast(jnp.zeros(x.shape[1:], x.dtype), plgpu.Layout.WGMMA)
            o_gmem[...] = jax.lax.fori_loop(0, num, add, zeros)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((2, *x.shape[1:]), x.dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        compiler_params=lab.compiler_params(),
    )(x)
