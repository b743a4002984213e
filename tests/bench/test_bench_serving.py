"""The work that the benchmark of the engine times."""

import ast
import dataclasses
import pathlib
import re
import types

import nbformat
import numpy as np
import pytest

from bench import serving
from lab import results
from serving import init


def test_sequences_that_decode_have_tokens_of_their_own(monkeypatch):
    """Equal tokens would have the same experts, of which a step would read few."""
    batches = []

    def step(config, weights, pages, batch, *args, **kwargs):
        batches.append(batch)
        return types.SimpleNamespace(tokens=None), pages

    monkeypatch.setattr(serving, "run_step", step)
    problem = serving.TINY
    serving._decoding(problem, init(problem.config), length=8, num_steps=1, backend="xla")()
    tokens = batches[0].tokens[: problem.max_seqs]
    assert len(set(tokens.tolist())) > problem.max_seqs // 2


PROBLEMS = [serving.TINY, serving.LLAMA_1B, serving.MOE_LAYER, serving.GPT_OSS]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda it: it.model)
def test_sequences_that_decode_share_no_pages(monkeypatch, problem):
    """Shared ones would be read from L2. Nothing is computed: the engine is asked how many pages it has."""
    batches, length = [], 320

    class Engine:
        def __init__(self, config, params, *, num_pages, page_size, **how):
            self.num_pages, self.backend, self.compiler_options, self.weights = num_pages, "xla", (), {}
            self._device = types.SimpleNamespace(pages=None, tokens=None)

    def step(config, weights, pages, batch, *args, **kwargs):
        batches.append(batch)
        return types.SimpleNamespace(tokens=None), pages

    monkeypatch.setattr(serving, "Engine", Engine)
    monkeypatch.setattr(serving, "run_step", step)
    serving._decoding(problem, {}, length, num_steps=1)()
    used = batches[0].block_tables[:, : length // problem.page_size]
    if problem.config.window:  # Only pages that a window of 128 tokens reaches are read.
        of_windows = batches[0].window_tables[:, : length // problem.page_size]
        assert (of_windows[:, :12] == -1).all() and (of_windows[:, 12:] >= 0).all()
        both = [*used.ravel(), *of_windows[:, 12:].ravel()]
        assert len(set(both)) == len(both)
        return
    assert len({*used.ravel().tolist()}) == used.size == problem.max_seqs * length // problem.page_size
    assert used.min() == 0 and used.max() == used.size - 1 and (np.diff(used) != 1).any()


def test_kernels_of_a_step_are_listed(gpu):
    config = dataclasses.replace(serving.TINY.config, dtype="bfloat16")
    problem = dataclasses.replace(serving.TINY, config=config)
    kernels = serving.decode_kernels(problem, init(config), length=8)
    launches = sum(kernel["launches"] for name, kernel in kernels.items() if "decode_kernel" in name)
    assert launches == config.num_hidden_layers
    assert all(kernel["ms"] > 0 for kernel in kernels.values())


def test_spans_of_the_host_are_parted():
    """Each part without what lies inside of it."""
    span = lambda name, start, end: types.SimpleNamespace(
        name=name, start_ns=1e3 * start, duration_ns=1e3 * (end - start)
    )
    execute = "CommonPjRtLoadedExecutable::ExecuteHelperOnSingleDevice"
    spans = [
        span("PjitFunction(model_step)", 0, 100), span("PjitFunction(model_step)", 1, 99), span("other", 2, 98),
        span(execute, 10, 80), span("Thunks::Prepare", 20, 30), span("Thunks::Initialize", 30, 35),
        span("cuGraphLaunch (CudaGraph:342)", 40, 70), span("PjitFunction(model_step)", 200, 210),
    ]  # fmt: skip
    expected = (30, 15, 25, 40)
    times = serving.times_of_parts(reversed(spans), count=2)
    assert times == dict(zip(serving.SPANS, (us / 2 for us in expected), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 4])
def test_the_host_of_a_step_is_timed(num_steps):
    times = serving.decode_host(serving.TINY, 8, count=3, num_steps=num_steps, backend="xla")
    whole = times.pop("the whole call")
    assert 0 < sum(times.values()) < whole and times["arguments and results"] > 0


def test_a_step_that_decodes_is_timed_alone_and_with_others():
    times = serving.decode_step(serving.TINY, init(serving.TINY.config), 8, count=8, backend="xla")
    assert set(times) == {"waited for each time", "sent off in a row", "several in a program"}
    assert all(0 < ms < 1e3 for ms in times.values())


def test_chapter_22_counts_kernels_by_the_names_that_they_have():
    """A kernel that is renamed would be counted as "all other"."""
    cells = nbformat.read(pathlib.Path(__file__).parents[2] / "notebooks/22_decode_step.ipynb", as_version=4).cells
    (groups,) = (re.search(r"GROUPS = (\{.*?\n\})", c.source, re.S) for c in cells if c.id == "time-table")
    names = results.stored(f"{serving.step_name(serving.LLAMA_1B)}/kernels")
    for group, begins in ast.literal_eval(re.sub(r"#.*", "", groups[1])).items():
        assert all(any(name.startswith(begin) for name in names) for begin in begins), group
