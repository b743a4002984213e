# SPDX-License-Identifier: Apache-2.0
"""Pages of a cache of keys and values: how the kernels find them, and what is asked of them.

Page ids and lengths: TMA reads zeros where an index is out of range, and any id that is becomes the first one after
the last page: no id can read elsewhere, and every copy that is waited for arrives. A length is cut at what the block
table holds.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ... import _host
from .. import checks
from ..core import E4M3, HEAD_DIMS, SERVED_HEAD_DIMS, div, rem

PAGE_SIZES = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Pages:
    """Sizes of the cache's pages and of the block table, and how blocks of `block_kv` tokens are copied from them."""

    num_pages: int
    page_size: int
    pages_per_seq: int
    block_kv: int

    @classmethod
    def of(cls, pages, block_tables, block_kv: int):
        """Those of a cache's `pages`, as `at_least_two` gives them."""
        return cls(max(2, pages.shape[0]), pages.shape[1], block_tables.shape[1], block_kv)

    @property
    def tokens(self) -> int:
        """Tokens that a copy takes from a page."""
        return min(self.page_size, self.block_kv)

    @property
    def copies(self) -> int:
        """Copies of keys, or of values, for a block."""
        return self.block_kv // self.tokens

    def length(self, kv_len):
        """`kv_len`, cut at what the block table holds."""
        return jnp.clip(kv_len, 0, self.pages_per_seq * self.page_size)

    def of_block(self, block_tables, seq, block):
        """The pages that the copies of a block read. Their ids are all in flight at once."""
        first = block * self.block_kv
        columns = [div(first + j * self.tokens, self.page_size) for j in range(self.copies)]
        return [page_of(block_tables, seq, column, self.num_pages) for column in columns]

    def first_token(self, block):
        """Where in their pages the copies of a block begin."""
        return rem(block * self.block_kv, self.page_size) if self.copies == 1 else 0


def page_of(block_tables, seq, column, num_pages: int):
    """The page in a column of the block table, or in its last column if there are fewer. An id that is no page becomes
    `num_pages`, where TMA reads zeros; a larger index could wrap around into the array as others are added to it."""
    page = block_tables[seq, jnp.minimum(column, block_tables.shape[1] - 1)]
    return jnp.where((page >= 0) & (page < num_pages), page, num_pages)


def at_least_two(pages):
    """`pages`, and pages of zeros behind them if they are fewer: a copy leaves out an axis of length 1, and with it the
    index that lies beyond it. TMA's boxes have five axes, and heads of 256 need them for other things."""
    return pages if len(pages) > 1 else jnp.pad(pages, ((0, 2 - len(pages)), *[(0, 0)] * 3))


def check_cache(op: str, q, k_pages, v_pages, block_tables, kv_lens) -> None:
    """Check the operands of attention over pages, q (..., heads, head_dim) among them.

    Raises:
      ValueError: a shape or dtype is not supported.
    """
    for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if x.dtype not in (q.dtype, E4M3) or q.dtype not in (jnp.bfloat16, jnp.float16):
            raise ValueError(f"{op}: {name}.dtype = {x.dtype}; all must be bfloat16 or all float16: cast them")
    if k_pages.dtype != v_pages.dtype or (k_pages.dtype == E4M3 and q.dtype != jnp.bfloat16):
        raise ValueError(
            f"{op}: {q.dtype=}, {k_pages.dtype=}, {v_pages.dtype=}; with pages of float8_e4m3fn both must be, and q "
            "bfloat16: cast them"
        )
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape or k_pages.shape[3] != q.shape[-1]:
        raise ValueError(
            f"{op}: {k_pages.shape=}, {v_pages.shape=}, {q.shape=}; both caches must be (num_pages, page_size, "
            "kv_heads, head_dim), with the head_dim of q"
        )
    num_pages, page_size, num_kv_heads, head_dim = k_pages.shape
    if page_size not in PAGE_SIZES or head_dim not in SERVED_HEAD_DIMS:
        raise ValueError(
            f"{op}: {page_size=} must be one of {PAGE_SIZES}, {head_dim=} one of {SERVED_HEAD_DIMS} (TMA's boxes): pad "
            "heads, copy the cache to other pages"
        )
    if k_pages.dtype == E4M3 and head_dim not in HEAD_DIMS:
        raise ValueError(f"{op}: {head_dim=}; must be one of {HEAD_DIMS} with pages of float8_e4m3fn: pad it")
    checks.groups(op.removeprefix(f"{_host.PACKAGE}."), q.shape[-2], num_kv_heads)
    if k_pages.size // head_dim >= 2**31:
        raise ValueError(f"{op}: {k_pages.shape=} has 2^31 rows or more, which TMA cannot index: split the cache")
    if block_tables.ndim != 2 or kv_lens.shape != block_tables.shape[:1]:
        raise ValueError(
            f"{op}: {block_tables.shape=}, {kv_lens.shape=}; must be (num_seqs, pages_per_seq) and (num_seqs,)"
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
