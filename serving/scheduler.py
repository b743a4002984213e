"""Choice of the tokens that the next step computes: continuous batching, chunked prefill, preemption by recomputation.

Requests are served in the order of their arrival. A step has a budget of tokens: every request that is decoding gets
its one token, and prompts, in chunks, share what is left. A request joins when there are pages for all of its tokens,
and some are left for those that run. When one needs a page and none is available, the one that arrived last gives up
its pages, and computes their tokens again later. So all that run arrived before all that wait, the first to arrive can
always go on, and since it fits into the cache alone, every request ends.

A step may be scheduled before the tokens of the one before are known: how many they are is known, and where they go.
Several that only decode may therefore be scheduled at once, for the device to compute them in a row; a request that
waits joins after them. A page can be shared from the moment at which a step that fills it is scheduled, by requests of
the same step too: steps are computed in their order, and within a step keys and values are written before they are
read.

In a model some of whose layers see a window of tokens, a request has two block tables: one for the layers that see all
tokens, and one for the others, whose pages are given back as soon as the window has passed them. A page is of either
kind, so one allocator has them all. A prefix is shared if its pages of the first kind are there, and those of the
second that the next token sees.

Faults: `unschedule` takes a schedule back. A method that is left by an exception half-way leaves `is_broken` set, and
`restart` makes the books anew, from the requests alone. No arrays are in here.

Sources: Yu et al., "Orca" (2022); Agrawal et al., "Sarathi-Serve" (2024).
"""

import collections
import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from cookbook import _host
from serving.pages import PageAllocator, extend_keys
from serving.request import Chunk, Request

SPARE = 1 / 64  # The share of pages that stay free when a request joins others. With less, more are preempted.


class Before(NamedTuple):
    """The books as a schedule found them: running requests with (pages, window pages, their number, window pages that
    were given back, tokens computed, pending, times preempted)."""

    running: list[tuple[Request, list[int], list[int], int, int, int, int, int]]
    counts: tuple[int, int, int]


def window_key(key: bytes) -> bytes:
    """The key of a page of the layers with a window."""
    return key + b"window"


class Scheduler:
    """Decides on steps: `schedule()`, then `complete()` with the tokens that were sampled.

    One more step, or several at once, may be scheduled before the schedule before is completed. They are computed after
    its steps, as they may use pages that these have used.

    Args:
      window: how many tokens the layers with a window see, the one that asks included; None if there are no such
        layers.
    """

    def __init__(
        self, allocator: PageAllocator, *, max_seqs: int, max_tokens_per_step: int, window: int | None = None
    ):  # fmt: skip
        self.max_seqs = _host.option("serving.Scheduler", "max_seqs", max_seqs, int)
        self.max_tokens_per_step = _host.option("serving.Scheduler", "max_tokens_per_step", max_tokens_per_step, int)
        if max_seqs < 1 or max_tokens_per_step < max_seqs:
            raise ValueError(
                f"Scheduler: {max_seqs=} must be at least 1, {max_tokens_per_step=} at least that, so that each "
                "sequence can have a token a step"
            )
        self.allocator, self.window = allocator, window
        self.running: list[Request] = []
        self.waiting: collections.deque[Request] = collections.deque()
        self.num_preemptions = 0
        self.num_shared_pages = 0  # Times that a page was shared instead of computed.
        self.is_broken = False  # Whether an exception left the books half-changed: `restart` is next.
        self.before: Before | None = None  # The state that `unschedule` goes back to.
        self.num_open = 0  # Schedules that are not completed.
        self._requests: dict[Request, None] = {}  # Those that wait or run, in the order of arrival.

    def __contains__(self, request: Request) -> bool:
        """Whether a request waits or runs."""
        return request in self._requests

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: it was submitted before, or could never fit into the cache.
        """
        if request.submitted is not None:
            raise ValueError("submit: the request was submitted before; make a new Request")
        most = len(request.prompt) + request.max_new_tokens - 1  # The last token is sampled and never computed.
        if (needed := self.pages_of(most)) > self.allocator.num_pages:
            raise ValueError(
                f"submit: a prompt of {len(request.prompt)} tokens, max_new_tokens = {request.max_new_tokens} need "
                f"{needed} pages of {self.allocator.page_size} tokens, and the cache has "
                f"{self.allocator.num_pages}: ask for fewer tokens, or give the engine more pages"
            )
        with self._changing():
            self._requests[request] = None
            self.waiting.append(request)
            request.submitted = time.perf_counter()

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, in the order of arrival; their pages are allocated. Empty if there is nothing to do.

        At most `max_seqs` chunks, of at most `max_tokens_per_step` tokens together.

        Raises:
          RuntimeError: two schedules are not completed.
        """
        return self.schedule_steps(1)[0]

    def schedule_steps(self, most: int) -> tuple[list[Chunk], int]:
        """As `schedule`, the chunks of up to `most` steps; and how many these are, a power of two.

        They are several if the first only decodes, with plain sampling, and all have pages without a preemption. Each
        chunk then has a token a step. A request that ends before the others is in the first steps only.
        """
        if self.num_open == 2:
            raise RuntimeError("Scheduler.schedule: two schedules wait for complete(), which must come before a third")
        with self._changing():
            self.before = self._books()
            self.allocator.begin()
            chunks, count = self._chunks(), 1
            if self.num_preemptions == self.before.counts[0]:  # A request preempted now may come back a step later.
                count = self._num_steps(chunks, most)
                for chunk in chunks if count > 1 else ():
                    self._lengthen(chunk, min(chunk.request.num_left, count - 1))
            self.num_open += bool(chunks)
        return chunks, count

    def unschedule(self) -> None:
        """Takes back the last `schedule`, after which nothing else was done: the books are as they were before it.

        Raises:
          RuntimeError: there is none to take back.
        """
        if self.before is None:
            raise RuntimeError("Scheduler.unschedule: must come directly after a schedule()")
        with self._changing():
            running, counts = self.before
            self.allocator.rollback()
            while len(self.running) > len(running):  # All that run arrived before all that wait, then as now.
                request = self.running.pop()
                request.forget_pages()
                request.num_pending = 0
                self.waiting.appendleft(request)
            while len(self.running) < len(running):
                self.running.append(self.waiting.popleft())
            for request, pages, window_pages, num_pages, *numbers in running:
                del pages[num_pages:], window_pages[num_pages:]
                request.pages, request.window_pages = pages, window_pages
                request.num_window_freed, request.num_computed, request.num_pending, request.num_preempted = numbers
            self.num_preemptions, self.num_shared_pages, self.num_open = counts
            self.before = None

    def complete(self, chunks: Sequence[Chunk], *sampled: Sequence[int]) -> list[Request]:
        """Takes note that `chunks` are computed, and that `sampled[j][i]` came after chunk i in the j-th of their steps
        (it is ignored where none was to be sampled). Returns the requests that are finished by that; their pages are
        released.

        A negative one says that the logits were not finite: the request fails, and nobody shares its pages.

        Schedules are completed in their order.
        """
        done = []
        with self._changing():
            self.before = None
            self.allocator.commit()
            self.num_open -= bool(chunks)
            for i, chunk in enumerate(chunks):
                request, num_sampled = chunk.request, chunk.num_sampled
                request.num_pending -= num_sampled
                if request not in self._requests:  # It ended with a stop token, which was not known then.
                    continue
                for step in range(num_sampled or 1):
                    if (token := sampled[step][i]) < 0:
                        self._fail(chunk, step)
                    elif num_sampled:
                        request.tokens.append(int(token))
                    if request.finished:
                        break
                if request.error is None:
                    self._publish(chunk)
                if request.finished:
                    self._remove(request)
                    done.append(request)
        return done

    def cancel(self, request: Request) -> bool:
        """Ends a request now. Returns whether it had not ended before.

        Raises:
          ValueError: it was never submitted here.
        """
        if request not in self:
            if not request.finished:
                raise ValueError("cancel: the request was not submitted here; submit it first")
            return False
        with self._changing():
            self.before = None
            self.allocator.commit()
            request.is_cancelled = True
            self._remove(request)
        return True

    def restart(self) -> None:
        """Makes the books anew from the requests and their tokens: all pages are free, and whoever has not ended waits.

        Steps that are scheduled and not completed are forgotten.
        """
        with self._changing():
            self.allocator.clear()
            self._requests = {request: None for request in self._requests if not request.finished}
            for request in self._requests:
                request.forget_pages()
                request.num_pending = 0
            self.running, self.waiting = [], collections.deque(self._requests)
            self.before, self.num_open = None, 0

    def check(self) -> None:
        """Compares the allocator's books with the requests.

        Raises:
          RuntimeError: they differ.
        """
        self.allocator.check(request.held_pages for request in [*self.running, *self.waiting])

    @contextlib.contextmanager
    def _changing(self):
        """The books are broken until the end of its `with`, if that is reached."""
        self.is_broken = True
        yield
        self.is_broken = False

    def _books(self) -> Before:
        pages_of = lambda r: (r.pages, r.window_pages, len(r.pages), r.num_window_freed)
        return Before(
            [(r, *pages_of(r), r.num_computed, r.num_pending, r.num_preempted) for r in self.running],
            (self.num_preemptions, self.num_shared_pages, self.num_open),
        )

    def _chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in self.running if self.window else ():
            self._free_window(request)
        budget, preemptions = self.max_tokens_per_step, self.num_preemptions
        i = 0
        while i < len(self.running):  # Preemption takes requests off its end.
            request = self.running[i]
            count = request.num_uncomputed
            if count > 1:  # Those after it that are decoding come first.
                count = min(count, budget - sum(other.num_uncomputed == 1 for other in self.running[i + 1 :]))
            if count > 0 and self._grow_by_force(request, count):
                chunks.append(self._chunk(request, count))
                budget -= count
            i += 1
        # A request preempted now would come back at once and be preempted again.
        while self.num_preemptions == preemptions and budget and self.waiting and len(self.running) < self.max_seqs:
            if self.waiting[0].num_pending > 1:  # Preempted, with tokens in flight: a chunk can have one of these.
                break
            if (chunk := self._admit(budget)) is None:
                break
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
        return chunks

    def _num_steps(self, chunks: list[Chunk], most: int) -> int:
        """The number of steps to schedule at once, that of `chunks` included; allocates the pages of all."""
        running = self.running
        if most == 1 or not all(chunk.end - chunk.start == chunk.num_sampled for chunk in chunks):
            return 1
        if not all(request.is_plain and request.num_uncomputed <= 1 for request in running):
            return 1
        longest = min(most, 1 + max((request.num_left for request in running), default=0))
        count = 2 ** (longest.bit_length() - 1)
        while count > 1 and self._missing(count - 1) > self.allocator.num_available:
            count //= 2
        for request in running:
            self._grow(request, min(request.num_left, count - 1))
        return count

    def _missing(self, count: int) -> int:
        """Pages that all running requests lack for `count` more tokens each, or for as many as they have left."""
        missing = sum(
            self._pages_for(request.num_computed + min(request.num_left, count)) - len(request.pages)
            for request in self.running
        )
        return 2 * missing if self.window else missing

    def _admit(self, budget: int) -> Chunk | None:
        """The first chunk of the first request that waits, which then runs; None if it has to wait for pages."""
        request, page_size = self.waiting[0], self.allocator.page_size
        extend_keys(request.keys, request.tokens, page_size)
        # Its last token is computed in any case: the logits of the next one come of it.
        self._share(request, request.keys[: (len(request.tokens) - 1) // page_size])
        request.num_computed = len(request.pages) * page_size
        total = request.num_computed + request.num_uncomputed
        missing = self.pages_of(total) - len(request.held_pages)
        spare = int(SPARE * self.allocator.num_pages) if self.running else 0
        if self.allocator.num_available < missing + spare:
            self._release(request)
            return None
        count = min(request.num_uncomputed, budget)
        self._grow(request, count)
        self.num_shared_pages += request.num_computed // page_size
        self.running.append(self.waiting.popleft())
        return self._chunk(request, count)

    def _share(self, request: Request, keys: list[bytes]) -> None:
        """Gives a request the pages of the longest prefix of `keys` that it can go on from."""
        pages = self.allocator.share(keys)
        if self.window:
            count, page_size = len(pages), self.allocator.page_size
            seen = lambda count: [window_key(key) for key in keys[self._first_seen(count * page_size) : count]]
            while not all(key in self.allocator for key in seen(count)):
                count -= 1
            self.allocator.release(pages[count:])
            del pages[count:]
            request.num_window_freed = self._first_seen(count * page_size)
            request.window_pages = [-1] * request.num_window_freed + self.allocator.share(seen(count))
        request.pages = pages

    def _first_seen(self, token: int) -> int:
        """The first page that a token, by its place, sees in the layers with a window."""
        return max(0, token + 1 - self.window) // self.allocator.page_size

    def _free_window(self, request: Request) -> None:
        """Gives back the pages that the next token to be computed does not see in the layers with a window."""
        first = self._first_seen(request.num_computed)
        if first > request.num_window_freed:
            self.allocator.release(request.window_pages[request.num_window_freed : first])
            request.num_window_freed = first

    def _chunk(self, request: Request, count: int) -> Chunk:
        chunk = Chunk(request, request.num_computed, request.num_computed + count)
        request.num_computed = chunk.end
        request.num_pending += chunk.num_sampled
        self._publish(chunk)
        return chunk

    def _lengthen(self, chunk: Chunk, count: int) -> None:
        """Adds `count` tokens that are not sampled yet, for which there are pages."""
        chunk.end += count
        chunk.num_sampled += count
        chunk.request.num_computed += count
        chunk.request.num_pending += count

    def _fail(self, chunk: Chunk, step: int) -> None:
        """Takes note that the logits of this step of a chunk are not finite."""
        request = chunk.request
        keys = request.keys[(chunk.start + step) // self.allocator.page_size :]
        self.allocator.forget([*keys, *map(window_key, keys)])
        last = chunk.end - max(chunk.num_sampled, 1) + step
        request.error = FloatingPointError(f"the logits after token {last} are not finite")

    def _publish(self, chunk: Chunk) -> None:
        """Offers the pages that a chunk fills, as far as their tokens are known."""
        request, page_size = chunk.request, self.allocator.page_size
        if chunk.end % page_size >= chunk.end - chunk.start:  # It fills none.
            return
        first, last = chunk.start // page_size, chunk.end // page_size
        if request.pages is chunk.pages:  # Or it was preempted since, and its pages are another's.
            extend_keys(request.keys, request.tokens, page_size)
            for i in range(first, min(last, len(request.keys))):
                self.allocator.publish(request.pages[i], request.keys[i])
                if self.window and i >= request.num_window_freed:
                    self.allocator.publish(request.window_pages[i], window_key(request.keys[i]))

    def _remove(self, request: Request) -> None:
        """Takes a request that has ended off the books."""
        self._release(request)
        (self.running if request in self.running else self.waiting).remove(request)
        del self._requests[request]

    def _grow(self, request: Request, count: int) -> bool:
        """Allocates pages for `count` more tokens of a request. Returns whether there were enough."""
        missing = self._pages_for(request.num_computed + count) - len(request.pages)
        pages = self.allocator.allocate(2 * missing if self.window else missing) if missing else []
        if pages:
            request.pages += pages[:missing]
            request.window_pages += pages[missing:]
        return pages is not None

    def _grow_by_force(self, request: Request, count: int) -> bool:
        """As `_grow`, but preempts, from the last arrival on. Returns False if that was the request itself."""
        while not self._grow(request, count):
            victim = self.running.pop()
            self._release(victim)
            victim.num_preempted += 1
            self.num_preemptions += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _release(self, request: Request) -> None:
        self.allocator.release(request.held_pages)
        request.forget_pages()

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.allocator.page_size)

    def _window_pages_for(self, num_tokens: int) -> int:
        """The most pages that a request of so many tokens holds at once for the layers with a window."""
        if not self.window:
            return 0
        return min(self._pages_for(num_tokens), self._pages_for(self.window - 1 + self.max_tokens_per_step) + 1)

    def pages_of(self, num_tokens: int) -> int:
        """The most pages that a request of so many tokens holds at once."""
        return self._pages_for(num_tokens) + self._window_pages_for(num_tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that fits into the cache alone."""
        pages = self.allocator.num_pages
        of_windows = self._window_pages_for(pages * self.allocator.page_size)
        return max(pages // 2 if self.window else 0, pages - of_windows) * self.allocator.page_size
