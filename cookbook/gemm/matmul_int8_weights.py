"""Matrix product of 16-bit activations and 8-bit integer weights, which become 16-bit on the way to the tensor cores.

    o = a @ w_q * scales, computed as oᵀ = wᵀ aᵀ

Shapes: a (M, K), w_q (K, N), or (N, K) with `transpose_w`, scales (N,), o (M, N). a is bfloat16 or float16, w_q int8, o
bfloat16, float16 or float32; sums are float32. Rows of a and w_q must be multiples of 16 bytes. 8-bit integers are
exact in either 16-bit float, so that only the quantization itself errs.

Role table: one block a SM, which computes tile after tile of oᵀ; three warpgroups.

    memory     one: starts the TMA copies of each step of K, of the 8-bit weights and of a, as in `matmul`
    compute    two: each reads its own weights of a step into registers, converts them there to 16-bit floats, and
               multiplies them by a's tile, which the tensor core reads from shared memory; in the meantime it reads
               the weights of the next step. Its own are half of the tile's columns of w_q, or with `split_dim=2` half
               of the step's values of K: then the second hands its sums over, and the first adds and stores. Results
               are scaled, rounded and transposed on their way to o.

Barrier table: of `cookbook/gemm/matmul.py`; but a slot is given back in the step that multiplied it, after
`wgmma_wait(0)`, because the registers that hold its weights are written again. With `split_dim=2` two more:

    barrier  arrivals                                        who waits
    written  the second compute warpgroup: sums are in SMEM  the first, before it adds them to its own
    taken    the first: it has read them                     the second, before it writes the next, and at its end

What bounds its speed: with many rows of a the tensor cores, as in `matmul`. With few rows the memory that the weights
come from, and the pattern in which it is read: longer rows a step are faster. Every SM has to read: tiles are small,
or K is split and the float32 parts are added by XLA.

Not supported: zero points, scales of groups along K, 4-bit weights; batches (use `jax.vmap`); differentiation. The
tensor cores want weights with K along their rows: a plain w_q is transposed, at the cost of one copy; store weights as
(N, K). Chapter: 9. Source: Dettmers et al., "LLM.int8()" (2022), for the use.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu, _tuned
from .matmul import (
    COMPUTE,
    COMPUTE_REGISTERS,
    MEMORY,
    MEMORY_REGISTERS,
    STEP_BYTES,
    fused_product,
    identity,
    load_tiles,
    store,
)
from .matmul import Config as MatmulConfig
from .matmul import Plan as MatmulPlan

UNIT = 64  # Values of a row of a that are swizzled together: 128 bytes.


def matmul_int8_weights_reference(a, w_q, scales):
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a.astype(dtype), w_q.astype(dtype), precision="highest") * scales.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Config(MatmulConfig):
    """As of `matmul`, for the product of the weights and a, both transposed: M and `tile_m` count columns of w_q, N and
    `tile_n` rows of a. With `split_dim=2` the two warpgroups share out each step of K, and their sums meet in shared
    memory: so that tiles are small enough for every SM to have one, without a split of K."""

    tile_m: int = 128
    tile_n: int = 256
    store_slots: int = 1
    swapped: bool = True
    tile_k: int = 64  # Values of K a step, and bytes of each row of weights: more where memory has to be read fast.

    def __post_init__(self):
        if self.split_dim not in (0, 2) or not self.swapped:
            raise ValueError(
                f"{self.split_dim=} must be 0 (columns of w_q) or 2 (steps of K), and {self.swapped=} True: weights go "
                "through registers"
            )
        if self.compute_tile[0] not in (64, 128):
            raise ValueError(f"{self.tile_m=} must leave 64 or 128 columns of w_q for each warpgroup")
        if self.split_dim == 2 and self.tile_k != 256:
            raise ValueError(f"{self.tile_k=} must be 256 for {self.split_dim=}: 128 values for each warpgroup")
        unit, most = 8 if self.tile_n < UNIT else UNIT, 64 * 256 // self.compute_tile[0]
        if self.tile_n % unit or not 8 <= self.tile_n <= most:
            raise ValueError(
                f"{self.tile_n=} must be a multiple of 8 up to 64, or of 64; with {self.tile_m=} it is at most {most}, "
                "because the registers hold no more sums"
            )
        if self.tile_k not in (64, 128, 256):
            raise ValueError(f"{self.tile_k=} must be 64, 128 or 256: the widths of the swizzle, or two of them")
        self.check()

    @property
    def smem_bytes(self) -> int:
        """The ring, the pieces of o on their way out, and the barriers."""
        ring = self.num_stages * (self.tile_m + 2 * self.tile_n) * self.tile_k
        sums = 4 * self.tile_m * self.tile_n + 16 if self.split_dim == 2 else 0
        return ring + self.pieces_bytes + sums + 16 * self.num_stages


def default_config(m: int, n: int, k: int, num_sms: int = 132) -> Config:
    """The configuration for an (m, k) by (k, n) product on `num_sms` SMs."""
    if m > 128:
        return Config(num_stages=5, cluster_dim=0)
    split_k = lambda tile_m: max(1, min(num_sms // pl.cdiv(n, tile_m), k // 512))
    if m > UNIT:
        return Config(tile_n=128, num_stages=4, split_k=split_k(128), tile_k=128)
    how = dict(num_stages=8 if m <= 32 else 4, split_dim=2, cluster_dim=0, split_k=split_k(64), tile_k=256)
    return Config(tile_m=64, tile_n=pl.cdiv(m, 8) * 8, **how)


def configs(a, w_q, scales, *, transpose_w=False, **_) -> list[Config]:
    """The configurations worth timing on these operands, for `cookbook.lab.autotune`."""
    (m, k), n, found = a.shape, scales.shape[0], []

    def add(tile_m, tile_n, **kwargs):
        for num_stages in range(12, 1, -1):
            try:
                return found.append(Config(tile_m, tile_n, num_stages, **kwargs))
            except ValueError:  # It does not fit in shared memory.
                continue

    if m > 128:
        for cluster_dim, minor_dim, width in itertools.product((None, 0), (0, 1), (4, 8, 16)):
            add(128, 256, cluster_dim=cluster_dim, grid_minor_dim=minor_dim, grid_tile_width=width)
        return found
    tile_n, idle = default_config(m, n, k).tile_n, max(1, 132 // pl.cdiv(n, 128))
    for cluster_dim in (None, 0):
        for tile_m in (64, 128):
            add(tile_m, tile_n, split_dim=2, cluster_dim=cluster_dim, tile_k=256)
        for tile_k, split_k in itertools.product((64, 128, 256), sorted({1, max(1, idle // 2), idle, 2 * idle})):
            if split_k <= max(1, k // 512):
                add(128, tile_n, cluster_dim=cluster_dim, split_k=split_k, tile_k=tile_k)
    return found


def problem(a, w_q, scales, *, transpose_w=False, **_) -> str:
    """What `cookbook.lab.autotune` calls the problem: the best configuration depends on nothing else."""
    return _tuned.problem_name(a, w_q, transpose_w=transpose_w)


@dataclasses.dataclass(frozen=True)
class Plan(MatmulPlan):
    """Of the product of the weights and a, both transposed: `m` counts columns of w_q, `n` rows of a."""

    @property
    def tile_k(self) -> int:
        return self.config.tile_k

    @property
    def a_piece(self) -> tuple[int, int]:
        return self.config.tile_m, min(self.tile_k, STEP_BYTES)

    @property
    def step_k(self) -> int:
        """Values of K of a step that a warpgroup multiplies."""
        return self.tile_k // (2 if self.config.split_dim == 2 else 1)

    @property
    def scratch(self) -> dict:
        c, scratch = self.config, super().scratch
        scratch["a_smem"] = self.tiles((c.num_stages, *self.a_tile), self.dtypes[0], self.a_piece, self.a_piece[1])
        if c.split_dim == 2:
            sums = plgpu.SMEM(c.compute_tile, jnp.float32)
            scratch |= dict(sums_smem=sums, written=plgpu.Barrier(), taken=plgpu.Barrier())
        if self.interpreted:  # Which wants both operands of WGMMA in shared memory.
            wide = (COMPUTE, self.step_k // UNIT, c.compute_tile[0], UNIT)
            scratch["wide_smem"] = self.tiles(wide, self.dtypes[1], None)
        return scratch


def _kernel(w_gmem, a_gmem, fused, o_gmem, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem=None, wide_smem=None,
            sums_smem=None, written=None, taken=None):  # fmt: skip
    (w_smem, w_tma), (a_smem, a_tma) = plan.views(a_smem, plan.a_piece), plan.views(b_smem, plan.b_piece)

    @pl.when(lax.axis_index("role") == MEMORY)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        load_tiles(plan, w_gmem, a_gmem, w_tma, a_tma, filled, freed)

    @pl.when(lax.axis_index("role") < COMPUTE)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        @pl.loop(0, plan.tiles_of_block())
        def _(tile):
            place = plan.place(tile)
            multiply = functools.partial(_multiply, plan, tile, w_smem, a_smem, filled, freed, wide_smem)
            values = pl.run_scoped(multiply, plgpu.ACC(plan.config.compute_tile, jnp.float32))
            if plan.config.split_dim == 2:
                values = _add_up(tile, values, sums_smem, written, taken)
            pl.when((lax.axis_index("role") == 0) | (plan.config.split_dim == 0))(
                lambda: store(plan, place, values, fused, o_gmem, o_smem)
            )

        if plan.config.split_dim == 2:  # Its last sums too.
            pl.when(lax.axis_index("role") == 1)(lambda: plgpu.barrier_wait(taken))
        plgpu.wait_smem_to_gmem(0)


def _multiply(plan: Plan, tile, w_smem, a_smem, filled, freed, wide_smem, acc):
    role, rows, by_steps = lax.axis_index("role"), plan.config.compute_tile[0], plan.config.split_dim == 2
    slot = lambda step: plan.slot(tile, step)[0]
    pieces = plan.step_k // plan.a_piece[1]

    def load(step):
        """The weights of a step, 8 bits each."""
        plgpu.barrier_wait(filled.at[slot(step)])
        if by_steps:
            parts = [w_smem.at[slot(step), 0, role]]
        else:
            parts = [w_smem.at[slot(step), 0, i, pl.ds(role * rows, rows)] for i in range(pieces)]
        return [plgpu.load(part, layout=plgpu.Layout.WGMMA_UPCAST_2X) for part in parts]

    def start(step, weights):
        with jax.named_scope("convert"):
            wide = [plgpu.layout_cast(part.astype(plan.dtypes[1]), plgpu.Layout.WGMMA) for part in weights]
            parts = [part[:, k : k + UNIT] for part in wide for k in range(0, part.shape[1], UNIT)]
            if plan.interpreted:
                for i, part in enumerate(parts):
                    wide_smem[role, i] = part
                plgpu.commit_smem()
                parts = [wide_smem.at[role, i] for i in range(len(parts))]
        with jax.named_scope("wgmma"):
            for i, part in enumerate(parts):
                plgpu.wgmma(acc, part, a_smem.at[slot(step), 0, role * len(parts) + i if by_steps else i].T)

    def body(step, weights):
        start(step, weights)
        weights = load(step + 1)  # While the tensor cores are busy.
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(freed.at[slot(step)])
        return weights

    last = plan.num_steps - 1
    start(last, lax.fori_loop(0, last, body, load(0)))
    values = acc[...]  # Waits for the last product.
    plgpu.barrier_arrive(freed.at[slot(last)])
    return values


def _add_up(tile, values, sums_smem, written, taken):
    """The sums of both warpgroups, for the first; the second hands over its own."""

    @pl.when(lax.axis_index("role") == 1)
    def _():
        pl.when(tile > 0)(lambda: plgpu.barrier_wait(taken))
        _mgpu.store(sums_smem, values)
        plgpu.commit_smem()
        plgpu.barrier_arrive(written)

    def add():
        plgpu.barrier_wait(written)
        total = values + plgpu.load(sums_smem, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()  # All four warps have read.
        plgpu.barrier_arrive(taken)
        return total

    return lax.cond(lax.axis_index("role") == 0, add, lambda: values)


def _check(a, w_q, scales, transpose_w: bool) -> tuple[int, int, int]:
    op = "cookbook.matmul_int8_weights"
    if a.ndim != 2 or w_q.ndim != 2:
        raise ValueError(f"{op}: {a.shape=}, {w_q.shape=}; both must be matrices: use jax.vmap for batches")
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
    return m, n, k


def matmul_int8_weights(a, w_q, scales, *, out_dtype=None, transpose_w=False, config: Config | None = None):
    """`a @ w_q * scales`, the weights dequantized on the way to the tensor core; float32 sums, rounded once.

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
    out_dtype = jnp.dtype(out_dtype or a.dtype)
    _mgpu.require_float("matmul_int8_weights", out_dtype)
    m, n, k = _check(a, w_q, scales, transpose_w)
    if config is not None and not isinstance(config, Config):
        raise ValueError(
            f"cookbook.matmul_int8_weights: {config=} is of another kernel, with another price in shared memory: use "
            "cookbook.matmul_int8_weights.Config"
        )
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    target = _mgpu.require_target("matmul_int8_weights")
    name = problem(a, w_q, scales, transpose_w=transpose_w)
    config = config or _tuned.tuned("matmul_int8_weights", target.name, name, Config)
    config = config or default_config(m, n, k, target.num_sms)
    interpreted = target.interpreted
    plan = Plan(n, m, k, (w_q.dtype, a.dtype), False, True, identity, out_dtype, config, interpreted)
    w, vectors = w_q if transpose_w else w_q.T, dict(col_scale=scales.astype(jnp.float32))
    params = _mgpu.compiler_params()
    return fused_product(w, a, vectors, plan=plan, num_sms=target.num_sms, params=params, kernel=_kernel)


matmul_int8_weights.Config = Config  # `cookbook.matmul_int8_weights` is this function, not its module.


def flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """a and the result, of `itemsize` bytes, and the 8-bit weights, each once."""
    return itemsize * m * k + k * n + itemsize * m * n
