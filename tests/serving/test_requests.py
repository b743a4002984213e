"""An engine as its user sees it: news, cancelling, resets, warm-up, options, errors; each request for itself."""

import dataclasses
import functools
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from serving import Engine, LlamaConfig, PageAllocator, Request, RopeScaling, Scheduler, init
from serving.checks import require_supported
from serving.reference import generate
from serving.stats import KEPT, Stats, StepStats
from serving.step import shapes

CONFIG = LlamaConfig(256, 128, 256, 2, 4, 2, 64, dtype="float32")
SIZES = dict(num_pages=24, page_size=16, max_seqs=8, max_tokens_per_step=32)
PARAMS = functools.cache(init)


def engine_of(config: LlamaConfig = CONFIG, params=None, **kwargs) -> Engine:
    return Engine(config, params or PARAMS(config), **SIZES | dict(backend="xla") | kwargs)


# News ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_tell_every_token_once_and_the_end_last(ahead):
    engine = engine_of(ahead=ahead)
    requests = [engine.submit(range(i + 1, 40), 3 + i, temperature=0.5 * i, logprobs=i or None) for i in range(5)]
    told = {request: [] for request in requests}
    for output in engine.stream():
        told[output.request].append(output)
    assert engine.is_idle and engine.step() == []
    assert all(0 <= step.waited <= step.seconds for step in engine.stats)
    for request, outputs in told.items():
        assert [token for output in outputs for token in output.tokens] == request.generated
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert all(len(output.tokens) == len(output.logprobs or output.tokens) for output in outputs)


def test_a_stream_takes_requests_that_come_while_it_runs():
    engine = engine_of()
    first = engine.submit([1, 2], 3)
    done = []
    for output in engine.stream():
        if output.request is first and len(first.generated) == 1:
            engine.submit([3], 2)
        done += [output.request] if output.finish_reason else []
    assert len(done) == 2


def test_logprobs_are_the_models():
    """Those of the reference's logits, whatever the temperature; the chosen token's is among all."""
    engine = engine_of()
    request = engine.submit([5, 6, 7], 4, temperature=2.0, seed=3, logprobs=3)
    engine.run()
    for i, found in enumerate(request.logprobs_of):
        prompt = request.tokens[: 3 + i]
        _, scores = generate(CONFIG, PARAMS(CONFIG), Request(prompt, 1), 16)
        logprobs = np.float64(scores[0]) - np.log(np.exp(np.float64(scores[0])).sum())
        assert abs(found.chosen - logprobs[request.generated[i]]) < 1e-4
        best = np.argsort(-logprobs)[:3]
        assert list(found.top) == best.tolist()
        np.testing.assert_allclose(list(found.top.values()), logprobs[best], atol=1e-4)
    assert len(request.logprobs_of) == 4


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(5))
def test_a_request_that_is_cancelled_ends_and_gives_its_pages_back(steps):
    engine = engine_of(num_pages=6)
    others = [engine.submit(range(i, 20 + i), 6) for i in range(2)]
    cancelled = engine.submit(range(30), 40)
    outputs = [output for _ in range(steps) for output in engine.step()]
    assert engine.cancel(cancelled) and not engine.cancel(cancelled)
    engine.check()
    so_far = list(cancelled.tokens)
    outputs += engine.stream()
    engine.check()
    assert engine.allocator.num_held == 0 and cancelled.tokens == so_far
    ends = {output.request: output.finish_reason for output in outputs if output.finish_reason}
    assert ends == {cancelled: "cancelled", others[0]: "length", others[1]: "length"}
    for request in others:
        assert request.generated == generate(CONFIG, PARAMS(CONFIG), request, 64)[0]


def test_a_reset_leaves_nothing():
    engine = engine_of()
    requests = [engine.submit(range(20), 9) for _ in range(3)]
    engine.step()
    engine.cancel(requests[0])
    engine.reset()
    assert engine.is_idle and engine.step() == [] and len(engine.stats) == 0 and engine.allocator.num_held == 0
    assert {request.finish_reason for request in requests} == {"cancelled"}
    again = engine.submit(range(20), 9)
    assert engine.scheduler.num_shared_pages == 0 or not engine.allocator._page_of
    assert engine.run() == [again] and again.generated == generate(CONFIG, PARAMS(CONFIG), again, 64)[0]


@pytest.mark.parametrize("backend, width", [("xla", 16), ("cookbook", 64)])
def test_block_tables_of_kernels_have_few_widths(backend, width, monkeypatch):
    def fail(*args, **how):
        raise RuntimeError(f"{args[3].block_tables.shape[1]} pages wide")

    monkeypatch.setattr(importlib.import_module("serving.engine"), "step", fail)
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    engine = engine_of(config, backend=backend)
    engine.submit(range(20), 1)
    with pytest.raises(RuntimeError, match=f"{width} pages wide"):
        engine.step()
    for pages, more in ((1, 1), (width, 1), (width + 1, 2), (3 * width, 3)):
        assert len({found for _, found, _ in shapes(4, 12, pages, width)}) == more


@pytest.mark.slow
@pytest.mark.parametrize("longest, widths", [(320, 2), (40, 1)])
def test_warm_up_compiles_all_that_a_mixed_trace_needs(longest, widths):
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, vocab_size=200 + widths)  # New programs.
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **kwargs: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    engine = engine_of(config, num_pages=40, max_seq_len=longest, max_seqs=4, max_tokens_per_step=12)
    assert engine.warmup() == len(shapes(4, 12, longest // 16)) == widths * 4
    assert compiled and engine.is_idle and len(engine.stats) == 0
    compiled.clear()
    rng = np.random.default_rng(0)
    for i in range(12):
        engine.submit(
            rng.integers(0, 200, rng.integers(1, 30)), int(rng.integers(1, 9)), temperature=i % 3 / 2,
            top_k=5 if i % 4 == 0 else None, logprobs=2 if i % 5 == 0 else None,
        )  # fmt: skip
    engine.submit(rng.integers(0, 200, longest - 20), 3)  # Needs the widest block table.
    engine.run()
    for temperature in (0.0, 1.0):  # Alone, so that several steps go off at once.
        for prompt in ([1], rng.integers(0, 200, longest - 20)):
            engine.submit(prompt, 9, temperature=temperature)
            engine.run()
    assert not compiled, f"{len(compiled)} programs were compiled after the warm-up"
    engine.submit([1], 1)
    with pytest.raises(RuntimeError, match="there are requests"):
        engine.warmup()


def test_stats_are_bounded_and_have_percentiles():
    stats = Stats()
    for i in range(KEPT + 10):
        stats.add_step(StepStats(i % 2 == 0, 2, 1, 1, 0, 0, 0.5, float(i), 0.0))
    assert len(stats) == KEPT and stats.num_steps == KEPT + 10 and stats.num_tokens == 2 * (KEPT + 10)
    seconds = [step.seconds for step in stats if step.decode]
    assert stats.percentiles()["decode_step"]["p90"] == np.percentile(seconds, 90)
    assert np.isnan(Stats().percentiles()["mixed_step"]["p50"])
    json.dumps(stats.percentiles())
    engine = engine_of()
    engine.submit([1, 2, 3], 2, stop_tokens=())
    engine.submit([1, 2, 3], 2, stop_tokens=range(256))
    engine.run()
    assert engine.stats.num_finished == {"length": 1, "stop": 1} and engine.stats.num_sampled == 3
    assert engine.stats.percentiles()["time_to_first_token"]["p50"] > 0


# Each request for itself ---------------------------------------------------------------------------------------------


def served_beside_a_bad_one(config: LlamaConfig, backend: str, poison: float, num_tokens: int = 3, **kwargs):
    """Requests, of which one has a token with a poisoned embedding; each good one has what it has without that one."""
    params = dict(PARAMS(config))
    name = "model.embed_tokens.weight"
    params[name] = params[name].at[77].set(poison)
    prompts = [[1, 2, 3], [4, 5, 77, 6], [7] * 18]
    serve = lambda params, prompts: [
        (engine := engine_of(config, params, backend=backend, **kwargs)),
        [engine.submit(prompt, num_tokens, temperature=0.5 * i, seed=i) for i, prompt in enumerate(prompts)],
        engine.run(),
        engine.check(),
    ]
    engine, (first, bad, last), *_ = serve(params, prompts)
    _, (like_first, _, like_last), *_ = serve(PARAMS(config), prompts)
    assert isinstance(bad.error, FloatingPointError) and bad.finish_reason == "error" and not bad.generated
    assert "after token 3 are not finite" in str(bad.error)
    assert first.generated == like_first.generated and last.generated == like_last.generated
    # Pages that had a NaN serve whoever comes next.
    again = [engine.submit([8] * 20, num_tokens, seed=5) for _ in range(4)]
    engine.run()
    alone = engine_of(config, backend=backend, **kwargs)
    expected = alone.submit([8] * 20, num_tokens, seed=5)
    alone.run()
    assert all(request.generated == expected.generated for request in again)
    assert engine.allocator.num_held == 0


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("experts", [0, 4])
def test_a_requests_nan_stays_its_own(poison, ahead, experts):
    config = dataclasses.replace(CONFIG, num_experts=experts, num_experts_per_tok=2 * (experts > 0))
    # As few pages as that: those of the bad request are soon another's, and page 0 pads every block table.
    served_beside_a_bad_one(config, "xla", poison, num_pages=6, ahead=ahead)


@pytest.mark.kernels
@pytest.mark.slow
def test_a_requests_nan_stays_its_own_on_the_kernels():
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, dtype="bfloat16")
    lab.run(functools.partial(served_beside_a_bad_one, num_pages=6, max_seqs=4), config, "cookbook", np.nan, 2)


@pytest.mark.parametrize("token", [-5, 256, 2**31 - 1])
def test_a_token_outside_of_the_vocabulary_fails_its_request_alone(monkeypatch, token):
    module = importlib.import_module("serving.engine")
    step = module.step

    def broken_step(*args, **kwargs):
        sampled, pages = step(*args, **kwargs)
        return sampled._replace(tokens=sampled.tokens.at[1].set(token)), pages

    engine = engine_of(ahead=False)
    good, bad = engine.submit([1, 2], 2), engine.submit([3, 4], 2)
    monkeypatch.setattr(module, "step", broken_step)
    assert [output.request for output in engine.step() if output.finish_reason] == [bad]
    monkeypatch.undo()
    engine.run()
    assert bad.finish_reason == "error" and good.generated == generate(CONFIG, PARAMS(CONFIG), good, 16)[0]


def test_pages_of_a_request_that_failed_are_not_shared():
    params = dict(PARAMS(CONFIG))
    params["model.embed_tokens.weight"] = params["model.embed_tokens.weight"].at[77].set(np.nan)
    engine = engine_of(params=params)
    engine.submit([77] * 20, 3)
    engine.run()
    assert not engine.allocator._page_of
    engine.submit([77] * 20, 3)
    (again,) = engine.run()
    assert engine.scheduler.num_shared_pages == 0 and again.error


def test_equal_prompts_of_one_batch_share_pages():
    """All but the tail of each: 3 full pages, computed once; the tokens are those of a request alone."""
    engine = engine_of(max_tokens_per_step=128)
    requests = [engine.submit(range(50), 2) for _ in range(6)]
    engine.step()
    assert engine.scheduler.num_shared_pages == 5 * 3 and engine.allocator.num_held == 3 + 6
    engine.run()
    expected = generate(CONFIG, PARAMS(CONFIG), requests[0], 64)[0]
    assert all(request.generated == expected for request in requests)


def test_a_prompt_in_chunks_takes_pages_that_another_one_computes():
    engine = engine_of(max_tokens_per_step=32, max_seqs=2)
    requests = [engine.submit([*range(60), i], 2) for i in range(2)]
    engine.run()
    assert sum(step.num_tokens for step in engine.stats) < 61 + 61 - 2 * 16
    for request in requests:
        assert request.generated == generate(CONFIG, PARAMS(CONFIG), request, 64)[0]


@pytest.mark.slow
def test_requests_without_a_seed_differ_and_their_seed_repeats_them():
    engine = engine_of()
    requests = [engine.submit([1, 2, 3], 8, temperature=2.0) for _ in range(3)]
    engine.run()
    assert len({tuple(request.generated) for request in requests}) == 3
    again = engine.submit([1, 2, 3], 8, temperature=2.0, seed=requests[1].seed)
    engine.run()
    assert again.generated == requests[1].generated


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_new_tokens", "prompt", "stop_tokens", "temperature", "seed"])
def test_a_request_cannot_be_changed(name):
    request = engine_of().submit([1], 4)
    with pytest.raises(AttributeError, match=f"Request.{name} cannot be changed"):
        setattr(request, name, 1)


def test_a_request_is_submitted_once():
    scheduler = Scheduler(PageAllocator(4, 4), max_seqs=1, max_tokens_per_step=8)
    request = Request([1, 2], 1)
    scheduler.submit(request)
    for _ in range(2):
        with pytest.raises(ValueError, match="submitted before; make a new Request"):
            scheduler.submit(request)
        scheduler.complete(scheduler.schedule(), [3] * bool(scheduler.running or scheduler.waiting))


def test_numbers_of_numpy_and_jax_are_taken():
    """And a config's EOS tokens in a list, or one of them."""
    config = dataclasses.replace(CONFIG, hidden_size=np.int64(128), rope_theta=jnp.float32(1e4), eos_token_ids=[3, 5])
    assert config == dataclasses.replace(CONFIG, eos_token_ids=(3, 5)) and hash(config)
    assert dataclasses.replace(CONFIG, eos_token_ids=np.int32(3)).eos_token_ids == (3,)
    options = dict(max_new_tokens=np.int16(2), temperature=jnp.float32(0.5), seed=np.uint32(7), top_k=jnp.int32(3))
    request = Request(jnp.array([1, 2]), **options, stop_tokens={np.int64(4)})
    assert (request.prompt, request.temperature, request.top_k) == ((1, 2), 0.5, 3)
    assert request.stop_tokens == {4} and type(request.seed) is type(request.prompt[0]) is int


def test_a_failed_schedule_is_taken_back():
    scheduler = Scheduler(PageAllocator(4, 4), max_seqs=2, max_tokens_per_step=8)
    with pytest.raises(RuntimeError, match="directly after"):
        scheduler.unschedule()
    scheduler.submit(Request(range(6), 3))
    first = scheduler.schedule()
    scheduler.unschedule()
    scheduler.check()
    assert scheduler.allocator.num_held == 0 and not scheduler.running and len(scheduler.waiting) == 1
    again = scheduler.schedule()
    assert [(chunk.start, chunk.end) for chunk in first] == [(chunk.start, chunk.end) for chunk in again] == [(0, 6)]


def test_a_rollback_leaves_the_oldest_page_the_oldest():
    allocator = PageAllocator(3, 1)
    pages = allocator.allocate(3)
    for page in pages:
        allocator.publish(page, bytes([page]))
    allocator.release(pages)
    before = list(allocator._cached), dict(allocator._page_of)
    allocator.begin()
    held = allocator.allocate(2)
    allocator.publish(held[0], b"new")
    allocator.release(held)
    allocator.rollback()
    allocator.check([])
    assert (list(allocator._cached), allocator._page_of) == before


def test_a_page_that_is_computed_again_is_not_shared_before_it_is_full():
    """A request is preempted while its step is in flight, and comes back in pieces before that is completed."""
    scheduler = Scheduler(PageAllocator(3, 4), max_seqs=2, max_tokens_per_step=8)
    short, long = Request([1], 3), Request(range(6), 4)
    scheduler.submit(short)
    scheduler.submit(long)
    steps = [scheduler.schedule()]
    for _ in range(2):  # The token in the last place of `long`'s second page is not known when its step is scheduled.
        steps.append(scheduler.schedule())
        scheduler.complete(steps.pop(0), [7, 7])
    assert scheduler.schedule() == [] and long.num_preempted == 1
    scheduler.cancel(short)  # `long` comes back when there are pages for all of its tokens.
    scheduler.max_tokens_per_step = 2
    ((chunk,), open_step) = scheduler.schedule(), steps.pop()
    assert (chunk.request, chunk.start, chunk.end) == (long, 4, 6)
    scheduler.complete(open_step, [7, 7])
    assert len(long.keys) == 2 and len(scheduler.allocator.share(long.keys)) == 1


def test_what_is_preempted_with_a_step_open_comes_back_later_or_whole():
    """The last token of a request is pending when it is preempted, and no chunk is left for the next step."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        scheduler = Scheduler(PageAllocator(int(rng.integers(3, 6)), 2), max_seqs=3, max_tokens_per_step=6)
        for _ in range(3):
            scheduler.submit(Request(rng.integers(0, 2, rng.integers(1, 3)), int(rng.integers(1, 5))))
        launched = []
        for _ in range(200):
            if chunks := scheduler.schedule():
                launched.append(chunks)
            elif rng.integers(2):
                continue  # A second schedule before the open step is completed.
            if launched and (len(launched) == 2 or not chunks):
                chunks = launched.pop(0)
                scheduler.complete(chunks, rng.integers(0, 2, len(chunks)))
            scheduler.check()
        assert not (scheduler.running or scheduler.waiting)


def released_twice():
    allocator = PageAllocator(2, 4)
    pages = allocator.allocate(1)
    allocator.release(pages)
    allocator.release(pages)


def released_twice_in_one_call():
    allocator = PageAllocator(2, 4)
    (page,) = allocator.allocate(1)
    try:
        allocator.release([page, page])
    finally:
        assert allocator.references(page) == 1, "nothing is released then"


def published_twice(again: bytes):
    allocator = PageAllocator(2, 4)
    (page,) = allocator.allocate(1)
    allocator.publish(page, b"a")
    allocator.publish(page, again)


def submitted(*args, **kwargs):
    return engine_of().submit(*args, **kwargs)


def scheduled(prompt, max_new_tokens):
    Scheduler(PageAllocator(24, 16), max_seqs=1, max_tokens_per_step=8).submit(Request(prompt, max_new_tokens))


def too_many_slots():
    sizes = dict(num_pages=2**27, page_size=16, max_seqs=1, max_tokens_per_step=1, max_pages=1)
    require_supported(
        dataclasses.replace(CONFIG, num_hidden_layers=1), {}, **sizes, backend="xla", weights=None, kv_cache_dtype=None
    )


def changed(**params):
    """An engine of parameters of which some are others; None: missing."""
    every = PARAMS(CONFIG) | {f"model.{name}.weight": value for name, value in params.items()}
    return engine_of(params={name: value for name, value in every.items() if value is not None})


@pytest.mark.parametrize(
    "changes, how, message",
    [
        (dict(intermediate_size=100), {}, "intermediate_size=100, .*row of . has 100 values.*: pad it to 104"),
        (dict(hidden_size=68), {}, "hidden_size=68, .*row of . has 68 values"),
        (dict(hidden_size=72), dict(weights="int8"), "weights='int8'.*w_q has 72 values along K.*: pad it to 80"),
        (dict(num_experts=4, num_experts_per_tok=2, intermediate_size=100), {}, "cookbook.moe: hidden=128, inner=100"),
        (dict(hidden_size=65544), {}, "cookbook.rms_norm"),
        (dict(head_dim=32), {}, "head_dim=32"),
        (dict(dtype="float32"), {}, "must both be bfloat16 or both float16"),
        (dict(dtype="float16"), dict(kv_cache_dtype="fp8"), "float8_e4m3fn"),
        ({}, dict(page_size=8), r"page_size=8 must be one of \(16, 32"),
    ],
)  # fmt: skip
def test_an_engine_refuses_what_its_kernels_would_refuse_at_each_step(changes, how, message):
    config = dataclasses.replace(LlamaConfig(16, 128, 128, 1, 2, 1, 64), **changes)
    params = {name: np.zeros(shape, config.dtype) for name, shape in config.shapes.items()}
    with pytest.raises(ValueError, match=f"(?s)serving.Engine: .*{message}"):
        engine_of(config, params, **dict(backend="cookbook") | how)


@pytest.mark.parametrize(
    "fn, message",
    [
        (released_twice, "released 1 time.* 0 reference"),
        (released_twice_in_one_call, "page . is released 2 time.* and has 1 reference.*: release each page once"),
        (lambda: published_twice(b"b"), "another key"),
        (lambda: PageAllocator(2, 4).publish(0, b"a"), "nobody holds page 0"),
        (lambda: PageAllocator(2, 4).release([2]), "no page 2; pages are 0 to 1"),
        (lambda: PageAllocator(2, 4).allocate(-1), "count=-1"),
        (lambda: PageAllocator(0, 4), "num_pages=0"),
        (lambda: engine_of(max_tokens_per_step=7), "max_tokens_per_step=7 at least that"),
        (lambda: engine_of(backend="cuda"), "backend = 'cuda'"),
        (lambda: engine_of(max_seq_len=24 * 16 + 1), "max_seq_len=385 must be from 1 to 384"),
        (lambda: Engine(CONFIG, {}, **SIZES, backend="xla"), "lacks 21 parameter.*embed_tokens|lacks 21 parameter"),
        (lambda: changed(norm=None), "lacks 1 parameter.*model.norm.weight"),
        (lambda: changed(norm=jnp.zeros(3)), r"model.norm.weight is \(3,\), float32; must be \(128,\), float32"),
        (lambda: changed(norm=jnp.zeros(128, "bfloat16")), r"model.norm.weight is \(128,\), bfloat16"),
        (lambda: changed(bias=jnp.zeros(3)), "1 unknown parameter.*model.bias.weight"),
        (lambda: scheduled([1] * 470, 12), "need 31 pages of 16 tokens, and the cache has 24"),
        (lambda: submitted([1] * 470, 12), "need 481 places; max_seq_len is 384"),
        (lambda: submitted([], 3), r"prompt=\[\]; must be at least one token: begin with"),
        (lambda: submitted(np.zeros(0, int), 3), r"prompt=\[\]; must be at least one token"),
        (lambda: submitted([1.5], 3), "prompt has 1.5; must be whole numbers"),
        (lambda: submitted(np.ones(3), 3), "prompt has 1.0; must be whole numbers, .*: convert it"),
        (lambda: submitted([True], 3), "prompt has True; must be whole numbers"),
        (lambda: submitted(np.ones((2, 3), int), 3), r"prompt has the shape \(2, 3\); .*: submit each row by itself"),
        (lambda: submitted([[1, 2], [3, 4]], 3), r"prompt has \[1, 2\]; .* submit each of several prompts by itself"),
        (lambda: submitted([np.arange(2)], 3), r"prompt has array\(\[0, 1\]\); must be whole numbers"),
        (lambda: submitted(np.int32(3), 3), "prompt=.*3.*; must be a collection of tokens, such as"),
        (lambda: submitted("abc", 3), "prompt='abc'; must be a collection of tokens, .*: encode"),
        (lambda: submitted([1], 0), "max_new_tokens=0; must be at least 1: ask for one"),
        (lambda: submitted([1], 2.0), "max_new_tokens=2.0; must be one int: pass 2"),
        (lambda: submitted([1], None), "max_new_tokens=None; must be one int"),
        (lambda: submitted([256], 1), "prompt has the token 256, outside of 0 to 255: encode"),
        (lambda: submitted([1], 1, stop_tokens={300}), "stop_tokens has the token 300"),
        (lambda: submitted([1], 1, stop_tokens=3), "stop_tokens=3; must be a collection of tokens"),
        (lambda: submitted([1], 1, temperature=-1.0), "temperature=-1.0; must be from 1e-06 to .*: 0 takes"),
        (
            lambda: submitted([1], 1, temperature=float("inf")),
            "temperature=inf; must be finite in float32: leave",
        ),
        (lambda: submitted([1], 1, temperature=float("nan")), "temperature=nan; must be finite"),
        (lambda: submitted([1], 1, temperature=1e39), "temperature=1e.39; must be finite"),
        (lambda: submitted([1], 1, temperature=1e-45), "temperature=1e-45; must be from 1e-06"),
        (lambda: submitted([1], 1, temperature="0"), "temperature='0'; must be one float: pass a number"),
        (lambda: submitted([1], 1, seed=-1), "seed=-1; must be from 0 to 4294967295: leave it out"),
        (lambda: submitted([1], 1, seed=3.0), "seed=3.0; must be one int: pass 3"),
        (lambda: submitted([1], 1, top_k=0), "top_k=0; must be from 1 to 2048: leave it out"),
        (lambda: submitted([1], 1, top_k=5.0), "top_k=5.0; must be one int: pass 5"),
        (lambda: submitted([1], 1, top_p=0.0), "top_p=0.0; must be from 1e-06 to 1.0: 1 keeps all"),
        (lambda: submitted([1], 1, top_p=1e-50), "top_p=1e-50; must be from 1e-06"),
        (lambda: submitted([1], 1, min_p=1.5), "min_p=1.5; must be from 0.0 to 1.0: 0 keeps all"),
        (lambda: submitted([1], 1, min_p=float("nan")), "min_p=nan; must be finite"),
        (lambda: submitted([1], 1, logprobs=21), "logprobs=21; must be from 0 to 20"),
        (too_many_slots, "num_pages=134217728; .* has 2147483648 slots and must have fewer than 2..31: take fewer"),
        (lambda: engine_of(num_pages=24.0), "num_pages=24.0; must be one int: pass 24"),
        (lambda: engine_of(page_size=16.0), "page_size=16.0; must be one int"),
        (lambda: engine_of(max_seqs=8.0), "max_seqs=8.0; must be one int"),
        (lambda: engine_of(max_tokens_per_step=32.5), "max_tokens_per_step=32.5; must be one int"),
        (lambda: engine_of(max_seq_len=100.0), "max_seq_len=100.0; must be one int: pass 100"),
        (lambda: engine_of(num_pages="24"), "num_pages='24'; must be one int: pass a whole number"),
        (lambda: Engine(CONFIG, None, **SIZES), "params: NoneType; must be a dict of arrays"),
        (lambda: dataclasses.replace(CONFIG, hidden_size=128.0), "hidden_size=128.0; must be one int: pass 128"),
        (lambda: dataclasses.replace(CONFIG, rope_theta=np.inf), "rope_theta=inf; must be finite"),
        (lambda: dataclasses.replace(CONFIG, rope_theta=0), "rope_theta=0.0 must be above 0"),
        (lambda: dataclasses.replace(CONFIG, rms_norm_eps=-1e-5), "rms_norm_eps=-1e-05 at least 0"),
        (lambda: dataclasses.replace(CONFIG, max_position_embeddings=0), "max_position_embeddings=0 must be at least"),
        (lambda: dataclasses.replace(CONFIG, eos_token_ids=[2.0]), "eos_token_ids=2.0; must be one int: pass 2"),
        (lambda: RopeScaling(np.inf, 1, 4, 8192), "factor=inf; must be finite"),
        (lambda: RopeScaling(8, 1, 4, 0), "original_max_position_embeddings must be at least 1"),
        (lambda: engine_of().cancel(Request([1], 1)), "was not submitted here"),
        (lambda: dataclasses.replace(CONFIG, num_key_value_heads=3), "num_key_value_heads=3"),
        (lambda: dataclasses.replace(CONFIG, head_dim=63), "head_dim=63"),
        (lambda: dataclasses.replace(CONFIG, dtype="int8"), "dtype='int8'"),
        (lambda: dataclasses.replace(CONFIG, vocab_size=0), "vocab_size = 0; must be at least 1"),
        (lambda: dataclasses.replace(CONFIG, num_experts=4, num_experts_per_tok=5), "num_experts_per_tok=5"),
        (lambda: dataclasses.replace(CONFIG, eos_token_ids=(256,)), "eos_token_ids"),
        (lambda: generate(CONFIG, {}, Request((1,), 9), 5), "max_seq_len=5 must be at least 10"),
        (lambda: generate(dataclasses.replace(CONFIG, qk_norm=True), {}, Request((1,), 9), 50), "norms of heads"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()
