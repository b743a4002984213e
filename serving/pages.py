"""Pages of a key-value cache: which are free, which are whose, and which prefixes of tokens they hold already.

A page holds the keys and values of `page_size` successive tokens of a sequence. Sequences that begin with the same
tokens share the pages of that prefix, as long as these are full: a full page is never written again, so sharing needs
no copy. Pages that nobody holds any more keep what they have until they are needed, the oldest first.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
"""

import array
import collections
import hashlib
from collections.abc import Callable, Iterable, Sequence

from cookbook import _host


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int) -> None:
    """Appends to `keys` the key of every full page of `tokens` that has none yet.

    A key is a hash of a page's tokens and of the key before it, so it stands for the whole prefix: keys and values
    depend on all tokens before them.
    """
    for start in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        content = array.array("q", tokens[start : start + page_size]).tobytes()
        before = keys[-1] if keys else b""
        keys.append(hashlib.blake2b(before + content, digest_size=16).digest())


class PageAllocator:
    """Hands out pages and counts their references.

    A page is in one of three states: held (by one sequence or several), cached (by none, but its tokens are known and
    a later sequence may share them), or free.

    `begin` opens a transaction: `rollback` takes back everything since then, `commit` keeps it.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = _host.option("serving.PageAllocator", "num_pages", num_pages, int)
        self.page_size = _host.option("serving.PageAllocator", "page_size", page_size, int)
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"PageAllocator: {num_pages=} and {page_size=} must be at least 1")
        self.clear()

    def clear(self) -> None:
        """Forgets all holders and all contents: every page is free."""
        self._references = [0] * self.num_pages
        self._free = list(reversed(range(self.num_pages)))  # The last is the next.
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()  # The oldest first.
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._undo: list[Callable] | None = None  # Inverses of what a transaction has done so far.

    def begin(self) -> None:
        """Opens a transaction, in place of one that is open."""
        self._undo = []

    def commit(self) -> None:
        """Ends the transaction and keeps what it did."""
        self._undo = None

    def rollback(self) -> None:
        """Ends the transaction and takes back what it did.

        The pages, their references and their contents are then as at `begin`. Cached pages that were shared since then
        are forgotten later than they would have been.
        """
        while self._undo:
            self._undo.pop()()
        self._undo = None

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def references(self, page: int) -> int:
        """How many hold `page`."""
        return self._references[self._known(page)]

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, whose contents are undefined; None, and no page, if there are fewer.

        Free pages come first, then those that were cached longest ago, whose contents are forgotten.
        """
        if count < 0:
            raise ValueError(f"PageAllocator.allocate: {count=} must be at least 0")
        if count > self.num_available:
            return None
        return [self._take() for _ in range(count)]

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest prefix of `keys` whose contents are here, each with one reference more."""
        pages = []
        for key in keys:
            if (page := self._page_of.get(key)) is None:
                break
            self._cached.pop(page, None)
            self._references[page] += 1
            pages.append(page)
            self._log(lambda page=page: self._drop(page))
        return pages

    def __contains__(self, key: bytes) -> bool:
        """Whether a page with the contents of `key` is here."""
        return key in self._page_of

    def publish(self, page: int, key: bytes) -> None:
        """Says that `page`, which the caller holds, is full and has the contents of `key`, for others to share.

        Nothing happens if another page has them already.

        Raises:
          ValueError: nobody holds the page, or it was published under another key.
        """
        if self.references(page) == 0:
            raise ValueError(f"PageAllocator.publish: nobody holds page {page}; publish a page before it is released")
        if self._key_of.get(page, key) != key:
            raise ValueError(f"PageAllocator.publish: page {page} has another key; a full page must not be rewritten")
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key
            self._log(lambda: (self._page_of.pop(key), self._key_of.pop(page)))

    def forget(self, keys: Iterable[bytes]) -> None:
        """Says that the contents of `keys` are not to be shared any more. Not for use within a transaction."""
        for key in keys:
            if (page := self._page_of.pop(key, None)) is not None:
                del self._key_of[page]
                if page in self._cached:
                    del self._cached[page]
                    self._free.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """Takes one reference off each of a sequence's `pages`.

        The last page is the first to be cached, so that the beginning of a prefix, which serves most, stays longest.

        Raises:
          ValueError: nobody holds one of them; nothing is released then.
        """
        for page, times in collections.Counter(pages).items():
            if self.references(page) < times:
                raise ValueError(
                    f"PageAllocator.release: page {page} is released {times} time(s) and has {self.references(page)} "
                    "reference(s): release each page once for each time that allocate or share gave it"
                )
        for page in reversed(pages):
            self._drop(page)
            self._log(lambda page=page: self._hold_again(page))

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Compares the books with the pages of all `holders`, one sequence of pages each.

        Raises:
          RuntimeError: a page is leaked, held without a reference, in two states or under a key that is not its own.
        """
        held = collections.Counter(page for pages in holders for page in pages)
        states = collections.Counter([*self._free, *self._cached])
        for page, references in enumerate(self._references):
            if references != held[page]:
                raise RuntimeError(f"page {page} has {references} reference(s) and {held[page]} holder(s)")
            if states[page] != (references == 0):
                raise RuntimeError(f"page {page} has {references} reference(s) and is available {states[page]} time(s)")
            if references == 0 and (page in self._cached) != (page in self._key_of):
                raise RuntimeError(f"page {page} is cached without a key, or free with one")
        if self._page_of != {key: page for page, key in self._key_of.items()}:
            raise RuntimeError("keys and pages do not belong to each other one by one")

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def _hold_again(self, page: int) -> None:
        """The inverse of `_drop`, directly after it: the page is the last of the cached ones, or of the free ones."""
        if self._references[page] == 0:
            if page in self._key_of:
                del self._cached[page]
            else:
                self._free.pop()
        self._references[page] += 1

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
            self._log(lambda: self._drop(page))
        else:
            page, _ = self._cached.popitem(last=False)
            key = self._key_of.pop(page)
            del self._page_of[key]
            self._log(lambda: self._put_back(page, key))
        self._references[page] = 1
        return page

    def _put_back(self, page: int, key: bytes) -> None:
        """The inverse of taking a cached page: it is the oldest again."""
        self._page_of[key], self._key_of[page] = page, key
        self._drop(page)
        self._cached.move_to_end(page, last=False)

    def _log(self, inverse: Callable) -> None:
        if self._undo is not None:
            self._undo.append(inverse)

    def _known(self, page: int) -> int:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"PageAllocator: there is no page {page}; pages are 0 to {self.num_pages - 1}")
        return page
