"""Attention over packed sequences of any lengths, whose keys are packed too or lie in pages of a cache.

    out = softmax(mask(cap(scale q kᵀ))) v  for each sequence,    lse = log sum exp of the same logits

Shapes: q (T, N, H), the queries of sequence i being rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`; k and v (S, K, H),
those of its keys being `cu_seqlens_kv[i]` to `cu_seqlens_kv[i + 1]`; or in pages (`ragged_paged_attention`). out
(T, N, H), lse (T, N). N is a multiple of K. With `is_causal` the last query of a sequence sees all of its keys, the one
before all but the last, and so on. Rows after the last sequence give zeros.

Role table: that of `attention`, whose compute role this is. Its operands and results lie elsewhere:

    memory     one, with few registers: copies queries and block after block of keys and values, which it finds at
               their rows of k and v, or page by page through the block table
    compute    two or three, each with 64 rows: as many queries as have room, with all heads that read the same keys, so
               that one token of a sequence that writes its answer loads its keys once, not once for each head

Barrier table: that of `attention`, and

    v_landed   copies of a block        memory, before it zeroes rows of other sequences or of none, and then arrives
                                        at v_filled in place of the copies

Blocks of threads take the tiles of a few KV heads at a time, so that L2 keeps what many tiles read. The longest of
these come first, dealt out to and fro, so that all blocks end at about the same time. XLA makes the list of tiles in a
few small kernels, once for all layers of a model under one `jax.jit`.

TMA finds rows of k and of q anywhere, but those of v, which tensor cores read by columns, only at multiples of 8. So
the blocks of a sequence begin at the multiple of 8 before its first key, and what lies before is masked.

Page ids and lengths: as in `paged_attention`; starts of sequences are cut at T and S, and never go back. No row is
written twice, or by two blocks.

Bound by: the tensor cores; with few queries for each sequence, memory.

Not supported: gradients (`attention` with segment_ids has them), heads of other sizes than 64, 128 and 256. If S is no
multiple of 8, v is padded by a copy. Sources: Shah et al., "FlashAttention-3" (2024); Kwon et al., "PagedAttention"
(2023).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from .attention import WG_ROWS, Config, compute
from .core import (
    HEAD_DIMS,
    PIECE,
    Blocks,
    check_numbers,
    div,
    page_of,
    rem,
    row_tiles,
    slot_of,
    views,
    window,
)

ROW_UNIT = 8  # TMA finds rows of v only at its multiples.
GROUP_BYTES = 32 * 2**20  # Bytes of keys and values read at about the same time: L2 keeps them.
OTHER_PLACE = 53  # Places that a block moves on every two waves; no divisor of the number of blocks.
# Registers of a thread of the memory and of the compute warpgroups, by the number of the latter. The memory warpgroup
# needs more with pages, whose ids it holds, and with heads of 256.
REGISTERS = {2: (24, 240), 3: (32, 160)}
REGISTERS_MEMORY = {2: (40, 232), 3: (32, 160)}


def varlen_attention_reference(
    q, k, v, cu_seqlens_q, cu_seqlens_kv, *, is_causal=False, scale=None, local_window_size=None, logits_soft_cap=None
):
    """(out, lse) in at least float32."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    of = lambda cu, n: jnp.searchsorted(cu, jnp.arange(n), side="right") - 1  # The sequence of each row.
    q_seq, kv_seq = of(cu_seqlens_q, len(q)), of(cu_seqlens_kv, len(k))
    q_end, kv_end = (jnp.append(cu[1:], 0) for cu in (cu_seqlens_q, cu_seqlens_kv))
    q_ids, kv_ids = jnp.arange(len(q)) - q_end[q_seq], jnp.arange(len(k)) - kv_end[kv_seq]  # From the end.
    left, right = window(is_causal, local_window_size)
    seen = (q_seq[:, None] == kv_seq) & (q_seq < len(cu_seqlens_q) - 1)[:, None]
    seen &= True if left is None else kv_ids >= q_ids[:, None] - left
    seen &= True if right is None else kv_ids <= q_ids[:, None] + right
    repeat = lambda x: jnp.repeat(x.astype(dtype), q.shape[1] // x.shape[1], axis=1)
    s = jnp.einsum("tnh,snh->tns", q.astype(dtype), repeat(k), precision="highest") * (scale or q.shape[-1] ** -0.5)
    s = s if logits_soft_cap is None else logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    seen, sees_any = seen[:, None], seen.any(-1)[:, None]
    s = jnp.where(seen, s, jnp.where(sees_any[..., None], -jnp.inf, 0.0))
    p = jnp.where(sees_any[..., None], jax.nn.softmax(s, axis=-1), 0.0)
    lse = jnp.where(sees_any, jax.nn.logsumexp(s, axis=-1), -jnp.inf)
    # A value that no query sees may be NaN.
    v = jnp.where(seen.any((0, 1))[:, None, None], repeat(v), 0.0)
    return jnp.einsum("tns,snh->tnh", p, v, precision="highest"), lse


def default_config(head_dim: int) -> Config:
    """The configuration for heads of this size. A third warpgroup for heads of 64 costs more than it gains where tiles
    are short."""
    return Config(in_turns=True) if head_dim <= 128 else Config(block_kv=64, in_turns=False)


@dataclasses.dataclass(frozen=True)
class Pages:
    """Sizes of the cache's pages and of the block table."""

    num_pages: int
    page_size: int
    pages_per_seq: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel."""

    num_tokens: int
    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    left: int | None
    right: int | None
    pages: Pages | None  # None for packed keys.
    config: Config
    num_blocks: int
    interpreted: bool
    # For `compute`: there are no segments, and the last block of keys may be cut.
    has_segments: bool = False
    cuts_blocks: bool = True

    @property
    def pieces(self) -> int:
        """Pieces of a row of a head, 128 bytes each."""
        return self.head_dim // PIECE

    @property
    def cuts_last_blocks(self) -> bool:
        """A causal mask's edge may cross from one block to the next: lengths are no multiples of a block."""
        return self.right is not None

    @property
    def cuts_first_blocks(self) -> bool:
        """A window's edge, or keys of the sequence before in a block that begins at a multiple of 8."""
        return self.left is not None or self.pages is None

    @property
    def group(self) -> int:
        """Query heads that share keys."""
        return self.num_heads // self.num_kv_heads

    @property
    def chunks(self) -> int:
        """Parts of a group: several if it has more heads than a warpgroup has rows."""
        return pl.cdiv(self.group, WG_ROWS)

    @property
    def heads(self) -> int:
        """Query heads of a tile."""
        return pl.cdiv(self.group, self.chunks)

    @property
    def shared_heads(self) -> int:
        """Heads that the last chunk computes again, where a group is no multiple of chunks, and does not store."""
        return self.chunks * self.heads - self.group

    @property
    def wg_queries(self) -> int:
        """Queries of a compute warpgroup."""
        return WG_ROWS // self.heads

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.wg_queries * self.config.compute_wgs

    @property
    def units(self) -> int:
        """Tiles for the same queries."""
        return self.num_kv_heads * self.chunks

    @property
    def max_tiles(self) -> int:
        """Most tiles of a unit; the rows after the last sequence count as one sequence more."""
        return self.num_seqs + 1 + self.num_tokens // self.queries

    @property
    def tokens(self) -> int:
        """Tokens of a block that one copy takes."""
        return min(self.pages.page_size, self.config.block_kv) if self.pages else self.config.block_kv

    @property
    def copies(self) -> int:
        return self.config.block_kv // self.tokens

    @property
    def scratch(self) -> dict:
        c = self.config
        barriers = lambda num, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=num)
        transforms = plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(128)
        tiles = plgpu.SMEM((c.num_stages, c.block_kv, self.head_dim), self.dtype, transforms=transforms)
        eights = plgpu.SMEM((c.num_stages, c.block_kv // 8, 8 * self.head_dim), self.dtype)
        rows = row_tiles((c.compute_wgs, self.pieces, WG_ROWS, PIECE), self.dtype, self.interpreted)
        keys = row_tiles((c.num_stages, self.pieces, c.block_kv, PIECE), self.dtype, self.interpreted)
        scratch = dict(
            q_smem=rows,
            k_smem=tiles if self.pages else keys,
            v_smem=tiles if self.interpreted else plgpu.RefUnion(tiles, eights),
            q_filled=barriers(c.compute_wgs, self.pieces * (self.wg_queries if self.interpreted else 1)),
            k_filled=barriers(c.num_stages, self.copies if self.pages else self.pieces),
            v_filled=barriers(c.num_stages, self.copies),
            v_landed=barriers(1, self.copies),
            q_freed=barriers(c.compute_wgs),
            k_freed=barriers(c.num_stages, c.compute_wgs),
            v_freed=barriers(c.num_stages, c.compute_wgs),
            turn=barriers(c.compute_wgs),
        )
        return scratch if c.out_over_query(self.head_dim) else scratch | dict(o_smem=rows)


FIELDS = ("token", "num_q", "first_q", "num_kv", "first_kv", "source", "number", "unit")


class Tile:
    """Some queries of a sequence, with heads that share keys. Its `fields`:

    token, num_q       its first row of q, and how many it has
    first_q            the position of its first query, among the keys of its blocks
    first_kv, num_kv   between which the keys of the sequence lie, in its blocks
    source             the row of k at which block 0 begins, or the row of the block table
    number             among the tiles of a unit: where its lse goes
    unit               the head of its keys, and the chunk of the group
    """

    def __init__(self, plan: Plan, fields):
        self.token, self.num_q, first_q, self.num_kv, self.first_kv, self.source, self.number, self.unit = fields
        self.kv_head, self.chunk = div(self.unit, plan.chunks), rem(self.unit, plan.chunks)
        self.head = self.kv_head * plan.group + jnp.minimum(self.chunk * plan.heads, plan.group - plan.heads)
        self.blocks = blocks_of(plan, first_q, self.num_kv, self.first_kv)
        first, end = self.blocks.seen(0 * self.unit, plan.queries * plan.heads)
        self.end = jnp.maximum(end, 1)
        self.first = jnp.minimum(first, self.end - 1)  # At least one, if only to find that no key is seen.
        self.steps = self.end - self.first


class Pieces:
    """Tiles of whole rows, read as `compute` reads keys: a slot and a piece at a time."""

    def __init__(self, tiles):
        self.tiles = tiles

    @property
    def at(self):
        return self

    def __getitem__(self, slot_and_piece):
        slot, piece = slot_and_piece
        return self.tiles.at[slot, :, pl.ds(piece * PIECE, PIECE)]


class CausalBlocks(Blocks):
    def mask(self, rows, kv_ids):
        """As `Blocks.mask`, without looking where the keys end: a query sees none after its own position, which has a
        key. Rows after the queries of a tile may see keys of other sequences; their results are not stored."""
        return (kv_ids >= self.first_kv) & (kv_ids <= self.position(rows))


def blocks_of(plan: Plan, first_q, num_kv, first_kv) -> Blocks:
    of = CausalBlocks if (plan.left, plan.right) == (None, 0) else Blocks
    return of(num_kv, plan.config.block_kv, plan.left, plan.right, first_kv, first_q, plan.heads)


def _kernel(
    table, num_tiles, block_tables, q_gmem, k_gmem, v_gmem, out_gmem, lse_gmem, *, plan: Plan, q_smem, k_smem, v_smem,
    q_filled, k_filled, v_filled, v_landed, q_freed, k_freed, v_freed, turn, o_smem=None,
):  # fmt: skip
    c, role = plan.config, lax.axis_index("role")
    (q_smem, q_tma), (v_smem, v_eights) = (views(smem, plan.interpreted) for smem in (q_smem, v_smem))
    k_smem, k_tma = (Pieces(k_smem), k_smem) if plan.pages else views(k_smem, plan.interpreted)
    o_smem, o_tma = (q_smem, q_tma) if o_smem is None else views(o_smem, plan.interpreted)
    needs_more = plan.pages or plan.head_dim > 128
    memory_registers, compute_registers = (REGISTERS_MEMORY if needs_more else REGISTERS)[c.compute_wgs]

    def for_each_tile(body):
        """Call `body(i, tile, count, fetch)` for each tile of this block, after `count` steps. `body` returns the next
        tile's fields, loaded by `fetch()`: they are in flight while it works. Return the number of steps and tiles."""
        block = lax.axis_index("block")
        row = lambda i: jnp.minimum(i * plan.num_blocks + block, table.shape[0] - 1)
        fields = lambda i: tuple(table[row(i), field] for field in range(len(FIELDS)))

        def one(i, carry):
            found, count = carry
            tile = Tile(plan, found)
            return body(i, tile, count, lambda: fields(i + 1)), count + tile.steps

        return lax.fori_loop(0, num_tiles[block], one, (fields(0 * block), 0 * block))[1], num_tiles[block]

    @pl.when(role == c.compute_wgs)
    def _():
        plgpu.set_max_registers(memory_registers, action="decrease")
        queries = q_gmem, q_tma, q_filled, q_freed
        keys, values = (k_gmem, k_tma, k_filled, k_freed), (v_gmem, v_smem, v_eights, v_filled, v_landed, v_freed)
        count, num_mine = for_each_tile(functools.partial(_load, plan, block_tables, queries, keys, values))
        # The last slots are given back too.
        for freed in (k_freed, v_freed):
            wait = lambda step, freed=freed: plgpu.barrier_wait(freed.at[slot_of(plan, step)])
            pl.loop(jnp.maximum(count - c.num_stages, 0), count)(wait)
        for wg in range(c.compute_wgs):
            pl.when(num_mine > 0)(lambda wg=wg: plgpu.barrier_wait(q_freed.at[wg]))

    @pl.when(role < c.compute_wgs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        turns = _mgpu.Turns(turn if c.in_turns else None, c.compute_wgs)
        turns.start(role)

        def one(i, tile, count, fetch):
            plgpu.barrier_wait(q_filled.at[role])
            ring = k_smem, v_smem, k_filled, v_filled, k_freed, v_freed
            free_query = lambda: plgpu.barrier_arrive(q_freed.at[role])
            over_query = c.out_over_query(plan.head_dim)
            early = (lambda: None) if over_query else free_query
            first_row = role * plan.wg_queries * plan.heads
            out, lse = compute(plan, tile, first_row, count, q_smem.at[role], ring, turns, {}, early)
            found = fetch()
            out = out.astype(plan.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The previous tile's out has left o_smem.
            for p in range(plan.pieces):
                o_smem[role, p] = out[:, p * PIECE : (p + 1) * PIECE]
            plgpu.commit_smem()
            _store(plan, tile, o_tma.at[role], out_gmem)
            _mgpu.store(lse_gmem.at[tile.number, tile.unit, role], lse)
            if over_query:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                free_query()
            return found

        for_each_tile(one)
        turns.drain(role)
        plgpu.wait_smem_to_gmem(0)


def _store(plan: Plan, tile: Tile, o_smem, out_gmem):
    """Copy this warpgroup's results to out, but not the rows after its queries: those are the next sequence's."""
    role = lax.axis_index("role")
    first = role * plan.wg_queries
    num = jnp.clip(tile.num_q - first, 0, plan.wg_queries)

    def copy(query, size: int, skip: int):
        """`size` queries, without heads that the chunk before has."""
        heads = pl.ds(tile.head + skip, plan.heads - skip)
        for p in range(plan.pieces):
            lane, row = pl.ds(p * PIECE, PIECE), tile.token + first + query
            source = o_smem.at[p, pl.ds(query * plan.heads + skip, size * plan.heads - skip)]
            if plan.interpreted:
                plgpu.copy_smem_to_gmem(source, out_gmem.at[row, heads, lane])
            else:
                source = source.reshape(size, plan.heads - skip, PIECE)
                plgpu.copy_smem_to_gmem(source, out_gmem.at[pl.ds(row, size), heads, lane])

    def copy_all(skip: int):
        if plan.interpreted:  # Its shared memory has one view, in which several queries are no box.
            pl.loop(0, num)(lambda query: copy(query, 1, skip))
            return
        pl.when(num == plan.wg_queries)(lambda: copy(0, plan.wg_queries, skip))

        @pl.when(num < plan.wg_queries)
        def _():
            query = 0 * num
            for size in (32, 16, 8, 4, 2, 1):
                if size < plan.wg_queries:
                    pl.when((num & size) != 0)(functools.partial(copy, query, size, skip))
                    query = query + (num & size)

    if plan.shared_heads == 0:
        copy_all(0)
    else:
        pl.when(tile.chunk < plan.chunks - 1)(lambda: copy_all(0))
        pl.when(tile.chunk == plan.chunks - 1)(lambda: copy_all(plan.shared_heads))


def _load(plan: Plan, block_tables, queries, keys, values, i, tile: Tile, count, fetch):
    """Memory warpgroup: copy a tile's queries, and its blocks of keys and values, the last block first, into slots as
    they are freed. Return the next tile's fields."""
    c = plan.config
    k_gmem, k_smem, k_filled, k_freed = keys
    v_gmem, v_smem, v_eights, v_filled, v_landed, v_freed = values

    def sources(block):
        """Indices that the copies of a block read in k and in v; each copy fills the next rows of the slot."""
        first = block * c.block_kv
        if not plan.pages:
            return [(pl.ds(pl.multiple_of(tile.source + first, ROW_UNIT), c.block_kv), tile.kv_head)]
        page_size, in_page = plan.pages.page_size, pl.multiple_of(rem(first, plan.pages.page_size), plan.tokens)
        columns = [div(first + j * plan.tokens, page_size) for j in range(plan.copies)]
        pages = [page_of(block_tables, tile.source, column, plan.pages.num_pages) for column in columns]
        # The ids are all in flight at once, and none is waited for between two copies.
        rows = pl.ds(in_page if plan.copies == 1 else 0, plan.tokens)
        return [(page, rows, tile.kv_head) for page in pages]

    def load_keys(slot, found):
        if plan.pages:
            load_tiles(k_gmem, k_smem, slot, found, k_filled.at[slot])
            return
        for p in range(plan.pieces):
            source = k_gmem.at[*found[0], pl.ds(p * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(source, k_smem.at[slot, p], k_filled.at[slot])

    def load_tiles(gmem, smem, slot, found, filled):
        for j, source in enumerate(found):
            rows = pl.ds(j * plan.tokens, plan.tokens)
            plgpu.copy_gmem_to_smem(gmem.at[source], smem.at[slot, rows], filled)

    load_values = functools.partial(load_tiles, v_gmem, v_smem)

    def load_clean_values(slot, found, block):
        """Copy the values of a block, and zero the rows of other sequences or of none, which may be NaN."""
        load_values(slot, found, v_landed.at[0])
        plgpu.barrier_wait(v_landed.at[0])
        rows, first = v_smem if plan.interpreted else v_eights, block * c.block_kv
        _clear(plan, rows.at[slot], tile.first_kv - first, tile.num_kv - first)
        for _ in range(plan.copies):
            plgpu.barrier_arrive(v_filled.at[slot])

    next_fields = fetch()

    @pl.loop(0, tile.steps)
    def _(step):
        slot, block = slot_of(plan, count + step), tile.end - 1 - step
        found = sources(block)
        pl.when(count + step >= c.num_stages)(lambda: plgpu.barrier_wait(k_freed.at[slot]))
        load_keys(slot, found)
        pl.when(step == 0)(lambda: _load_queries(plan, queries, i, tile))
        pl.when(count + step >= c.num_stages)(lambda: plgpu.barrier_wait(v_freed.at[slot]))
        is_cut = (block * c.block_kv < tile.first_kv) | ((block + 1) * c.block_kv > tile.num_kv)
        pl.when(is_cut)(lambda: load_clean_values(slot, found, block))
        pl.when(~is_cut)(lambda: load_values(slot, found, v_filled.at[slot]))

    return next_fields


def _load_queries(plan: Plan, queries, i, tile: Tile):
    """Copy each warpgroup's queries. Rows after the last query of the tile are copied too, as far as there are any."""
    q_gmem, q_smem, q_filled, q_freed = queries
    heads = pl.ds(tile.head, plan.heads)
    for wg in range(plan.config.compute_wgs):
        pl.when(i > 0)(lambda wg=wg: plgpu.barrier_wait(q_freed.at[wg]))
        first = tile.token + wg * plan.wg_queries
        for p in range(plan.pieces):
            lane = pl.ds(p * PIECE, PIECE)
            if not plan.interpreted:
                source = q_gmem.at[pl.ds(first, plan.wg_queries), heads, lane]
                rows = q_smem.at[wg, p, pl.ds(0, plan.wg_queries * plan.heads)]
                rows = rows.reshape(plan.wg_queries, plan.heads, PIECE)
                plgpu.copy_gmem_to_smem(source, rows, q_filled.at[wg])
                continue
            for query in range(plan.wg_queries):  # Its shared memory has one view, in which several are no box.
                rows = q_smem.at[wg, p, pl.ds(query * plan.heads, plan.heads)]
                plgpu.copy_gmem_to_smem(q_gmem.at[first + query, heads, lane], rows, q_filled.at[wg])


def _clear(plan: Plan, values, first, end):
    """Zero the rows of a block before `first` and from `end` on. `values` has single rows, or 8 together."""
    if plan.interpreted:
        row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values[...] = jnp.where((row >= first) & (row < end), values[...], 0)
        plgpu.commit_smem()
        return

    def clear(eight):
        # Rows of 8 lie together in pieces of 128 bytes, and swizzling moves nothing out of its row.
        place = plgpu.broadcasted_iota(jnp.int32, (8 * plan.head_dim,), 0)
        row = 8 * eight + rem(div(place, PIECE), 8)
        values[eight] = jnp.where((row >= first) & (row < end), values[eight], jnp.zeros((), plan.dtype))

    num = plan.config.block_kv // 8
    stop = jnp.clip(div(first + 7, 8), 0, num)
    pl.loop(0, stop)(clear)
    pl.loop(jnp.clip(div(jnp.maximum(end, 0), 8), stop, num), num)(clear)
    plgpu.commit_smem()


def _starts(cu_seqlens, num_rows: int):
    """`cu_seqlens`, cut at the number of rows, and never going back."""
    return _running(jnp.max, jnp.clip(cu_seqlens.astype(jnp.int32), 0, num_rows))


def _running(reduce, x):
    """`reduce` of the first number, of the first two, and so on: all at once, which takes a fraction of the time of
    XLA's scan. The numbers are at least 0."""
    i = jnp.arange(x.shape[-1])
    return reduce(jnp.where(i <= i[:, None], x[..., None, :], 0), axis=-1).astype(x.dtype)


def _tiles(plan: Plan, starts_q, kv_first, kv_lens):
    """(fields of the tiles, in the order in which `_deal` deals them out; how many each block takes; where rows of q
    find their lse).

    `starts_q` has the first row of each sequence's queries, and the end of the last ones; `kv_first` the row of k where
    each sequence's keys begin, or 0 in pages; `kv_lens` how many keys it has.
    """
    first_kv = rem(kv_first, ROW_UNIT)
    # The rows after the last sequence count as one sequence more, without keys.
    starts = jnp.append(starts_q, plan.num_tokens)
    first_kv, source, kv_lens = (
        jnp.append(x, 0) for x in (first_kv, jnp.arange(plan.num_seqs) if plan.pages else kv_first - first_kv, kv_lens)
    )
    q_lens = starts[1:] - starts[:-1]
    num = pl.cdiv(q_lens, plan.queries)
    ends, kv_ends = _running(jnp.sum, jnp.stack([num, kv_lens]))
    number = jnp.arange(plan.max_tiles, dtype=jnp.int32)
    seq = jnp.searchsorted(ends, number, side="right", method="compare_all")
    seq = jnp.minimum(seq, plan.num_seqs)
    first = (number - (ends - num)[seq]) * plan.queries
    first_kv, num_kv = first_kv[seq], (first_kv + kv_lens)[seq]
    first_q = num_kv - q_lens[seq] + first
    fields = dict(
        token=starts[seq] + first, num_q=jnp.clip(q_lens[seq] - first, 0, plan.queries), first_q=first_q, num_kv=num_kv,
        first_kv=first_kv, source=source[seq], number=number,
    )  # fmt: skip
    begin, end = blocks_of(plan, first_q, num_kv, first_kv).seen(0 * number, plan.queries * plan.heads)
    row, unit, counts = _deal(plan, jnp.where(number < ends[-1], end - begin, 0), ends[-1], kv_ends[-1])
    table = jnp.stack([fields[name].astype(jnp.int32) for name in FIELDS[:-1]], axis=1)
    return jnp.concatenate([table[row], unit[:, None]], axis=1), counts, (starts, ends - num)


def _deal(plan: Plan, steps, num_rows, num_kv):
    """Row and unit of each tile, in the order in which blocks take them; and how many each block takes, of tiles b,
    b + num_blocks, and so on for block b. There is a tile for each of the first `num_rows` rows and each unit.

    Some units at a time, whose keys and values L2 keeps, with the longest tiles first. They are dealt out to and fro.
    """
    most = (2**31 - 1) // plan.max_tiles - 1
    key = (most - jnp.minimum(steps, most)) * plan.max_tiles + jnp.arange(plan.max_tiles, dtype=jnp.int32)
    if plan.max_tiles <= 4096:  # Two reductions over pairs, in place of a sort's passes.
        rank = jnp.sum(key < key[:, None], axis=1)
        order = jnp.sum(jnp.where(rank == jnp.arange(plan.max_tiles)[:, None], jnp.arange(plan.max_tiles), 0), axis=1)
    else:
        order = jnp.sort(key) % plan.max_tiles
    fit = GROUP_BYTES / (4.0 * plan.head_dim * num_kv)
    divisors = [n for n in range(1, plan.units + 1) if plan.units % n == 0]
    together = functools.reduce(lambda found, n: jnp.where(n <= fit, n, found), divisors)

    size = pl.cdiv(plan.max_tiles * plan.units, plan.num_blocks)
    wave, block = jnp.arange(size)[:, None], jnp.arange(plan.num_blocks)

    def dealt(wave):
        """Number of the tile that each block takes in a wave; odd waves run backwards. Every two waves the blocks
        change places, so that differences of one step do not add up."""
        place = (block - OTHER_PLACE * (wave // 2)) % plan.num_blocks
        return wave * plan.num_blocks + jnp.where(wave % 2 == 0, place, plan.num_blocks - 1 - place)

    number, num_tiles = dealt(wave), num_rows * plan.units
    whole_waves = num_tiles // plan.num_blocks
    counts = whole_waves + (dealt(whole_waves) < num_tiles)
    of_group = num_rows * together
    group = number // of_group
    start = group * of_group
    # A group's longest tiles begin a round of all blocks; what is left of the one before is filled with its shortest.
    rank = (number - start - -start % plan.num_blocks) % of_group
    return order[rank // together].ravel(), (group * together + rank % together).ravel(), counts


def _lse_of_rows(plan: Plan, lse, starts, first_tiles):
    """The lse of each row and head, (T, N), gathered from what tiles wrote."""
    row, head = jnp.arange(plan.num_tokens)[:, None], jnp.arange(plan.num_heads)
    seq = jnp.minimum(jnp.searchsorted(starts[1:], row[:, 0], side="right", method="compare_all"), plan.num_seqs)[
        :, None
    ]
    query = row - starts[seq]
    in_tile = query % plan.queries
    kv_head, in_group = jnp.divmod(head, plan.group)
    chunk = jnp.minimum(in_group // plan.heads, plan.chunks - 1)
    in_chunk = in_group - jnp.minimum(chunk * plan.heads, plan.group - plan.heads)
    wg, in_wg = jnp.divmod(in_tile, plan.wg_queries)
    tile = first_tiles[seq] + query // plan.queries
    return lse[tile, kv_head * plan.chunks + chunk, wg, in_wg * plan.heads + in_chunk]


@functools.partial(jax.jit, static_argnames=("plan", "params", "return_lse"))
def _forward(q, k, v, block_tables, cu_seqlens_q, kv_where, *, plan: Plan, params, return_lse: bool):
    """(out, lse), the second of them None unless it is asked for. `kv_where`: the lengths of sequences in pages, else
    cu_seqlens_kv."""
    c = plan.config
    if plan.pages:
        kv_lens = jnp.clip(kv_where, 0, plan.pages.pages_per_seq * plan.pages.page_size)
        kv_first = jnp.zeros_like(kv_lens)
    else:
        v = jnp.pad(v, [(0, -len(v) % ROW_UNIT), (0, 0), (0, 0)])
        kv_starts = _starts(kv_where, len(k))
        kv_first, kv_lens = kv_starts[:-1], kv_starts[1:] - kv_starts[:-1]
    table, num_tiles, places = _tiles(plan, _starts(cu_seqlens_q, len(q)), kv_first, kv_lens)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((plan.max_tiles, plan.units, c.compute_wgs, WG_ROWS), jnp.float32),
        ],
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=c.compute_wgs + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(table, num_tiles, block_tables, q, k, v)
    return out, _lse_of_rows(plan, lse, *places) if return_lse else None


def run(op, q, k, v, block_tables, cu_seqlens_q, kv_where, *, pages, is_causal, scale, local_window_size,
        logits_soft_cap, return_lse, config):  # fmt: skip
    """Run `varlen_attention` or `ragged_paged_attention`, whose arguments have been checked."""
    target = _mgpu.require_tensor_cores(op)
    num_tokens, num_heads, head_dim = q.shape
    left, right = window(is_causal, local_window_size)
    config = config or default_config(head_dim)
    plan = Plan(
        num_tokens, len(cu_seqlens_q) - 1, num_heads, k.shape[-2], head_dim, q.dtype, scale or head_dim**-0.5,
        logits_soft_cap, left, right, pages, config, target.num_sms,
        interpreted=target.interpreted,
    )  # fmt: skip
    if (need := config.smem_bytes(head_dim) + 8) > _mgpu.SMEM_BYTES_MAX:
        raise ValueError(
            f"cookbook.{op}: {config} needs {need} bytes of shared memory for {head_dim=}, and a block has "
            f"{_mgpu.SMEM_BYTES_MAX}: fewer stages or smaller blocks"
        )
    out, lse = _forward(
        q, k, v, block_tables, cu_seqlens_q, kv_where, plan=plan, params=_mgpu.compiler_params(approx_math=True),
        return_lse=return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check(q, k, v, cu_seqlens_q, cu_seqlens_kv) -> None:
    op = "cookbook.varlen_attention"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3 or 0 in x.shape:
            raise ValueError(f"{op}: {name}.shape = {x.shape}; must be (rows, heads, head_dim), none of them 0")
        if x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != q.dtype:
            raise ValueError(f"{op}: {name}.dtype = {x.dtype}; all must be bfloat16 or all float16: cast them")
    if k.shape != v.shape or k.shape[2] != q.shape[2] or q.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"{op}: {q.shape=}, {k.shape=}, {v.shape=}; k and v must have the same shape, and the head_dim of q, one "
            f"of {HEAD_DIMS}: pad it"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{op}: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    if cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape != cu_seqlens_kv.shape or len(cu_seqlens_q) < 2:
        raise ValueError(f"{op}: {cu_seqlens_q.shape=}, {cu_seqlens_kv.shape=}; both must be (num_seqs + 1,)")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if x.dtype != jnp.int32:
            raise ValueError(f"{op}: {name}.dtype = {x.dtype}; must be int32: cast it")


def varlen_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_kv, *, is_causal=False, scale=None, local_window_size=None, logits_soft_cap=None,
    return_lse=False, config: Config | None = None,
):  # fmt: skip
    """Attention of packed sequences, each to its own keys, as flash-attn's varlen functions; the same to the bit in
    every run.

    Args:
      q: (T, N, H), the queries of all sequences one after the other; bfloat16 or float16; H is 64, 128 or 256.
      k, v: (S, K, H), their keys and values, of the dtype of `q`; K divides N.
      cu_seqlens_q: (num_seqs + 1,), int32: where queries of each sequence begin in `q`, and where the last ones end.
      cu_seqlens_kv: (num_seqs + 1,), int32: the same of keys.
      is_causal: the last query of a sequence sees all of its keys, the one before all but the last, and so on.
      scale: what logits are multiplied by; None for 1 / sqrt(H).
      local_window_size: (left, right): how many keys a query sees before and after its own position, which are
        aligned at the ends; None for a side without bound, one number for both.
      logits_soft_cap: c, so that logits become c tanh(logits / c).
      return_lse: also return the logarithms of the sums of exponentials.
      config: blocks, stages and warpgroups, as of `attention`; None chooses by H.

    Returns:
      (T, N, H), of the dtype of `q`; with `return_lse` also (T, N), float32, natural logarithms. A query that sees no
      key gives zeros, and -inf; so does a row of q after the last sequence.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_kv)
    check_numbers("cookbook.varlen_attention", scale, logits_soft_cap, local_window_size)
    return run(
        "varlen_attention", q, k, v, (), cu_seqlens_q, cu_seqlens_kv, pages=None, is_causal=is_causal, scale=scale,
        local_window_size=local_window_size, logits_soft_cap=logits_soft_cap, return_lse=return_lse, config=config,
    )  # fmt: skip


varlen_attention.Config = Config  # `cookbook.varlen_attention` is this function, not its module.


def flops(q_lens, kv_lens, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
    """Floating-point operations of the two products over these lengths; a causal mask leaves out hidden pairs."""
    pairs = (q * (kv - (q - 1) / 2 if is_causal else kv) for q, kv in zip(q_lens, kv_lens, strict=True))
    return int(4 * num_heads * head_dim * sum(pairs))


def bytes_moved(q_lens, kv_lens, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """q and out, k and v, of 16 bits, each once."""
    return 4 * head_dim * (num_heads * int(sum(q_lens)) + num_kv_heads * int(sum(kv_lens)))
