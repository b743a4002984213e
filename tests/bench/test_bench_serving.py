"""The work that the benchmark of the engine times."""

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
