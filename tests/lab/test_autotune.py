"""The search for a configuration, on an op whose times are made up: no GPU is needed to see what it keeps."""

import dataclasses
import functools
import json
import sys

import jax.numpy as jnp
import pytest

import cookbook
import lab
from bench import tune
from lab import interpreter, results, timing

module = sys.modules[lab.autotune.__module__]


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int = 1
    wrong: bool = False

    def __post_init__(self):
        if self.tile > 64:
            raise ValueError(f"{self.tile=} does not fit")


def scale(x, *, factor=2.0, config=None):
    """The op: it takes as many milliseconds as its tile is far from 8."""
    if config is not None and config.tile == 5:
        raise ValueError("tile 5 does not compile")
    return factor * x + (1.0 if config is not None and config.wrong else 0.0)


CONFIGS = [Config(4), Config(8), Config(5), Config(16), Config(8, wrong=True)]
autotune = functools.partial(lab.autotune, configs=CONFIGS)


@pytest.fixture
def op(monkeypatch, results_folder):
    """`scale`, with a GPU that is not there; `timed` lists the tiles that were timed."""
    monkeypatch.setattr(interpreter, "on_gpu", lambda *_: True)
    monkeypatch.setattr(results, "this_gpu", lambda: "h200")
    timed = []

    def compile_op(fn, args):
        fn(*args)  # A function that does not trace does not compile.
        compiled = lambda *args: fn(*args)
        compiled.tile = fn.keywords["config"].tile
        return compiled

    def median_ms(compiled, args, iterations):
        timed.append(compiled.tile)
        return 1.0 + abs(compiled.tile - 8)

    monkeypatch.setattr(module, "_compile", compile_op)
    monkeypatch.setattr(timing, "median_ms", median_ms)
    scale.timed = timed
    return scale


X = jnp.arange(1.0, 9.0)


def test_the_fastest_right_one_wins(op):
    found = autotune(op, X)
    assert found.best == Config(8) and found.ms == 1.0 and op.timed == [4, 8, 16]
    assert {c.tile: text for c, text in found.failures.items() if not c.wrong} == {
        5: "ValueError: tile 5 does not compile"
    }
    assert "not that of the op's own choice" in found.failures[Config(8, wrong=True)]
    assert "1.0000 ms" in repr(found) and "tile=16" in repr(found) and "2 failed" in repr(found)


def test_what_was_timed_is_not_timed_again(op):
    autotune(op, X)
    autotune(op, X)
    assert op.timed == [4, 8, 16]
    autotune(op, X, refresh=True)
    assert op.timed == 2 * [4, 8, 16]
    autotune(op, X[:4])  # Another problem.
    assert op.timed == 3 * [4, 8, 16]


def test_an_interrupted_search_goes_on_where_it_was(op, monkeypatch):
    whole = timing.median_ms

    def interrupted(compiled, args, iterations):
        if compiled.tile == 16:
            raise KeyboardInterrupt
        return whole(compiled, args, iterations)

    monkeypatch.setattr(timing, "median_ms", interrupted)
    with pytest.raises(KeyboardInterrupt):
        autotune(op, X)
    monkeypatch.setattr(timing, "median_ms", whole)
    assert autotune(op, X).best == Config(8) and op.timed == [4, 8, 16]


def test_what_is_right_does_not_depend_on_what_is_left(op):
    """A search that goes on with a wrong configuration first."""
    found = lab.autotune(op, X, configs=iter([Config(8, wrong=True), Config(4), Config(4)]))
    assert found.best == Config(4) and set(found.failures) == {Config(8, wrong=True)} and op.timed == [4]


def test_times_of_other_code_are_taken_anew(op):
    autotune(op, X)
    file = results.path("configs", "h200")
    data = json.loads(file.read_text())
    data["scale"][module.problem_name(X)]["program"] = "of another day"
    file.write_text(json.dumps(data))
    autotune(op, X)
    assert op.timed == 2 * [4, 8, 16]


def test_without_a_gpu_it_tells_what_was_recorded(op, monkeypatch):
    autotune(op, X)
    monkeypatch.setattr(interpreter, "on_gpu", lambda *_: False)
    found = autotune(op, X)
    assert found.recorded and found.best == Config(8) and "[recorded]" in repr(found)
    with pytest.raises(RuntimeError, match=r"nothing was recorded for scale, float32\[3\]"):
        autotune(op, X[:3])


def test_nothing_to_try_is_refused():
    with pytest.raises(ValueError, match="configs is empty"):
        lab.autotune(scale, X, configs=[])


def test_the_names_of_problems_tell_them_apart():
    a, b = jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((8, 2), jnp.bfloat16)
    name = module.problem_name(a, b, transpose_a=False, transpose_b=True, activation=jnp.tanh, bias=b[0])
    assert name == "bfloat16[4,8] bfloat16[8,2] activation=tanh bias=bfloat16[2] transpose_b=True"


def test_what_was_recorded_is_of_configurations_that_there_are():
    """A kernel whose Config got other fields has to be searched anew, and its entries have to go."""
    for op_name, problems in results.load("configs", "h200").items():
        config_type = (tune.OPS.get(op_name) or getattr(cookbook, op_name)).Config
        for entry in problems.values():
            assert all(config_type(**trial["config"]) for trial in entry["trials"])
            assert config_type(**entry["best"])
