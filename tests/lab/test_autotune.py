"""The search for a configuration, on an op whose times are made up: no GPU is needed to see what it keeps."""

import dataclasses
import importlib
import json
import sys
import types

import jax.numpy as jnp
import pytest

from cookbook import _tuned, lab
from cookbook.lab import autotune as autotune_function
from cookbook.lab import interpreter, results, timing

module = sys.modules[autotune_function.__module__]


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


def configs(x, **_):
    return [Config(4), Config(8), Config(5), Config(16), Config(8, wrong=True)]


def problem(x, **_):
    return _tuned.problem_name(x)


@pytest.fixture
def op(monkeypatch, tmp_path):
    """`scale`, with a GPU that is not there; `timed` lists the tiles that were timed."""
    op_module = types.ModuleType("op_with_configs")
    vars(op_module).update(scale=scale, configs=configs, problem=problem, Config=Config)
    monkeypatch.setitem(sys.modules, "op_with_configs", op_module)
    monkeypatch.setattr(scale, "__module__", "op_with_configs")
    monkeypatch.setattr(_tuned, "ROOT", tmp_path)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(interpreter, "on_gpu", lambda: True)
    monkeypatch.setattr(results, "this_gpu", lambda: "h200")
    timed = []

    def compile_op(fn, args):
        fn(*args)  # What does not trace does not compile.
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
    found = lab.autotune(op, X)
    assert found.best == Config(8) and found.ms == 1.0 and op.timed == [4, 8, 16]
    assert {c.tile: text for c, text in found.failures.items() if not c.wrong} == {
        5: "ValueError: tile 5 does not compile"
    }
    assert "not that of the op's own choice" in found.failures[Config(8, wrong=True)]
    assert "1.0000 ms" in repr(found) and "tile=16" in repr(found) and "2 failed" in repr(found)


def test_what_was_timed_is_not_timed_again(op):
    lab.autotune(op, X)
    lab.autotune(op, X)
    assert op.timed == [4, 8, 16]
    lab.autotune(op, X, refresh=True)
    assert op.timed == 2 * [4, 8, 16]
    lab.autotune(op, X[:4])  # Another problem.
    assert op.timed == 3 * [4, 8, 16]


def test_an_interrupted_search_goes_on_where_it_was(op, monkeypatch):
    whole = timing.median_ms

    def interrupted(compiled, args, iterations):
        if compiled.tile == 16:
            raise KeyboardInterrupt
        return whole(compiled, args, iterations)

    monkeypatch.setattr(timing, "median_ms", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.autotune(op, X)
    monkeypatch.setattr(timing, "median_ms", whole)
    assert lab.autotune(op, X).best == Config(8) and op.timed == [4, 8, 16]


def test_what_is_right_does_not_depend_on_what_is_left(op, monkeypatch):
    """A search that goes on with a wrong configuration first."""
    monkeypatch.setattr(sys.modules["op_with_configs"], "configs", lambda x: [Config(8, wrong=True), Config(4)])
    found = lab.autotune(op, X)
    assert found.best == Config(4) and set(found.failures) == {Config(8, wrong=True)}


def test_times_of_other_code_are_taken_anew(op):
    lab.autotune(op, X)
    data = json.loads(_tuned.path("h200").read_text())
    data["scale"][problem(X)]["code"] = "of another day"
    _tuned.path("h200").write_text(json.dumps(data))
    lab.autotune(op, X)
    assert op.timed == 2 * [4, 8, 16]


def test_without_a_gpu_it_tells_what_was_recorded(op, monkeypatch):
    lab.autotune(op, X)
    monkeypatch.setattr(interpreter, "on_gpu", lambda: False)
    found = lab.autotune(op, X)
    assert found.recorded and found.best == Config(8) and "[recorded]" in repr(found)
    with pytest.raises(RuntimeError, match=r"nothing was recorded for scale, float32\[3\]"):
        lab.autotune(op, X[:3])


def test_a_kernel_finds_what_was_tuned_for_its_gpu(op):
    lab.autotune(op, X)
    assert _tuned.tuned("scale", "NVIDIA H200", problem(X), Config) == Config(8)
    for op_name, gpu, name in (
        ("scale", "NVIDIA B200", problem(X)),
        ("scale", "NVIDIA H200", problem(X[:3])),
        ("other", "NVIDIA H200", problem(X)),
    ):
        assert _tuned.tuned(op_name, gpu, name, Config) is None
    renamed = dataclasses.make_dataclass("Config", [("size", int)])
    assert _tuned.tuned("scale", "NVIDIA H200", problem(X), renamed) is None


def test_an_op_without_configs_is_refused():
    with pytest.raises(ValueError, match="has no configs"):
        lab.autotune(lab.roofline.bound, X)


def test_the_names_of_problems_tell_them_apart():
    a, b = jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((8, 2), jnp.bfloat16)
    assert (
        _tuned.problem_name(a, b, transpose_a=False, transpose_b=True) == "bfloat16[4,8] bfloat16[8,2] transpose_b=True"
    )


@pytest.mark.parametrize("op_name", ["matmul", "matmul_fp8", "matmul_int8_weights"])
def test_kernels_list_configurations_that_fit(op_name):
    """Their own checks, and so the price of shared memory, are passed by being made."""
    kernel = importlib.import_module(f"cookbook.gemm.{op_name}")
    a, b, scales = jnp.zeros((64, 4096), jnp.bfloat16), jnp.zeros((4096, 512), jnp.int8), jnp.ones(512)
    listed = kernel.configs(a, b, scales) if op_name == "matmul_int8_weights" else kernel.configs(a, b)
    assert len(listed) > 5 and len(set(listed)) == len(listed)


def test_a_kernel_takes_the_tuned_configuration(monkeypatch, tmp_path):
    from cookbook.gemm import matmul as kernel

    a, b = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)
    best = kernel.Config(tile_m=64, tile_n=128, split_dim=1, num_stages=2)
    monkeypatch.setattr(_tuned, "ROOT", tmp_path)
    _tuned.path("h200").parent.mkdir()
    smem = lambda: lab.compile_for("h200", kernel.matmul, a, b).smem_bytes
    by_shape = smem()
    entry = {"matmul": {kernel.problem(a, b): {"best": dataclasses.asdict(best)}}}
    _tuned.path("h200").write_text(json.dumps(entry))
    assert best.smem_bytes <= smem() < by_shape
