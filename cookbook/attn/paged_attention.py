"""Paged attention, decode: one query token of each sequence, keys and values in pages of a cache.

    out = softmax(mask(cap(scale q kᵀ))) v,    lse = log sum exp of the same logits

Shapes: q (num_seqs, N, H), k_pages and v_pages (num_pages, page_size, K, H), block_tables (num_seqs, pages_per_seq),
int32: page `block_tables[i, j]` holds tokens j page_size to (j + 1) page_size of sequence i, of which the first
`kv_lens[i]` count. out (num_seqs, N, H), lse (num_seqs, N). N is a multiple of K; the N / K query heads that share keys
are the rows of one WGMMA, which has 64.

A unit is a KV head, with up to 64 of the query heads that read it. The blocks of keys of all sequences, one after the
other, are cut into equal parts, so that all end at the same time, whatever the lengths are. There are as many parts as
there can be if each unit of each part gets an SM of its own, so units that read other heads of the same pages do so at
about the same time. A piece is the share of a part in one sequence; a second kernel merges the pieces of each sequence.

Role table: one block a SM, for a unit of a part, which it computes piece after piece; the warpgroups are

    memory     one: copies the query of a piece, and the pages of block after block, which it finds through the block
               table, into the slots of a ring
    compute    one: s = q kᵀ, softmax and p v of block after block; then out and lse of the piece

Barrier table:

    barrier        arrivals                    who waits
    q_filled       copies of a piece's query   compute, before its first product
    q_freed        compute                     memory, before it copies the query of the next piece, which takes the
                                               place of out of this one; its first blocks are in flight by then
    filled[slot]   copies of the pages of a    compute, before s
                   block, keys and values
    freed[slot]    compute                     memory, before it refills the slot

Bound by: memory, of which each key and value is read once; once for each 64 heads of a larger group.

Page ids and lengths: TMA reads zeros where an index is out of range, and any id that is becomes the first one after
the last page: no id can read elsewhere, and every copy that is waited for arrives. A length is cut at what the block
table holds. Keys after it in a page are masked, and values there are overwritten with zeros: not even NaN gets out.

Not supported: pages of other sizes than 16, 32, 64, 128 and 256, heads of others than 64, 128 and 256, gradients.
Sources: Kwon et al., "PagedAttention" (2023); Osama et al., "Stream-K" (2023), on equal parts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from .core import (
    HEAD_DIMS,
    LOG2E,
    PIECE,
    ROWS,
    check_numbers,
    div,
    page_of,
    rem,
    row_tiles,
    slot_of,
    window,
)

QUERY_ROWS = 64  # Rows of a WGMMA: query heads that share keys, and padding, whose results are discarded.
PAGE_SIZES = (16, 32, 64, 128, 256)
COMPUTE, MEMORY = 0, 1  # Warpgroups by their role.
PIECES_AT_ONCE = 8  # Pieces that are merged together.


def paged_attention_reference(
    q, k_pages, v_pages, block_tables, kv_lens, *, scale=None, logits_soft_cap=None, local_window_size=None
):
    """(out, lse) in at least float32, over gathered pages."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    (num_seqs, num_heads, head_dim), (_, page_size, kv_heads, _) = q.shape, k_pages.shape
    length = block_tables.shape[1] * page_size
    position = jnp.arange(length)
    seen = position < kv_lens[:, None]
    if (left := window(True, local_window_size)[0]) is not None:
        seen &= position >= kv_lens[:, None] - 1 - left
    there = ((block_tables >= 0) & (block_tables < len(k_pages)))[:, :, None, None, None]
    gather = lambda pages: jnp.where(there, pages[block_tables], 0).reshape(num_seqs, length, kv_heads, head_dim)
    k, v = (jnp.where(seen[:, :, None, None], gather(pages), 0).astype(dtype) for pages in (k_pages, v_pages))
    grouped = q.astype(dtype).reshape(num_seqs, kv_heads, -1, head_dim)
    s = jnp.einsum("bkgh,bskh->bkgs", grouped, k, precision="highest") * (scale or head_dim**-0.5)
    s = s if logits_soft_cap is None else logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    seen = seen[:, None, None]
    sees_any = seen.any(-1)
    s = jnp.where(seen, s, jnp.where(sees_any[..., None], -jnp.inf, 0.0))
    lse = jnp.where(sees_any, jax.nn.logsumexp(s, axis=-1), -jnp.inf)
    p = jnp.where(sees_any[..., None], jax.nn.softmax(s, axis=-1), 0.0)
    out = jnp.einsum("bkgs,bskh->bkgh", p, v, precision="highest")
    return out.reshape(q.shape), lse.reshape(num_seqs, num_heads)


def merge_attention(out_a, lse_a, out_b, lse_b):
    """(out, lse) over the keys of both, of results over disjoint keys: out (..., H), lse (...), natural logarithms."""
    lse = jnp.logaddexp(lse_a, lse_b)
    share = lambda part: jnp.where(jnp.isneginf(part), 0.0, jnp.exp(part - jnp.where(jnp.isneginf(lse), 0.0, lse)))
    out = share(lse_a)[..., None] * out_a.astype(jnp.float32) + share(lse_b)[..., None] * out_b.astype(jnp.float32)
    return out.astype(out_a.dtype), lse


@dataclasses.dataclass(frozen=True)
class Config:
    block_kv: int = 128  # Tokens of a step.
    num_stages: int = 2  # Slots of the ring.

    def __post_init__(self):
        if self.block_kv not in (64, 128) or self.num_stages < 2:
            raise ValueError(
                f"{self.block_kv=} must be 64 or 128 (tokens that tensor cores take at once), {self.num_stages=} at "
                "least 2 (a block is loaded while another is used)"
            )

    def smem_bytes(self, head_dim: int) -> int:
        """Out in float32, in whose place the query lies before; the ring; and the barriers."""
        return (4 * QUERY_ROWS + 4 * self.num_stages * self.block_kv) * head_dim + 8 * (2 * self.num_stages + 2)


def default_config(head_dim: int) -> Config:
    if head_dim <= 64:
        return Config(num_stages=4)
    return Config() if head_dim <= 128 else Config(block_kv=64)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernels."""

    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    pages_per_seq: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    left: int | None  # Tokens before the last one that it sees.
    config: Config
    num_sms: int
    interpreted: bool

    @property
    def group(self) -> int:
        """Query heads that share keys."""
        return self.num_heads // self.num_kv_heads

    @property
    def chunks(self) -> int:
        """Units that a group makes."""
        return pl.cdiv(self.group, QUERY_ROWS)

    @property
    def rows(self) -> int:
        """Query heads of a unit."""
        return pl.cdiv(self.group, self.chunks)

    @property
    def rows_at_once(self) -> int:
        """Rows that the second kernel merges at once: one to four values for each of its 128 threads."""
        least = max(1, 128 // self.head_dim)
        return min(pl.cdiv(self.rows, least) * least, 512 // self.head_dim)

    @property
    def stored_rows(self) -> int:
        return pl.cdiv(self.rows, self.rows_at_once) * self.rows_at_once

    @property
    def num_units(self) -> int:
        return self.num_kv_heads * self.chunks

    @property
    def num_parts(self) -> int:
        return max(1, self.num_sms // self.num_units)

    @property
    def pieces(self) -> int:
        """Pieces of a row of a query, 128 bytes each."""
        return self.head_dim // PIECE

    @property
    def copies(self) -> int:
        """Copies of keys, or of values, for a block."""
        return max(1, self.config.block_kv // self.page_size)

    @property
    def scratch(self) -> dict:
        c, transforms = self.config, (plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(128))
        ring = plgpu.SMEM((c.num_stages, c.block_kv, self.head_dim), self.dtype, transforms=transforms)
        query = row_tiles((self.pieces, QUERY_ROWS, PIECE), self.dtype, self.interpreted)
        out = plgpu.SMEM((QUERY_ROWS, self.head_dim), jnp.float32)
        return dict(
            q_and_out=[query, out] if self.interpreted else plgpu.RefUnion(*query.refs, out),
            k_smem=ring,
            v_smem=ring,
            q_filled=plgpu.Barrier(num_arrivals=self.pieces),
            q_freed=plgpu.Barrier(),
            filled=plgpu.Barrier(num_arrivals=2 * self.copies, num_barriers=c.num_stages),
            freed=plgpu.Barrier(num_barriers=c.num_stages),
        )

    def length(self, kv_len):
        """`kv_len`, cut at what the block table holds."""
        return jnp.clip(kv_len, 0, self.pages_per_seq * self.page_size)

    def blocks(self, kv_len):
        """(first, number) of the blocks of keys that the last of so many tokens sees; one, if only to find none."""
        kv_len = self.length(kv_len)
        first = 0 * kv_len if self.left is None else div(jnp.maximum(kv_len - 1 - self.left, 0), self.config.block_kv)
        return first, jnp.maximum(div(kv_len + self.config.block_kv - 1, self.config.block_kv) - first, 1)

    def start(self, part, num_blocks):
        """The first block of a part: the first parts have one more where they cannot all have as many."""
        return part * div(num_blocks, self.num_parts) + jnp.minimum(part, rem(num_blocks, self.num_parts))

    def part_of(self, block, num_blocks):
        """The part that has a block."""
        share, extra = div(num_blocks, self.num_parts), rem(num_blocks, self.num_parts)
        in_long_ones = lax.div(block, share + 1)
        return jnp.where(block < extra * (share + 1), in_long_ones, lax.div(block - extra, jnp.maximum(share, 1)))


class Part:
    """Work of a block of threads: `steps` blocks of keys, from block `begin` of `first_seq` on, in so many `pieces`.
    `ends` are those of the sequences in the row of all blocks, and `seqs` the first sequence of each part."""

    def __init__(self, plan: Plan, ends, seqs, kv_lens, part):
        starts, found, begins = [], [], []
        for p in (part, part + 1):
            seq = jnp.minimum(seqs[p], plan.num_seqs - 1)
            _, steps = plan.blocks(kv_lens[seq])
            starts.append(plan.start(p, ends[plan.num_seqs - 1]))
            found.append(seq)
            begins.append(starts[-1] - ends[seq] + steps)
        self.first_seq, self.begin, self.steps = found[0], begins[0], starts[1] - starts[0]
        self.pieces = jnp.where(self.steps > 0, found[1] + jnp.where(begins[1] > 0, 1, 0) - self.first_seq, 0)


class Piece:
    """Share of a part in one sequence: blocks `first` to `first + steps` of its keys."""

    def __init__(self, plan: Plan, kv_lens, seq, begin, remaining):
        self.seq = seq
        self.kv_len = plan.length(kv_lens[seq])
        first, steps = plan.blocks(self.kv_len)
        self.first = first + begin
        self.steps = jnp.minimum(steps - begin, remaining)


def _kernel(
    ends, seqs, kv_lens, block_tables, q_gmem, k_gmem, v_gmem, out_gmem, lse_gmem, *, plan: Plan, q_and_out, k_smem,
    v_smem, q_filled, q_freed, filled, freed,
):  # fmt: skip
    c, role, part, unit = plan.config, *(lax.axis_index(name) for name in ("role", "part", "unit"))
    q_smem, q_tma, o_smem = q_and_out if not plan.interpreted else (q_and_out[0], *q_and_out)

    def for_each_piece(body):
        """Call `body(i, piece, count)` for each piece of this part, after `count` steps. Return (steps, pieces)."""
        mine = Part(plan, ends, seqs, kv_lens, part)

        def one(i, count):
            begin = jnp.where(i == 0, mine.begin, 0)
            piece = Piece(plan, kv_lens, mine.first_seq + i, begin, mine.steps - count)
            body(i, piece, count)
            return count + piece.steps

        return lax.fori_loop(0, mine.pieces, one, jnp.int32(0)), mine.pieces

    @pl.when(role == COMPUTE)
    def _():
        compute = functools.partial(_compute, plan, q_smem, k_smem, v_smem, q_filled, filled, freed)

        def store(i, piece, count):
            out, lse = compute(piece, count)
            _mgpu.store(o_smem, out)
            plgpu.commit_smem()
            # Pieces are in order of sequences and of parts, so that no two have the same sum.
            plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, plan.stored_rows)], out_gmem.at[piece.seq + part, unit])
            _mgpu.store(lse_gmem.at[piece.seq + part, unit], lse)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(q_freed)

        for_each_piece(store)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == MEMORY)
    def _():
        load = functools.partial(_load, plan, block_tables, (q_gmem, q_tma, q_filled, q_freed))
        count, pieces = for_each_piece(functools.partial(load, (k_gmem, k_smem), (v_gmem, v_smem), filled, freed))
        # The last slots are given back too.
        last = lambda step: plgpu.barrier_wait(freed.at[slot_of(plan, step)])
        pl.loop(jnp.maximum(count - c.num_stages, 0), count)(last)
        pl.when(pieces > 0)(lambda: plgpu.barrier_wait(q_freed))


def _load(plan: Plan, block_tables, query, keys, values, filled, freed, i, piece: Piece, count):
    """The memory warpgroup: the query heads of a unit, and block after block of its keys and values."""
    c, (q_gmem, q_smem, q_filled, q_freed), unit = plan.config, query, lax.axis_index("unit")
    kv_head = div(unit, plan.chunks)
    head = kv_head * plan.group + rem(unit, plan.chunks) * plan.rows
    tokens = min(plan.page_size, c.block_kv)  # Tokens that a copy takes from a page.

    def pages(step):
        """The pages that the copies of a block read."""
        first = (piece.first + step) * c.block_kv
        columns = [div(first + j * tokens, plan.page_size) for j in range(plan.copies)]
        return [page_of(block_tables, piece.seq, column, plan.num_pages) for column in columns]

    def load_query():
        pl.when(i > 0)(lambda: plgpu.barrier_wait(q_freed))
        for p in range(plan.pieces):
            # Heads after the unit's are copied too, as far as there are any; their results are discarded.
            source = q_gmem.at[piece.seq, pl.ds(head, QUERY_ROWS), pl.ds(p * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(source, q_smem.at[p], q_filled)

    # The query comes after as many blocks as there are slots: the ring is full while the previous piece is stored.
    blocks_before_query = jnp.where(i == 0, 1, jnp.minimum(piece.steps, c.num_stages))

    def one(step, found):
        slot = slot_of(plan, count + step)
        found_next = pages(step + 1)  # In flight while this one waits.
        pl.when(count + step >= c.num_stages)(lambda: plgpu.barrier_wait(freed.at[slot]))
        first = rem((piece.first + step) * c.block_kv, plan.page_size) if plan.copies == 1 else 0
        for j, page in enumerate(found):
            for gmem, smem in (keys, values):
                source = gmem.at[page, pl.ds(first, tokens), kv_head]
                plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(j * tokens, tokens)], filled.at[slot])
        pl.when(step + 1 == blocks_before_query)(load_query)
        return found_next

    lax.fori_loop(0, piece.steps, one, pages(0))


def _compute(plan: Plan, q_smem, k_smem, v_smem, q_filled, filled, freed, piece: Piece, count):
    """The compute warpgroup: (out, lse) of a piece, in float32; base-2 logarithms."""
    c, shape = plan.config, (QUERY_ROWS, plan.config.block_kv)
    low = 0 if plan.left is None else jnp.maximum(piece.kv_len - 1 - plan.left, 0)  # The first token that is seen.
    # Scale from a stored score to its base-2 logit. It must be positive: the maximum is taken before scaling.
    unit = LOG2E * (plan.scale if plan.soft_cap is None else plan.soft_cap)
    per_row = lambda numbers, shape: lax.broadcast_in_dim(numbers, shape, [0])

    def step(step, carry, masked: bool):
        acc, m, total = carry
        slot, first = slot_of(plan, count + step), (piece.first + step) * c.block_kv
        plgpu.barrier_wait(filled.at[slot])

        def logits(s_ref):
            for p in range(plan.pieces):
                plgpu.wgmma(s_ref, q_smem.at[p], k_smem.at[slot, :, pl.ds(p * PIECE, PIECE)].T)
            return s_ref[...]

        s = pl.run_scoped(logits, plgpu.ACC(shape, jnp.float32))
        s = s if plan.soft_cap is None else jnp.tanh(s * (plan.scale / plan.soft_cap))
        if masked:
            token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first
            s = jnp.where((token >= low) & (token < piece.kv_len), s, -jnp.inf)
            _clear(v_smem.at[slot], low - first, piece.kv_len - first)
        m_new = jnp.maximum(m, s.max(axis=1) * unit)
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
        p = jnp.exp2(s * unit - per_row(shift, shape))
        alpha = jnp.exp2(m - shift)
        total = total * alpha + p.sum(axis=1)
        acc, p = acc * per_row(alpha, acc.shape), p.astype(plan.dtype)
        if plan.interpreted:  # It wants both operands of WGMMA in shared memory.
            acc = acc + jnp.dot(p, v_smem[slot], preferred_element_type=jnp.float32)
            plgpu.commit_smem()
        else:
            acc = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_smem.at[slot]))(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(freed.at[slot])
        return acc, m_new, total

    numbers = lambda value: plgpu.layout_cast(jnp.full((QUERY_ROWS,), value, jnp.float32), ROWS)
    acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, plan.head_dim), jnp.float32), plgpu.Layout.WGMMA)
    carry = acc, numbers(-jnp.inf), numbers(0.0)
    # Steps whose tokens are all seen lie between `start` and `end`.
    end = jnp.clip(div(piece.kv_len, c.block_kv) - piece.first, 0, piece.steps)
    start = jnp.int32(0)
    if plan.left is not None:
        start = jnp.clip(div(low + c.block_kv - 1, c.block_kv) - piece.first, 0, end)
    plgpu.barrier_wait(q_filled)
    if plan.left is not None:
        carry = lax.fori_loop(0, start, functools.partial(step, masked=True), carry)
    carry = lax.fori_loop(start, end, functools.partial(step, masked=False), carry)
    acc, m, total = lax.fori_loop(end, piece.steps, functools.partial(step, masked=True), carry)
    sees_any = total > 0
    out = acc * per_row(jnp.where(sees_any, 1 / total, 0.0), acc.shape)
    return out, jnp.where(sees_any, m + jnp.log2(jnp.where(sees_any, total, 1.0)), -jnp.inf)


def _clear(v_smem, first, end):
    """Zero the values of a block before row `first` and from `end` on, which may be NaN."""
    rows, cols = v_smem.shape
    for r in range(0, rows, 64):
        for p in range(0, cols, PIECE):
            part = v_smem.at[pl.ds(r, 64), pl.ds(p, PIECE)]
            row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA) + r
            part[...] = jnp.where((row >= first) & (row < end), part[...], jnp.zeros((), part.dtype))
    plgpu.commit_smem()


def _merge(ends, kv_lens, part_gmem, part_lse_gmem, out_gmem, lse_gmem, *, plan: Plan):
    """The second kernel: merges the pieces of a sequence, in their order."""
    seq, unit, rows = lax.axis_index("seq_index"), lax.axis_index("unit"), plan.rows_at_once
    first_row = lax.axis_index("rows") * rows
    shape = (rows * plan.head_dim,)
    (_, steps), num_blocks = plan.blocks(kv_lens[seq]), ends[plan.num_seqs - 1]
    first_piece, last_piece = (seq + plan.part_of(block, num_blocks) for block in (ends[seq] - steps, ends[seq] - 1))
    which = div(plgpu.broadcasted_iota(jnp.int32, shape, 0), plan.head_dim)
    of_rows = lambda numbers: functools.reduce(lambda a, r: jnp.where(which == r, numbers[r], a), range(1, rows),
                                               jnp.full(shape, numbers[0]))  # fmt: skip

    def some(i, carry):
        """A few pieces, whose loads do not wait for each other."""
        acc, m, total = carry
        pieces = [first_piece + PIECES_AT_ONCE * i + j for j in range(PIECES_AT_ONCE)]
        lse, out = [], []
        for piece in pieces:
            index = jnp.minimum(piece, last_piece)
            lse.append(
                [
                    jnp.where(piece <= last_piece, part_lse_gmem[index, unit, first_row + r], -jnp.inf)
                    for r in range(rows)
                ]
            )
            out.append(part_gmem[index, unit, pl.ds(first_row * plan.head_dim, rows * plan.head_dim)])
        m_new = [functools.reduce(jnp.maximum, (each[r] for each in lse), m[r]) for r in range(rows)]
        shift = [jnp.where(x == -jnp.inf, 0.0, x) for x in m_new]
        alpha = [jnp.exp2(m[r] - shift[r]) for r in range(rows)]
        shares = [[jnp.exp2(each[r] - shift[r]) for r in range(rows)] for each in lse]
        acc = acc * of_rows(alpha)
        for share, each in zip(shares, out, strict=True):
            acc = acc + of_rows(share) * each
        return acc, m_new, [total[r] * alpha[r] + sum(share[r] for share in shares) for r in range(rows)]

    numbers = lambda value: [jnp.float32(value) + 0.0 * seq.astype(jnp.float32) for _ in range(rows)]
    carry = jnp.zeros(shape, jnp.float32), numbers(-jnp.inf), numbers(0.0)
    groups = div(last_piece - first_piece, PIECES_AT_ONCE) + 1
    acc, m, total = lax.fori_loop(0, groups, some, carry)
    out = acc * of_rows([jnp.where(x > 0, 1 / x, 0.0) for x in total])
    out_gmem[seq, unit, pl.ds(first_row * plan.head_dim, rows * plan.head_dim)] = out.astype(plan.dtype)
    for r in range(rows):
        lse = (m[r] + jnp.log2(jnp.where(total[r] > 0, total[r], 1.0))) / LOG2E
        lse_gmem[seq, unit, first_row + r] = jnp.where(total[r] > 0, lse, -jnp.inf)


def _ends_and_seqs(plan: Plan, kv_lens):
    """`ends` and `seqs` of `Part`, by two small kernels of XLA, once for all layers of a model under one `jax.jit`."""
    _, steps = plan.blocks(kv_lens)
    seq = jnp.arange(plan.num_seqs)
    ends = jnp.sum(jnp.where(seq <= seq[:, None], steps, 0), axis=1, dtype=jnp.int32)
    starts = plan.start(jnp.arange(plan.num_parts + 1, dtype=jnp.int32), ends[-1])
    return ends, jnp.sum(ends <= starts[:, None], axis=1, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def _decode(q, k_pages, v_pages, block_tables, kv_lens, *, plan: Plan, params):
    """(out, lse)."""
    ends, seqs = _ends_and_seqs(plan, kv_lens)
    num_pieces = plan.num_seqs + plan.num_parts
    part_out, part_lse = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((num_pieces, plan.num_units, plan.stored_rows, plan.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_pieces, plan.num_units, QUERY_ROWS), jnp.float32),
        ],
        grid=(plan.num_parts, plan.num_units),
        grid_names=("part", "unit"),
        num_threads=2,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(ends, seqs, kv_lens, block_tables, q, k_pages, v_pages)
    row = plan.stored_rows * plan.head_dim
    out, lse = plgpu.kernel(
        functools.partial(_merge, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((plan.num_seqs, plan.num_units, row), q.dtype),
            jax.ShapeDtypeStruct((plan.num_seqs, plan.num_units, plan.stored_rows), jnp.float32),
        ],
        grid=(plan.num_seqs, plan.num_units, plan.stored_rows // plan.rows_at_once),
        grid_names=("seq_index", "unit", "rows"),
        compiler_params=params,
    )(ends, kv_lens, part_out.reshape(num_pieces, plan.num_units, row), part_lse)
    # Padding rows and heads; their results are discarded.
    of_heads = lambda x, *end: x.reshape(plan.num_seqs, plan.num_kv_heads, plan.chunks, plan.stored_rows, *end)[
        :, :, :, : plan.rows
    ].reshape(plan.num_seqs, plan.num_kv_heads, -1, *end)[:, :, : plan.group]
    out, lse = of_heads(out, plan.head_dim), of_heads(lse)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _check(q, k_pages, v_pages, block_tables, kv_lens, scale, logits_soft_cap, local_window_size) -> None:
    op = "cookbook.paged_attention"
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"{op}: {q.shape=}; must be (num_seqs, heads, head_dim), none of them 0")
    check_cache(op, q, k_pages, v_pages, block_tables, kv_lens)
    if block_tables.shape[0] != q.shape[0]:
        raise ValueError(f"{op}: {q.shape=} and {block_tables.shape=} differ in their number of sequences")
    check_numbers(op, scale, logits_soft_cap, local_window_size)


def check_cache(op: str, q, k_pages, v_pages, block_tables, kv_lens) -> None:
    """Check the operands of attention over pages, q (..., heads, head_dim) among them.

    Raises:
      ValueError: a shape or dtype is not supported.
    """
    for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != q.dtype:
            raise ValueError(f"{op}: {name}.dtype = {x.dtype}; all must be bfloat16 or all float16: cast them")
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape or k_pages.shape[3] != q.shape[-1] or 0 in k_pages.shape:
        raise ValueError(
            f"{op}: {k_pages.shape=}, {v_pages.shape=}, {q.shape=}; both caches must be (num_pages, page_size, "
            "kv_heads, head_dim), with the head_dim of q"
        )
    num_pages, page_size, num_kv_heads, head_dim = k_pages.shape
    if page_size not in PAGE_SIZES or head_dim not in HEAD_DIMS:
        raise ValueError(
            f"{op}: {page_size=} must be one of {PAGE_SIZES}, {head_dim=} one of {HEAD_DIMS} (TMA's boxes)"
        )
    if q.shape[-2] % num_kv_heads:
        raise ValueError(f"{op}: {q.shape[-2]} query heads are no multiple of {num_kv_heads} key heads")
    if k_pages.size // head_dim >= 2**31:
        raise ValueError(f"{op}: {k_pages.shape=} has 2^31 rows or more, which TMA cannot index: split the cache")
    if block_tables.ndim != 2 or 0 in block_tables.shape or kv_lens.shape != block_tables.shape[:1]:
        raise ValueError(
            f"{op}: {block_tables.shape=}, {kv_lens.shape=}; must be (num_seqs, pages_per_seq), none of them 0, and "
            "(num_seqs,)"
        )
    for name, x in (("block_tables", block_tables), ("kv_lens", kv_lens)):
        if x.dtype != jnp.int32:
            raise ValueError(f"{op}: {name}.dtype = {x.dtype}; must be int32: cast it")


def check_block_tables(block_tables, kv_lens, *, num_pages: int, page_size: int) -> None:
    """Looks at the numbers themselves, on the host; the kernels, which cannot raise, read zeros in place of a page that
    is not there and cut a length that the table cannot hold.

    Args:
      block_tables: (num_seqs, pages_per_seq), integers.
      kv_lens: (num_seqs,), integers.
      num_pages, page_size: of the cache.

    Raises:
      ValueError: names the first sequence whose length, or one of whose pages below its length, is out of range.
    """
    tables, lens = np.asarray(block_tables), np.asarray(kv_lens)
    for seq, (table, length) in enumerate(zip(tables, lens, strict=True)):
        if not 0 <= length <= tables.shape[1] * page_size:
            raise ValueError(
                f"sequence {seq}: kv_lens[{seq}] = {length}; must be from 0 to {tables.shape[1]} pages of {page_size} "
                "tokens: widen block_tables"
            )
        used = table[: pl.cdiv(int(length), page_size)]
        if len(wrong := np.flatnonzero((used < 0) | (used >= num_pages))):
            j = wrong[0]
            raise ValueError(
                f"sequence {seq}: block_tables[{seq}, {j}] = {used[j]}; must be a page from 0 to {num_pages - 1}, for "
                f"its {length} tokens reach into it"
            )


def paged_attention(
    q, k_pages, v_pages, block_tables, kv_lens, *, scale=None, logits_soft_cap=None, local_window_size=None,
    return_lse=False, config: Config | None = None,
):  # fmt: skip
    """Attention of the last token of each sequence to all of its tokens, whose keys and values lie in pages.

    The same to the bit in every run. A page that is not there counts as zeros, and a length is cut at what the block
    table holds: `cookbook.paged_attention.check_block_tables` looks for both.

    Args:
      q: (num_seqs, heads, head_dim), the queries of the last tokens; bfloat16 or float16; head_dim 64, 128 or 256.
      k_pages, v_pages: (num_pages, page_size, kv_heads, head_dim), of the dtype of `q`; page_size 16, 32, 64, 128 or
        256; kv_heads divides heads.
      block_tables: (num_seqs, pages_per_seq), int32: the pages of each sequence, in order. Entries after those that
        `kv_lens` needs do not matter.
      kv_lens: (num_seqs,), int32: tokens of each sequence, with the one that asks.
      scale: what logits are multiplied by; None for 1 / sqrt(head_dim).
      logits_soft_cap: c, so that logits become c tanh(logits / c).
      local_window_size: how many tokens before itself the last one sees; of a pair the first counts.
      return_lse: also return the logarithms of the sums of exponentials.
      config: blocks and stages; None chooses by head_dim.

    Returns:
      (num_seqs, heads, head_dim), of the dtype of `q`; with `return_lse` also (num_seqs, heads), float32, natural
      logarithms. A sequence of no tokens gives zeros, and -inf.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    _check(q, k_pages, v_pages, block_tables, kv_lens, scale, logits_soft_cap, local_window_size)
    target = _mgpu.require_tensor_cores("paged_attention")
    (num_seqs, num_heads, head_dim), (num_pages, page_size, num_kv_heads, _) = q.shape, k_pages.shape
    config = config or default_config(head_dim)
    if (need := config.smem_bytes(head_dim)) > _mgpu.SMEM_BYTES_MAX:
        raise ValueError(
            f"cookbook.paged_attention: {config} needs {need} bytes of shared memory for {head_dim=}, and a block has "
            f"{_mgpu.SMEM_BYTES_MAX}: fewer stages or smaller blocks"
        )
    plan = Plan(
        num_seqs, num_heads, num_kv_heads, head_dim, num_pages, page_size, block_tables.shape[1], q.dtype,
        scale or head_dim**-0.5, logits_soft_cap, window(True, local_window_size)[0], config,
        target.num_sms, interpreted=target.interpreted,
    )  # fmt: skip
    params = _mgpu.compiler_params(approx_math=True)
    out, lse = _decode(q, k_pages, v_pages, block_tables, kv_lens, plan=plan, params=params)
    return (out, lse) if return_lse else out


paged_attention.Config = Config  # `cookbook.paged_attention` is this function, not its module.
paged_attention.check_block_tables = check_block_tables


def flops(kv_lens, num_heads: int, head_dim: int) -> int:
    """Floating-point operations of the two products over sequences of these lengths."""
    return 4 * num_heads * head_dim * int(sum(kv_lens))


def bytes_moved(kv_lens, num_kv_heads: int, head_dim: int) -> int:
    """Keys and values, of 16 bits, each once. All else is small beside them."""
    return 4 * num_kv_heads * head_dim * int(sum(kv_lens))
