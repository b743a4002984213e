"""Matrix product of 16-bit activations and 8-bit integer weights, which become 16-bit on the way to the tensor cores.

    o = a @ w_q * scales, computed as oᵀ = wᵀ aᵀ

Shapes: a (M, K), w_q (K, N), or (N, K) with `transpose_w`, scales (N,), o (M, N). a is bfloat16 or float16, w_q int8, o
bfloat16, float16 or float32; sums are float32. Rows of a and w_q must be multiples of 16 bytes. 8-bit integers are
exact in either 16-bit float, so that only the quantization itself errs.

Role and barrier tables: `roles.py`, where the operand `a` is w_q and the operand `b` is a. A compute warpgroup reads
its rows of a step's weights into registers, converts them there to 16-bit floats, and multiplies them by a's tile,
which the tensor cores read from shared memory. Meanwhile it reads the weights of the next step, and with `overlap` also
converts them. A slot is freed when the products of its step have ended: they read the registers and the slot till then.

Bound by: the tensor cores with many rows of a, as in `matmul`; with few, the memory that the weights come from. Longer
steps read longer rows at a time.

Not supported: zero points, scales of groups along K, 4-bit weights; batches (use `jax.vmap`); differentiation. The
tensor cores want weights with K along their rows: a plain w_q is transposed, at the cost of one copy; store weights as
(N, K). Under an automatic mesh JAX gathers sharded operands first: call it inside `jax.shard_map`. Chapter: 9b. Source:
Dettmers et al., "LLM.int8()" (2022), for the use.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from . import core, cost
from .core import COMPUTE, Operand, Tiles
from .roles import fused_product, identity

UNIT = 64  # Values of a row of a that are swizzled together: 128 bytes.


def matmul_int8_weights_reference(a, w_q, scales):
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a.astype(dtype), w_q.astype(dtype), precision="highest") * scales.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Config(core.Config):
    """As `core.Config`, for the product of the weights and a, both transposed: M and `tile_m` count columns of w_q, N
    and `tile_n` rows of a."""

    swapped: bool = True
    tile_k: int = 128  # Values of K a step, and bytes of each row of weights.
    overlap: bool = False  # Weights are converted while products of the step before run, which helps in a single wave.

    def check_tile(self):
        super().check_tile()
        if self.split_dim != 0 or not self.swapped or self.tail_split != 1:
            raise ValueError(
                f"{self.split_dim=} must be 0, {self.swapped=} True and {self.tail_split=} 1: weights go through "
                "registers, a warpgroup's own rows of them"
            )
        if self.tile_k not in (64, 128, 256):
            raise ValueError(f"{self.tile_k=} must be 64, 128 or 256: the widths of the swizzle, or two of them")


@dataclasses.dataclass(frozen=True)
class Plan(core.Plan):
    """The weights are operand `a`, and a is operand `b`."""

    @property
    def scratch(self) -> dict:
        scratch = super().scratch
        if self.interpreted:  # It wants both operands of WGMMA in shared memory, of which it has any amount.
            wide = (COMPUTE, self.tiles.tile_k // UNIT, self.compute_tile[0], UNIT)
            scratch["wide_smem"] = core.swizzled(wide, self.b.dtype, None, core.STEP_BYTES, self.interpreted)
        return scratch


@functools.lru_cache(4096)
def default_config(m: int, n: int, k: int, num_sms: int = 132) -> Config:
    """The configuration of the least predicted time for an (m, k) by (k, n) product."""
    return ranked(m, n, k, 1, num_sms)[0]


def ranked(m: int, n: int, k: int, count: int, num_sms: int = 132) -> list[Config]:
    """The `count` configurations of the least predicted time, the best first: those that are worth timing."""
    return sorted(_candidates(m, n, k, num_sms), key=lambda config: _predict(config, m, n, k, num_sms))[:count]


def _candidates(m: int, n: int, k: int, num_sms: int):
    widths = [width for width in cost.WIDTHS if width < 2 * m or width == 8]
    for tile_n in widths:
        tiles = pl.cdiv(n, 128) * pl.cdiv(m, tile_n)
        for tile_k in (128, 256) if tile_n <= 32 else (64, 128) if tile_n <= 128 else (64,):
            for cluster_m in (2, 1) if tiles >= num_sms // 2 else (1,):
                overlap = tiles <= num_sms and tile_n >= LEAST_OVERLAP
                yield Config(128, tile_n, cluster_m=cluster_m, tile_k=tile_k, overlap=overlap)
            for split_k in range(2, min(core.SPLIT_K_MAX, k // 512) + 1):
                if tiles <= WAVES_OF_PARTS * core.resident(num_sms, split_k) and tile_n <= 128:
                    yield Config(128, tile_n, split_k=split_k, tile_k=tile_k)
                if tiles * split_k <= num_sms:
                    parts = dict(split_k=split_k, second_kernel=True, overlap=tile_n >= LEAST_OVERLAP)
                    yield Config(128, tile_n, tile_k=tile_k, **parts)


def _predict(c: Config, m: int, n: int, k: int, num_sms: int) -> float:
    """Microseconds of the product on one H200."""
    h, adds_parts = cost.H200, c.split_k > 1 and not c.second_kernel
    fit = core.resident(num_sms, c.cluster_m * c.split_k) if not c.second_kernel else num_sms // c.split_k
    waves = pl.cdiv(pl.cdiv(n, c.tile_m * c.cluster_m) * pl.cdiv(m, c.tile_n), fit)
    values = c.tile_m * c.tile_n
    received = 4 * values * c.split_k // core.owners(c.tile_n, c.split_k, True, 2) if adds_parts else 0
    stages = (cost.SMEM_FOR_RING - received) // ((c.tile_m + 2 * c.tile_n) * c.tile_k)
    if stages < 2:
        return math.inf
    # One warpgroup converts while the other multiplies, at best.
    convert = CONVERT_STEP + CONVERT * c.tile_m * c.tile_k / 16384
    tensor = values * c.tile_k / 2048 / h.tensor / 1e3
    step = max(tensor, convert + tensor / 2, h.latency / min(stages, core.STAGES_MAX))
    time = waves * (pl.cdiv(k, c.tile_k * c.split_k) * step + h.tile + 0.9 * values / 32768)
    if adds_parts:
        time += h.parts + PARTS * values * (1 - 1 / c.split_k) / 16384
    elif c.second_kernel:
        time += h.second_kernel + 8e-6 * c.split_k * m * n / h.read
    start = h.start * (waves if c.split_k > 1 else 1)  # A block of parts computes one tile.
    return start + cost.longer(time, (n * k + 2 * m * (n + k)) / h.read / 1e6)


LEAST_OVERLAP = 128  # Rows of a tile from which on a product of one wave overlaps conversion with products.
WAVES_OF_PARTS = 4  # Waves of clusters that add up parts of K, at most.
PARTS = 14.0  # us to add up parts of K, for each 16,384 values that a block sends.
CONVERT_STEP, CONVERT = 0.05, 0.46  # us of a step to read and convert its weights: of any, and more for each 16,384.


def multiply(plan: Plan, ring: _mgpu.Ring, w_smem, a_smem, before, acc, wide_smem=None):
    """The sums of this warpgroup's half of a tile, whose steps follow `before` others in the ring."""
    tiles, role, rows = plan.tiles, lax.axis_index("role"), plan.compute_tile[0]
    last = -(-tiles.k // (tiles.tile_k * plan.config.split_k)) - 1

    def load(step):
        """The weights of a step, 8 bits each."""
        slot = ring.wait(before + step)
        pieces = [w_smem.at[slot, 0, j, pl.ds(role * rows, rows)] for _, j in plan.a.pieces]
        return [plgpu.load(piece, layout=plgpu.Layout.WGMMA) for piece in pieces]

    def convert(weights):
        """As floats of 16 bits, UNIT values of K in each array."""
        with jax.named_scope("convert"):
            wide = [part.astype(plan.b.dtype) for part in weights]
            return [part[:, k : k + UNIT] for part in wide for k in range(0, part.shape[1], UNIT)]

    def start(step, parts):
        if plan.interpreted:
            for i, part in enumerate(parts):
                wide_smem[role, i] = part
            plgpu.commit_smem()
            parts = [wide_smem.at[role, i] for i in range(len(parts))]
        with jax.named_scope("wgmma"):
            for i, part in enumerate(parts):
                plgpu.wgmma(acc, part, a_smem.at[ring.slot(before + step), 0, i].T)

    def in_turn():
        def one_step(step, weights):
            start(step, convert(weights))
            weights = load(step + 1)
            plgpu.wgmma_wait(0)
            ring.free(before + step)
            return weights

        start(last, convert(lax.fori_loop(0, last, one_step, load(0))))

    def overlapped():
        def one_step(step, parts):
            start(step, parts)
            plgpu.wgmma_wait(len(parts))  # The products of the step before have ended, and these go on.
            pl.when(step > 0)(lambda: ring.free(before + step - 1))
            return convert(load(step + 1))

        # Two steps a turn, because the weights of each need registers of their own.
        two_steps = lambda i, parts: one_step(2 * i + 1, one_step(2 * i, parts))
        parts = lax.fori_loop(0, last // 2, two_steps, convert(load(0)))
        start(last, one_step(last - 1, parts) if last % 2 else parts)

    (overlapped if plan.config.overlap else in_turn)()
    values = acc[...]  # Waits for the last product.
    for step in range(max(last - 1, 0) if plan.config.overlap else last, last + 1):
        ring.free(before + step)
    return values


def _check(a, w_q, scales, transpose_w: bool) -> tuple[int, int, int]:
    op = "cookbook.matmul_int8_weights"
    if a.ndim != 2 or w_q.ndim != 2:
        raise ValueError(f"{op}: {a.shape=}, {w_q.shape=}; both must be matrices: reshape a, or use jax.vmap")
    if a.dtype not in (jnp.bfloat16, jnp.float16) or w_q.dtype != jnp.int8:
        raise ValueError(f"{op}: {a.dtype=}, {w_q.dtype=}; must be bfloat16 or float16, and int8: cast them")
    (m, k), (k_w, n) = a.shape, w_q.shape[:: -1 if transpose_w else 1]
    if k != k_w:
        raise ValueError(
            f"{op}: {a.shape=} and {w_q.shape=} ({transpose_w=}) share no K: {k} is not {k_w}; is w_q stored the other "
            "way round?"
        )
    for name, x in (("a", a), ("w_q", w_q)):
        unit = 16 // x.dtype.itemsize
        if x.shape[1] % unit:
            raise ValueError(
                f"{op}: a row of {name} has {x.shape[1]} values, {x.shape[1] * x.dtype.itemsize} bytes; TMA needs a "
                f"multiple of 16 bytes: pad it to {pl.cdiv(x.shape[1], unit) * unit} (jnp.pad, one copy of {name})"
            )
    if scales.shape != (n,) or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(f"{op}: {scales.shape=}, {scales.dtype=}; must be ({n},), one float for each of N")
    _mgpu.require_indices("matmul_int8_weights", M=m, N=n, K=k)
    return m, n, k


def matmul_int8_weights(a, w_q, scales, *, out_dtype=None, transpose_w=False, config: Config | None = None):
    """`a @ w_q * scales`, the weights dequantized on the way to the tensor core; float32 sums, rounded once.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      a: (M, K); bfloat16 or float16.
      w_q: (K, N), which costs a copy, or (N, K) with `transpose_w`; int8.
      scales: (N,), of a floating dtype: what one unit of a column of w_q stands for.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `a`.
      transpose_w: w_q is given transposed, and is read as it lies.
      config: tiles, stages, cluster and order; None chooses by shape.

    Returns:
      (M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    a, w_q, scales = (
        _mgpu.as_array("matmul_int8_weights", name, x) for name, x in (("a", a), ("w_q", w_q), ("scales", scales))
    )
    transpose_w = _mgpu.option("matmul_int8_weights", "transpose_w", transpose_w, bool)
    _mgpu.require_config("matmul_int8_weights", config, Config)
    m, n, k = _check(a, w_q, scales, transpose_w)
    out_dtype = _mgpu.require_float("matmul_int8_weights", a.dtype if out_dtype is None else out_dtype)
    instead = "cookbook.matmul of dequantized weights"
    a, w_q, scales = _mgpu.without_gradient("matmul_int8_weights", instead, a, w_q, scales)
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    target = _mgpu.require_tensor_cores("matmul_int8_weights")
    config = config or default_config(m, n, k, target.num_sms)
    tiles = Tiles(n, m, k, config.tile_k, config, target.num_sms)
    operands = (
        Operand(w_q.dtype, config.tile_m, config.tile_k, False),
        Operand(a.dtype, config.tile_n, config.tile_k, False),
    )
    plan = Plan(tiles, *operands, identity, out_dtype, target.interpreted)
    vectors = dict(col_scale=scales.astype(jnp.float32))
    return fused_product(
        w_q if transpose_w else w_q.T, a, vectors, plan=plan, params=_mgpu.compiler_params(), multiply=multiply
    )


matmul_int8_weights.Config = Config  # `cookbook.matmul_int8_weights` is this function, not its module.


def flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """a and the result, of `itemsize` bytes, and the 8-bit weights, each once."""
    return itemsize * m * k + k * n + itemsize * m * n
