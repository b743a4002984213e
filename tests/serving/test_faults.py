"""Faults at every point of a step: no token is wrong, no page is lost, and the next step goes on.

The model is a fake one whose next token depends on all tokens before it, as the pages of the fake device have them:
a page that was given away, shared wrongly or not computed again changes the tokens that come.
"""

import dataclasses
import importlib
import inspect
import random
import sys

import numpy as np
import pytest

import lab
from serving import Engine, LlamaConfig, init
from serving.sampling import Sampled

engine_module = importlib.import_module("serving.engine")

CONFIG = LlamaConfig(61, 8, 8, 1, 1, 1, 8, dtype="float32")
# Its first layer sees five tokens, and has pages of its own.
WITH_WINDOW = dataclasses.replace(CONFIG, num_hidden_layers=2, sliding_window=5, window_layers=(0,))
PARAMS = {config: init(config) for config in (CONFIG, WITH_WINDOW)}
PAGE = 4
FILES = [
    importlib.import_module(f"serving.{name}").__file__
    for name in ("engine", "scheduler", "pages", "step", "request", "stats")
]
STEP, FIRST_LINE = inspect.getsourcelines(Engine.step)
LAST_LINE = FIRST_LINE + len(STEP) - 1


class Fault(BaseException):
    """As a KeyboardInterrupt: no `except Exception` catches it."""


class DeviceFault(RuntimeError):
    """As an XlaRuntimeError."""


class LaterFault:
    """Stands for tokens of a step that fails on the device: whoever waits for them hears of it."""

    def __array__(self, *args, **kwargs):
        raise DeviceFault("the device failed")


@dataclasses.dataclass
class Pages:
    """Fake pages: `slots` has the token and position written to each slot. A launch may take them away, as donation
    does."""

    slots: np.ndarray
    deleted: bool = False

    def is_deleted(self) -> bool:
        return self.deleted


def next_token(tokens) -> int:
    state = 17
    for token in tokens:
        state = (state * 31 + int(token) + 1) % 1000003
    return state % CONFIG.vocab_size


class FakeDevice:
    """In place of `step` and `decode_steps`: reads a sequence's tokens out of the pages, and fails where it is told
    to."""

    def __init__(self):
        self.fault: str | None = None  # In the next launch.
        self.num_caches = self.num_several = 0

    def empty_pages(self, config, num_pages, page_size, kv_cache_dtype):
        self.num_caches += 1
        return Pages(np.full((num_pages * page_size, 2), -1))

    def step(self, config, params, pages, batch, previous, *, backend, decode, logprobs, **_):
        tokens, later, pages = self.launch(pages, batch, previous)
        return Sampled(later or tokens, None, (tokens, tokens[:, None], tokens[:, None]) if logprobs else None), pages

    def decode_steps(self, config, params, pages, batch, previous, *, count, **_):
        self.num_several += 1
        lens, start, all_tokens = batch.kv_lens, batch.positions, []
        for i in range(count):
            where = np.minimum(start + i, lens - 1)

            def slots(tables, where=where, i=i):
                page = tables[np.arange(len(lens)), np.maximum(where, 0) // PAGE]
                return np.where(start + i < lens, page * PAGE + where % PAGE, -1)

            now = dataclasses.replace(
                batch, positions=where, kv_lens=where + 1, tokens=batch.tokens if i == 0 else -1 - np.arange(len(lens)),
                slot_mapping=slots(batch.block_tables),
            )  # fmt: skip
            if batch.window_tables is not None:
                now = dataclasses.replace(now, window_slot_mapping=slots(batch.window_tables))
            tokens, later, pages = self.launch(pages, now, previous)
            previous, all_tokens = tokens, [*all_tokens, tokens]
            if later:
                return later, tokens, pages
        return np.stack(all_tokens), tokens, pages

    def launch(self, pages, batch, previous):
        """The tokens of a step; what stands for them if waiting for them is to fail, or None; the new pages."""
        fault, self.fault = self.fault, None
        if fault == "launch":
            raise DeviceFault("out of memory")
        assert not pages.deleted, "a step is given pages that another one took"
        pages.deleted = True  # Donated.
        if fault == "donated":
            raise DeviceFault("out of memory, and the pages are gone")
        slots, previous = pages.slots.copy(), np.asarray(previous)
        known = np.where(batch.tokens < 0, previous[np.maximum(-1 - batch.tokens, 0)], batch.tokens)
        is_real = batch.slot_mapping >= 0
        slots[batch.slot_mapping[is_real]] = np.stack([known, batch.positions], 1)[is_real]
        if batch.window_tables is not None:
            slots[batch.window_slot_mapping[is_real]] = np.stack([known, batch.positions], 1)[is_real]
        tokens = np.zeros(len(batch.kv_lens), np.int32)
        for i, length in enumerate(batch.kv_lens):
            where = np.arange(length)
            read = slots[batch.block_tables[i, where // PAGE] * PAGE + where % PAGE]
            # Pages that are not this sequence's give another token, and not an error: as on a device.
            tokens[i] = next_token(read[:, 0]) if (read[:, 1] == where).all() else -2
            if batch.window_tables is not None and length:
                first = length - np.diff(batch.cu_seqlens_q)[i]  # The first of its tokens in this step.
                seen = where[max(0, first + 1 - WITH_WINDOW.sliding_window) :]
                pages_of = batch.window_tables[i, seen // PAGE]
                same = (slots[pages_of * PAGE + seen % PAGE] == read[seen]).all() and (pages_of >= 0).all()
                tokens[i] = tokens[i] if same else -2
        return tokens, LaterFault() if fault == "wait" else None, Pages(slots)


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(engine_module, "step", fake.step)
    monkeypatch.setattr(engine_module, "decode_steps", fake.decode_steps)
    monkeypatch.setattr(engine_module, "empty_pages", fake.empty_pages)
    monkeypatch.setattr(engine_module.jax, "device_get", fake_device_get)
    monkeypatch.setattr(engine_module.jnp, "zeros", np.zeros)
    return fake


def fake_device_get(sampled):
    return sampled._replace(tokens=np.asarray(sampled.tokens))


def at_line(fn, count: int, fault=Fault):
    """Calls fn, and raises a fault before the `count`-th line of the engine that it runs, 0: before none, which is not
    traced; also says where it did."""
    left = [count]

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                where.append((frame.f_code.co_name, frame.f_lineno))
                raise fault(f"line {frame.f_lineno} of {frame.f_code.co_filename}")
        return trace

    where, before = [], sys.gettrace()
    sys.settrace(trace if count else before)
    try:
        return fn(), where
    except (Fault, DeviceFault, MemoryError) as error:
        return error, where
    finally:
        sys.settrace(before)


def expected(request) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_tokens:
            break
    return tokens


def books(engine, requests):
    """All that a launch that fails has to leave as it was."""
    state = lambda r: (
        *r.tokens,
        *r.pages,
        *r.window_pages,
        r.num_window_freed,
        r.num_computed,
        r.num_pending,
        r.num_preempted,
    )
    pages, scheduler = engine.allocator, engine.scheduler
    return (
        list(scheduler.running), list(scheduler.waiting), [state(request) for request in requests],
        list(pages._references), dict(pages._page_of), set(pages._cached), list(pages._free),
        (scheduler.num_preemptions, scheduler.num_shared_pages, scheduler.num_open),
    )  # fmt: skip


def serve_with_faults(device, seed: int, ahead: bool, config: LlamaConfig = CONFIG) -> dict:
    """Random requests, cancellations and faults. Returns what came to pass."""
    rng, device.num_caches, device.num_several = random.Random(seed), 0, 0
    max_seqs = rng.randint(1, 4)
    engine = Engine(
        config, PARAMS[config], num_pages=rng.randint(5, 12) * (1 if config is CONFIG else 2), page_size=PAGE,
        max_seqs=max_seqs, backend="xla", ahead=ahead,
        max_tokens_per_step=max_seqs + rng.randint(0, 12), num_scheduler_steps=rng.choice([1, 2, 4]),
    )  # fmt: skip
    requests, told, ends, seen = [], {}, {}, dict(faults=0, taken_back=0)
    steps, cancelled = 0, set()
    while len(requests) < 10 or not engine.is_idle:
        if len(requests) < 10 and rng.random() < 0.5:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            stop_tokens, logprobs = {rng.randrange(CONFIG.vocab_size)}, rng.choice([None, None, None, 0])
            requests.append(engine.submit(prompt, rng.randint(1, 8), stop_tokens=stop_tokens, logprobs=logprobs))
            told[requests[-1]] = []
        if requests and rng.random() < 0.05:
            victim = rng.choice(requests)
            if engine.cancel(victim):
                cancelled.add(victim)
        kind = rng.choice(["none", "none", "launch", "donated", "wait", "line", "line"]) if steps < 300 else "none"
        device.fault = kind if kind in ("launch", "donated", "wait") else None
        if kind == "launch":
            engine._repair()  # Two faults at once may have left that to the next step.
        before = books(engine, requests)
        fault = rng.choice([Fault, MemoryError])
        outputs, where = at_line(engine.step, rng.randint(1, 400) if kind == "line" else 0, fault)
        if engine._device is not None and not engine.scheduler.is_broken:
            engine.check()
        failed = isinstance(outputs, BaseException)
        seen["faults"] += failed
        if failed and "out of memory" == str(outputs):
            assert before == books(engine, requests), "a launch that failed is not taken back"
            seen["taken_back"] += 1
        if where == [("step", LAST_LINE)]:  # On its way back to the caller: all was told, and nobody heard.
            for request in requests:
                told[request] = request.generated
                ends |= {request: request.finish_reason} if request.finished else {}
        for output in () if failed else outputs:
            told[output.request] += output.tokens
            if output.finish_reason:
                assert output.request not in ends
                ends[output.request] = output.finish_reason
        device.fault, steps = None, steps + 1
        assert steps < 3000, "it never ends"
    engine.check()
    assert engine.allocator.num_held == 0
    seen |= dict(lost=device.num_caches - 1, several=device.num_several)
    for request in requests:
        right = expected(request)
        assert request.error is None and ends[request] == request.finish_reason
        assert told[request] == request.generated
        assert request.logprobs is None or [found.chosen for found in request.logprobs_of] == request.generated
        assert request.tokens == right[: len(request.tokens)]
        assert request.tokens == right or request in cancelled
    return seen


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_interrupts_while_the_host_waits(device, monkeypatch, num_scheduler_steps):
    """The steps stay in flight, and the next `step` may schedule before it waits for them again: requests that were
    preempted since have tokens that are not known yet."""
    rng = random.Random(0)

    def interrupted(sampled):
        if rng.random() < 0.3:
            raise Fault
        return fake_device_get(sampled)

    monkeypatch.setattr(engine_module.jax, "device_get", interrupted)
    preempted = 0
    for _ in range(150):
        max_seqs = rng.randint(1, 4)
        engine = Engine(
            CONFIG, PARAMS[CONFIG], num_pages=rng.randint(5, 12), page_size=PAGE, max_seqs=max_seqs, backend="xla",
            max_tokens_per_step=max_seqs + rng.randint(0, 12), num_scheduler_steps=num_scheduler_steps,
        )  # fmt: skip
        requests, cancelled = [], set()
        while len(requests) < 10 or not engine.is_idle:
            if len(requests) < 10 and rng.random() < 0.5:
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
                requests.append(
                    engine.submit(prompt, rng.randint(1, 8), stop_tokens={rng.randrange(CONFIG.vocab_size)})
                )
            if requests and rng.random() < 0.08:
                engine.cancel(victim := rng.choice(requests))
                cancelled.add(victim)
            try:
                engine.step()
            except Fault:
                pass
            engine.check()
        preempted += engine.scheduler.num_preemptions
        for request in requests:
            right = expected(request)
            assert request.tokens == right[: len(request.tokens)] and request.num_pending == 0
            assert request.tokens == right or request in cancelled
    assert preempted > 50


def test_a_request_preempted_with_several_tokens_on_their_way(device, monkeypatch):
    """It may run again only when they are known: a batch can have one token that is not."""
    engine = Engine(
        CONFIG, PARAMS[CONFIG], num_pages=4, page_size=PAGE, max_seqs=2, max_tokens_per_step=16, backend="xla"
    )
    first, second, interrupts = engine.submit([1], 6), engine.submit([9, 10], 8), []

    def interrupted(sampled):
        if not interrupts and any(request.num_pending > 1 for request in engine.scheduler.waiting):
            interrupts.append(engine.cancel(first))
            raise Fault
        return fake_device_get(sampled)

    monkeypatch.setattr(engine_module.jax, "device_get", interrupted)
    while not engine.is_idle:
        try:
            engine.step()
        except Fault:
            pass
        engine.check()
    assert interrupts == [True] and second.tokens == expected(second)


def test_a_request_that_fails_between_steps_of_one_program(device, monkeypatch):
    """It keeps the tokens before; those after it are thrown away, and the other request has all of its own."""
    right = next_token
    monkeypatch.setitem(globals(), "next_token", lambda text: -1 if len(text) == 6 and text[0] == 1 else right(text))
    engine = Engine(CONFIG, PARAMS[CONFIG], num_pages=12, page_size=PAGE, max_seqs=2, backend="xla")
    bad, good = engine.submit([1, 2, 3], 12), engine.submit([2, 3, 4], 12)
    engine.run()
    assert device.num_several and bad.finish_reason == "error" and len(bad.generated) == 3
    assert good.tokens == expected(good) and "after token 5 are not finite" in str(bad.error)


SCHEDULES = 60  # With `ahead` and without it; the slow tests bring each to 110.


def serve_all(device, seeds, ahead: bool):
    seen = [serve_with_faults(device, seed, ahead) for seed in seeds]
    assert sum(each["faults"] for each in seen) > 5 * len(seen)
    assert sum(each["lost"] for each in seen) > len(seen) and sum(each["several"] for each in seen) > len(seen)
    assert sum(each["taken_back"] for each in seen) > len(seen)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_fault_anywhere_leaves_right_tokens(device, ahead):
    serve_all(device, range(SCHEDULES), ahead)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_fault_anywhere_leaves_right_tokens_with_a_window(device, ahead):
    seen = [serve_with_faults(device, seed, ahead, WITH_WINDOW) for seed in range(10)]
    assert sum(each["faults"] for each in seen) > 30 and sum(each["taken_back"] for each in seen) > 10


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_a_fault_anywhere_leaves_right_tokens_in_all_schedules(device, ahead):
    serve_all(device, range(SCHEDULES, 110), ahead)


# The same with real models, on both backends ------------------------------------------------------------------------


def serve_between_faults(config: LlamaConfig, backend: str, faults: random.Random | None, ahead: bool, count: int):
    """The tokens of some requests, with faults about every second step; None: without."""
    engine = Engine(
        config, init(config), num_pages=5, page_size=16, max_seqs=2, max_tokens_per_step=16, backend=backend,
        ahead=ahead,
    )  # fmt: skip
    requests = [engine.submit(range(i // 2, 20), 4, temperature=i % 2, seed=i) for i in range(count)]
    step, device_get, seen = engine_module.step, engine_module.jax.device_get, []

    def failing(fn, when: str):
        def call(*args, **kwargs):
            kind = faults.choice(["before", "after", None, None, None]) if len(seen) < 4 * count else None
            out = fn(*args, **kwargs) if kind != "before" else None
            if kind:
                seen.append((when, kind))
                raise DeviceFault(f"{kind} the {when}")
            return out

        return call

    with pytest.MonkeyPatch.context() as patch:
        if faults:
            patch.setattr(engine_module, "step", failing(step, "launch"))
            patch.setattr(engine_module, "decode_steps", failing(engine_module.decode_steps, "launch"))
            patch.setattr(engine_module.jax, "device_get", failing(device_get, "wait"))
        while not engine.is_idle:
            try:
                engine.step()
            except DeviceFault:
                pass
            engine.check()
    assert engine.allocator.num_held == 0 and all(request.finish_reason == "length" for request in requests)
    return [request.generated for request in requests], set(seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, count, seeds, ahead",
    [
        ("xla", 5, range(4), True),
        ("xla", 5, range(4), False),
        pytest.param("cookbook", 2, range(1), True, marks=(pytest.mark.slow, pytest.mark.kernels)),
    ],
)
def test_faults_change_no_token_of_a_real_model(backend, count, seeds, ahead):
    config = LlamaConfig(61, 128, 128, 1, 2, 1, 64, dtype="bfloat16")
    serve = lambda *args: lab.run(serve_between_faults, config, backend, *args, ahead, count)
    expected, _ = serve(None)
    seen = set()
    for seed in seeds:
        tokens, faults = serve(random.Random(seed))
        assert tokens == expected
        seen |= faults
    assert len(seen) == 4 or len(seeds) == 1 <= len(seen)
