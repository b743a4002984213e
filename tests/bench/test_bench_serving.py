"""The work that the benchmark of the engine times."""

import dataclasses
import types

from bench import serving
from cookbook.serving import init


def test_sequences_that_decode_have_tokens_of_their_own(monkeypatch):
    """Equal tokens would have the same experts, of which a step would read few."""
    batches = []

    def step(config, weights, pages, batch, *args, **kwargs):
        batches.append(batch)
        return types.SimpleNamespace(tokens=None), pages

    monkeypatch.setattr(serving, "run_step", step)
    problem = serving.TINY
    serving._decoding(problem, init(problem.config), length=8, backend="xla")()
    tokens = batches[0].tokens[: problem.max_seqs]
    assert len(set(tokens.tolist())) > problem.max_seqs // 2


def test_kernels_of_a_step_are_listed(gpu):
    config = dataclasses.replace(serving.TINY.config, dtype="bfloat16")
    problem = dataclasses.replace(serving.TINY, config=config)
    kernels = serving.decode_kernels(problem, init(config), length=8)
    launches = sum(kernel["launches"] for name, kernel in kernels.items() if "decode_kernel" in name)
    assert launches == config.num_hidden_layers
    assert all(kernel["ms"] > 0 for kernel in kernels.values())
