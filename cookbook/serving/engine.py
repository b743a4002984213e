"""The engine: requests go in, and step by step their tokens come out.

It is a step ahead of its device: while one step is computed, the next is scheduled, packed and sent off after it. For a
token that is not known yet, the batch has the row of the previous step in which it is sampled. A stop token is seen one
step late, and the results of that step for its request are thrown away.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cookbook.serving.backends import backend as backend_of
from cookbook.serving.model import Batch, LlamaConfig, empty_pages, step
from cookbook.serving.pages import PageAllocator
from cookbook.serving.scheduler import Chunk, Request, Scheduler

TABLE_WIDTH_MIN = 16  # Pages of the narrowest block table: fewer widths are fewer compilations.


@dataclasses.dataclass(frozen=True)
class StepStats:
    """Counts and time of a step."""

    decode: bool  # Whether it had one token of each sequence, so that none was a longer piece of a prompt.
    num_tokens: int  # Tokens that were computed.
    num_sampled: int  # New tokens of requests.
    num_running: int
    num_waiting: int
    num_preemptions: int  # Since the step before.
    kv_utilization: float  # Share of the cache's pages that requests hold.
    # Until the step's tokens are on the host, from its scheduling or the previous step's tokens, whichever is later.
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens of requests, a second."""
        return self.num_sampled / self.seconds


class Engine:
    """Continuous batching on one device.

    Args:
      config: the model's sizes.
      params: its parameters, of `init` or `load`.
      num_pages: of the cache, in each layer; with `LlamaConfig.page_bytes_per_token` bytes a token.
      page_size: tokens a page.
      max_seqs: sequences of a step.
      max_tokens_per_step: tokens of a step; at least `max_seqs`.
      backend: "cookbook" for this package's kernels, "xla" for plain XLA.
      ahead: whether a step is scheduled and sent off while the one before is computed.

    `allocator` and `scheduler` keep the books; `stats` has one `StepStats` a step.

    Raises:
      ValueError: a size does not fit another, or there is no such backend.
    """

    def __init__(
        self, config: LlamaConfig, params, *, num_pages: int, page_size: int = 16, max_seqs: int = 64,
        max_tokens_per_step: int = 512, backend: str = "cookbook", ahead: bool = True,
    ):  # fmt: skip
        self.config = config
        self.params = params
        self.backend = backend
        backend_of(backend)
        self.allocator = PageAllocator(num_pages, page_size)
        self.scheduler = Scheduler(self.allocator, max_seqs=max_seqs, max_tokens_per_step=max_tokens_per_step)
        self.pages = empty_pages(config, num_pages, page_size)
        self.stats: list[StepStats] = []
        self.ahead = ahead
        self._launched: Launched | None = None  # The step that the device computes now.
        self._sampled = jnp.zeros(max_seqs, jnp.int32)  # By the last step that was launched.
        self._latest = 0.0  # When the last tokens came.
        self._num_preemptions = 0  # Those that `stats` has, or the step in flight.

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int, *, temperature: float = 0.0, seed: int = 0,
        stop_token: int | None = None,
    ) -> Request:  # fmt: skip
        """Queues a request, to be read when `step` or `run` has worked on it.

        Args:
          prompt: tokens, at least one.
          max_new_tokens: how many to generate at most.
          temperature: what logits are divided by before one is drawn by its probability; 0 takes the largest.
          seed: of the draws; with the same one, the same prompt has the same tokens, whatever else is served.
          stop_token: the request ends with it.

        Raises:
          ValueError: a token is outside of the vocabulary, a number out of range, or the request larger than the cache.
        """
        if any(not 0 <= token < self.config.vocab_size for token in prompt):
            raise ValueError(f"submit: the prompt has a token outside of 0 to {self.config.vocab_size - 1}")
        if not temperature >= 0.0 or not 0 <= seed < 2**32:
            raise ValueError(f"submit: {temperature=} must be at least 0, {seed=} in 0 to 2**32 - 1")
        request = Request(tuple(prompt), max_new_tokens, temperature, seed, stop_token)
        request.submitted = time.perf_counter()
        self.scheduler.submit(request)
        return request

    def step(self) -> list[Request]:
        """Sends off a step, if there is anything to do, and waits for the one before, or with `ahead` off for itself.
        Returns the requests that are finished by that."""
        before, self._launched = self._launched, self._launch()
        if before is None and not self.ahead:
            before, self._launched = self._launched, None
        return self._complete(before) if before else []

    def run(self) -> list[Request]:
        """Steps until every request is finished; returns those, as they finished."""
        done = []
        while self.scheduler.running or self.scheduler.waiting or self._launched:
            done += self.step()
        return done

    def _launch(self) -> "Launched | None":
        start = time.perf_counter()
        chunks = self.scheduler.schedule()
        if not chunks:
            return None
        decode = all(chunk.end - chunk.start == 1 for chunk in chunks)
        rows = {chunk.request: i for i, chunk in enumerate(self._launched.chunks)} if self._launched else {}
        batch = pack(chunks, self.allocator.page_size, self.scheduler.max_seqs, decode, rows)
        self._sampled, _, self.pages = step(
            self.config, self.params, self.pages, batch, self._sampled, backend=self.backend, decode=decode
        )
        before, self._num_preemptions = self._num_preemptions, self.scheduler.num_preemptions
        preemptions = self._num_preemptions - before
        return Launched(chunks, decode, self._sampled, start, preemptions, self.allocator.num_held)

    def _complete(self, launched: "Launched") -> list[Request]:
        """Waits for the tokens of a step."""
        chunks, sampled = launched.chunks, np.asarray(launched.sampled)[: len(launched.chunks)]
        before, self._latest = self._latest, time.perf_counter()
        new = [chunk.request for chunk in chunks if chunk.samples and not chunk.request.finished]
        for request in new:
            if request.first_token is None:
                request.first_token = self._latest
        self.stats.append(
            StepStats(
                decode=launched.decode,
                num_tokens=sum(chunk.end - chunk.start for chunk in chunks),
                num_sampled=len(new),
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                num_preemptions=launched.num_preemptions,
                kv_utilization=launched.num_held / self.allocator.num_pages,
                seconds=self._latest - max(before, launched.start),
            )
        )
        return self.scheduler.complete(chunks, sampled)


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step in flight: what it computes, when its scheduling began, and what the books said then."""

    chunks: list[Chunk]
    decode: bool
    sampled: jax.Array
    start: float
    num_preemptions: int
    num_held: int


def pack(
    chunks: Sequence[Chunk], page_size: int, max_seqs: int, decode: bool, rows: Mapping[Request, int] | None = None
) -> Batch:
    """The arrays of a step, NumPy's, in one of few shapes, so that few are compiled.

    Rows of sequences are `max_seqs`. Tokens are as many in a step that decodes alone, the token of sequence i in row i,
    and otherwise `max_seqs` times a power of two. Block tables are 16 pages wide, or a larger power of two. A token
    that is not known yet is -1 minus its request's row in the step before, which `rows` has.
    """
    requests = [chunk.request for chunk in chunks]
    starts, ends = (np.array([getattr(chunk, name) for chunk in chunks]) for name in ("start", "end"))
    counts = ends - starts
    cu_seqlens_q = np.full(max_seqs + 1, counts.sum(), np.int32)
    cu_seqlens_q[: len(chunks) + 1] = np.append(0, counts.cumsum())
    sequence = np.repeat(np.arange(len(chunks)), counts)  # The sequence of each token.
    where = starts[sequence] + np.arange(len(sequence)) - cu_seqlens_q[sequence]

    num_tokens = max_seqs if decode else bucket(len(sequence), max_seqs)
    width = bucket(max(len(request.pages) for request in requests), TABLE_WIDTH_MIN)
    tokens, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    slot_mapping = np.full(num_tokens, -1, np.int32)
    block_tables = np.zeros((max_seqs, width), np.int32)
    kv_lens, seeds = np.zeros(max_seqs, np.int32), np.zeros(max_seqs, np.uint32)
    temperatures = np.zeros(max_seqs, np.float32)
    for i, request in enumerate(requests):
        block_tables[i, : len(request.pages)] = request.pages
    tokens[: len(where)] = [token for chunk in chunks for token in tokens_of(chunk, rows)]
    positions[: len(where)] = where
    slot_mapping[: len(where)] = block_tables[sequence, where // page_size] * page_size + where % page_size
    kv_lens[: len(chunks)] = ends
    temperatures[: len(chunks)] = [request.temperature for request in requests]
    seeds[: len(chunks)] = [request.seed for request in requests]
    return Batch(tokens, positions, slot_mapping, block_tables, kv_lens, cu_seqlens_q, temperatures, seeds)


def tokens_of(chunk: Chunk, rows: Mapping[Request, int] | None) -> list[int]:
    """The tokens of a chunk, the last replaced by -1 minus its row if it is not known yet."""
    tokens = chunk.request.tokens[chunk.start : chunk.end]
    return tokens if len(tokens) == chunk.end - chunk.start else [*tokens, -1 - rows[chunk.request]]


def bucket(count: int, least: int) -> int:
    """`least` times the smallest power of two that gives at least `count`."""
    while least < count:
        least *= 2
    return least
