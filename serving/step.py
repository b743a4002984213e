"""Steps on the device: their requests' chunks as arrays, the model, and sampling."""

import concurrent.futures
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from serving.backends import TABLE_WIDTHS_MIN
from serving.config import LlamaConfig
from serving.defaults import under_defaults
from serving.model import Batch, forward
from serving.request import Chunk, Request
from serving.sampling import Options, Sampled, sample

OF_SEQUENCES = 7  # The last fields of a batch, from `kv_lens` on: a value or one more for each sequence.
ALL_TOKENS = 2**31 - 1  # The top_k that cuts nothing off.


class Launched(NamedTuple):
    """A program in flight: what its steps compute, when their scheduling began, and what the books said then."""

    chunks: list[Chunk]
    num_steps: int
    decode: bool
    sampled: Sampled
    start: float
    num_preemptions: int
    num_held: int


def rows_of(launched: Launched) -> dict[Request, int]:
    """The row of each request in the arrays of a program."""
    return {chunk.request: i for i, chunk in enumerate(launched.chunks)}


class Device(NamedTuple):
    """Arrays on the device, replaced as a whole: a step is launched with all that it changes, or not at all."""

    pages: list
    tokens: jax.Array  # The last ones that were sampled.
    in_flight: tuple[Launched, ...]  # The oldest first.


def pack(
    chunks: Sequence[Chunk], page_size: int, max_seqs: int, decode: bool, rows: Mapping[Request, int] | None = None, *,
    width_min: int = TABLE_WIDTHS_MIN["xla"],
) -> Batch:  # fmt: skip
    """The arrays of a step, NumPy's, in one of few shapes, so that few are compiled.

    Rows of sequences are `max_seqs`. Tokens are as many in a step that decodes alone, the token of sequence i in row i,
    and otherwise `max_seqs` times a power of two. Block tables have `width_min` pages, or that times a power of two. A
    token that is not known yet is -1 minus its request's row in the step before, which `rows` has. A batch that decodes
    has the first token of each chunk, and in `kv_lens` the ends of all (see `decode_steps`).
    """
    requests = [chunk.request for chunk in chunks]
    starts, ends = (np.fromiter(map(of, chunks), np.int32, len(chunks)) for of in (_START, _END))
    counts = np.ones_like(starts) if decode else ends - starts
    num_pages = np.array([len(request.pages) for request in requests])
    sequence = np.repeat(np.arange(len(chunks)), counts)  # The sequence of each token.
    num_tokens = max_seqs if decode else bucket(len(sequence), max_seqs)
    windows = any(request.window_pages for request in requests)
    width = bucket(num_pages.max(), width_min)
    batch = padding(num_tokens, width, max_seqs, _options(tuple(requests), max_seqs), windows=windows)
    batch.cu_seqlens_q[:] = counts.sum()
    batch.cu_seqlens_q[: len(chunks) + 1] = np.append(0, counts.cumsum())
    where = starts[sequence] + np.arange(len(sequence)) - batch.cu_seqlens_q[sequence]
    place = np.arange(width)

    def enter(tables, pages):
        pages = np.fromiter(itertools.chain.from_iterable(pages), np.int32, num_pages.sum())
        tables[: len(chunks)][place < num_pages[:, None]] = pages

    enter(batch.block_tables, [request.pages for request in requests])
    tokens = itertools.chain.from_iterable(map(tokens_of, chunks, counts.tolist(), itertools.repeat(rows)))
    batch.tokens[: len(where)] = np.fromiter(tokens, np.int32, len(where))
    batch.positions[: len(where)] = where
    slots_in = lambda tables: tables[sequence, where // page_size] * page_size + where % page_size
    batch.slot_mapping[: len(where)] = slots_in(batch.block_tables)
    if windows:
        enter(batch.window_tables, [request.window_pages for request in requests])
        freed = np.array([request.num_window_freed for request in requests])
        batch.window_tables[: len(chunks)][place < freed[:, None]] = -1
        batch.window_slot_mapping[: len(where)] = slots_in(batch.window_tables)
    batch.kv_lens[: len(chunks)] = ends
    return batch


_START, _END = operator.attrgetter("start"), operator.attrgetter("end")


@functools.lru_cache(maxsize=2)  # The requests of a step are mostly those of the one before. It keeps these alive.
def _options(requests: tuple[Request, ...], max_seqs: int) -> dict[str, np.ndarray]:
    """How tokens of these requests are drawn: the last fields of a batch, which cannot be written to."""
    fields = dict(
        temperatures=(np.float32, 0, [request.temperature for request in requests]),
        seeds=(np.uint32, 0, [request.seed for request in requests]),
        top_ks=(np.int32, ALL_TOKENS, [request.top_k or ALL_TOKENS for request in requests]),
        top_ps=(np.float32, 1, [request.top_p for request in requests]),
        min_ps=(np.float32, 0, [request.min_p for request in requests]),
    )
    options = {}
    for name, (dtype, default, values) in fields.items():
        options[name] = np.full(max_seqs, default, dtype)
        options[name][: len(values)] = values
        options[name].setflags(write=False)
    return options


def padding(
    num_tokens: int, width: int, max_seqs: int, options: Mapping[str, np.ndarray] | None = None, *,
    windows: bool = False,
) -> Batch:  # fmt: skip
    """A batch of no sequences, whose step writes to no page. Its last fields are `options`, if these are given; with
    `windows` it has block tables of the layers with a window, too."""
    zeros = lambda *shape, dtype=np.int32: np.zeros(shape, dtype)
    if options is None:
        options = {name: array.copy() for name, array in _options((), max_seqs).items()}
    no_slots = lambda: np.full(num_tokens, -1, np.int32)
    if windows:
        options = dict(options, window_slot_mapping=no_slots(), window_tables=zeros(max_seqs, width))
    return Batch(
        tokens=zeros(num_tokens), positions=zeros(num_tokens), slot_mapping=no_slots(),
        block_tables=zeros(max_seqs, width), kv_lens=zeros(max_seqs), cu_seqlens_q=zeros(max_seqs + 1), **options,
    )  # fmt: skip


def shapes(
    max_seqs: int, max_tokens: int, max_pages: int, width_min: int = TABLE_WIDTHS_MIN["xla"]
) -> list[tuple[int, int, bool]]:
    """(tokens, width of the block tables, decode) of every batch that `pack` makes, with chunks of up to `max_tokens`
    tokens together, of sequences of up to `max_pages` pages, and tables of at least `width_min`."""
    doubled = lambda least, most: itertools.takewhile(
        lambda n: n < 2 * max(most, least), (least * 2**i for i in itertools.count())
    )  # fmt: skip
    tokens = [(max_seqs, True), *((count, False) for count in doubled(max_seqs, max_tokens))]
    return [(count, width, decode) for width in doubled(width_min, max_pages) for count, decode in tokens]


def tokens_of(chunk: Chunk, count: int, rows: Mapping[Request, int] | None) -> list[int]:
    """The first `count` tokens of a chunk, the last replaced by -1 minus its row if it is not known yet."""
    tokens = chunk.request.tokens[chunk.start : chunk.start + count]
    return tokens if len(tokens) == count else [*tokens, -1 - rows[chunk.request]]


def bucket(count: int, least: int) -> int:
    """`least` times the smallest power of two that gives at least `count`."""
    while least < count:
        least *= 2
    return least


def step(
    config: LlamaConfig, weights, pages, batch: Batch, previous=None, *, backend: str, decode: bool,
    logprobs: bool = False, scored: bool = False, compiler_options: tuple[tuple[str, object], ...] = (),
) -> tuple[Sampled, list]:  # fmt: skip
    """`forward`, and sampling.

    Args:
      weights: of `prepared`.
      batch: of NumPy's arrays, which go to the device as one: each transfer costs the host as much, however small.
      previous: the next tokens of the step before, (R,) int32: a token -1 - i of the batch stands for the i-th of them.
        So a step can begin before the host knows them. None if the batch has no such token.
      logprobs: whether log probabilities are wanted.
      scored: whether the scores that tokens are chosen by are wanted.
      compiler_options: XLA's, for the program of the model, by name.

    Returns:
      The next token of each sequence; and the pages, in place of those given.
    """
    packed, form = joined(batch)
    draws = batch.temperatures > 0
    how = dict(draws=bool(draws.any()), cuts=_cuts_of(batch, draws), logprobs=logprobs, scored=scored)
    samples = decode and not (how["cuts"] or logprobs or scored)
    result, tail, pages = _program(compiler_options, model_step)(
        config, weights, pages, packed, previous, **form, backend=backend, decode=decode,
        draws=how["draws"] if samples else None,
    )  # fmt: skip
    sampled = result if samples else _sample(
        result, tail, layout=form["layout"][-OF_SEQUENCES:], backend=backend, **how
    )  # fmt: skip
    for array in jax.tree.leaves((sampled.tokens, sampled.logprobs)):
        array.copy_to_host_async()  # The copy begins when the step ends, and not when somebody waits for it.
    return sampled, pages


def _cuts_of(batch: Batch, draws: np.ndarray) -> str:
    """How tokens are cut off where rows draw, as `sample` takes it."""
    has_top_k = draws & (batch.top_ks < ALL_TOKENS)
    if has_top_k.any():
        return "top_k" if (has_top_k == draws).all() else "both"
    return "share" if (draws & ((batch.top_ps < 1) | (batch.min_ps > 0))).any() else ""


def decode_steps(
    config: LlamaConfig, weights, pages, batch: Batch, previous, *, count: int, backend: str,
    compiler_options: tuple[tuple[str, object], ...] = (),
) -> tuple[jax.Array, jax.Array, tuple]:  # fmt: skip
    """`count` steps in one program, which the host sends off once. They only decode, and sample plainly.

    Args:
      batch: of the first step, but for `kv_lens`, which are those of each sequence's last one. A sequence that ends
        before the others keeps its row.

    Returns:
      The next tokens of each step, (count, R) int32; those of the last, for `previous`; and the pages.
    """
    packed, form = joined(batch)
    draws = bool((batch.temperatures > 0).any())
    tokens, last, pages = _program(compiler_options, decode_program)(
        config, weights, pages, packed, previous, **form, backend=backend, draws=draws, count=count
    )  # fmt: skip
    tokens.copy_to_host_async()
    return tokens, last, pages


def compile_steps(
    config: LlamaConfig, weights, pages, previous, max_seqs: int, sizes: Sequence[tuple[int, int, bool]], *,
    backend: str, counts: Sequence[int] = (), compiler_options: tuple[tuple[str, object], ...] = (),
) -> None:  # fmt: skip
    """Compiles the programs that `step` needs of the model for these sizes, of `shapes`, and `decode_steps` for these
    numbers of steps; several at a time."""

    def compile_one(fn, size, **how):
        num_tokens, width, _ = size
        packed, form = joined(padding(num_tokens, width, max_seqs, windows=bool(config.window_layers)))
        _program(compiler_options, fn).lower(
            config, weights, pages, packed, previous, **form, **how, backend=backend
        ).compile()

    programs = []
    for size in sizes:
        decode = size[-1]
        programs += [(model_step, size, dict(decode=decode, draws=None))]
        for draws in (False, True) if decode else ():
            programs += [(model_step, size, dict(decode=True, draws=draws))]
            programs += [(decode_program, size, dict(draws=draws, count=count)) for count in counts]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda program: compile_one(*program[:2], **program[2]), programs))


def joined(batch: Batch) -> tuple[np.ndarray, dict]:
    """The arrays of a batch in one; and how `model_step` takes it apart."""
    arrays, tree = jax.tree.flatten(batch)
    layout = tuple((array.shape, array.dtype) for array in arrays)
    starts = starts_of(layout)
    packed = np.zeros(starts[-1], np.int32)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.ravel().view(np.int32)
    return packed, dict(tree=tree, layout=layout)


def starts_of(layout) -> list[int]:
    """Where arrays begin in one of int32, and the last ends: at multiples of 256 bytes, as a kernel wants its operands,
    for XLA gives it a part as it lies."""
    return [0, *itertools.accumulate(-(-math.prod(shape) // 64) * 64 for shape, _ in layout)]


@functools.cache
def _program(compiler_options: tuple[tuple[str, object], ...], fn):
    """`model_step` or `decode_program`, compiled with these options.

    The arrays of a step lie at one of few sets of addresses, as buffers are freed and taken again. A command buffer
    records its kernels anew for a set that it does not know, and XLA by itself remembers fewer.
    """
    options = [name for name, of in inspect.signature(fn).parameters.items() if of.kind is of.KEYWORD_ONLY]
    return jax.jit(
        fn, static_argnames=("config", *options),
        donate_argnames=("pages",), compiler_options=dict(xla_cmd_buffer_trace_cache_size=64) | dict(compiler_options),
    )  # fmt: skip


@under_defaults
def model_step(
    config: LlamaConfig, weights, pages, packed, previous, *, tree, layout, backend: str, decode: bool,
    draws: bool | None,
):  # fmt: skip
    """A step, with plain sampling; or with `draws` None the model's part of it: logits, the end of `packed` from which
    `_sample` reads, the pages.

    Sampling is a program of its own where a step has more than one token of a sequence or wants more than tokens: a
    program for each shape and each way to sample would be many. Most steps have no use for it, and the host sends off
    one program in less time than two.
    """
    batch = jax.tree.unflatten(tree, _parts(packed, layout))
    if previous is not None:
        batch = dataclasses.replace(batch, tokens=_known(batch.tokens, previous))
    logits, pages = forward(config, weights, pages, batch, backend=backend, decode=decode)
    # One slice for sampling, whose program then depends on no shape of the rest.
    tail = packed[starts_of(layout)[-1 - OF_SEQUENCES] :]
    if draws is None:
        return logits, tail, pages
    how = dict(backend=backend, draws=draws, cuts="", logprobs=False)
    return _sample(logits, tail, layout=layout[-OF_SEQUENCES:], **how), None, pages


@under_defaults
def decode_program(
    config: LlamaConfig, weights, pages, packed, previous, *, tree, layout, backend: str, draws: bool, count: int
):
    """The program of `decode_steps`: a loop, whose kernels the host prepares once and XLA can record as one graph.

    A scan's stacked results would be stored by an asynchronous copy, which keeps the body out of a graph.
    """
    first, page_size = jax.tree.unflatten(tree, _parts(packed, layout)), pages[0].shape[2]

    def body(step, carry):
        pages, tokens, found = carry
        positions = first.positions + jnp.int32(step)

        def page_in(tables):
            return jnp.take_along_axis(tables, positions[:, None] // page_size, axis=1, mode="clip")[:, 0]

        def slots_of(page):
            return jnp.where(positions < first.kv_lens, page * page_size + positions % page_size, -1)

        page = page_in(first.block_tables)
        batch = dataclasses.replace(
            first, tokens=tokens, positions=positions, kv_lens=jnp.minimum(positions + 1, first.kv_lens),
            slot_mapping=slots_of(page),
        )  # fmt: skip
        if config.window_layers:
            batch = dataclasses.replace(batch, window_slot_mapping=slots_of(page_in(first.window_tables)))
        logits, pages = forward(config, weights, pages, batch, backend=backend, decode=True)
        options = Options(batch.temperatures, batch.seeds, batch.kv_lens, batch.top_ks, batch.top_ps, batch.min_ps)
        tokens = sample(logits, options, backend=backend, draws=draws, cuts="", logprobs=False).tokens
        return pages, tokens, jnp.where(jnp.arange(count)[:, None] == step, tokens, found)

    start = pages, _known(first.tokens, previous), jnp.zeros((count, len(first.kv_lens)), jnp.int32)
    pages, last, tokens = jax.lax.fori_loop(0, count, body, start)
    return tokens, last, pages


def _known(tokens, previous):
    """`tokens`, those included that are -1 minus the row of one of `previous`. Where there was none to sample it is -1,
    a token like others: its request has failed."""
    return jnp.where(tokens < 0, previous[jnp.maximum(-1 - tokens, 0)], tokens)


@functools.partial(jax.jit, static_argnames=("layout", "backend", "draws", "cuts", "logprobs", "scored"))
@under_defaults
def _sample(logits, tail, *, layout, **how) -> Sampled:
    kv_lens, _, temperatures, seeds, *cuts = _parts(tail, layout)
    return sample(logits, Options(temperatures, seeds, kv_lens, *cuts), **how)


def _parts(packed, layout) -> list[jax.Array]:
    packed = jnp.asarray(packed)  # NumPy's under `jax_disable_jit`, where it would refuse indices that XLA clips.
    part = lambda start, shape, dtype: packed[start : start + math.prod(shape)].view(dtype).reshape(shape)
    return [part(start, *of) for start, of in zip(starts_of(layout), layout, strict=False)]
