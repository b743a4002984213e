# SPDX-License-Identifier: Apache-2.0
"""Pages of a cache of keys and values: how the kernels find them.

Page ids and lengths: TMA reads zeros where an index is out of range, and any id that is becomes the first one after
the last page: no id can read elsewhere, and every copy that is waited for arrives. A length is cut at what the block
table holds.
"""

import dataclasses

import jax.numpy as jnp

from ..._device import div, rem


@dataclasses.dataclass(frozen=True)
class Pages:
    """Sizes of the cache's pages and of the block table, and how blocks of `block_kv` tokens are copied from them."""

    num_pages: int
    page_size: int
    pages_per_seq: int
    block_kv: int

    @classmethod
    def of(cls, pages, block_tables, block_kv: int):
        """The sizes of a cache's `pages`, as `at_least_two` gives them."""
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
        entries = [div(first + j * self.tokens, self.page_size) for j in range(self.copies)]
        return [page_of(block_tables, seq, entry, self.num_pages) for entry in entries]

    def first_token(self, block):
        """Where in their pages the copies of a block begin."""
        return rem(block * self.block_kv, self.page_size) if self.copies == 1 else 0


def page_of(block_tables, seq, entry, num_pages: int):
    """The page in an entry of a sequence's row of the block table, or in the last one if there are fewer. An id that is
    no page becomes `num_pages`, where TMA reads zeros; a larger index could wrap around into the array as others are
    added to it."""
    page = block_tables[seq, jnp.minimum(entry, block_tables.shape[1] - 1)]
    return jnp.where((page >= 0) & (page < num_pages), page, num_pages)


def at_least_two(pages):
    """`pages`, and pages of zeros behind them if they are fewer: a copy leaves out an axis of length 1, and with it the
    index that lies beyond it. TMA's boxes have five axes, and heads of 256 need them for other things."""
    return pages if len(pages) > 1 else jnp.pad(pages, ((0, 2 - len(pages)), *[(0, 0)] * 3))
