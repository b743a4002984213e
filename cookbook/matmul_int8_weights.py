"""Matrix product of 16-bit activations and 8-bit integer weights, which become 16-bit on the way to the tensor core.

    o = a @ w_q * scales

Shapes: a (M, K), w_q (K, N), or (N, K) with `transpose_w`, scales (N,), o (M, N). a is bfloat16 or float16, w_q int8, o
bfloat16, float16 or float32; sums are float32. Rows of a and w_q must be multiples of 16 bytes. 8-bit integers are
exact in either 16-bit float, so that only the quantization itself errs.

Role table: one block a SM, which computes tile after tile of o; three warpgroups.

    supply     one: starts the TMA copies of a step of K, of a and of the 8-bit weights, into the next slot; then reads
               the weights of an older one, and writes them as 16-bit floats into one of two slots of their own
    compute    two: each multiplies its half of the tile, scales it, and sends it to o

Barrier table:

    barrier          arrivals                               who waits
    filled[slot]     2: the copies of a's and w_q's tile    all three, before they read the slot
    converted[wide]  supply                                 both compute warpgroups, before they read the weights
    freed[slot]      the compute warpgroups of all blocks   supply, before it refills the slot, or overwrites the
                     of the cluster                         weights that were converted of it

What bounds its speed: by a count of bytes, shared memory, which the weights enter with 8 bits, leave, enter with 16 and
leave again; with up to 64 rows of a, reading them from HBM takes nearly as long, half as long as 16-bit ones would.
Neighbouring tiles of a cluster share the rows of a, and K is split, so that every SM reads. With many rows the tensor
cores, as in `matmul`: the conversion runs beside them.

Not supported: zero points, scales of groups along K, 4-bit weights; batches (use `jax.vmap`); differentiation. Weights
are padded, at the cost of one copy, unless N is a multiple of 128 and K of 8, or with `transpose_w` K of 64 and N of 8.
Not timed on a GPU yet, and so not in the package's index. Source: Dettmers et al., "LLM.int8()" (2022), for the use.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import _mgpu, _tuned
from cookbook.matmul import (
    COMPUTE,
    PIECES_BYTES,
    STEP_BYTES,
    candidates,
    compute_tiles,
    fused_product,
    identity,
    load_step,
)
from cookbook.matmul import Config as MatmulConfig
from cookbook.matmul import Plan as MatmulPlan

SUPPLY_REGISTERS, COMPUTE_REGISTERS = 96, 200  # A thread; 128 threads each, 65,536 in all.
WIDE_SLOTS = 2  # Of converted weights.
VECTOR, LANES, WARPS = 8, 32, 4  # Weights that a thread converts at once; threads of a warp, warps of a warpgroup.
PIECES = 4  # Of a slot's weights, converted one after another, so that few registers hold them.


def matmul_int8_weights_reference(a, w_q, scales):
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a.astype(dtype), w_q.astype(dtype), precision="highest") * scales.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Config(MatmulConfig):
    """As of `matmul`; `num_stages` counts the slots of a and of the 8-bit weights."""

    @property
    def smem_bytes(self) -> int:
        """The ring, the converted weights, the pieces of o on their way out, and the barriers."""
        ring = self.num_stages * (self.tile_m + self.tile_n // 2) * STEP_BYTES
        wide = WIDE_SLOTS * self.tile_n * STEP_BYTES
        return ring + wide + PIECES_BYTES + 16 * self.num_stages + 8 * WIDE_SLOTS


def default_config(m: int, n: int, k: int, num_sms: int = 132) -> Config:
    """The configuration for an (m, k) by (k, n) product on `num_sms` SMs."""
    if m > 128:
        return Config(cluster_dim=0)
    tiles = 2 * pl.cdiv(n, 512)  # In clusters of two.
    split_k = max(1, min(num_sms // tiles, k // 512))
    tile_m, tile_n, num_stages = (64, 256, 5) if m <= 64 else (128, 128, 6)
    return Config(tile_m, tile_n, num_stages, split_dim=1, cluster_dim=1, split_k=split_k)


def configs(a, w_q, scales, *, transpose_w=False, **_) -> list[Config]:
    """The configurations worth timing on these operands, for `cookbook.lab.autotune`."""
    return candidates(Config, a.shape[0], scales.shape[0], a.shape[1])


def problem(a, w_q, scales, *, transpose_w=False, **_) -> str:
    """What `cookbook.lab.autotune` calls the problem: the best configuration depends on nothing else."""
    return _tuned.problem_name(a, w_q, transpose_w=transpose_w)


@dataclasses.dataclass(frozen=True)
class Plan(MatmulPlan):
    @property
    def b_is_narrow(self) -> bool:
        return False

    def padded(self, a, b):
        return super().padded(a, a)[0], _mgpu.pad_to_tiles(b, (8, 64 if self.transpose_b else 128))

    @property
    def scratch(self) -> dict:
        scratch = super().scratch
        wide = plgpu.SMEM((WIDE_SLOTS, *scratch["b_smem"].shape[1:]), self.dtypes[0])
        return scratch | dict(wide_smem=wide, converted=plgpu.Barrier(num_barriers=WIDE_SLOTS))

    @property
    def layout(self):
        """Of a piece of the weights, as the supply warpgroup holds it: neighbouring threads have neighbouring columns,
        8 of them each, which are one load of 8-bit values and one store of 16-bit ones."""
        cols = min(self.scratch["b_smem"].shape[-1], 16 * VECTOR)
        rows = LANES * VECTOR // cols
        tiling = plgpu.Tiling(((WARPS * rows, cols), (rows, cols), (VECTOR,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _kernel(a_gmem, w_gmem, fused, o_gmem, *, plan: Plan, a_smem, b_smem, o_smem, filled, freed, wide_smem, converted):
    stages = plan.config.num_stages
    a_smem, a_tma = plan.views(a_smem, plan.a_is_narrow)
    slot, wide = (lambda count: lax.rem(count, stages)), (lambda count: lax.rem(count, WIDE_SLOTS))
    steps = plan.tiles_of_block() * plan.num_steps

    def load(count):
        tile, step = lax.div(count, plan.num_steps), lax.rem(count, plan.num_steps)
        into = (x.at[slot(count)] for x in (a_tma, b_smem, filled))
        load_step(plan, plan.tile(tile), step, a_gmem, w_gmem, *into)

    def reuse(count):
        """Loads a step into the slot whose product ended `WIDE_SLOTS` steps ago."""
        plgpu.barrier_wait(freed.at[slot(count - WIDE_SLOTS)])
        ahead = count - WIDE_SLOTS + stages
        pl.when(ahead < steps)(lambda: load(ahead))

    def operands(count):
        plgpu.barrier_wait(filled.at[slot(count)])
        plgpu.barrier_wait(converted.at[wide(count)])
        return plan.halves(a_smem.at[slot(count)], wide_smem.at[wide(count)])

    @pl.when(lax.axis_index("role") == COMPUTE)
    def _():
        plgpu.set_max_registers(SUPPLY_REGISTERS, action="decrease")
        pl.loop(0, lax.min(stages, steps))(load)

        @pl.loop(0, steps)
        def _(count):
            pl.when(count >= WIDE_SLOTS)(lambda: reuse(count))
            plgpu.barrier_wait(filled.at[slot(count)])
            with jax.named_scope("convert"):
                _convert(plan, b_smem.at[slot(count)], wide_smem.at[wide(count)])
            plgpu.barrier_arrive(converted.at[wide(count)])

        # No block leaves while another of its cluster may still arrive at its barriers.
        pl.loop(lax.max(steps - WIDE_SLOTS, 0), steps)(lambda count: plgpu.barrier_wait(freed.at[slot(count)]))

    @pl.when(lax.axis_index("role") < COMPUTE)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        release = lambda count: plgpu.barrier_arrive(freed.at[slot(count)])
        compute_tiles(plan, operands, release, fused, o_gmem, o_smem)


def _convert(plan: Plan, w_smem, wide_smem):
    rows = w_smem.shape[0] // PIECES
    for piece in range(PIECES):
        part = pl.ds(piece * rows, rows)
        weights = plgpu.load(w_smem.at[part], layout=plan.layout, optimized=False)
        _mgpu.store(wide_smem.at[part], weights.astype(plan.dtypes[0]))
    plgpu.commit_smem()


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
      w_q: (K, N), or (N, K) with `transpose_w`; int8.
      scales: (N,), of a floating dtype: what one unit of a column of w_q stands for.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `a`.
      transpose_w: w_q is given transposed, and is read as it lies: no copy is made.
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
    interpreted = target.name == "the GPU interpreter"
    plan = Plan(m, n, k, (a.dtype, w_q.dtype), False, transpose_w, identity, out_dtype, config, interpreted)
    vectors = dict(col_scale=scales.astype(jnp.float32))
    return fused_product(
        a, w_q, vectors, plan=plan, num_sms=target.num_sms, params=_mgpu.compiler_params(), kernel=_kernel,
    )  # fmt: skip


def flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """a and the result, of `itemsize` bytes, and the 8-bit weights, each once."""
    return itemsize * m * k + k * n + itemsize * m * n
