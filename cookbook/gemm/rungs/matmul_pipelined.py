# SPDX-License-Identifier: Apache-2.0
"""Matrix product on the tensor cores, its operands brought by `emit_pipeline`.

    o = activation(a @ b)

Shapes: a (M, K), b (K, N), o (M, N); with `transpose_a` a is (K, M), with `transpose_b` b is (N, K), read as they lie.
a and b are both bfloat16 or both float16; sums are float32; o is bfloat16, float16 or float32. Rows of a and b must be
multiples of 16 bytes, which TMA asks for.

Role table: one warpgroup per block computes one tile of o. `emit_pipeline` issues the TMA copies of the next tiles of a
and b, and the warpgroup the WGMMAs of this one. Two blocks share an SM where registers and shared memory allow it:
one's epilogue runs while the other multiplies.

Barrier table: one barrier for each of `num_stages` stages, made by `emit_pipeline`; the two TMA copies of a stage
arrive on it, the warpgroup waits for it. A stage is refilled `delay_release` steps after its product was started:
WGMMA is asynchronous, and `wgmma_wait(delay_release)` leaves that many products running. An earlier refill would be a
race that the interpreter cannot see (chapter 6 shows it on a GPU).

Bound by: the tensor cores, when M, N and K are large; chapter 6 measures what keeps the kernel below them. Tiles are
visited in a snake `grid_tile_width` tiles wide, so that blocks that run together find more of their operands in L2.

Not supported: batches (use `jax.vmap`), other dtypes, differentiation. An operand or a result whose rows are not a
multiple of 8 or whose columns are not a multiple of 64 is padded, at the cost of one copy of it: Pallas's view of
swizzled shared memory has whole tiles of 8 rows by 128 bytes. Chapter: notebooks/06_pipelining.ipynb. Source: CUTLASS's
efficient GEMM notes, for the idea.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host, _numerics
from .. import arguments
from ..references import bytes_moved as bytes_moved
from ..references import exact_product
from ..references import flops as flops

EPILOGUE_COLUMNS = 64  # Columns whose activation is computed at a time: all at once would spill.


def matmul_reference(a, b, activation=None):
    return _numerics.activation_fn("matmul_reference", activation)(exact_product(a, b))


@dataclasses.dataclass(frozen=True)
class Config:
    tile_m: int = 128  # Rows of o per block. WGMMA takes 64 at a time.
    tile_n: int = 128  # Columns of o per block. The accumulator takes tile_m * tile_n / 128 registers of each thread.
    tile_k: int = 64  # Steps of K per stage: 64 values of 16 bits are the 128 bytes of the widest swizzle.
    num_stages: int = 3  # Stages of the ring. Three let two blocks share an SM with tiles of 128 x 128.
    delay_release: int = 1  # Steps that a stage is kept after its WGMMA was issued, and WGMMAs left running.
    grid_minor_dim: int = 0  # The axis of the tile grid that is cut into strips: 0 for M, 1 for N.
    grid_tile_width: int = 8  # Tiles across a strip of the snake.

    def __post_init__(self):
        if self.tile_m % 64 or self.tile_n % 64 or self.tile_k % 64 or min(self.tile_m, self.tile_n, self.tile_k) < 64:
            raise ValueError(
                f"{self.tile_m=}, {self.tile_n=}, {self.tile_k=}: each must be a multiple of 64 (WGMMA's "
                "rows; columns of the 128-byte swizzle)"
            )
        if self.tile_m > 256 or self.tile_n > 256 or self.tile_m * self.tile_n > 128 * 192:
            raise ValueError(
                f"{self.tile_m=} x {self.tile_n=}: at most 256 each (TMA), and 128 x 192 together: a larger "
                "accumulator spills the registers of one warpgroup"
            )
        if not 0 <= self.delay_release < self.num_stages:
            raise ValueError(f"{self.delay_release=}: must be at least 0 and below {self.num_stages=}")
        if self.smem_bytes > _device.SMEM_BYTES_MAX:
            raise ValueError(
                f"{self.num_stages=} of {self.tile_m=}, {self.tile_n=}, {self.tile_k=} need {self.smem_bytes} bytes of "
                f"shared memory, and a block has {_device.SMEM_BYTES_MAX}: fewer stages or smaller tiles"
            )

    @property
    def smem_bytes(self) -> int:
        """The ring, or the tile of o (in float32) that takes its place."""
        ring = dict(
            a_smem=plgpu.SMEM((self.num_stages, self.tile_m, self.tile_k), jnp.bfloat16),
            b_smem=plgpu.SMEM((self.num_stages, self.tile_k, self.tile_n), jnp.bfloat16),
        )
        o_smem = plgpu.SMEM((self.tile_m, self.tile_n), jnp.float32)
        return max(_device.smem_bytes(ring), _device.smem_bytes(dict(o_smem=o_smem)))


def default_config(m: int, n: int, k: int) -> Config:
    """The configuration for an (m, k) by (k, n) product. Chapter 6 measures those of large products."""
    tiles = lambda tile_m, tile_n: pl.cdiv(m, tile_m) * pl.cdiv(n, tile_n)
    if tiles(128, 192) >= 16 * 132:  # Sixteen waves on 132 SMs: the last, partly empty one weighs little.
        return Config(tile_n=192, num_stages=4, grid_tile_width=16)
    if tiles(128, 128) < 132:
        return Config(tile_m=64, num_stages=4)
    return Config()


def _kernel(a_gmem, b_gmem, o_gmem, *, sizes, transpose_a: bool, transpose_b: bool, activation, config: Config):
    c, (m, n, k) = config, sizes
    grid = pl.cdiv(m, c.tile_m), pl.cdiv(n, c.tile_n)
    mi, ni = plgpu.planar_snake(lax.axis_index("tile"), grid, c.grid_minor_dim, c.grid_tile_width)
    a_shape, a_index = (c.tile_m, c.tile_k), lambda ki: (mi, ki)
    b_shape, b_index = (c.tile_k, c.tile_n), lambda ki: (ki, ni)
    if transpose_a:
        a_shape, a_index = a_shape[::-1], lambda ki: (ki, mi)
    if transpose_b:
        b_shape, b_index = b_shape[::-1], lambda ki: (ni, ki)

    def multiply(acc):
        def step(_, a_smem, b_smem):
            with jax.named_scope("wgmma"):
                plgpu.wgmma(acc, a_smem.T if transpose_a else a_smem, b_smem.T if transpose_b else b_smem)
                plgpu.wgmma_wait(c.delay_release)

        plgpu.emit_pipeline(
            step,
            grid=(pl.cdiv(k, c.tile_k),),
            in_specs=[
                plgpu.BlockSpec(a_shape, a_index, delay_release=c.delay_release),
                plgpu.BlockSpec(b_shape, b_index, delay_release=c.delay_release),
            ],
            max_concurrent_steps=c.num_stages,
        )(a_gmem, b_gmem)
        return acc[...]

    def store(o_smem):
        with jax.named_scope("store"):
            for start in range(0, c.tile_n, EPILOGUE_COLUMNS):
                columns = slice(start, start + EPILOGUE_COLUMNS)
                o_smem[:, columns] = activation(values[:, columns]).astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(mi * c.tile_m, c.tile_m), pl.ds(ni * c.tile_n, c.tile_n)])
            plgpu.wait_smem_to_gmem(0)

    values = pl.run_scoped(multiply, plgpu.ACC((c.tile_m, c.tile_n), jnp.float32))
    # Scoped apart from the ring, so that the tile of o takes the ring's place in shared memory.
    pl.run_scoped(store, plgpu.SMEM((c.tile_m, c.tile_n), o_gmem.dtype))


@functools.partial(
    jax.jit,
    static_argnames=("sizes", "transpose_a", "transpose_b", "activation", "out_dtype", "config", "params"),
)
def _call(a, b, *, sizes, transpose_a, transpose_b, activation, out_dtype, config, params):
    (m, n, _), values = sizes, jax.ShapeDtypeStruct((config.tile_m * config.tile_n,), jnp.float32)
    a, b = _host.pad_to_tiles(a, _device.SWIZZLE_TILE), _host.pad_to_tiles(b, _device.SWIZZLE_TILE)
    how = dict(sizes=sizes, transpose_a=transpose_a, transpose_b=transpose_b, config=config)
    out = _host.kernel(
        functools.partial(_kernel, activation=_numerics.lowerable(activation, values), **how),
        out_type=jax.ShapeDtypeStruct(_host.padded_shape((m, n), _device.SWIZZLE_TILE), out_dtype),
        grid=(pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n),),
        grid_names=("tile",),
        compiler_params=params,
    )(a, b)
    return out[:m, :n]


def matmul_pipelined(
    a: jax.Array,
    b: jax.Array,
    *,
    activation: _host.Activation | None = None,
    out_dtype: _host.DType | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    config: Config | None = None,
) -> jax.Array:
    """`activation(a @ b)`, with float32 sums, rounded once.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      a: (M, K), or (K, M) with `transpose_a`; bfloat16 or float16.
      b: (K, N), or (N, K) with `transpose_b`; of the dtype of `a`.
      activation: "relu", "gelu" (the tanh form), "sigmoid", "silu", an element-wise function, or None.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `a`.
      transpose_a, transpose_b: the operand is given transposed, and is read as it lies: no copy is made.
      config: tiles and stages; None chooses by shape.

    Returns:
      (M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype, row length or activation is not supported; RuntimeError: no GPU.
    """
    a, b = _host.as_array("matmul_pipelined", "a", a), _host.as_array("matmul_pipelined", "b", b)
    transpose_a = _host.option("matmul_pipelined", "transpose_a", transpose_a, bool)
    transpose_b = _host.option("matmul_pipelined", "transpose_b", transpose_b, bool)
    _host.require_config("matmul_pipelined", config, Config)
    m, n, k = arguments.product_sizes("matmul_pipelined", dict(a=a, b=b), transpose_a, transpose_b)
    arguments.require_halves("matmul_pipelined", a=a, b=b)
    out_dtype = _host.require_float("matmul_pipelined", a.dtype if out_dtype is None else out_dtype)
    a, b = _host.without_gradient("matmul_pipelined", f"{_host.PACKAGE}.matmul", a, b)
    activation = _numerics.activation_fn("matmul_pipelined", activation)
    if 0 in (m, n):
        return jnp.zeros((m, n), out_dtype)
    if k == 0:
        return jnp.broadcast_to(activation(jnp.zeros((), jnp.float32)), (m, n)).astype(out_dtype)
    _host.require_tensor_cores("matmul_pipelined")
    return _call(
        a, b, sizes=(m, n, k), transpose_a=transpose_a, transpose_b=transpose_b, activation=activation,
        out_dtype=out_dtype, config=config or default_config(m, n, k),
        params=_host.compiler_params(approx_math=out_dtype.itemsize == 2),
    )  # fmt: skip


matmul_pipelined.Config = Config  # `cookbook.matmul_pipelined` is this function, not its module.
