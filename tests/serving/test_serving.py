"""The serving engine: its tokens are the reference's, whoever else is served; no page is lost or given twice."""

import collections
import dataclasses
import functools
import importlib
import inspect
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from bench import serving as bench
from serving import Engine, LlamaConfig, PageAllocator, Request, Scheduler, init, memory
from serving.backends import backend
from serving.model import rotate
from serving.pages import extend_keys
from serving.reference import generate
from tests.arrays import array

CONFIG = LlamaConfig(256, 128, 256, 2, 4, 2, 64, dtype="float32")
SIZES = dict(num_pages=24, page_size=16, max_seqs=8, max_tokens_per_step=32)  # Fewer pages than 8 requests need.
MAX_SEQ_LEN = 176


# Pages ---------------------------------------------------------------------------------------------------------------


def use_at_random(module, seed: int, steps: int = 300):
    """Random use of an allocator, beside a list of what each page holds; every page that is shared has to hold it."""
    rng = np.random.default_rng(seed)
    allocator = module.PageAllocator(num_pages=int(rng.integers(1, 20)), page_size=2)
    holders, contents = [], {}
    for _ in range(steps):
        sequence = rng.integers(0, 2, 2 * rng.integers(1, 5)).tolist()  # So few tokens that prefixes repeat.
        keys = []
        module.extend_keys(keys, sequence, 2)
        action = rng.integers(3)
        if action == 0:
            before = allocator.num_available
            pages = allocator.share(keys)
            new = allocator.allocate(len(keys) - len(pages))
            for i, page in enumerate(pages):
                assert contents[page] == sequence[: 2 * (i + 1)], "a page was shared that holds other tokens"
            if new is None:
                allocator.release(pages)
                assert allocator.num_available == before
                continue
            assert len(set(pages + new)) == len(keys) and not {page for held in holders for page in held} & set(new)
            for i, page in enumerate(pages + new):
                contents[page] = sequence[: 2 * (i + 1)]
                if i < len(pages) or rng.integers(4):
                    allocator.publish(page, keys[i])
            holders.append(pages + new)
        elif action == 1 and holders:
            allocator.release(holders.pop(rng.integers(len(holders))))
        elif action == 2 and (pages := allocator.allocate(int(rng.integers(3)))) is not None:
            for page in pages:
                contents[page] = None
            holders.append(pages)
        allocator.check(holders)
    for pages in holders:
        allocator.release(pages)
    assert allocator.num_held == 0 and len(allocator.allocate(allocator.num_pages)) == allocator.num_pages


@pytest.mark.parametrize("seed", range(40))
def test_allocator_never_leaks_and_never_gives_a_page_twice(seed):
    use_at_random(importlib.import_module("serving.pages"), seed)


def test_the_books_are_compared_with_the_holders():
    allocator = PageAllocator(4, 2)
    pages = allocator.allocate(2)
    allocator.check([pages])
    for wrong in ([], [pages, pages], [pages[:1]], [[*pages, 3 - pages[0]]]):
        with pytest.raises(RuntimeError, match="reference"):
            allocator.check(wrong)
    allocator._free.append(pages[0])
    with pytest.raises(RuntimeError, match="available 1 time"):
        allocator.check([pages])


def test_cached_pages_go_the_oldest_first_and_tails_before_heads():
    allocator, keys = PageAllocator(3, 1), []
    extend_keys(keys, [5, 6, 7], 1)
    pages = allocator.allocate(3)
    for page, key in zip(pages, keys, strict=True):
        allocator.publish(page, key)
    allocator.release(pages)
    assert allocator.allocate(1) == pages[2:]
    assert allocator.share(keys) == pages[:2]


# Scheduling ----------------------------------------------------------------------------------------------------------


def schedule_at_random(module, seed: int, window: int | None = None):
    """Random requests, whose tokens are random too; returns how often one was preempted, and how often several steps
    were scheduled at once. With every second seed steps are scheduled before those before are completed, and requests
    may end with a stop token.

    `cache` has, for each slot, the tokens that its keys and values were computed of: all up to that place; `texts` the
    tokens of each request, which the device knows and the scheduler is told of later. With a `window` there are layers
    that see so many tokens, with pages of their own.
    """
    rng = np.random.default_rng(seed)
    num_pages, max_seqs, ahead = int(rng.integers(6, 13)), int(rng.integers(1, 7)), seed % 2 == 1
    budget = max_seqs + int(rng.integers(0, 20))
    allocator = PageAllocator(2 * num_pages if window else num_pages, 4)
    scheduler = module.Scheduler(allocator, max_seqs=max_seqs, max_tokens_per_step=budget, window=window)
    requests = [
        module.Request(
            tuple(rng.integers(0, 2, rng.integers(1, 20))), int(rng.integers(1, 6)), stop_tokens={1} if ahead else ()
        )
        for _ in range(40)
    ]
    order = {request: i for i, request in enumerate(requests)}
    texts = {request: list(request.prompt) for request in requests}
    to_submit, done, cache, launched, several = collections.deque(requests), [], {}, collections.deque(), 0
    for _ in range(3000):
        while to_submit and rng.integers(2):
            scheduler.submit(to_submit.popleft())
        decoding = {request for request in scheduler.running if request.num_uncomputed == 1}
        chunks, count = scheduler.schedule_steps(int(rng.choice([1, 2, 4])))
        scheduler.check()
        several += count > 1
        served = [chunk.request for chunk in chunks]
        assert len(set(served)) == len(chunks)
        assert count in (1, 2, 4) and (count == 1 or all(c.end - c.start == c.num_sampled <= count for c in chunks))
        assert len(scheduler.running) <= max_seqs and set(served) <= set(scheduler.running)
        assert decoding & set(scheduler.running) <= set(served), "a request that decodes waited"
        arrived = [order[request] for request in (*scheduler.running, *scheduler.waiting)]
        assert arrived == sorted(arrived), "one overtook another"
        launched.append((chunks, []))
        for step in range(count):
            written = collections.Counter()
            kinds = lambda request: [request.pages, request.window_pages][: 2 if window else 1]
            slot = lambda pages, i: (pages[i // 4], i % 4)
            parts = [(chunk.request, chunk.start, chunk.end) for chunk in chunks]
            if count > 1:
                parts = [(r, start + step, start + step + 1) for r, start, end in parts if start + step < end]
            assert sum(end - start for _, start, end in parts) <= budget
            for request, start, end in parts:  # Keys and values are written before any are read, as in a layer.
                text = texts[request]
                assert start < end <= 4 * len(request.pages) and (count == 1 or end == len(text))
                for pages in kinds(request):
                    where = {slot(pages, i): text[: i + 1] for i in range(start, end)}
                    written.update({page for page, _ in where})
                    for page in {page for page, _ in where}:
                        is_full = 4 * pages.index(page) + 4 <= end
                        assert is_full or scheduler.allocator.references(page) == 1, "a page is shared that is not full"
                    cache |= where
            for request, start, _ in parts:
                for pages, first in zip(kinds(request), (0, max(0, start + 1 - (window or 0))), strict=False):
                    assert first >= 4 * request.num_window_freed or pages is request.pages, "a page is freed too early"
                    for i in range(first, start):
                        assert cache.get(slot(pages, i)) == texts[request][: i + 1], "a page holds other tokens"
                if window:
                    held = len(request.window_pages) - request.num_window_freed
                    assert held <= (window - 1 + max(budget, count)) // 4 + 2, "pages that no token sees are held"
            assert all(times == 1 for times in written.values()), "two write to one page"
            sampled = rng.integers(0, 2, len(chunks))
            for i, chunk in enumerate(chunks):
                samples = chunk.num_sampled > step if count > 1 else chunk.end == len(texts[chunk.request])
                assert count > 1 or samples == chunk.num_sampled
                texts[chunk.request] += [int(sampled[i])] * samples
            launched[-1][1].append(sampled)
        assert chunks or launched[0][0] or not (scheduler.running or scheduler.waiting)
        while len(launched) > ahead:
            chunks, sampled = launched.popleft()
            done += scheduler.complete(chunks, *sampled)
            scheduler.check()
        if len(done) == len(requests):
            break
    assert set(done) == set(requests) and len(done) == len(requests)
    for request in requests:
        assert request.tokens == texts[request][: len(request.tokens)] and request.finished
        assert len(request.generated) == request.max_new_tokens or request.tokens[-1] in request.stop_tokens
        assert not request.stop_tokens & set(request.generated[:-1]), "it went on after a stop token"
    scheduler.check()
    assert scheduler.allocator.num_held == 0
    return scheduler.num_preemptions, several


def test_scheduler_keeps_its_promises():
    """Budget, order, no page written by two or while shared, every request ends."""
    counts = [schedule_at_random(importlib.import_module("serving.scheduler"), seed) for seed in range(200)]
    for ahead in (0, 1):
        assert sum(count > 0 for count, _ in counts[ahead::2]) >= 30 and sum(n for _, n in counts[ahead::2]) >= 200


def test_scheduler_keeps_its_promises_with_a_window():
    """Also: a page that a token sees is not given back, one that none sees is. Windows within a page and over many."""
    module = importlib.import_module("serving.scheduler")
    counts = [schedule_at_random(module, seed, window=1 + seed % 11) for seed in range(60)]
    assert sum(count > 0 for count, _ in counts) >= 15 and sum(n for _, n in counts) >= 60


@pytest.mark.parametrize(
    "old, new",
    [
        ("max(0, token + 1 - self.window)", "max(0, token + 5 - self.window)"),
        ("keys[self._first_seen(count * page_size) : count]", "keys[count - 1 : count]"),
        ("            self.allocator.release(pages[count:])\n", ""),
        ("            request.num_window_freed = first\n", ""),
        ("request.window_pages += pages[missing:]", "request.window_pages += pages[:missing]"),
    ],
)
def test_mutants_of_windows_are_caught(copied, old, new):
    module = copied("scheduler", old, new)["scheduler"]
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        for seed in range(60):
            schedule_at_random(module, seed, window=1 + seed % 11)


def test_a_long_sequence_holds_few_pages_of_layers_with_a_window():
    """900 tokens of a prompt in chunks of 64, then 100 new ones, several steps at once; a window of 128."""
    scheduler = Scheduler(PageAllocator(63 + 14, 16), max_seqs=1, max_tokens_per_step=64, window=128)
    request, most = Request(tuple(range(900)), 101), 0
    scheduler.submit(request)
    while not request.finished:
        chunks, count = scheduler.schedule_steps(4)
        most = max(most, len(request.held_pages) - len(request.pages))
        scheduler.complete(chunks, *[[7]] * count)
        scheduler.check()
    assert most == 12 and scheduler.most_tokens == 64 * 16 and scheduler.num_preemptions == 0
    with pytest.raises(ValueError, match="need 78 pages of 16 tokens, and the cache has 77"):
        scheduler.submit(Request(tuple(range(1000)), 26))


def test_memory_is_said_before_there_is_an_engine():
    """Sizes of gpt-oss-20b, without allocating them; and those of a small engine, which has them."""
    config = LlamaConfig(
        201_088, 2880, 2880, 24, 64, 8, 64, num_experts=32, num_experts_per_tok=4, attention_bias=True,
        attention_sinks=True, expert_bias=True, swiglu_limit=7.0, sliding_window=128,
        window_layers=tuple(range(0, 24, 2)),
    )  # fmt: skip
    found = memory(config, num_pages=32768, max_seq_len=8192)
    # Twelve layers, 16 tokens, keys and values, eight heads of 64 bfloat16; 41.8 GB of weights.
    assert found.cache == 32768 * 12 * 16 * 2 * 8 * 64 * 2 and 41.7e9 < found.weights < 41.9e9
    assert (found.pages_per_sequence, found.num_sequences) == (512 + 41, 59)
    params = jax.eval_shape(functools.partial(init, config, packing="mxfp4"))
    packed = memory(config, params, num_pages=32768, max_seq_len=8192).weights
    experts = 24 * 32 * 3 * 2880 * 2880
    assert found.weights - packed == 2 * experts - experts // 2 - experts // 32 and 13.7e9 < packed < 13.8e9
    sizes = dict(num_pages=24, page_size=16, max_seqs=8, max_tokens_per_step=32)
    engine = Engine(CONFIG, init(CONFIG), **sizes, backend="xla")
    found = memory(CONFIG, **sizes, max_seq_len=176)
    nbytes = lambda arrays: sum(x.nbytes for x in jax.tree.leaves(arrays))
    assert (found.weights, found.cache) == (nbytes(engine.weights), nbytes(engine._device.pages))
    assert (found.pages_per_sequence, found.num_sequences) == (11, 2)


def test_at_most_one_step_ahead():
    scheduler = Scheduler(PageAllocator(4, 4), max_seqs=1, max_tokens_per_step=1)
    scheduler.submit(Request((1, 2, 3), 1))
    scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="two schedules wait"):
        scheduler.schedule()


def test_a_long_prompt_does_not_stop_those_that_decode():
    scheduler = Scheduler(PageAllocator(40, 4), max_seqs=3, max_tokens_per_step=8)
    short, long = Request((1, 2), 9), Request(tuple(range(50)), 1)
    scheduler.submit(short)
    scheduler.complete(scheduler.schedule(), [7])
    scheduler.submit(long)
    for _ in range(3):
        chunks = scheduler.schedule()
        assert [(chunk.request, chunk.end - chunk.start) for chunk in chunks] == [(short, 1), (long, 7)]
        scheduler.complete(chunks, [7, 7])


@pytest.mark.parametrize("num_pages, wanted, joins", [(7, 4, True), (7, 5, False), (128, 123, True), (128, 124, False)])
def test_a_request_joins_when_there_are_pages_for_all_of_its_tokens(num_pages, wanted, joins):
    """And of many pages some are left, for those that run. Its first chunk needs two."""
    scheduler = Scheduler(PageAllocator(num_pages, 4), max_seqs=3, max_tokens_per_step=8)
    runs, waits = Request((1,) * 8, 9), Request((2,) * (4 * wanted), 1)
    scheduler.submit(runs)
    scheduler.complete(scheduler.schedule(), [7])
    scheduler.submit(waits)
    assert ([chunk.request for chunk in scheduler.schedule()] == [runs, waits]) == joins


# The engine against the reference ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trace:
    """Requests (arguments of `Engine.submit`), and the tokens and scores that the reference has for each."""

    params: dict
    requests: list[dict]
    tokens: list[list[int]]
    scores: list[np.ndarray]


def answered(config: LlamaConfig, requests: list[dict]) -> Trace:
    params = init(config)
    answers = [generate(config, params, Request(**request), MAX_SEQ_LEN) for request in requests]
    return Trace(params, requests, *map(list, zip(*answers, strict=True)))


def gaps(scores: np.ndarray) -> np.ndarray:
    """By how much each best score exceeds the next."""
    second, first = np.sort(scores, axis=-1)[:, -2:].T
    return first - second


@pytest.fixture(scope="module")
def trace() -> Trace:
    return answered(CONFIG, bench.trace(150, CONFIG.vocab_size, max_prompt=60, max_new_tokens=40))


def served(engine: Engine, requests: list[dict]) -> list[Request]:
    """Submits some requests a step, so that they come while others are served, and checks the books at each."""
    requests, submitted = collections.deque(requests), []
    done = []
    while requests or engine.scheduler.running or engine.scheduler.waiting:
        submitted += [engine.submit(**requests.popleft()) for _ in range(min(2, len(requests)))]
        done += [output.request for output in engine.step() if output.finish_reason]
        engine.check()
    done += engine.run()
    assert set(done) == set(submitted) and len(done) == len(submitted) and engine.run() == []
    assert engine.allocator.num_held == 0
    return submitted


def recorded(monkeypatch) -> dict:
    """Filled, from here on, with the scores that the engine chose from, by request and place of the new token.

    Its steps go off one at a time."""
    module, scores, launched = importlib.import_module("serving.engine"), {}, collections.deque()
    step, complete = module.step, Scheduler.complete

    def recording_step(*args, **kwargs):
        sampled, pages = step(*args, **kwargs, scored=True)
        launched.append(np.asarray(sampled.scores))
        return sampled, pages

    def recording_complete(self, chunks, sampled):
        rows = zip(chunks, launched.popleft(), strict=False)
        scores.update({(chunk.request, chunk.end): row for chunk, row in rows if chunk.num_sampled})
        return complete(self, chunks, sampled)

    monkeypatch.setattr(module, "step", recording_step)
    monkeypatch.setattr(Scheduler, "complete", recording_complete)
    return scores


def assert_served_as_answered(requests: list[Request], trace: Trace, scores: dict):
    """The same tokens, and for a reason: no score is wrong by half of what separates the reference's best two."""
    assert [request.generated for request in requests] == trace.tokens
    error = max(
        np.abs(scores[request, len(request.prompt) + i] - row).max()
        for request, rows in zip(requests, trace.scores, strict=True)
        for i, row in enumerate(rows)
    )
    least = min(gaps(rows).min() for rows in trace.scores)
    assert 2 * error < least, f"scores differ by {error:.2g}, the best two by {least:.2g}: equal tokens are luck"


@pytest.mark.parametrize("ahead", [True, False])
def test_engine_gives_the_references_tokens(trace, monkeypatch, ahead):
    """150 requests under preemption and with shared prefixes, greedy and sampled, in float32."""
    scores = recorded(monkeypatch)
    engine = Engine(CONFIG, trace.params, **SIZES, backend="xla", ahead=ahead, num_scheduler_steps=1)
    requests = served(engine, trace.requests)
    assert_served_as_answered(requests, trace, scores)
    assert sum(request.num_preempted > 0 for request in requests) >= 10
    assert engine.scheduler.num_shared_pages >= 100
    stopped = [request for request in requests if request.tokens[-1] in request.stop_tokens]
    assert any(len(request.generated) < request.max_new_tokens for request in stopped)
    stats = engine.stats
    assert sum(step.num_sampled for step in stats) == sum(len(request.generated) for request in requests)
    assert sum(step.num_preemptions for step in stats) == sum(request.num_preempted for request in requests)
    assert max(step.kv_utilization for step in stats) == 1.0 and all(step.tokens_per_second >= 0 for step in stats)
    assert {step.decode for step in stats} == {True, False}
    assert all(0 < request.time_to_first_token < 300 for request in requests)


@pytest.fixture
def several(monkeypatch) -> list[int]:
    """Filled, from here on, with the numbers of steps that go off at once, where there are several."""
    module, counts = importlib.import_module("serving.engine"), []
    original = module.decode_steps

    def counting(*args, count, **kwargs):
        counts.append(count)
        return original(*args, count=count, **kwargs)

    monkeypatch.setattr(module, "decode_steps", counting)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_several_steps_in_one_program_give_the_references_tokens(trace, several, ahead):
    engine = Engine(CONFIG, trace.params, **SIZES, backend="xla", ahead=ahead)
    requests = served(engine, trace.requests)
    assert [request.generated for request in requests] == trace.tokens
    assert several.count(2) >= 5 and several.count(4) >= 5


@pytest.mark.kernels
@pytest.mark.slow
def test_several_steps_in_one_program_on_the_kernels(several):
    """Pages are equal to the bit with those of one step after the other: one sequence ends early, one is sampled."""
    config = LlamaConfig(128, 128, 128, 1, 2, 1, 64, dtype="bfloat16")
    params, found = init(config), []
    requests = [
        dict(prompt=[3, 5], max_new_tokens=3),
        dict(prompt=range(14), max_new_tokens=5, temperature=1.0, seed=7),
    ]
    for count in (1, 4):
        engine = Engine(config, params, **SIZES | dict(max_seqs=2), backend="cookbook", num_scheduler_steps=count)
        tokens = [request.generated for request in lab.run(served, engine, requests)]
        found.append((tokens, [np.asarray(pages).view(np.uint16) for pages in engine._device.pages]))
    assert several and set(several) <= {2, 4} and found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("count", [0, 3, -1, 2.0, "4", None])
def test_steps_at_once_are_a_power_of_two(count):
    with pytest.raises(ValueError, match="num_scheduler_steps=.* must be (a power of two|one int)"):
        Engine(CONFIG, init(CONFIG), **SIZES, backend="xla", num_scheduler_steps=count)


BF16_GAP = 0.06  # Weights and pages of bfloat16 move scores, whose deviation is 1, by 0.02.


def decided(config: LlamaConfig, requests: list[dict], least_gap: float) -> Trace:
    """Each request as far as the reference's best two scores are `least_gap` apart: rounding cannot choose there."""
    trace, kept = answered(config, requests), []
    for i, request in enumerate(trace.requests):
        count = int(np.argmax(np.append(gaps(trace.scores[i]), 0.0) < least_gap))
        if count:
            trace.tokens[i], trace.scores[i] = trace.tokens[i][:count], trace.scores[i][:count]
            kept.append((request | dict(max_new_tokens=count), trace.tokens[i], trace.scores[i]))
    return Trace(trace.params, *map(list, zip(*kept, strict=True)))


@pytest.mark.slow
def test_engine_in_bfloat16(monkeypatch):
    """The same with 16-bit weights and pages, for tokens that do not hang on their rounding."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    trace = decided(config, bench.trace(150, config.vocab_size, max_prompt=60, max_new_tokens=20), BF16_GAP)
    assert len(trace.requests) > 100 and sum(map(len, trace.tokens)) > 250
    sizes, scores = SIZES | dict(num_pages=10, num_scheduler_steps=1), recorded(monkeypatch)
    engine = Engine(config, trace.params, **sizes, backend="xla")
    requests = served(engine, trace.requests)
    assert_served_as_answered(requests, trace, scores)
    assert sum(request.num_preempted > 0 for request in requests) >= 3


@pytest.mark.kernels
@pytest.mark.slow  # Chapter 15b serves two requests on the kernels.
def test_engine_on_the_kernels(monkeypatch):
    """A prompt in two chunks beside one that decodes; on a GPU all of what XLA is tested with."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16", num_hidden_layers=1)
    if on_gpu := lab.on_gpu():
        requests = bench.trace(300, config.vocab_size, max_prompt=60, max_new_tokens=20)
    else:
        requests = bench.trace(3, config.vocab_size, max_prompt=40, max_new_tokens=3)
    trace, scores = decided(config, requests, BF16_GAP), recorded(monkeypatch)
    sizes = SIZES | dict(num_scheduler_steps=1) | ({} if on_gpu else dict(max_seqs=2))
    engine = Engine(config, trace.params, **sizes, backend="cookbook")
    requests = lab.run(served, engine, trace.requests)
    assert_served_as_answered(requests, trace, scores)
    assert {step.decode for step in engine.stats} == {True, False}


def test_sampling_follows_the_probabilities():
    """Two thousand draws of one distribution, each with another seed: frequencies within four deviations."""
    from serving.sampling import scores

    logits, count = np.float32([2.0, 1.0, 0.0, -1.0]), 2000
    rows = scores(
        np.tile(logits, (count, 1)), np.full(count, 0.7, np.float32), np.arange(count, dtype=np.uint32),
        np.full(count, 3, np.int32),
    )  # fmt: skip
    p = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    frequency = np.bincount(np.asarray(rows).argmax(axis=1), minlength=4) / count
    assert (abs(frequency - p) < 4 * np.sqrt(p * (1 - p) / count)).all()


def test_rotary_positions_turn_complex_numbers():
    """As the paper has it, with a head's halves as real and imaginary parts: Hugging Face's order."""
    x, positions = np.random.default_rng(0).normal(size=(5, 3, 64)), np.array([0, 1, 2, 100, 5000])
    angles = positions[:, None, None] * 10000.0 ** (-2 * np.arange(32) / 64)
    turned = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    # float32 knows an angle of 5000 to 2e-4.
    np.testing.assert_allclose(rotate(jnp.float32(x), jnp.asarray(positions), 10000.0), expected, atol=2e-3)


def test_a_request_alone_has_the_tokens_that_it_has_in_company(trace):
    options = trace.requests[1] | dict(max_new_tokens=20, temperature=1.5, stop_tokens=())
    engine = Engine(CONFIG, trace.params, **SIZES, backend="xla")
    alone, twice = (served(engine, [options] * count) for count in (1, 2))
    other = served(engine, [options | dict(seed=77)])
    assert alone[0].generated == twice[0].generated == twice[1].generated != other[0].generated


def test_attention_of_the_two_backends_has_one_result_for_decoding_and_for_chunks():
    """Decoding is a chunk of one token; a sequence of no tokens and padding give zeros."""
    rng, xla = np.random.default_rng(0), backend("xla")
    draw = lambda *shape: array(rng.normal(size=shape), jnp.float32)
    q, pages = draw(4, 4, 64), (draw(9, 16, 2, 64), draw(9, 16, 2, 64))
    tables, kv_lens = jnp.asarray(rng.permutation(9)[:8].reshape(4, 2)), jnp.array([17, 0, 32, 1])
    decoded = xla.paged_attention(q, *pages, tables, kv_lens)
    chunked = xla.ragged_paged_attention(q, *pages, tables, kv_lens, jnp.array([0, 1, 1, 2, 2]))
    np.testing.assert_array_equal(decoded[1], 0)
    np.testing.assert_array_equal(chunked[2:], 0)
    np.testing.assert_allclose(chunked[0], decoded[0], atol=1e-6)
    again = xla.paged_attention(q[1:2], *pages, tables[2:3], kv_lens[2:3])
    np.testing.assert_allclose(chunked[1], again[0], atol=1e-6)


def test_a_request_that_just_fits_is_served():
    """It needs every page, and the last of its tokens needs none; with embeddings that give the logits too."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    params = init(config)
    engine = Engine(config, params, **SIZES | dict(num_pages=2), backend="xla")
    (request,) = served(engine, [dict(prompt=[1] * 30, max_new_tokens=3)])
    assert request.generated == generate(config, params, request, MAX_SEQ_LEN)[0]
    with pytest.raises(ValueError, match="need 33 places; max_seq_len is 32"):
        engine.submit([1] * 30, 4)


@pytest.mark.slow
def test_bench_serves_a_tiny_trace():
    figures = bench.serve(bench.TINY, "xla", init(bench.TINY.config))
    assert figures["tokens_per_second"] > 0 and figures["shared_pages"] > 0


# Mutants -------------------------------------------------------------------------------------------------------------

# In an order of their imports; those without a program of the device come last, and a mutant of them compiles none.
MODULES = ["request", "sampling", "backends", "model", "step", "pages", "scheduler", "engine"]


@pytest.fixture
def copied(monkeypatch):
    """`copied(name, old, new)`: the serving modules from `name` on, by name, with `old` replaced in that one."""

    def copy_from(name: str, old: str = "", new: str = "") -> dict[str, types.ModuleType]:
        copies = {}
        for each in MODULES[MODULES.index(name) :]:
            source = inspect.getsource(importlib.import_module(f"serving.{each}"))
            if each == name and old:
                assert source.count(old) == 1
                source = source.replace(old, new)
            for other in copies:
                source = source.replace(f"from serving.{other} import", f"from copy_of_{other} import")
            copy = copies[each] = types.ModuleType(f"copy_of_{each}")
            monkeypatch.setitem(sys.modules, copy.__name__, copy)
            exec(compile(source, copy.__name__, "exec"), copy.__dict__)
        return copies

    return copy_from


def try_out(copies: dict[str, types.ModuleType], trace: Trace):
    """The beginning of the trace, in which all happens that can."""
    if "pages" in copies:
        use_at_random(copies["pages"], 0)
    if "scheduler" in copies:
        for seed in range(40):
            schedule_at_random(copies["scheduler"], seed)
    sizes = SIZES | dict(max_tokens_per_step=16, num_scheduler_steps=2)  # Few programs: each mutant compiles its own.
    engine = copies["engine"].Engine(CONFIG, trace.params, **sizes, backend="xla")
    for first, end in ((0, 6), (6, 45)):  # The few find most mutants, and sooner.
        tokens = [request.generated for request in served(engine, trace.requests[first:end])]
        assert tokens == trace.tokens[first:end], "other tokens"


def test_what_is_no_mutant_passes(trace, copied):
    try_out(copied("sampling"), trace)


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("pages", "[page] -= 1\n        if self._references[page] == 0", "[page] -= 1\n        if True"),
        ("pages", 'keys[-1] if keys else b""', 'b""'),
        ("pages", "            self._cached.pop(page, None)\n", ""),
        ("pages", "            del self._page_of[key]\n", ""),
        ("pages", "self._references[page] += 1\n            pages.append", "pages.append"),
        ("scheduler", "(len(request.tokens) - 1) //", "len(request.tokens) //"),
        ("scheduler", "min(last, len(request.keys))", "min(len(request.keys), len(request.pages))"),
        ("scheduler", "            self._release(victim)\n", "            victim.pages, victim.num_computed = [], 0\n"),
        ("scheduler", "victim = self.running.pop()", "victim = self.running.pop(0)"),
        ("step", "[request.pages for request", "[sorted(request.pages) for request"),
        ("step", "starts[sequence] + np.arange", "np.arange"),
        ("step", "-1 - rows[chunk.request]", "-1"),
        (
            "scheduler",
            "if request.pages is chunk.pages:  # Or it",
            "if True:  # Or it",
        ),
        (
            "scheduler",
            "                if request not in self._requests:  # It ended",
            "                if False:  # It ended",
        ),
        ("scheduler", "self.running if request in self.running else self.waiting", "self.running"),
        ("scheduler", "min(chunk.request.num_left, count - 1)", "count - 1"),
        ("scheduler", "self._missing(count - 1) > self", "0 > self"),
        ("scheduler", "== chunk.num_sampled for chunk", "== 1 or True for chunk"),
        ("scheduler", "range(num_sampled or 1)", "range(1)"),
        ("scheduler", "                    if request.finished:\n                        break\n", ""),
        ("scheduler", "chunk.request.num_pending += count", "pass"),
        ("step", "previous[jnp.maximum(-1 - tokens, 0)]", "previous[0]"),
        ("step", "first.positions + jnp.int32(step)", "first.positions"),
        ("step", "jnp.minimum(positions + 1, first.kv_lens)", "first.kv_lens"),
        ("step", "page * page_size + positions % page_size, -1)", "page * page_size + positions % page_size, 0)"),
        ("step", "batch.kv_lens[: len(chunks)] = ends", "batch.kv_lens[: len(chunks)] = starts + 1"),
        ("step", "np.ones_like(starts) if decode else ends - starts", "ends - starts"),
        ("step", "seeds, kv_lens, *cuts", "seeds, jnp.arange(seeds.size), *cuts"),
        ("model", "batch.cu_seqlens_q[1:] - 1", "batch.cu_seqlens_q[:-1]"),
        ("model", "numbers + first)", "numbers + 0 * first)"),
        ("backends", "kv_lens[sequence] - behind", "kv_lens[sequence]"),
        ("sampling", "noise.row_key(seeds, positions)", "noise.row_key(0 * seeds, positions)"),
        ("step", "np.full(num_tokens, -1, np.int32)", "np.zeros(num_tokens, np.int32)"),
    ],
)
def test_mutants_are_caught(trace, copied, name, old, new):
    """Pages given away while held, prefixes mixed up, stale tables, wrong positions, a look into the future."""
    copies = copied(name, old, new)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        try_out(copies, trace)
