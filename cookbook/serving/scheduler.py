"""Who computes which tokens in the next step: continuous batching, chunked prefill, preemption by recomputation.

Requests are served in the order of their arrival. A step has a budget of tokens: every request that is decoding gets
its one token, and prompts, in chunks, share what is left. When a request needs a page and none is available, the one
that arrived last gives up its pages, and computes their tokens again later. So all that run arrived before all that
wait, the first to arrive can always go on, and since it fits into the cache alone, every request ends.

A step may be scheduled before the tokens of the one before are known: how many they are is known, and where they go.

No arrays are in here. Sources: Yu et al., "Orca" (2022); Agrawal et al., "Sarathi-Serve" (2024).
"""

import collections
import dataclasses
from collections.abc import Sequence

from cookbook.serving.pages import PageAllocator, extend_keys


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and what was generated for it; the engine's to change, its user's to read."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_token: int | None = None
    # State.
    tokens: list[int] = dataclasses.field(init=False)  # The prompt, and what was generated.
    pages: list[int] = dataclasses.field(default_factory=list, init=False)  # Its block table, of its first tokens.
    keys: list[bytes] = dataclasses.field(default_factory=list, init=False)  # Keys of its full pages.
    num_computed: int = dataclasses.field(default=0, init=False)  # Tokens that steps so far have put into `pages`.
    num_pending: int = dataclasses.field(default=0, init=False)  # Tokens that are sampled, and not in `tokens` yet.
    num_preempted: int = dataclasses.field(default=0, init=False)
    submitted: float = dataclasses.field(default=0.0, init=False)  # Seconds of a clock.
    first_token: float | None = dataclasses.field(default=None, init=False)  # Seconds of that clock.

    def __post_init__(self):
        self.prompt = tuple(int(token) for token in self.prompt)
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        """The new tokens so far, a stop token included."""
        return self.tokens[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        new = len(self.tokens) - len(self.prompt)
        return new >= self.max_new_tokens or (new > 0 and self.tokens[-1] == self.stop_token)

    @property
    def num_tokens(self) -> int:
        """Those in `tokens`, and those that are pending."""
        return len(self.tokens) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are to be computed before the next can be sampled: 1 while it is decoding, 0 at the end."""
        is_wanted = self.num_tokens < len(self.prompt) + self.max_new_tokens
        return self.num_tokens - self.num_computed if is_wanted else 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from submission on; None until then."""
        return None if self.first_token is None else self.first_token - self.submitted


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a request, which one step computes."""

    request: Request
    start: int
    end: int
    samples: bool = dataclasses.field(init=False)  # Whether it ends with the last token: the next one is sampled.

    def __post_init__(self):
        object.__setattr__(self, "samples", self.end == self.request.num_tokens)


class Scheduler:
    """Decides on steps: `schedule()`, then `complete()` with the tokens that were sampled.

    One more step may be scheduled before a step is completed. It is computed after it, as it may use pages that the
    other has used.
    """

    def __init__(self, allocator: PageAllocator, *, max_seqs: int, max_tokens_per_step: int):
        if max_seqs < 1 or max_tokens_per_step < max_seqs:
            raise ValueError(
                f"Scheduler: {max_seqs=} must be at least 1, {max_tokens_per_step=} at least that, so that each "
                "sequence can have a token a step"
            )
        self.allocator = allocator
        self.max_seqs = max_seqs
        self.max_tokens_per_step = max_tokens_per_step
        self.running: list[Request] = []
        self.waiting: collections.deque[Request] = collections.deque()
        self.num_preemptions = 0
        self.num_shared_pages = 0  # Times that a page was shared instead of computed.
        self._num_open = 0  # Steps that are scheduled and not completed.

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: it is empty, or could never fit into the cache.
        """
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError(
                f"submit: a prompt of {len(request.prompt)} tokens, max_new_tokens = {request.max_new_tokens}; "
                "both must be at least 1"
            )
        most = len(request.prompt) + request.max_new_tokens - 1  # The last token is sampled and never computed.
        if self._pages_for(most) > self.allocator.num_pages:
            raise ValueError(
                f"submit: a prompt of {len(request.prompt)} tokens, max_new_tokens = {request.max_new_tokens} need "
                f"{self._pages_for(most)} pages of {self.allocator.page_size} tokens, and the cache has "
                f"{self.allocator.num_pages}: ask for fewer tokens, or give the engine more pages"
            )
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, in the order of arrival; their pages are allocated. Empty if there is nothing to do.

        At most `max_seqs` chunks, of at most `max_tokens_per_step` tokens together.

        Raises:
          RuntimeError: two steps are scheduled and not completed.
        """
        if self._num_open == 2:
            raise RuntimeError("Scheduler.schedule: two steps wait for complete(), which must come before a third")
        chunks: list[Chunk] = []
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
        # Who was preempted now would come back at once, and be preempted again.
        while self.num_preemptions == preemptions and budget and self.waiting and len(self.running) < self.max_seqs:
            if (chunk := self._admit(budget)) is None:
                break
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
        self._num_open += bool(chunks)
        return chunks

    def complete(self, chunks: Sequence[Chunk], sampled: Sequence[int]) -> list[Request]:
        """Takes note that `chunks` are computed and `sampled[i]` came after the last token of chunk i (it is ignored
        for a chunk that does not sample). Returns the requests that are finished by that; their pages are released.

        Steps are completed in the order in which they were scheduled.
        """
        done = []
        page_size = self.allocator.page_size
        self._num_open -= bool(chunks)
        for chunk, token in zip(chunks, sampled, strict=True):
            request = chunk.request
            request.num_pending -= chunk.samples
            if request.finished:  # With a stop token, which was not known when this chunk was scheduled.
                continue
            extend_keys(request.keys, request.tokens, page_size)
            if request.pages:  # It has none if it was preempted since.
                for i in range(chunk.start // page_size, chunk.end // page_size):
                    self.allocator.publish(request.pages[i], request.keys[i])
            if chunk.samples:
                request.tokens.append(int(token))
            if request.finished:
                self._release(request)
                (self.running if request in self.running else self.waiting).remove(request)
                done.append(request)
        return done

    def check(self) -> None:
        """Compares the allocator's books with the requests.

        Raises:
          RuntimeError: they differ.
        """
        self.allocator.check(request.pages for request in [*self.running, *self.waiting])

    def _admit(self, budget: int) -> Chunk | None:
        """The first chunk of the first request that waits, which then runs; None if it has to wait for pages."""
        request = self.waiting[0]
        extend_keys(request.keys, request.tokens, self.allocator.page_size)
        # Its last token is computed in any case: the logits of the next one come of it.
        request.pages = self.allocator.share(request.keys[: (len(request.tokens) - 1) // self.allocator.page_size])
        request.num_computed = len(request.pages) * self.allocator.page_size
        count = min(request.num_uncomputed, budget)
        if not self._grow(request, count):
            self._release(request)
            return None
        self.num_shared_pages += request.num_computed // self.allocator.page_size
        self.running.append(self.waiting.popleft())
        return self._chunk(request, count)

    def _chunk(self, request: Request, count: int) -> Chunk:
        chunk = Chunk(request, request.num_computed, request.num_computed + count)
        request.num_computed = chunk.end
        request.num_pending += chunk.samples
        return chunk

    def _grow(self, request: Request, count: int) -> bool:
        """Allocates pages for `count` more tokens of a request. Returns whether there were enough."""
        pages = self.allocator.allocate(self._pages_for(request.num_computed + count) - len(request.pages))
        request.pages += pages or []
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
        self.allocator.release(request.pages)
        request.pages, request.num_computed = [], 0

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.allocator.page_size)
