"""The engine: requests go in, and step by step their tokens come out."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from cookbook.serving.backends import backend as backend_of
from cookbook.serving.model import Batch, LlamaConfig, empty_pages, step
from cookbook.serving.pages import PageAllocator
from cookbook.serving.scheduler import Chunk, Request, Scheduler

TABLE_WIDTH_MIN = 16  # Pages of the narrowest block table: fewer widths are fewer compilations.


@dataclasses.dataclass(frozen=True)
class StepStats:
    """What a step did."""

    decode: bool  # Whether it had one token of each sequence, so that none was a longer piece of a prompt.
    num_tokens: int  # Computed.
    num_sampled: int  # New tokens of requests.
    num_running: int
    num_waiting: int
    num_preemptions: int  # In this step.
    kv_utilization: float  # Share of the cache's pages that requests hold.
    seconds: float  # From scheduling to tokens on the host.

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

    `allocator` and `scheduler` keep the books; `stats` has one `StepStats` a step.

    Raises:
      ValueError: a size does not fit another, or there is no such backend.
    """

    def __init__(
        self, config: LlamaConfig, params, *, num_pages: int, page_size: int = 16, max_seqs: int = 64,
        max_tokens_per_step: int = 512, backend: str = "cookbook",
    ):  # fmt: skip
        self.config = config
        self.params = params
        self.backend = backend
        backend_of(backend)
        self.allocator = PageAllocator(num_pages, page_size)
        self.scheduler = Scheduler(self.allocator, max_seqs=max_seqs, max_tokens_per_step=max_tokens_per_step)
        self.pages = empty_pages(config, num_pages, page_size)
        self.stats: list[StepStats] = []

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
        """Computes one step; returns the requests that it finished."""
        start, preemptions = time.perf_counter(), self.scheduler.num_preemptions
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        decode = all(chunk.end - chunk.start == 1 for chunk in chunks)
        batch = pack(chunks, self.allocator.page_size, self.scheduler.max_seqs, decode)
        sampled, _, self.pages = step(self.config, self.params, self.pages, batch, backend=self.backend, decode=decode)
        sampled = np.asarray(sampled)[: len(chunks)]
        end = time.perf_counter()
        for chunk in chunks:
            if chunk.samples and chunk.request.first_token is None:
                chunk.request.first_token = end
        self.stats.append(
            StepStats(
                decode=decode,
                num_tokens=sum(chunk.end - chunk.start for chunk in chunks),
                num_sampled=sum(chunk.samples for chunk in chunks),
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                num_preemptions=self.scheduler.num_preemptions - preemptions,
                kv_utilization=self.allocator.num_held / self.allocator.num_pages,
                seconds=end - start,
            )
        )
        return self.scheduler.complete(chunks, sampled)

    def run(self) -> list[Request]:
        """Steps until every request is finished; returns those, as they finished."""
        done = []
        while self.scheduler.running or self.scheduler.waiting:
            done += self.step()
        return done


def pack(chunks: Sequence[Chunk], page_size: int, max_seqs: int, decode: bool) -> Batch:
    """The arrays of a step, in one of few shapes, so that few are compiled.

    Rows of sequences are `max_seqs`. Tokens are as many in a step that decodes alone, the token of sequence i in row i,
    and otherwise `max_seqs` times a power of two. Block tables are 16 pages wide, or a larger power of two.
    """
    counts = [chunk.end - chunk.start for chunk in chunks]
    num_tokens = max_seqs if decode else bucket(sum(counts), max_seqs)
    width = bucket(max(len(chunk.request.pages) for chunk in chunks), TABLE_WIDTH_MIN)
    tokens, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    slot_mapping = np.full(num_tokens, -1, np.int32)
    block_tables = np.zeros((max_seqs, width), np.int32)
    kv_lens, seeds = np.zeros(max_seqs, np.int32), np.zeros(max_seqs, np.uint32)
    temperatures = np.zeros(max_seqs, np.float32)
    cu_seqlens_q = np.full(max_seqs + 1, sum(counts), np.int32)
    cu_seqlens_q[: len(counts) + 1] = np.cumsum([0, *counts])
    for i, chunk in enumerate(chunks):
        request, rows = chunk.request, slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        tokens[rows] = request.tokens[chunk.start : chunk.end]
        positions[rows] = where = np.arange(chunk.start, chunk.end)
        block_tables[i, : len(request.pages)] = request.pages
        slot_mapping[rows] = block_tables[i, where // page_size] * page_size + where % page_size
        kv_lens[i], temperatures[i], seeds[i] = chunk.end, request.temperature, request.seed
    return jax.device_put(
        Batch(tokens, positions, slot_mapping, block_tables, kv_lens, cu_seqlens_q, temperatures, seeds)
    )


def bucket(count: int, least: int) -> int:
    """`least` times the smallest power of two that gives at least `count`."""
    while least < count:
        least *= 2
    return least
