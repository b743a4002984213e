# SPDX-License-Identifier: Apache-2.0
"""Matrix product on the tensor cores, its copies and barriers by hand.

    o = a @ b

Shapes: a (M, K), b (K, N), o (M, N); with `transpose_a` a is (K, M), with `transpose_b` b is (N, K), read as they lie.
a and b are both bfloat16 or both float16; sums are float32; o is bfloat16, float16 or float32. Rows of a and b must be
multiples of 16 bytes, which TMA asks for.

Role table: one warpgroup per block computes one tile of o, and has three roles in turn.

    load      starts the TMA copies of a tile of a and of b into a slot of the ring in shared memory
    multiply  waits for a slot to arrive, starts its WGMMA, waits until the one before has finished
    store     rounds the accumulator into shared memory, from where TMA copies it to o

Barrier table:

    barrier       arrivals                          who waits
    loaded[slot]  2: the copies of a's and b's tile  the warpgroup, before the WGMMA that reads the slot

No barrier says that a slot is free: the warpgroup that refills it multiplied it, and `wgmma_wait` tells.

Bound by: the loads and the tensor cores together. Each alone takes less time; together they slow each other down. Two
blocks share an SM, so that one multiplies while the other starts or stores.

Not supported: batches (use `jax.vmap`), other dtypes, differentiation, Blackwell (its tensor cores take other
instructions). An operand or a result whose rows are not a multiple of 8 or whose columns are not a multiple of 64 is
padded, at the cost of one copy of it: Pallas's view of swizzled shared memory has whole tiles of 8 rows by 128 bytes.
Chapter: notebooks/05_wgmma.ipynb. Source: this project's.
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
from ..references import bytes_moved as bytes_moved
from ..references import exact_product
from ..references import flops as flops

IN_FLIGHT = 1  # WGMMAs left running while the next is started, so that the tensor cores do not idle between two.
TILE_MAX = 128 * 192  # Elements of o per block: 192 registers of each thread, 220 of 255 in all. 128 * 256 spills.


def matmul_wgmma_reference(a, b, *, transpose_a=False, transpose_b=False):
    return exact_product(a.T if transpose_a else a, b.T if transpose_b else b)


@dataclasses.dataclass(frozen=True)
class Config:
    tile_m: int = 128  # Rows of o per block. WGMMA takes 64 at a time.
    tile_n: int = 128  # Columns of o per block. Larger tiles read a and b fewer times, and take more registers.
    tile_k: int = 64  # Steps of K per slot: 64 values of 16 bits are the 128 bytes of the widest swizzle.
    num_stages: int = 3  # Slots of the ring. More hide more latency; three let two blocks share an SM.

    def __post_init__(self):
        for name in ("tile_m", "tile_n", "tile_k"):
            if (size := getattr(self, name)) not in (64, 128, 192, 256):
                raise ValueError(f"{name} = {size} must be 64, 128, 192 or 256: whole swizzled tiles, one TMA copy")
        if self.tile_m * self.tile_n > TILE_MAX:
            raise ValueError(
                f"{self.tile_m=} x {self.tile_n=} must be at most {TILE_MAX} elements: a larger accumulator spills the "
                "registers of one warpgroup; shrink a side"
            )
        if self.num_stages <= IN_FLIGHT:
            raise ValueError(f"{self.num_stages=} must be at least {IN_FLIGHT + 1}: one multiplied, one loaded")
        if self.smem_bytes > _device.SMEM_BYTES_MAX:
            raise ValueError(
                f"{self.num_stages=} of {self.tile_m=}, {self.tile_n=}, {self.tile_k=} need {self.smem_bytes} bytes of "
                f"shared memory, and a block has {_device.SMEM_BYTES_MAX}: take fewer stages or smaller tiles"
            )

    @property
    def smem_bytes(self) -> int:
        """The ring and its barriers, or the tile of o (in float32) that takes its place."""
        o_smem = plgpu.SMEM((self.tile_m, self.tile_n), jnp.float32)
        return max(_device.smem_bytes(scratch(self, jnp.bfloat16)), _device.smem_bytes(dict(o_smem=o_smem)))


def default_config(m: int, n: int, k: int) -> Config:
    """128 x 128, or 64 along a side that needs no more. Any `k`."""
    return Config(tile_m=64 if m <= 64 else 128, tile_n=64 if n <= 64 else 128)


def scratch(config: Config, dtype, transpose_a=False, transpose_b=False) -> dict:
    """The ring, for operands of `dtype`."""
    c = config
    a_shape = (c.tile_k, c.tile_m) if transpose_a else (c.tile_m, c.tile_k)
    b_shape = (c.tile_n, c.tile_k) if transpose_b else (c.tile_k, c.tile_n)
    return dict(
        a_smem=plgpu.SMEM((c.num_stages, *a_shape), dtype),
        b_smem=plgpu.SMEM((c.num_stages, *b_shape), dtype),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=c.num_stages),
    )


def _kernel(a_gmem, b_gmem, o_gmem, *, sizes, transpose_a: bool, transpose_b: bool, config: Config):
    c, num_steps = config, pl.cdiv(sizes[2], config.tile_k)
    ahead = c.num_stages - IN_FLIGHT  # Steps that are loaded ahead of the product that is started.
    tile, across = lax.axis_index("tile"), pl.cdiv(sizes[1], c.tile_n)
    mi, ni = lax.div(tile, across), lax.rem(tile, across)

    def with_ring(a_smem, b_smem, loaded):
        def load(step):
            """Starts the copies of a step into its slot. Elements outside an operand arrive as zeros."""
            slot = lax.rem(step, c.num_stages)
            m, n, k = (pl.ds(i * size, size) for i, size in ((mi, c.tile_m), (ni, c.tile_n), (step, c.tile_k)))
            with jax.named_scope("load"):
                a_tile = a_gmem.at[k, m] if transpose_a else a_gmem.at[m, k]
                b_tile = b_gmem.at[n, k] if transpose_b else b_gmem.at[k, n]
                plgpu.copy_gmem_to_smem(a_tile, a_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(b_tile, b_smem.at[slot], loaded.at[slot])

        def multiply(acc):
            """Multiplies the slots in turn, and refills each one as soon as its product has finished."""

            @pl.loop(0, num_steps)
            def _(step):
                slot = lax.rem(step, c.num_stages)
                with jax.named_scope("wait"):
                    plgpu.barrier_wait(loaded.at[slot])
                with jax.named_scope("wgmma"):
                    a, b = a_smem.at[slot], b_smem.at[slot]
                    plgpu.wgmma(acc, a.T if transpose_a else a, b.T if transpose_b else b)
                    plgpu.wgmma_wait(IN_FLIGHT)  # The product before this one has finished: its slot is free.
                pl.when(step + ahead < num_steps)(lambda: load(step + ahead))

            return acc[...]

        pl.loop(0, min(ahead, num_steps))(load)
        return pl.run_scoped(multiply, plgpu.ACC((c.tile_m, c.tile_n), jnp.float32))

    def store(o_smem):
        with jax.named_scope("store"):
            o_smem[...] = values.astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(mi * c.tile_m, c.tile_m), pl.ds(ni * c.tile_n, c.tile_n)])
            plgpu.wait_smem_to_gmem(0)

    values = pl.run_scoped(with_ring, **scratch(c, a_gmem.dtype, transpose_a, transpose_b))
    # Scoped apart from the ring, so that the tile of o takes the ring's place in shared memory.
    pl.run_scoped(store, plgpu.SMEM((c.tile_m, c.tile_n), o_gmem.dtype))


@functools.partial(jax.jit, static_argnames=("sizes", "transpose_a", "transpose_b", "out_dtype", "config", "params"))
def _call(a, b, *, sizes, transpose_a: bool, transpose_b: bool, out_dtype, config: Config, params):
    m, n, _ = sizes  # As the caller has them, before padding.
    how = dict(sizes=sizes, transpose_a=transpose_a, transpose_b=transpose_b, config=config)
    kernel = _host.kernel(
        functools.partial(_kernel, **how),
        out_type=jax.ShapeDtypeStruct(_host.padded_shape((m, n), _device.SWIZZLE_TILE), out_dtype),
        grid=(pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n),),
        grid_names=("tile",),
        compiler_params=params,
    )
    a, b = _host.pad_to_tiles(a, _device.SWIZZLE_TILE), _host.pad_to_tiles(b, _device.SWIZZLE_TILE)
    return kernel(a, b)[:m, :n]


def matmul_wgmma(
    a: jax.Array,
    b: jax.Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`a @ b`, with float32 sums, rounded once.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      a: (M, K), or (K, M) with `transpose_a`; bfloat16 or float16.
      b: (K, N), or (N, K) with `transpose_b`; of the dtype of `a`.
      transpose_a, transpose_b: the operand is given transposed, and is read as it lies: no copy is made.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `a`.
      config: tiles and stages; None chooses by shape.

    Returns:
      (M, N) of `out_dtype`, bitwise reproducible from run to run.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    a, b = _host.as_array("matmul_wgmma", "a", a), _host.as_array("matmul_wgmma", "b", b)
    transpose_a = _host.option("matmul_wgmma", "transpose_a", transpose_a, bool)
    transpose_b = _host.option("matmul_wgmma", "transpose_b", transpose_b, bool)
    _host.require_config("matmul_wgmma", config, Config)
    m, n, k = arguments.product_sizes("matmul_wgmma", dict(a=a, b=b), transpose_a, transpose_b)
    arguments.require_halves("matmul_wgmma", a=a, b=b)
    out_dtype = _host.require_float("matmul_wgmma", a.dtype if out_dtype is None else out_dtype)
    a, b = _host.without_gradient("matmul_wgmma", f"{_host.PACKAGE}.matmul", a, b)
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    _host.require_tensor_cores("matmul_wgmma")
    return _call(
        a, b, sizes=(m, n, k), transpose_a=transpose_a, transpose_b=transpose_b, out_dtype=out_dtype,
        config=config or default_config(m, n, k), params=_host.compiler_params(),
    )  # fmt: skip


matmul_wgmma.Config = Config  # `cookbook.matmul_wgmma` is this function, not its module.
