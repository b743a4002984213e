"""The engine: requests go in, and step by step their tokens come out.

It is a step ahead of its device: while one step is computed, the next is scheduled, packed and sent off after it. For a
token that is not known yet, the batch has the row of the previous step in which it is sampled. A stop token is seen one
step late, and the results of that step for its request are thrown away.

Steps that only decode go off several at a time, in one program, and a request that waits joins after them: the host
then does most of its work once for all of them. A stop token is seen when all of them are done, and with `ahead` those
sent off meanwhile.

State after an exception, wherever it comes from, a `KeyboardInterrupt` included:

    where                                    what happens to
    before a step is launched, or in that    the step: it is taken back, and the engine is as before
    while the host waits, and it is an       the wait: the step is still in flight, and the next `step` waits for it
    interrupt
    while the host waits, and it is an       the steps in flight and the cache: they are lost. Requests keep the tokens
    error of the device; or half-way         that are known, and compute the others again: the same ones, as they depend
    through the books                        on nothing but the request

No request fails by that, and the next `step` goes on. A step that fails each time raises each time, until `cancel` or
`reset` takes away what it fails of. A request fails alone, with `Request.error`, if its logits are not finite.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cookbook import _host
from serving import backends
from serving.checks import require_supported
from serving.config import LlamaConfig, check_params
from serving.model import empty_pages
from serving.pages import PageAllocator
from serving.request import Chunk, Output, Request, logprobs_of_row, output_since
from serving.sampling import Sampled
from serving.scheduler import Scheduler
from serving.stats import Stats, StepStats
from serving.step import ALL_TOKENS, Device, Launched, compile_steps, decode_steps, pack, padding, rows_of, shapes, step
from serving.weights import prepared


class Engine:
    """Continuous batching on one device.

    Args:
      config: the model's sizes.
      params: its parameters, of `init` or `load`. The engine keeps them joined, which are copies of most: drop yours.
      num_pages: of the cache, with `LlamaConfig.page_bytes_per_token` bytes per token, or one byte per value in 8 bits.
        A page holds keys and values of all layers, or, if some see a window of tokens, either of these or of the
        others. `serving.memory` says how much memory that is, and for how many sequences.
      page_size: tokens per page.
      max_seqs: sequences of a step.
      max_tokens_per_step: tokens of a step; at least `max_seqs`.
      max_seq_len: tokens of the longest request, new ones included; None: as many as the model and the cache allow.
        `warmup` compiles less if there are fewer.
      backend: "cookbook" for this package's kernels, "xla" for plain XLA.
      weights: None for weights as they are, "int8" for all matrices in 8 bits, each output channel with a scale.
      kv_cache_dtype: None for keys and values of the model's dtype; "fp8" for e4m3, cut at 448, as vLLM has them
        without scales in the checkpoint.
      compiler_options: XLA's, for the program of the model. XLA records the kernels of a step, this package's included,
        as command buffers (CUDA graphs); `xla_gpu_enable_command_buffer="INVALID"` turns that off,
        `xla_cmd_buffer_trace_cache_size` (64) says for how many sets of addresses a recording is kept.
      ahead: whether a step is scheduled and sent off while the one before is computed.
      num_scheduler_steps: how many steps that decode are sent off at once, at most; a power of two. With more, tokens
        come in larger groups, a request that is submitted meanwhile waits longer, more is computed in vain after a stop
        token, and `warmup` compiles more.

    `allocator` and `scheduler` keep the books; `stats` has the figures of the steps.

    Raises:
      ValueError: a size does not fit another, a parameter not the config, the kernels refuse a size of the model or the
        engine, or there is no such backend.
    """

    def __init__(
        self, config: LlamaConfig, params, *, num_pages: int, page_size: int = 16, max_seqs: int = 64,
        max_tokens_per_step: int = 512, max_seq_len: int | None = None, backend: str = "cookbook",
        weights: str | None = None, kv_cache_dtype: str | None = None,
        compiler_options: Mapping[str, object] | None = None, ahead: bool = True, num_scheduler_steps: int = 4,
    ):  # fmt: skip
        backends.backend(backend)
        if kv_cache_dtype not in (None, "fp8"):
            raise ValueError(f'{kv_cache_dtype=}; must be None or "fp8"')
        check_params(config, params)
        whole = functools.partial(_host.option, "serving.Engine")
        count = self.num_scheduler_steps = whole("num_scheduler_steps", num_scheduler_steps, int)
        if count < 1 or count & (count - 1):
            raise ValueError(f"Engine: {num_scheduler_steps=} must be a power of two, such as 1 or 4")
        self.config, self.backend, self.ahead, self.kv_cache_dtype = config, backend, ahead, kv_cache_dtype
        self.compiler_options = _checked(compiler_options or {})
        self.allocator = PageAllocator(num_pages, page_size)
        self.scheduler = Scheduler(
            self.allocator, max_seqs=max_seqs, max_tokens_per_step=max_tokens_per_step, window=config.window
        )
        most = min(self.scheduler.most_tokens, config.max_position_embeddings or self.scheduler.most_tokens)
        self.max_seq_len = most if max_seq_len is None else whole("max_seq_len", max_seq_len, int)
        if not 1 <= self.max_seq_len <= most:
            raise ValueError(f"Engine: {max_seq_len=} must be from 1 to {most}, which the model and the cache allow")
        require_supported(
            config, params, backend=backend, weights=weights, kv_cache_dtype=kv_cache_dtype, num_pages=num_pages,
            page_size=page_size, max_seqs=max_seqs, max_tokens_per_step=max_tokens_per_step, max_pages=self._max_pages,
        )  # fmt: skip
        self.weights = prepared(config, params, weights)
        self.stats = Stats()
        self._news: dict[Request, int] = {}  # Requests to tell of, and how many tokens they had when last told of.
        self._latest = 0.0  # When the last tokens came.
        self._num_preemptions = 0  # Those that `stats` has, or a step in flight.
        self._device = self._new_device()

    @property
    def _max_pages(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_seq_len // self.allocator.page_size)

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and was told of."""
        in_flight = self._device is None or self._device.in_flight  # None: a restart was interrupted.
        return not (self.scheduler.running or self.scheduler.waiting or in_flight or self._news)

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int, *, temperature: float = 0.0, seed: int | None = None,
        stop_tokens: Sequence[int] | None = None, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0,
        logprobs: int | None = None,
    ) -> Request:  # fmt: skip
        """Queues a request, to be read when `step`, `stream` or `run` has worked on it.

        Args:
          stop_tokens: None for those of the config. For all others see `Request`.

        Raises:
          ValueError: a token is outside of the vocabulary, a number out of range, or the request larger than the cache
            or `max_seq_len`.
        """
        self._repair()
        stop_tokens = self.config.eos_token_ids if stop_tokens is None else stop_tokens
        request = Request(
            prompt, max_new_tokens, temperature, seed, stop_tokens, top_k, top_p, min_p, logprobs
        )  # fmt: skip
        for name, tokens in (("prompt", request.prompt), ("stop_tokens", request.stop_tokens)):
            for token in tokens:
                if not 0 <= token < self.config.vocab_size:
                    raise ValueError(
                        f"submit: {name} has the token {token}, outside of 0 to {self.config.vocab_size - 1}: encode "
                        "the text with this model's tokenizer"
                    )
        # The last token is sampled and never computed.
        if (places := len(request.prompt) + request.max_new_tokens - 1) > self.max_seq_len:
            raise ValueError(
                f"submit: a prompt of {len(request.prompt)} tokens and {max_new_tokens=} need {places} places; "
                f"max_seq_len is {self.max_seq_len}: ask for fewer tokens, or give the engine more"
            )
        self.scheduler.submit(request)
        return request

    def cancel(self, request: Request) -> bool:
        """Ends a request now; the next `step` tells of it. Returns whether it had not ended before.

        Raises:
          ValueError: it was never submitted here.
        """
        self._repair()
        if request in self.scheduler:
            self._news.setdefault(request, len(request.tokens))
        return self.scheduler.cancel(request)

    def reset(self) -> None:
        """Cancels all requests, without telling of them, and forgets cached pages and figures."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            request.is_cancelled = True
        self._news, self.stats = {}, Stats()
        self._restart()

    def step(self) -> list[Output]:
        """Sends off a step, or several that decode, if there is anything to do, and waits for those before, or with
        `ahead` off for these. Returns what is new: of each request that has new tokens or has ended, once.

        If it raises, this docstring's module says what is left; what would have been told is told by the next step.
        """
        self._repair()
        is_launched = len(self._device.in_flight) <= self.ahead and self._launch()
        if len(self._device.in_flight) > (self.ahead if is_launched else 0):
            self._complete()
        outputs = [output_since(request, count) for request, count in self._news.items()]
        outputs = [output for output in outputs if output.tokens or output.finish_reason]
        self._news = {}
        return outputs

    def stream(self) -> Iterator[Output]:
        """Steps until every request has ended, those included that come while it runs; gives what is new at once."""
        while not self.is_idle:
            yield from self.step()

    def run(self) -> list[Request]:
        """Steps until every request has ended; returns those, as they ended."""
        return [output.request for output in self.stream() if output.finish_reason]

    def warmup(self) -> int:
        """Compiles every program that a step may need, several at a time, and runs each once. Returns the number of
        shapes of steps.

        Raises:
          RuntimeError: there are requests.
        """
        self._repair()
        if not self.is_idle:
            raise RuntimeError("Engine.warmup: there are requests; call it before the first one, or after a reset()")
        s, counts = self.scheduler, [2**i for i in range(1, self.num_scheduler_steps.bit_length())]
        found = shapes(s.max_seqs, s.max_tokens_per_step, self._max_pages, backends.TABLE_WIDTHS_MIN[self.backend])
        if self.backend == "xla" or jax.default_backend() == "gpu":  # The interpreter serves one thread alone.
            compile_steps(
                self.config, self.weights, self._device.pages, self._device.tokens, s.max_seqs, found,
                backend=self.backend, counts=counts, compiler_options=self.compiler_options,
            )  # fmt: skip
        for i, (num_tokens, width, decode) in enumerate(found):
            batch = padding(num_tokens, width, s.max_seqs, windows=bool(self.config.window_layers))
            for way, (temperature, top_k, top_p) in enumerate(_ways_to_sample(s.max_seqs)):
                is_plain = way < 2
                if i and not is_plain:  # That program has the same shapes in all steps.
                    continue
                batch.temperatures[:], batch.top_ks[:], batch.top_ps[:] = temperature, top_k, top_p
                for logprobs in (False, True) if i == 0 else (False,):
                    with self._repairing():
                        sampled, pages = self._step(batch, decode, logprobs)
                        self._device = Device(pages, sampled.tokens, ())
                    jax.device_get((sampled.tokens, sampled.logprobs))
                for count in counts if decode and is_plain else ():
                    with self._repairing():
                        tokens, last, pages = self._steps(batch, count)
                        self._device = Device(pages, last, ())
                    jax.device_get(tokens)
        return len(found)

    def check(self) -> None:
        """Compares the allocator's books with the requests. Raises RuntimeError if they differ."""
        self.scheduler.check()

    def _step(self, batch, decode: bool, logprobs: bool):
        return step(
            self.config, self.weights, self._device.pages, batch, self._device.tokens, backend=self.backend,
            decode=decode, logprobs=logprobs, compiler_options=self.compiler_options,
        )  # fmt: skip

    def _steps(self, batch, count: int):
        return decode_steps(
            self.config, self.weights, self._device.pages, batch, self._device.tokens, count=count,
            backend=self.backend, compiler_options=self.compiler_options,
        )  # fmt: skip

    def _launch(self) -> bool:
        """Schedules a step, or several, and sends them off. Returns whether there was anything to do."""
        start, scheduler = time.perf_counter(), self.scheduler
        with self._repairing():
            before, plan = self._device, scheduler.before
            try:
                chunks, num_steps = scheduler.schedule_steps(self.num_scheduler_steps)
                if chunks:
                    self._device = self._sent_off(chunks, num_steps, start)
            except BaseException:
                if self._device is before and scheduler.before is not plan and not scheduler.is_broken:
                    scheduler.unschedule()
                raise
        return bool(chunks)

    def _sent_off(self, chunks: list[Chunk], num_steps: int, start: float) -> Device:
        """The arrays on the device after the launch of these steps."""
        before = self._device.in_flight
        decode = num_steps > 1 or all(chunk.end - chunk.start == 1 for chunk in chunks)
        batch = pack(
            chunks, self.allocator.page_size, self.scheduler.max_seqs, decode, rows_of(before[-1]) if before else {},
            width_min=backends.TABLE_WIDTHS_MIN[self.backend],
        )  # fmt: skip
        preemptions, held = self.scheduler.num_preemptions, self.allocator.num_held
        if num_steps == 1:
            sampled, pages = self._step(batch, decode, any(chunk.request.logprobs is not None for chunk in chunks))
            last = sampled.tokens
        else:
            tokens, last, pages = self._steps(batch, num_steps)
            sampled = Sampled(tokens, None, None)
        launched = Launched(chunks, num_steps, decode, sampled, start, preemptions, held)
        return Device(pages, last, (*before, launched))

    def _complete(self) -> None:
        """Waits for the tokens of the oldest steps in flight, and enters them into the books."""
        launched, *later = self._device.in_flight
        start = time.perf_counter()
        try:
            tokens, _, logprobs = jax.device_get(launched.sampled)
        except Exception:  # An error of the device; an interrupt is none, and leaves the step in flight.
            self._restart()
            raise
        with self._repairing():  # The steps are entered and not in flight any more, or all starts again.
            self._enter(launched, tokens, logprobs, time.perf_counter() - start)
            self._device = self._device._replace(in_flight=tuple(later))

    def _enter(self, launched: Launched, tokens: np.ndarray, logprobs, waited: float) -> None:
        before, self._latest = self._latest, time.perf_counter()
        seconds, count = self._latest - max(before, launched.start), launched.num_steps
        tokens = np.where(tokens < self.config.vocab_size, tokens, -1).reshape(count, -1).tolist()
        known = [(i, chunk) for i, chunk in enumerate(launched.chunks) if chunk.request in self.scheduler]
        lengths = [len(chunk.request.tokens) for _, chunk in known]
        for (i, chunk), length in zip(known, lengths, strict=True):
            request = chunk.request
            self._news.setdefault(request, length)
            if chunk.num_sampled and tokens[0][i] >= 0:
                request.first_token = self._latest if request.first_token is None else request.first_token
                if request.logprobs is not None:
                    request.recorded[len(request.generated) :] = [logprobs_of_row(logprobs, i, request.logprobs)]
        done = self.scheduler.complete(launched.chunks, *tokens)
        new = [len(chunk.request.tokens) - length for (_, chunk), length in zip(known, lengths, strict=True)]
        self._add_steps(launched, new, seconds / count, waited / count)
        for request in done:
            self.stats.add_finished(request)

    def _add_steps(self, launched: Launched, new: list[int], seconds: float, waited: float) -> None:
        """The figures of the steps of a program, of whose requests some have so many `new` tokens."""
        counts = [chunk.end - chunk.start for chunk in launched.chunks]
        for i in range(launched.num_steps):
            preemptions, self._num_preemptions = self._num_preemptions, launched.num_preemptions
            self.stats.add_step(
                StepStats(
                    decode=launched.decode,
                    num_tokens=sum(counts) if launched.num_steps == 1 else sum(count > i for count in counts),
                    num_sampled=sum(count > i for count in new),
                    num_running=len(self.scheduler.running),
                    num_waiting=len(self.scheduler.waiting),
                    num_preemptions=launched.num_preemptions - preemptions,
                    kv_utilization=launched.num_held / self.allocator.num_pages,
                    seconds=seconds,
                    waited=waited,
                )
            )

    @contextlib.contextmanager
    def _repairing(self):
        try:
            yield
        except BaseException:
            self._repair()
            raise

    def _repair(self) -> None:
        """Starts again if an exception left the books half-changed, or took the pages along with a step."""
        device, scheduler = self._device, self.scheduler
        if (
            device is None
            or scheduler.is_broken
            or scheduler.num_open != len(device.in_flight)
            or jax.tree.leaves(device.pages)[0].is_deleted()  # A step takes all of them or none.
        ):
            self._restart()

    def _restart(self) -> None:
        """An empty cache and nothing in flight: all that has not ended waits, with the tokens that it has."""
        self._device = None  # Its memory is free before there is a new one.
        self.scheduler.restart()
        self._num_preemptions = self.scheduler.num_preemptions
        self._device = self._new_device()

    def _new_device(self) -> Device:
        sizes = self.allocator.num_pages, self.allocator.page_size
        pages = empty_pages(self.config, *sizes, self.kv_cache_dtype)
        return Device(pages, jnp.zeros(self.scheduler.max_seqs, jnp.int32), ())


def _ways_to_sample(max_seqs: int) -> list[tuple]:
    """(temperature, top_k, top_p) of steps that sample by different programs; the first two in the model's own."""
    some = np.where(np.arange(max_seqs) == 0, 1, ALL_TOKENS)
    return [(0, ALL_TOKENS, 1.0), (1, ALL_TOKENS, 1.0), (1, 1, 1.0), (1, ALL_TOKENS, 0.5), (1, some, 1.0)]


def _checked(compiler_options: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """The options as `step` takes them.

    Raises:
      ValueError: XLA refuses one.
    """
    try:
        jax.jit(lambda: 0, compiler_options=dict(compiler_options)).lower().compile()
    except Exception as error:
        raise ValueError(f"Engine: {compiler_options=}: {error}; must be options that XLA knows") from error
    return tuple(sorted(compiler_options.items()))
