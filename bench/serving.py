"""Serves one trace of requests on this package's kernels and on plain XLA: `python -m bench serving`.

`python -m bench.serving` serves a small trace on XLA, on any device, and records nothing.
"""

import dataclasses
import functools
import time

import numpy as np

from cookbook import lab
from cookbook.serving import Engine, LlamaConfig, init


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


# Sizes of Llama 3.2 1B, with random weights: what they are changes no time. The longest request has 1024 tokens; the
# pages are too few for 64 sequences of the trace.
LLAMA_1B = Problem(
    LlamaConfig(128_256, 2048, 8192, 16, 32, 8, 64, rope_theta=500_000.0, tie_word_embeddings=True),
    num_requests=384, max_prompt=384, max_new_tokens=352, num_pages=512, max_seqs=64, max_tokens_per_step=512,
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


def serve(problem: Problem, backend: str, params) -> dict:
    """Figures of serving the whole trace, submitted at once; of the second time, when all is compiled."""
    requests = trace(problem.num_requests, problem.config.vocab_size, problem.max_prompt, problem.max_new_tokens)
    for _ in range(2):
        engine = Engine(
            problem.config, params, num_pages=problem.num_pages, page_size=problem.page_size,
            max_seqs=problem.max_seqs, max_tokens_per_step=problem.max_tokens_per_step, backend=backend,
        )  # fmt: skip
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
        mixed_step_ms=1e3 * float(np.median([step.seconds for step in steps if not step.decode])),
        kv_utilization=float(np.mean([step.kv_utilization for step in steps])),
        time_to_first_token_p50=float(np.median(first)),
        time_to_first_token_p99=float(np.quantile(first, 0.99)),
        preemptions=engine.scheduler.num_preemptions,
        shared_pages=engine.scheduler.num_shared_pages,
    )


def name(problem: Problem, backend: str) -> str:
    """Name under which a measurement is stored."""
    return f"serving/llama-1b/{problem.num_requests}-requests/{backend}"


def measured(problem: Problem, backend: str, params) -> dict | None:
    """Figures of `serve` on this GPU, with `params()`; the recorded ones, where there is no GPU."""
    return lab.results.value(name(problem, backend), lambda: serve(problem, backend, params()))


def run() -> None:
    """Serve the large trace on both backends and print the figures; the recorded ones, where there is no GPU."""
    params = functools.cache(lambda: init(LLAMA_1B.config))
    for backend in ("cookbook", "xla"):
        _print(backend, measured(LLAMA_1B, backend, params))


def _print(backend: str, figures: dict | None):
    print(backend if figures else f"{backend}: not recorded")
    for name, value in (figures or {}).items():
        print(f"    {name:28s}{value:12.4g}")


if __name__ == "__main__":  # A small trace on XLA, on any device; not recorded.
    _print("xla", serve(TINY, "xla", init(TINY.config)))
