"""FlashAttention-3, forward: softmax(scale q kᵀ) v without its matrix of weights ever in memory.

    out = softmax(mask(cap(scale q kᵀ))) v,    lse = log sum exp of the same logits

Shapes: query (B, T, N, H), key and value (B, S, K, H), out (B, T, N, H), lse (B, N, T). N is a multiple of K: query
head n reads key head n // (N // K). All are bfloat16 or all float16; logits, sums and lse are float32. H is a multiple
of 8, up to 256. Positions count from the start of both sequences: with `is_causal` query i sees keys 0 to i.

Role table: a block for each head and `block_q` queries; three warpgroups.

    memory     one, with few registers: copies block after block of keys and values into the next slot of two rings
    compute    two, with the others' registers, each half of the queries: s = q kᵀ on the tensor cores, softmax on the
               CUDA cores, and acc = acc * alpha + p v on the tensor cores, with p from registers

Barrier table:

    barrier            arrivals              who waits
    q_filled[wg]       copies of its queries compute warpgroup, before the first product
    k_filled[slot]     the copies of a block both compute warpgroups, before s
    v_filled[slot]     the copies of a block both compute warpgroups, before p v
    k_freed[slot]      compute warpgroups    memory, before it refills the slot
    v_freed[slot]      compute warpgroups    memory, before it refills the slot
    turn               compute warpgroups    each other: one is at the tensor cores while the other is at its softmax

Blocks of keys that a mask excludes for all queries of a block are neither loaded nor computed; of the others only those
that a mask cuts are masked, element by element.

What bounds its speed: the tensor cores, and the exponentials that wait between two products.

Not supported: masks as arrays, biases, dropout. No GPU has run it yet, and so it is not in the package's index. Source:
Shah et al., "FlashAttention-3" (2024).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import _mgpu

COMPUTE, MEMORY = 2, 2  # Compute warpgroups, and the index of the memory warpgroup, which follows them.
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # A thread; 128 threads each, 65,536 registers in all.
PIECE = 64  # Values of a row that are swizzled together, 128 bytes.
LOG2E = math.log2(math.e)
ROWS = plgpu.Layout.WGMMA.reduce(1)  # How a warpgroup holds one number for each of its queries.


def attention_reference(
    query, key, value, *, scale=None, is_causal=False, local_window_size=None, logits_soft_cap=None
):
    """(out, lse) in at least float32."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    q, k, v = (x.astype(dtype) for x in (query, key, value))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * (scale or q.shape[-1] ** -0.5)
    s = s if logits_soft_cap is None else logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    left, right = window(is_causal, local_window_size)
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    seen = (True if left is None else j >= i - left) & (True if right is None else j <= i + right) & (j >= 0)
    s = jnp.where(seen, s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    return jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest"), lse


def window(is_causal: bool, local_window_size) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees; None for all."""
    if local_window_size is None:
        local_window_size = (None, None)
    left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    return left, (0 if is_causal else right)


@dataclasses.dataclass(frozen=True)
class Config:
    block_q: int = 128  # Queries of a block, half of them for each compute warpgroup.
    block_kv: int = 128  # Keys and values of a step.
    num_stages: int = 2  # Slots of each of the two rings.

    def __post_init__(self):
        if self.block_q % (64 * COMPUTE) or self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(
                f"{self.block_q=} must be a multiple of {64 * COMPUTE} (64 rows of WGMMA for each warpgroup), "
                f"{self.block_kv=} a multiple of 64 up to 256"
            )
        if self.num_stages < 2:
            raise ValueError(f"{self.num_stages=} must be at least 2: a block is loaded while another is used")

    def smem_bytes(self, head_dim: int) -> int:
        """The queries, which o takes the place of, both rings, and the barriers."""
        row = 2 * pl.cdiv(head_dim, PIECE) * PIECE
        return (self.block_q + 2 * self.num_stages * self.block_kv) * row + 8 * (4 * self.num_stages + COMPUTE + 1)


def default_config(head_dim: int) -> Config:
    """The configuration for heads of this size."""
    if head_dim <= 128:
        return Config(num_stages=3 if head_dim <= 64 else 2)
    return Config(block_kv=64, num_stages=2)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which blocks of keys a range of queries sees: pure arithmetic, for Python's numbers and for traced ones."""

    num_kv: int  # Keys in all.
    block_kv: int
    left: int | None  # Keys that a query sees before its own position; None for all.
    right: int | None

    def seen(self, first_q, num_q: int):
        """(first, end) of the blocks that hold a key which one of the queries sees."""
        first = 0 if self.left is None else lax.max(first_q - self.left, 0)
        end = self.num_kv if self.right is None else lax.clamp(0, first_q + num_q + self.right, self.num_kv)
        first = lax.div(jnp.int32(first), jnp.int32(self.block_kv))
        return first, lax.max(first, lax.div(jnp.int32(end + self.block_kv - 1), jnp.int32(self.block_kv)))

    def whole(self, first_q, num_q: int, first, end):
        """(first, end) of those between `first` and `end` whose keys all the queries see."""
        start = first
        if self.left is not None:
            before = lax.max(first_q + num_q - 1 - self.left, 0)
            start = lax.div(jnp.int32(before + self.block_kv - 1), jnp.int32(self.block_kv))
        stop = self.num_kv if self.right is None else lax.clamp(0, first_q + self.right + 1, self.num_kv)
        start = lax.clamp(first, start, end)
        return start, lax.clamp(start, lax.div(jnp.int32(stop), jnp.int32(self.block_kv)), end)

    def mask(self, q_ids, kv_ids):
        """Whether each query sees each key."""
        seen = kv_ids < self.num_kv
        seen = seen if self.left is None else seen & (kv_ids >= q_ids - self.left)
        return seen if self.right is None else seen & (kv_ids <= q_ids + self.right)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel."""

    batch: int
    num_q: int
    num_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    left: int | None
    right: int | None
    config: Config
    interpreted: bool

    @property
    def rows(self) -> int:
        """Queries of a compute warpgroup."""
        return self.config.block_q // COMPUTE

    @property
    def pieces(self) -> int:
        """Of a row of a head: 128 bytes each."""
        return pl.cdiv(self.head_dim, PIECE)

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.num_kv, self.config.block_kv, self.left, self.right)

    @property
    def num_q_blocks(self) -> int:
        return pl.cdiv(self.num_q, self.config.block_q)

    def tiles(self, lead: int, rows: int):
        """Shared memory for rows of a head in pieces: as tensor cores read them, and as TMA writes them, which cuts off
        at the edges of an array only what it takes for rows of 128 bytes. The interpreter gets the first alone."""
        swizzle, shape = plgpu.SwizzleTransform(128), (lead, self.pieces, rows, PIECE)
        tiled = plgpu.SMEM(shape, self.dtype, transforms=(plgpu.TilingTransform((8, PIECE)), swizzle))
        return (
            tiled if self.interpreted else plgpu.RefUnion(tiled, plgpu.SMEM(shape, self.dtype, transforms=(swizzle,)))
        )

    def views(self, smem):
        """(as tensor cores, as TMA sees it) of what `tiles` described."""
        return (smem, smem) if self.interpreted else tuple(smem)

    @property
    def scratch(self) -> dict:
        c = self.config
        ring = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=c.num_stages)
        return dict(
            q_smem=self.tiles(COMPUTE, self.rows),
            k_smem=self.tiles(c.num_stages, c.block_kv),
            v_smem=self.tiles(c.num_stages, c.block_kv),
            q_filled=plgpu.Barrier(num_arrivals=self.pieces, num_barriers=COMPUTE),
            k_filled=ring(self.pieces),
            v_filled=ring(self.pieces),
            k_freed=ring(COMPUTE),
            v_freed=ring(COMPUTE),
            turn=plgpu.Barrier(num_arrivals=COMPUTE),
        )


def _kernel(
    q_gmem, k_gmem, v_gmem, out_gmem, lse_gmem, *, plan: Plan, q_smem, k_smem, v_smem, q_filled, k_filled, v_filled,
    k_freed, v_freed, turn,
):  # fmt: skip
    (q_smem, q_tma), (k_smem, k_tma), (v_smem, v_tma) = (plan.views(x) for x in (q_smem, k_smem, v_smem))
    role, batch, head = lax.axis_index("role"), lax.axis_index("batch"), lax.axis_index("head")
    # With a causal mask the last queries have most to do: they go first.
    first_q = (plan.num_q_blocks - 1 - lax.axis_index("q_block")) * plan.config.block_q
    first, end = plan.blocks.seen(first_q, plan.config.block_q)

    @pl.when(role == MEMORY)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        kv_head = lax.div(head, jnp.int32(plan.num_heads // plan.num_kv_heads))
        rings = (k_gmem, k_tma, k_filled, k_freed), (v_gmem, v_tma, v_filled, v_freed)
        _load(plan, batch, kv_head, first, end, rings)

    @pl.when(role < COMPUTE)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        my_q = first_q + role * plan.rows
        for p in range(plan.pieces):
            source = q_gmem.at[batch, pl.ds(my_q, plan.rows), head, _lane(plan, p)]
            plgpu.copy_gmem_to_smem(source, q_tma.at[role, p], q_filled.at[role])
        plgpu.barrier_wait(q_filled.at[role])
        rings = k_smem, v_smem, k_filled, v_filled, k_freed, v_freed
        acc, m, total = _compute(plan, my_q, first, end, q_smem.at[role], rings, turn)
        sees_any = total > 0
        share = jnp.where(sees_any, 1 / total, 0.0)
        out = (acc * lax.broadcast_in_dim(share, acc.shape, [0])).astype(plan.dtype)
        for p in range(plan.pieces):
            q_smem[role, p] = out[:, p * PIECE : (p + 1) * PIECE]
        plgpu.commit_smem()
        for p in range(plan.pieces):
            target = out_gmem.at[batch, pl.ds(my_q, plan.rows), head, _lane(plan, p)]
            plgpu.copy_smem_to_gmem(q_tma.at[role, p], target)
        if lse_gmem is not None:
            lse = jnp.where(sees_any, (m + jnp.log2(jnp.where(sees_any, total, 1.0))) / LOG2E, -jnp.inf)
            _mgpu.store(lse_gmem.at[batch, head, pl.ds(my_q, plan.rows)], lse)
        plgpu.wait_smem_to_gmem(0)


def _lane(plan: Plan, piece: int):
    """Values of a head that a piece holds. Pallas lets only a traced start go beyond the edge."""
    start = piece * PIECE
    return pl.ds(start if start + PIECE <= plan.head_dim else start + 0 * lax.axis_index("batch"), PIECE)


def _load(plan: Plan, batch, kv_head, first, end, rings):
    """The memory warpgroup: blocks `first` to `end` of keys and values, as fast as slots are given back."""
    c = plan.config

    @pl.loop(0, end - first)
    def _(step):
        slot = lax.rem(step, jnp.int32(c.num_stages))
        rows = pl.ds((first + step) * c.block_kv, c.block_kv)
        for gmem, smem, filled, freed in rings:
            pl.when(step >= c.num_stages)(lambda freed=freed: plgpu.barrier_wait(freed.at[slot]))
            for p in range(plan.pieces):
                source = gmem.at[batch, rows, kv_head, _lane(plan, p)]
                plgpu.copy_gmem_to_smem(source, smem.at[slot, p], filled.at[slot])

    # The last slots are given back too.
    steps = end - first
    for _, _, _, freed in rings:
        wait = lambda step, freed=freed: plgpu.barrier_wait(freed.at[lax.rem(step, jnp.int32(c.num_stages))])
        pl.loop(lax.max(steps - c.num_stages, 0), steps)(wait)


def _compute(plan: Plan, my_q, first, end, q_smem, rings, turn):
    """A compute warpgroup: (acc, m, total) of its queries: not yet divided, their largest logit in base 2, the sum."""
    c, role, shape = plan.config, lax.axis_index("role"), (plan.rows, plan.config.block_kv)
    k_smem, v_smem, k_filled, v_filled, k_freed, v_freed = rings
    slot = lambda block: lax.rem(block - first, jnp.int32(c.num_stages))
    per_row = lambda values, shape=shape: lax.broadcast_in_dim(values, shape, [0])

    def take_turns():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def logits(block):
        def multiply(s):
            plgpu.barrier_wait(k_filled.at[slot(block)])
            for p in range(plan.pieces):
                plgpu.wgmma(s, q_smem.at[p], k_smem.at[slot(block), p].T)
            take_turns()
            return s[...]

        s = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(k_freed.at[slot(block)])
        return s if plan.soft_cap is None else jnp.tanh(s * (plan.scale / plan.soft_cap))

    # What a logit is of what `logits` returns, in base 2. Largest ones are found before, so that it must be positive.
    unit = LOG2E * (plan.scale if plan.soft_cap is None else plan.soft_cap)

    def step(block, carry, masked: bool):
        acc, m, total = carry
        s = logits(block)
        if masked:
            ids = [plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1)]
            s = jnp.where(plan.blocks.mask(ids[0] + my_q, ids[1] + block * c.block_kv), s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=1) * unit)
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
        p = jnp.exp2(s * unit - per_row(shift))  # One multiply-add and one exponential each.
        alpha = jnp.exp2(m - shift)
        total = total * alpha + p.sum(axis=1)
        acc = acc * per_row(alpha, acc.shape)
        p = p.astype(plan.dtype)
        acc, total, m_new, p = lax.optimization_barrier((acc, total, m_new, p))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(v_filled.at[slot(block)])
        plgpu.barrier_wait(turn)
        acc = _add_product(plan, acc, p, v_smem.at[slot(block)])
        plgpu.barrier_arrive(v_freed.at[slot(block)])
        return acc, m_new, total

    acc = plgpu.layout_cast(jnp.zeros((plan.rows, plan.pieces * PIECE), jnp.float32), plgpu.Layout.WGMMA)
    m = plgpu.layout_cast(jnp.full((plan.rows,), -jnp.inf, jnp.float32), ROWS)
    total = plgpu.layout_cast(jnp.zeros((plan.rows,), jnp.float32), ROWS)
    start, stop = plan.blocks.whole(my_q, plan.rows, first, end)
    pl.when(role == 1)(take_turns)  # The second warpgroup is half a step behind the first.
    carry = lax.fori_loop(first, start, functools.partial(step, masked=True), (acc, m, total))
    carry = lax.fori_loop(start, stop, functools.partial(step, masked=False), carry)
    carry = lax.fori_loop(stop, end, functools.partial(step, masked=True), carry)
    pl.when(role == 0)(take_turns)
    return carry


def _add_product(plan: Plan, acc, p, v_smem):
    """`acc + p @ v`, with p from registers."""
    if plan.interpreted:  # Which wants both operands of WGMMA in shared memory.
        v = jnp.concatenate([v_smem[i] for i in range(plan.pieces)], axis=1)
        plgpu.commit_smem()  # TMA may write again what has been read here.
        return acc + jnp.dot(p, v, preferred_element_type=jnp.float32)

    def multiply(acc_ref):
        for i in range(plan.pieces):
            plgpu.wgmma(acc_ref.at[:, i * PIECE : (i + 1) * PIECE], p, v_smem.at[i])

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


@functools.partial(jax.jit, static_argnames=("plan", "return_lse", "params"))
def _forward(query, key, value, *, plan: Plan, return_lse: bool, params):
    c = plan.config
    out_type = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    if return_lse:
        lse_shape = (plan.batch, plan.num_heads, plan.num_q_blocks * c.block_q)
        out_type.append(jax.ShapeDtypeStruct(lse_shape, jnp.float32))
    kernel = functools.partial(_kernel, plan=plan)
    body = kernel if return_lse else lambda q, k, v, out, **scratch: kernel(q, k, v, out, None, **scratch)
    out, *lse = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(plan.num_q_blocks, plan.num_heads, plan.batch),
        grid_names=("q_block", "head", "batch"),
        num_threads=COMPUTE + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(query, key, value)
    return (out, lse[0][:, :, : plan.num_q]) if return_lse else out


def _check(query, key, value, scale, local_window_size, logits_soft_cap) -> None:
    op = "cookbook.attention"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{op}: {name}.shape = {x.shape}; must be (batch, positions, heads, head_dim)")
        if x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != query.dtype:
            raise ValueError(f"{op}: {name}.dtype = {x.dtype}; all must be bfloat16 or all float16: cast them")
    if key.shape != value.shape or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"{op}: {query.shape=}, {key.shape=}, {value.shape=}; key and value must have the same shape, and batch "
            "and head_dim of query"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{op}: {query.shape[2]} query heads are no multiple of {key.shape[2]} key heads")
    if query.shape[3] % 8 or not 8 <= query.shape[3] <= 256:
        raise ValueError(
            f"{op}: head_dim = {query.shape[3]} must be a multiple of 8 up to 256 (TMA's 16 bytes): pad it"
        )
    if 0 in query.shape or 0 in key.shape:
        raise ValueError(f"{op}: {query.shape=}, {key.shape=}; no size may be 0")
    sizes = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,)
    for name, number in (("scale", scale), ("logits_soft_cap", logits_soft_cap)):
        if number is not None and not number > 0:
            raise ValueError(f"{op}: {name} = {number} must be above 0")
    if any(size is not None and size < 0 for size in sizes):
        raise ValueError(f"{op}: {local_window_size=} must be keys before and after, each at least 0")


def attention(
    query, key, value, *, scale=None, is_causal=False, local_window_size=None, logits_soft_cap=None, return_lse=False,
    config: Config | None = None,
):  # fmt: skip
    """Scaled dot-product attention, as `jax.nn.dot_product_attention`; the same to the bit in every run.

    Args:
      query: (B, T, N, H); bfloat16 or float16.
      key, value: (B, S, K, H), of the dtype of `query`; K divides N.
      scale: what logits are multiplied by; None for 1 / sqrt(H).
      is_causal: query i sees keys up to i.
      local_window_size: (left, right): query i sees keys i - left to i + right; one number for both.
      logits_soft_cap: c, so that logits become c tanh(logits / c).
      return_lse: also return the logarithms of the sums of exponentials.
      config: blocks and stages; None chooses by H.

    Returns:
      (B, T, N, H), of the dtype of `query`; with `return_lse` also (B, N, T), float32, natural logarithms. A query that
      sees no key gives zeros, and -inf.

    Raises:
      ValueError: a shape, dtype or window is not supported; RuntimeError: no GPU.
    """
    _check(query, key, value, scale, local_window_size, logits_soft_cap)
    target = _mgpu.require_target("attention")
    (batch, num_q, num_heads, head_dim), (_, num_kv, num_kv_heads, _) = query.shape, key.shape
    left, right = window(is_causal, local_window_size)
    plan = Plan(
        batch, num_q, num_kv, num_heads, num_kv_heads, head_dim, query.dtype, scale or head_dim**-0.5, logits_soft_cap,
        left, right, config or default_config(head_dim), interpreted=target.name == "the GPU interpreter",
    )  # fmt: skip
    if (need := plan.config.smem_bytes(head_dim)) > _mgpu.SMEM_BYTES_MAX:
        raise ValueError(
            f"cookbook.attention: {plan.config} needs {need} bytes of shared memory for head_dim = {head_dim}, and a "
            f"block has {_mgpu.SMEM_BYTES_MAX}: fewer stages or smaller blocks"
        )
    params = _mgpu.compiler_params(approx_math=True)
    return _forward(query, key, value, plan=plan, return_lse=return_lse, params=params)


def flops(batch: int, num_q: int, num_kv: int, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
    """Of the two products; half of them with a causal mask."""
    return 4 * batch * num_heads * num_q * num_kv * head_dim // (2 if is_causal else 1)


def bytes_moved(batch: int, num_q: int, num_kv: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """query and out, key and value, of 16 bits, each once."""
    return 4 * batch * head_dim * (num_q * num_heads + num_kv * num_kv_heads)
