# SPDX-License-Identifier: Apache-2.0
"""Matrix product on the CUDA cores, by outer products of tiles in registers.

    o = a @ b

Shapes: a (M, K), b (K, N), o (M, N), of one dtype: float32, bfloat16 or float16. Products and sums are float32, also of
16-bit operands; float32 operands keep all their bits, which the tensor cores would round to 11. Rows of a, b and o must
be multiples of 16 bytes, which TMA asks for.

Role table: one warpgroup per block computes one tile of o, and has three roles in turn.

    load      starts the TMA copies of a tile of a and of b into a stage of the ring in shared memory
    compute   waits for a stage to arrive; for each k in it, adds the outer product of a's column and b's row
    store     rounds the tile of o into shared memory, from where TMA copies it to o

Barrier table:

    barrier        arrivals                          who waits
    filled[stage]  2: the copies of a's and b's tile  the warpgroup, before it reads the stage

No barrier says that a stage is free: the warpgroup that refills it has read it, and `commit_smem` ends the reading.

Bound by: the multiply-adds, and probably the registers that they read. A thread keeps 8 x 16 values of o; for each k it
reads 8 and 16 values from shared memory and does 128 multiply-adds with them, so fourteen instructions in fifteen are
multiply-adds. Each reads three registers, which lie in two banks; how many of them share a bank, and so take a second
clock, is the compiler's choice. Two blocks share an SM, so that one computes while the other starts, waits or stores.
16-bit operands are converted first, which costs more than their fewer bytes save: chapter 5 gives them to the tensor
cores.

Not supported: batches (use `jax.vmap`), operands of two dtypes, differentiation, splitting K (a small o with a long K
leaves SMs idle). Chapter: notebooks/04_blocked_matmul.ipynb. Source: the classic SGEMM of Volkov and Demmel,
"Benchmarking GPUs to tune dense linear algebra" (2008), with TMA in place of loads and stores.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import arguments
from ..references import exact_product
from ..references import flops as flops

LANES_M, LANES_N, WARPS = 4, 8, 4  # A warp's threads stand 4 x 8 on the tile, a warpgroup's warps one above the other.
ROWS = LANES_M * WARPS  # A thread has every ROWS-th row of the tile.
LOAD_BYTES = 16  # The widest load from shared memory.
TILE_MAX = 128 * 128  # Values of o per block: 128 registers of each thread. More spill.


def matmul_blocked_reference(a, b):
    return exact_product(a, b)


@dataclasses.dataclass(frozen=True)
class Config:
    tile_m: int = 128  # Rows of o per block. Larger tiles read a and b fewer times, and take more registers.
    tile_n: int = 128  # Columns of o per block.
    tile_k: int = 16  # Steps of K per stage, unrolled. Fewer wait more often; more cost seconds of compile time.
    num_stages: int = 4  # Stages of the ring. Four take the room of a float32 tile of o, which follows them.
    grid_tile_width: int = 16  # Tiles across the snake in which o is visited, for the L2 cache.

    def __post_init__(self):
        for name, unit in (("tile_m", ROWS), ("tile_n", 64), ("tile_k", 8)):
            size = getattr(self, name)
            if size % unit or not 0 < size <= 256:
                raise ValueError(f"{name} = {size} must be a multiple of {unit}, and at most 256 (one TMA copy)")
        if self.tile_m * self.tile_n > TILE_MAX:
            raise ValueError(
                f"{self.tile_m=} x {self.tile_n=} must be at most {TILE_MAX} values: more spill the registers of one "
                "warpgroup; shrink a side"
            )
        if self.num_stages < 1 or self.grid_tile_width < 1:
            raise ValueError(f"{self.num_stages=} and {self.grid_tile_width=} must be at least 1")


def default_config(m: int, n: int, k: int) -> Config:
    """The largest tiles that give every SM of an H200 one; small ones for a small o. Any `k`."""
    for tile_m, tile_n in ((128, 128), (128, 64), (64, 64), (32, 64)):
        if pl.cdiv(m, tile_m) * pl.cdiv(n, tile_n) >= 132:
            break
    return Config(tile_m, tile_n)


def scratch(config: Config, dtype) -> dict:
    """The ring."""
    c = config
    return dict(
        a_smem=plgpu.SMEM((c.num_stages, c.tile_m, c.tile_k), dtype),
        b_smem=plgpu.SMEM((c.num_stages, c.tile_k, c.tile_n), dtype),
        filled=plgpu.Barrier(num_arrivals=2, num_barriers=c.num_stages),
    )


def smem_bytes(config: Config, dtype) -> int:
    """The ring, or the tile of o that takes its place, and the ring's barriers."""
    ring, o_smem = scratch(config, dtype), plgpu.SMEM((config.tile_m, config.tile_n), dtype)
    barriers = _device.smem_bytes(dict(filled=ring.pop("filled")))
    return max(_device.smem_bytes(ring), _device.smem_bytes(dict(o_smem=o_smem))) + barriers


def _layouts(vec: int):
    """Layouts of a tile of o, and of some columns of a, where a thread loads `vec` neighbouring values at once.

    Every thread has runs of `vec` columns in every ROWS-th row of o, and all of a's columns in these rows: LANES_N
    threads hold the same of a.
    """
    cols = LANES_N * vec
    o_tiling, a_tiling = plgpu.Tiling(((ROWS, cols), (LANES_M, cols), (vec,))), plgpu.Tiling(((ROWS, 1), (LANES_M, 1)))
    o_layout = plgpu.Layout.TILED(o_tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    lane_dims = -2, plgpu.Replicated(LANES_N)
    return o_layout, plgpu.Layout.TILED(a_tiling, warp_dims=(-4,), lane_dims=lane_dims, vector_dim=-1)


def _columns(a_smem, stage, start, vec: int, layout):
    """Columns `start` to `start + vec` of a tile of a, each a (tile_m,) in the layout of o's rows.

    A value in registers cannot be indexed by column, but it can be summed over columns. The sum of one column and of
    zeros costs nothing: which columns are zeros is known when the kernel is compiled, and adding integer zeros folds.
    """
    a = _device.load(a_smem.at[stage, :, pl.ds(start, vec)], layout)
    bits = lax.bitcast_convert_type(a.astype(jnp.float32), jnp.int32)
    ids = plgpu.broadcasted_iota(jnp.int32, bits.shape, 1, layout=layout)
    picked = [jnp.sum(jnp.where(ids == i, bits, 0), axis=1) for i in range(vec)]
    return [lax.bitcast_convert_type(column, jnp.float32) for column in picked]


def _kernel(a_gmem, b_gmem, o_gmem, *, sizes, config: Config):
    c, (rows, cols, depth), dtype = config, sizes, o_gmem.dtype
    num_steps, vec = pl.cdiv(depth, c.tile_k), LOAD_BYTES // dtype.itemsize
    o_layout, a_layout = _layouts(vec)
    grid = pl.cdiv(rows, c.tile_m), pl.cdiv(cols, c.tile_n)
    mi, ni = plgpu.planar_snake(lax.axis_index("tile"), grid, 0, c.grid_tile_width)

    def with_ring(a_smem, b_smem, filled):
        def load(step):
            """Starts the copies of a step into its stage. Elements outside an operand arrive as zeros."""
            stage = lax.rem(step, c.num_stages)
            m, n, k = (pl.ds(i * size, size) for i, size in ((mi, c.tile_m), (ni, c.tile_n), (step, c.tile_k)))
            with jax.named_scope("load"):
                plgpu.copy_gmem_to_smem(a_gmem.at[m, k], a_smem.at[stage], filled.at[stage])
                plgpu.copy_gmem_to_smem(b_gmem.at[k, n], b_smem.at[stage], filled.at[stage])

        def compute(step, acc):
            """`acc` and the product of the stage of `step`, which is refilled."""
            stage = lax.rem(step, c.num_stages)
            with jax.named_scope("wait"):
                plgpu.barrier_wait(filled.at[stage])
            with jax.named_scope("compute"):
                for k in range(c.tile_k):
                    if k % vec == 0:
                        columns = _columns(a_smem, stage, k, vec, a_layout)
                    row = _device.load(b_smem.at[stage, k], o_layout.reduce(0)).astype(jnp.float32)
                    row = _device.spread(row, 1, acc.shape)
                    acc += _device.spread(columns[k % vec], 0, acc.shape) * row
                plgpu.commit_smem()  # No thread reads the stage any longer.
            ahead = step + c.num_stages
            pl.when(ahead < num_steps)(lambda: load(ahead))
            return acc

        pl.loop(0, min(c.num_stages, num_steps))(load)
        zeros = plgpu.layout_cast(jnp.zeros((c.tile_m, c.tile_n), jnp.float32), o_layout)
        return lax.fori_loop(0, num_steps, compute, zeros)

    def store(o_smem):
        with jax.named_scope("store"):
            _device.store(o_smem, acc.astype(dtype))
            plgpu.commit_smem()
            # This is always ni * tile_n. Written so that it might be odd, it keeps JAX from swizzling o_smem: TMA
            # stores a swizzled buffer only in whole tiles, and the sides of o need not be multiples of these.
            first = jnp.minimum(ni * c.tile_n, cols | 1)
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(mi * c.tile_m, c.tile_m), pl.ds(first, c.tile_n)])
            plgpu.wait_smem_to_gmem(0)

    acc = pl.run_scoped(with_ring, **scratch(c, dtype))
    # Scoped apart from the ring, so that the tile of o takes the ring's place in shared memory.
    pl.run_scoped(store, plgpu.SMEM(acc.shape, dtype))


@functools.partial(jax.jit, static_argnames=("config", "params"))
def _call(a, b, *, config: Config, params):
    (m, k), n = a.shape, b.shape[1]
    return _host.kernel(
        functools.partial(_kernel, sizes=(m, n, k), config=config),
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n),),
        grid_names=("tile",),
        compiler_params=params,
    )(a, b)


def matmul_blocked(a: jax.Array, b: jax.Array, *, config: Config | None = None) -> jax.Array:
    """`a @ b` without the tensor cores, with float32 sums, rounded once.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      a: (M, K); float32, bfloat16 or float16.
      b: (K, N); of the dtype of `a`.
      config: tiles, stages and order; None chooses by shape.

    Returns:
      (M, N) of the dtype of `a`, bitwise reproducible from run to run.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    a, b = _host.as_array("matmul_blocked", "a", a), _host.as_array("matmul_blocked", "b", b)
    _host.require_config("matmul_blocked", config, Config)
    if a.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or a.dtype != b.dtype:
        raise ValueError(
            f"{_host.PACKAGE}.matmul_blocked: {a.dtype=}, {b.dtype=}; must both be float32, bfloat16 or float16: cast "
            "one"
        )
    m, n, k = arguments.product_sizes("matmul_blocked", dict(a=a, b=b))
    a, b = _host.without_gradient("matmul_blocked", f"{_host.PACKAGE}.matmul", a, b)
    if 0 in (m, n, k):
        return jnp.zeros((m, n), a.dtype)
    _host.require_target("matmul_blocked")
    config = config or default_config(m, n, k)
    if (needed := smem_bytes(config, a.dtype)) > _device.SMEM_BYTES_MAX:
        raise ValueError(
            f"{_host.PACKAGE}.matmul_blocked: {config} needs {needed} bytes of shared memory for {a.dtype}, and a "
            f"block has {_device.SMEM_BYTES_MAX}: take fewer stages or smaller tiles"
        )
    return _call(a, b, config=config, params=_host.compiler_params(reduction_scratch_bytes=0))  # Sums stay in a thread.


matmul_blocked.Config = Config  # `cookbook.matmul_blocked` is this function, not its module.


def bytes_moved(m: int, n: int, k: int, itemsize: int = 4) -> int:
    """Each operand read once and the result written once, all of `itemsize` bytes."""
    return itemsize * (m * k + k * n + m * n)
