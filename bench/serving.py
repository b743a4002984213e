"""Serves one trace of requests on this package's kernels and on plain XLA: `python -m bench serving`.

`python -m bench.serving` serves a small trace on XLA, on any device, and records nothing.
"""

import concurrent.futures
import dataclasses
import functools
import glob
import math
import multiprocessing
import os
import tempfile
import time

import jax
import numpy as np

import lab
from serving import Engine, LlamaConfig, YarnScaling, init
from serving.backends import TABLE_WIDTHS_MIN
from serving.model import empty_pages
from serving.request import Chunk, Request
from serving.step import decode_steps, model_step, pack, padding, starts_of
from serving.step import step as run_step
from serving.weights import prepared


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, an engine, and how many requests of what lengths it serves."""

    config: LlamaConfig
    num_requests: int
    max_prompt: int  # Tokens of the longest prompt, without a shared prefix.
    max_new_tokens: int
    num_pages: int
    max_seqs: int
    max_tokens_per_step: int
    page_size: int = 16
    model: str = "llama-1b"  # In the names of results.
    packing: str | None = None  # As `init` takes it.


# Sizes of Llama 3.2 1B, with random weights: what they are changes no time. The longest request has 1024 tokens; the
# pages are too few for 64 sequences of the trace.
LLAMA_1B = Problem(
    LlamaConfig(128_256, 2048, 8192, 16, 32, 8, 64, rope_theta=500_000.0, tie_word_embeddings=True),
    num_requests=384, max_prompt=384, max_new_tokens=352, num_pages=512, max_seqs=64, max_tokens_per_step=512,
)  # fmt: skip
# A layer of Qwen3-30B-A3B: 128 experts, of which each token has 8. Logits are no part of it: a small vocabulary.
MOE_LAYER = Problem(
    LlamaConfig(2048, 2048, 768, 1, 32, 4, 128, rope_theta=1_000_000.0, qk_norm=True, num_experts=128,
                num_experts_per_tok=8),
    num_requests=64, max_prompt=256, max_new_tokens=256, num_pages=4096, max_seqs=64, max_tokens_per_step=512,
    model="qwen3-moe-layer",
)  # fmt: skip
# gpt-oss-20b's sizes, random weights, its experts packed.
GPT_OSS = Problem(
    LlamaConfig(
        201_088, 2880, 2880, 24, 64, 8, 64, rope_theta=150_000.0, num_experts=32, num_experts_per_tok=4,
        attention_bias=True, attention_sinks=True, expert_bias=True, swiglu_limit=7.0, sliding_window=128,
        window_layers=tuple(range(0, 24, 2)), rope_scaling=YarnScaling(32.0, 4096, truncate=False),
        max_position_embeddings=131_072,
    ),
    num_requests=384, max_prompt=384, max_new_tokens=352, num_pages=8192, max_seqs=64, max_tokens_per_step=512,
    model="gpt-oss-20b", packing="mxfp4",
)  # fmt: skip
TINY = Problem(
    LlamaConfig(256, 128, 256, 2, 4, 2, 64, dtype="float32"),
    num_requests=24, max_prompt=60, max_new_tokens=12, num_pages=24, max_seqs=8, max_tokens_per_step=32,
)  # fmt: skip


def trace(num_requests: int, vocab_size: int, max_prompt: int, max_new_tokens: int, seed: int = 0) -> list[dict]:
    """Arguments of `Engine.submit` for requests of mixed lengths: many short, few long.

    One third begins with one of two long texts, whose pages can be shared; one third has these after a beginning of
    its own, so that they must not be; every tenth has the same prompt, of whole pages of 16. Every second request is
    sampled at a temperature; every fifth may stop early.
    """
    rng = np.random.default_rng(seed)
    tokens = lambda count: rng.integers(0, vocab_size, count).tolist()
    length = lambda most: int(np.exp(rng.uniform(0, np.log(most + 1))))
    texts = [tokens(max_prompt * 2 // 3) for _ in range(2)]
    beginnings = tokens(16), tokens(32)
    requests = []
    for i in range(num_requests):
        begins = [texts[i % 2], beginnings[i % 2] + texts[i % 2], []][i % 3]
        prompt = texts[0][: len(texts[0]) // 16 * 16] if i % 10 == 9 else begins + tokens(length(max_prompt))
        requests.append(
            dict(
                prompt=prompt,
                max_new_tokens=length(max_new_tokens),
                temperature=0.8 if i % 2 else 0.0,
                seed=i,
                stop_tokens=(int(rng.integers(vocab_size)),) if i % 5 == 0 else (),
            )
        )
    return requests


def serve(problem: Problem, backend: str, params, **how) -> dict:
    """Figures of serving the whole trace, submitted at once, when all is compiled; `how` are options of `Engine`."""
    requests = trace(problem.num_requests, problem.config.vocab_size, problem.max_prompt, problem.max_new_tokens)
    engine = Engine(
        problem.config, params, num_pages=problem.num_pages, page_size=problem.page_size, max_seqs=problem.max_seqs,
        max_tokens_per_step=problem.max_tokens_per_step, backend=backend,
        max_seq_len=max(len(request["prompt"]) + request["max_new_tokens"] for request in requests), **how,
    )  # fmt: skip
    engine.warmup()
    with lab.alone():
        start = time.perf_counter()
        served = [engine.submit(**request) for request in requests]
        engine.run()
        seconds = time.perf_counter() - start
    first = [request.time_to_first_token for request in served]
    steps = list(engine.stats)
    return dict(
        seconds=seconds,
        new_tokens=sum(step.num_sampled for step in steps),
        tokens_per_second=sum(step.num_sampled for step in steps) / seconds,
        computed_tokens_per_second=sum(step.num_tokens for step in steps) / seconds,
        steps=len(steps),
        decode_step_ms=1e3 * float(np.median([step.seconds for step in steps if step.decode])),
        decode_wait_ms=1e3 * float(np.median([step.waited for step in steps if step.decode])),
        mixed_step_ms=1e3 * float(np.median([step.seconds for step in steps if not step.decode])),
        mixed_wait_ms=1e3 * float(np.median([step.waited for step in steps if not step.decode])),
        mixed_steps=sum(not step.decode for step in steps),
        kv_utilization=float(np.mean([step.kv_utilization for step in steps])),
        time_to_first_token_p50=float(np.median(first)),
        time_to_first_token_p99=float(np.quantile(first, 0.99)),
        preemptions=engine.scheduler.num_preemptions,
        shared_pages=engine.scheduler.num_shared_pages,
    )


PACKED_BYTES = {"mxfp4": 1 / 2 + 1 / 32, "int4": 1 / 2 + 2 / 128}  # A weight and its share of a scale.


def decode_bound(problem: Problem, length: int, weights: str | None = None) -> lab.roofline.Bound:
    """The roofline bound of a step in which `max_seqs` sequences of `length` tokens decode.

    Each matrix is read once; of experts, those that at least one token is expected to have, if all are as likely.
    """
    config, tokens = problem.config, problem.max_seqs
    routed = config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0
    itemsize = 1 if weights == "int8" else np.dtype(config.dtype).itemsize
    flops = nbytes = 0.0
    for name, shape in config.shapes.items():
        size, is_experts = math.prod(shape), len(shape) == 3
        if (
            len(shape) == 1
            or name.endswith(".bias")
            or (name == "model.embed_tokens.weight" and not config.tie_word_embeddings)
        ):
            continue
        flops += 2 * size * tokens * (routed if is_experts else 1)
        is_packed = is_experts if problem.packing == "mxfp4" else problem.packing and "_proj." in name
        bytes_each = PACKED_BYTES[problem.packing] if is_packed else itemsize
        nbytes += bytes_each * size * (1 - (1 - routed) ** tokens if is_experts else 1)
    layers = config.num_hidden_layers
    seen = layers * length - len(config.window_layers) * max(0, length - (config.window or length))
    flops += 4 * seen * config.num_attention_heads * config.head_dim * tokens
    page_bytes = config.page_bytes_per_token // config.page_layers  # In one layer.
    return lab.roofline.bound(flops, nbytes + page_bytes * tokens * (seen + layers), "bf16")


STEPS_A_PROGRAM = Engine.__init__.__kwdefaults__["num_scheduler_steps"]  # Where several steps go off at once.


def own_pages(num_seqs: int, pages_each: int) -> np.ndarray:
    """(num_seqs, pages_each): block tables in which no two places have the same page; the pages in random order."""
    return np.random.default_rng(0).permutation(num_seqs * pages_each).reshape(num_seqs, pages_each)


def _decoding(problem: Problem, params, length: int, num_steps: int, **how):
    """A function that sends off a step in which `max_seqs` sequences of `length` tokens decode, and gives its tokens.

    With more than one in `num_steps` it is one program of so many steps, the last of which has that length.

    Each sequence has pages of its own, in random order: shared ones would be read from L2.

    `how` are options of `Engine`.
    """
    kinds = 2 if problem.config.window_layers else 1  # Block tables of a sequence.
    tables = own_pages(kinds * problem.max_seqs, -(-length // problem.page_size))
    engine = Engine(problem.config, params, num_pages=tables.size, page_size=problem.page_size,
                    max_seqs=problem.max_seqs, max_tokens_per_step=problem.max_tokens_per_step, **how)  # fmt: skip
    chunks, rng = [], np.random.default_rng(0)  # Equal tokens would all have the same experts.
    for i in range(problem.max_seqs):
        request = Request(tuple(rng.integers(problem.config.vocab_size, size=length).tolist()), 8)
        request.pages, *window = tables[i :: problem.max_seqs].tolist()
        if window:
            (request.window_pages,) = window
            before = length - num_steps + 1 - problem.config.window  # Tokens that none sees any more.
            request.num_window_freed = max(0, before) // problem.page_size
        chunks.append(Chunk(request, length - num_steps, length - num_steps + 1))
    width_min = TABLE_WIDTHS_MIN[engine.backend]
    batch = pack(chunks, problem.page_size, problem.max_seqs, True, width_min=width_min)
    pages = engine._device.pages

    def send():
        nonlocal pages
        args = problem.config, engine.weights, pages, batch, engine._device.tokens
        options = dict(backend=engine.backend, compiler_options=engine.compiler_options)
        if num_steps > 1:
            tokens, _, pages = decode_steps(*args, count=num_steps, **options)
            return tokens
        sampled, pages = run_step(*args, decode=True, **options)
        return sampled.tokens

    batch.kv_lens[:] = length
    return send


def decode_step(problem: Problem, params, length: int = 320, count: int = 40, **how) -> dict:
    """Milliseconds of a step in which `max_seqs` sequences decode: waited for each time; sent off in a row; and in a
    row, `STEPS_A_PROGRAM` steps in each program.

    Args:
      how: options of `Engine`, such as `backend`, `weights` and `compiler_options`.
    """
    send, send_several = (_decoding(problem, params, length, num_steps, **how) for num_steps in (1, STEPS_A_PROGRAM))

    def milliseconds(send, calls: int, waits: bool) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            tokens = send()
            if waits:
                jax.block_until_ready(tokens)
        jax.block_until_ready(tokens)
        return 1e3 * (time.perf_counter() - start) / calls

    for each in (send, send_several):
        milliseconds(each, 3, True)  # Compiles.
        milliseconds(each, count, False)  # XLA records a command buffer for each set of addresses that steps lie at.
    with lab.alone():
        return {
            "waited for each time": milliseconds(send, count, True),
            "sent off in a row": milliseconds(send, count, False),
            "several in a program": milliseconds(send_several, count // STEPS_A_PROGRAM, False) / STEPS_A_PROGRAM,
        }


def decode_kernels(problem: Problem, params, length: int = 320, **how) -> dict[str, dict]:
    """Launches and milliseconds of the kernels of a step that decodes, by their names, as CUPTI sees them."""
    return kernel_times(_decoding(problem, params, length, 1, **how))


def kernel_times(send) -> dict[str, dict]:
    """Launches and milliseconds of the kernels that `send()` launches, by their names, as CUPTI sees them.

    Args:
      send: sends off work, the same each time, and returns arrays that are there when it is done.
    """
    from jax.experimental.mosaic.gpu import profiler

    for _ in range(3):
        jax.block_until_ready(send())
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # `profiler.measure` compiles what it is given as one program.
    with lab.alone():
        cupti._cupti_init()
        try:
            jax.block_until_ready(send())
        finally:
            launched = cupti._cupti_get_timings(True)
    kernels: dict[str, dict] = {}
    for name, ms in launched:
        kernel = kernels.setdefault(name, dict(launches=0, ms=0.0))
        kernel["launches"] += 1
        kernel["ms"] += ms
    return kernels


# Parts of the call that sends off a step, by the names that XLA's spans begin with. These are no API: it may find none.
SPANS = {
    "launch of the graph": ("cuGraphLaunch",),
    "each kernel made ready": ("Thunks::Prepare", "Thunks::Initialize"),
    "buffers and events": ("CommonPjRtLoadedExecutable::ExecuteHelperOnSingleDevice",),
    "arguments and results": ("PjitFunction(",),
}


def decode_host(problem: Problem, length: int = 320, count: int = 20, num_steps: int = 1, **how) -> dict[str, float]:
    """Microseconds of the host, for each of `num_steps` that decode and that one call sends off: each part of `SPANS`
    without those inside of it, and the whole call. Means of `count` calls, each of which is waited for.

    A process of its own measures them: where JAX's profiler has been on, the next `lab.measure` would end the process.
    """
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_decode_host, problem, length, count, num_steps, how).result()


def _decode_host(problem: Problem, length: int, count: int, num_steps: int, how: dict) -> dict[str, float]:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # The caller's process has arrays on the GPU, too.
    send = _decoding(problem, init(problem.config, packing=problem.packing), length, num_steps, **how)
    for _ in range(40):  # Compiles; XLA records its command buffers.
        jax.block_until_ready(send())
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder, lab.alone():
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(count):
                start = time.perf_counter()
                tokens = send()
                seconds += time.perf_counter() - start
                jax.block_until_ready(tokens)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
    lines = [list(line.events) for plane in planes for line in plane.lines]
    program = "PjitFunction(decode_program)" if num_steps > 1 else "PjitFunction(model_step)"
    (events,) = [line for line in lines if any(event.name == program for event in line)]
    steps = count * num_steps
    return {**times_of_parts(events, steps), "the whole call": 1e6 * seconds / steps}


def times_of_parts(events, count: int) -> dict[str, float]:
    """Microseconds of each part of `SPANS`, of `count` calls; `events` are the spans of one thread."""
    part_of = lambda name: next((part for part, begins in SPANS.items() if name.startswith(begins)), None)
    times, around = dict.fromkeys(SPANS, 0.0), []  # (end, part) of the spans around the next one.
    for event in sorted(events, key=lambda event: (event.start_ns, -event.duration_ns)):
        start, duration, name = event.start_ns, event.duration_ns, event.name
        while around and around[-1][0] <= start:
            around.pop()
        if (part := part_of(name)) is None:
            continue
        if around:
            times[around[-1][1]] -= duration
        times[part] += duration
        around.append((start + duration, part))
    return {part: ns / count / 1e3 for part, ns in times.items()}


def step_name(problem: Problem, variant: str = "cookbook") -> str:
    """Name under which the times of `decode_step` are stored."""
    return f"serving/{problem.model}/decode-{problem.max_seqs}/{variant}"


def host_name(problem: Problem, num_steps: int) -> str:
    """Name under which the times of `decode_host` are stored."""
    return step_name(problem) + "/host" + (f"_of_{num_steps}" if num_steps > 1 else "")


def decode_launches(
    config: LlamaConfig, max_seqs: int, weights: str | None = None, packing: str | None = None
) -> list[lab.Launch]:
    """The launches of a step on an H200 in which `max_seqs` sequences decode, greedily; counted without a GPU."""
    params = jax.eval_shape(functools.partial(init, config, packing=packing))
    params = jax.eval_shape(functools.partial(prepared, config, kind=weights), params)
    pages = jax.eval_shape(lambda: empty_pages(config, 512, 16))
    arrays, tree = jax.tree.flatten(padding(max_seqs, 64, max_seqs, windows=config.window is not None))
    layout = tuple((array.shape, array.dtype) for array in arrays)
    packed, previous = (jax.ShapeDtypeStruct((n,), np.int32) for n in (starts_of(layout)[-1], max_seqs))
    how = dict(tree=tree, layout=layout, backend="cookbook", decode=True, draws=False)
    model = functools.partial(model_step, config, **how)
    return lab.launches("h200", model, params, pages, packed, previous, donate_argnums=1)


def name(problem: Problem, backend: str) -> str:
    """Name under which a measurement is stored."""
    return f"serving/{problem.model}/{problem.num_requests}-requests/{backend}"


def measured(problem: Problem, backend: str, params) -> dict | None:
    """Figures of `serve` on this GPU, with `params()`; the recorded ones, where there is no GPU."""
    return lab.results.value(name(problem, backend), lambda: serve(problem, backend, params()))


def run() -> None:
    """Serve the large trace on both backends and print the figures; the recorded ones, where there is no GPU."""
    params = functools.cache(lambda: init(LLAMA_1B.config))
    for backend in ("cookbook", "xla"):
        _print(backend, measured(LLAMA_1B, backend, params))
    for problem, weights in ((LLAMA_1B, None), (LLAMA_1B, "int8"), (MOE_LAYER, None), (GPT_OSS, None)):
        bound = decode_bound(problem, 320, weights)
        print(f"a step of {problem.model} that decodes, weights {weights or problem.config.dtype}: {bound}")
        of_problem = params if problem is LLAMA_1B else functools.partial(init, problem.config, packing=problem.packing)
        name = step_name(problem, weights or "cookbook")
        _print("ms", lab.results.value(name, functools.partial(_of_params, decode_step, problem, of_problem, weights)))
        kernels = functools.partial(_of_params, decode_kernels, problem, of_problem, weights)
        kernels = lab.results.value(f"{name}/kernels", kernels)
        _print("ms of kernels", kernels and {kernel: figures["ms"] for kernel, figures in kernels.items()})
    for num_steps in (1, STEPS_A_PROGRAM):
        host = functools.partial(decode_host, LLAMA_1B, num_steps=num_steps)
        _print(f"us of the host, {num_steps} in a program", lab.results.value(host_name(LLAMA_1B, num_steps), host))


def _of_params(measure, problem: Problem, params, weights: str | None) -> dict:
    return measure(problem, params(), weights=weights)


def _print(backend: str, figures: dict | None):
    print(backend if figures else f"{backend}: not recorded")
    for name, value in (figures or {}).items():
        print(f"    {name:28s}{value:12.4g}")


if __name__ == "__main__":  # A small trace on XLA, on any device; not recorded.
    _print("xla", serve(TINY, "xla", init(TINY.config)))
