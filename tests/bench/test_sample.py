"""Random problems: which they are, and what is said of their times."""

import dataclasses
import functools
import sys

import jax
import numpy as np
import pytest

import cookbook
import lab
from bench import __main__ as bench
from bench import peers, problems, sample, torch_attention, torch_peers
from cookbook import _host


@pytest.mark.parametrize("op", sample.SAMPLES)
def test_problems_are_the_seeds_own_and_in_bounds(op):
    drawn = sample.SAMPLES[op].problems(300, seed=1)
    assert drawn[:20] == sample.SAMPLES[op].problems(20, seed=1) != sample.SAMPLES[op].problems(20, seed=2)
    for sizes in drawn:
        if op in ("matmul_int8_weights", "matmul_int4_weights"):
            m, n, k = sizes
            assert 1 <= m <= 4096 and 2048 <= min(n, k) and max(n, k) <= 28672 and n % 16 == k % 16 == 0
        elif op == "ragged_dot":
            m, n, k, g, skew = sizes
            assert 64 <= m <= 131072 and 1 <= g <= 256 and 0 <= skew <= 100 and n % 128 == k % 64 == 0
        elif op == "ssd":
            seqs, tokens, heads, groups, head_dim, state_dim = sizes
            assert heads % groups == 0 and head_dim in (64, 128) and state_dim in (64, 128, 256)
            assert tokens % 64 == 0 and 2**13 <= seqs * tokens * heads <= 2**22
        elif op in ("gated_delta_rule", "kda"):
            seqs, tokens, key_heads, heads, dim = sizes
            assert heads % key_heads == 0 and dim in (64, 128)
            assert tokens % 64 == 0 and 2**13 <= seqs * tokens * heads <= 2**22
        elif op.startswith("attention"):
            seqs, tokens, heads, kv_heads, head_dim, is_causal = sizes
            assert 256 <= tokens <= 32768 and tokens % 2 == 0 and seqs * tokens * heads <= 2**20
            assert heads % kv_heads == 0 and head_dim in (64, 128) and is_causal in (0, 1)
        elif op == "causal_conv1d":
            seqs, tokens, channels, taps = sizes
            assert 10**6 <= seqs * tokens * channels <= 10**9 and channels >= 128 and 2 <= taps <= 5
        elif op == "top_k":
            rows, cols, k = sizes
            assert 1 <= rows <= 1024 and 1 <= k <= min(cols, 2048) and cols <= 2**18
        elif op == "linear_cross_entropy":
            tokens, hidden, labels = sizes
            assert 256 <= tokens <= 16384 and 448 <= hidden <= 8192 and hidden % 64 == 0 and 4000 <= labels <= 262144
        elif op.startswith(("matmul", "glu")):
            m, n, k = sizes
            multiple = 16 if op == "matmul_fp8" else 8
            assert 1 <= min(sizes) and max(sizes) <= 16384 and n % multiple == k % multiple == 0
            assert 1e8 <= 2 * m * n * k <= 2e12
        else:
            rows, cols = sizes
            assert 1 <= rows <= 10**6 and 1 <= cols <= 65536 and 10**6 <= rows * cols <= 10**9


@pytest.mark.parametrize(
    "make",
    [
        lambda: problems._ssd_step(3, 2, 1, 64, 64),
        lambda: problems._delta_rule_step(3, 1, 2),
        lambda: problems._conv_step(3, 130, 4),
    ],
)
def test_steps_change_a_state_in_place_and_equal_their_peers(make):
    case = make()
    inputs = case.inputs()
    exact, before = jax.jit(case.reference)(*inputs), np.asarray(inputs[case.in_place])
    for fn in (case.kernel, *case.peers.values()):
        call, given = case.applied(fn, inputs)
        with lab.interpret():
            first, second = (jax.jit(call)(*given) for _ in range(2))
        assert (
            problems.relative_error(first, exact) < 5e-3 < problems.relative_error(second, exact)
        )  # It has a new state.
    np.testing.assert_array_equal(inputs[case.in_place], before)


def test_products_are_drawn_as_the_issue_says():
    rng = np.random.default_rng(1)
    while True:
        m, n, k = np.exp(rng.uniform(0, np.log(16384), 3))
        m, n, k = max(1, round(m)), max(8, round(n / 8) * 8), max(8, round(k / 8) * 8)
        if 1e8 <= 2 * m * n * k <= 2e12:
            break
    assert sample.SAMPLES["matmul"].problems(1, seed=1) == [(m, n, k)]


@pytest.mark.parametrize("op", sample.SAMPLES)
def test_a_case_takes_the_inputs_that_it_draws(op):
    case = sample.SAMPLES[op].case(*sample.SAMPLES[op].problems(1, seed=3)[0])
    inputs = jax.eval_shape(case.inputs)
    shapes = lambda fn: jax.tree.map(lambda x: x.shape, jax.eval_shape(fn, *inputs))
    with _host.building_for(_host.Target("H200", 132)):
        assert shapes(case.kernel) == shapes(case.reference)
    for impl, peer in case.peers.items():
        if impl != "cudnn" or lab.on_gpu():  # Elsewhere cuDNN has no version to tell.
            assert shapes(peer) == shapes(case.reference)


@pytest.mark.parametrize("m, g, exponent", [(100, 7, 0), (100, 7, 1.0), (3, 9, 2.0), (100, 256, 99), (64, 1, 0)])
def test_skewed_groups_share_out_all_rows(m, g, exponent):
    sizes = problems.skewed(m, g, exponent)
    assert sizes.sum() == m and sizes.min() >= 0 and len(sizes) == g
    assert exponent or sizes.max() - sizes.min() <= 1
    assert exponent < 99 or sizes.max() == m


def test_statistics():
    assert sample.statistics([0.5, 2.0]) == pytest.approx((1.0, 0.65, 0.5))
    geometric, p10, worst = sample.statistics(np.linspace(1.0, 2.0, 11))
    assert (round(p10, 6), worst) == (1.1, 1.0) and 1.0 < geometric < 1.5


def row(ours, peers, sizes=(10, 10, 10)):
    return sample.Row(sizes, ours, peers)


def test_table_is_sorted_and_compares_with_the_best_peer():
    said = sample.table("softmax", [row(1.0, {"xla": 2.0, "cudnn": 1.5}, (7, 9)), row(2.0, {"xla": 2.0}, (3, 5))])
    assert said.index("3x5") < said.index("7x9") and "1.500 of cudnn" in said
    assert "geometric mean 1.225 (1.10), p10 1.050 (1.00), worst 1.000 (0.95): target reached" in said
    assert "MISSED" in sample.table("softmax", [row(1.0, {"xla": 1.0})])


def test_int8_weights_have_a_target_for_each_number_of_rows():
    rows = [row(1.0, {"xla": ratio, "cublas": 9.0}, (m, 16, 16)) for m, ratio in ((64, 1.3), (65, 1.1), (129, 1.0))]
    verdicts = [line.split()[-1] for line in sample.table("matmul_int8_weights", rows).splitlines()[-3:]]
    assert verdicts == ["reached", "MISSED", "reached"]


def test_without_a_gpu_the_recorded_sample_is_printed(no_gpu, results_folder, monkeypatch, capsys):
    entry = lambda ms: dict(ms=ms, min_ms=ms, spread=0.0, flops=1, nbytes=1, provenance={})
    rows = {"sample_softmax/3x5/bf16": {"cookbook": entry(1.0), "xla": entry(1.25)}}
    lab.results.save("sample_softmax", "h200", dict(rows=rows))
    monkeypatch.setenv("COOKBOOK_RECORD", "0")
    monkeypatch.setattr("sys.argv", ["bench", "softmax", "--sample", "40"])
    assert bench.main() == 0
    assert "3x5" in (said := capsys.readouterr().out) and "1.250 of xla" in said


def test_run_times_ours_and_the_peers_once_each(results_folder, monkeypatch):
    """With a kernel and a stopwatch that need no GPU."""
    monkeypatch.setattr(lab, "on_gpu", lambda *_: True)
    monkeypatch.setattr(cookbook, "softmax", jax.nn.softmax)
    monkeypatch.setenv("COOKBOOK_RECORD", "1")
    timed, topic, gpu = [], "sample_softmax", lab.results.this_gpu()

    def record(problem, impl):
        data = lab.results.load(topic, gpu) or {"rows": {}}
        data["rows"].setdefault(problem, {})[impl] = {}
        lab.results.save(topic, gpu, data)

    record("sample_softmax/4x4/bf16", "cookbook")

    def measure(fn, x, *, problem, impl, **_):
        timed.append((problem, impl, fn(x).shape))
        record(problem, impl)
        return lab.Measurement(problem, impl, 2.0 if impl == "xla" else 1.0)

    monkeypatch.setattr(lab, "measure", measure)
    small = dataclasses.replace(
        sample.SAMPLES["softmax"], draw=lambda rng: (int(rng.integers(1, 9)), 5), accept=lambda *_: True
    )
    monkeypatch.setitem(sample.SAMPLES, "softmax", small)
    rows = sample.run("softmax", 3, seed=1, iterations=1)
    assert [row.sizes for row in rows] == small.problems(3, seed=1) and {row.ratio for row in rows} == {2.0}
    problem = "sample_softmax/{}x{}/bf16".format(*rows[0].sizes)
    assert timed[:2] == [(problem, "cookbook", rows[0].sizes), (problem, "xla", rows[0].sizes)] and len(timed) == 6
    recorded = lab.results.load(topic, gpu)
    assert recorded["rows"].keys() == {problem for problem, *_ in timed}, "the sample before is gone"
    monkeypatch.setattr(cookbook, "softmax", lambda x: 1 - jax.nn.softmax(x))
    with pytest.raises(ValueError, match="cookbook and xla differ"):
        sample.run("softmax", 1, seed=2, iterations=1)
    kept = lab.results.load(topic, gpu)["rows"]
    assert recorded["rows"].keys() <= kept.keys(), "a run that is interrupted loses nothing"


GROUPED = [case for case in problems.CASES if case.op.startswith(("ragged_dot", "moe"))]


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.problem)
def test_grouped_problems_have_peers_of_the_same_result(case):
    inputs = jax.eval_shape(case.inputs)
    with _host.building_for(_host.Target("H200", 132)):
        # JAX's sums ask the device at hand for its SMs, and a CPU has no answer.
        peers = {} if case.op == "ragged_dot_transposed" else case.peers
        shapes = {impl: jax.eval_shape(fn, *inputs) for impl, fn in ({"ours": case.kernel} | peers).items()}
    wanted = jax.eval_shape(case.reference, *inputs).shape
    assert all(out.shape == wanted for impl, out in shapes.items() if impl not in case.parts)
    assert case.target.peer in (None, *case.peers)


def test_torch_is_timed_on_the_matrices_that_it_takes(monkeypatch):
    timed = torch_peers.cases("ragged_dot")
    assert timed and all(case.shapes[1][1] == case.shapes[0][1] for case in timed)
    others = {"matmul_int4_weights", "ssd", "gated_delta_rule", "causal_conv1d", "rms_norm"}
    assert {case.op for case in torch_peers.cases()} == {"ragged_dot", *others, *torch_attention.OPS}
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="torch cannot be imported .*: install it"):
        torch_peers.main()


@pytest.mark.parametrize(
    "source, is_there",
    [("", True), ("import xprof_that_is_not_there", False), ("raise OSError('libcudart.so')", False), (None, False)],
)
def test_a_peer_that_does_not_import_counts_as_missing(tmp_path, monkeypatch, source, is_there):
    """As tokamax without xprof."""
    monkeypatch.setattr(peers, "imports", functools.cache(peers.imports.__wrapped__))
    monkeypatch.setattr(problems, "imports", peers.imports)
    monkeypatch.delitem(sys.modules, "tokamax", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    if source is not None:
        (tmp_path / "tokamax.py").write_text(source)
    else:
        monkeypatch.setitem(sys.modules, "tokamax", None)
    assert ("tokamax" in problems._attention(64, 4096, True, None).peers) == is_there
    assert ("tokamax" in problems._attention(64, 4096, True, None, gradients=True).peers) == is_there
    assert ("tokamax" in problems._ragged(512, 256, 256, [256, 256]).peers) == is_there


def test_what_is_stale_is_timed_again_and_nothing_else(no_gpu, results_folder, monkeypatch, capsys):
    entry = lambda ms, **provenance: dict(ms=ms, min_ms=ms, spread=0.0, flops=1, nbytes=1, provenance=provenance)
    fresh = dict(gpu="NVIDIA H200", date="2026-11-23")
    old = fresh | dict(stale=True)
    wide, long = "softmax/16384x8192/bf16", "softmax/4096x32768/bf16"
    rows = {wide: {"cookbook": entry(1.0, **fresh)}, long: {"cookbook": entry(1.0, **old)}}
    lab.results.save("softmax", "h200", dict(rows=rows))
    sizes = "{}x{}".format(*sample.SAMPLES["softmax"].problems(1, seed=1)[0])
    sampled = {f"sample_softmax/{sizes}/bf16": {"cookbook": entry(1.0, **old), "xla": entry(1.25)}}
    lab.results.save("sample_softmax", "h200", dict(rows=sampled))
    monkeypatch.setenv("COOKBOOK_RECORD", "0")

    def said(*options):
        monkeypatch.setattr("sys.argv", ["bench", *options, "--stale"])
        assert bench.main() == 0
        return capsys.readouterr().out

    for op, shown in (([], {long, sizes}), (["softmax"], {long, sizes}), (["rms_norm"], set())):
        assert {text for text in (wide, long, sizes) if text in said(*op)} == shown
    assert "1 random problems of softmax are not those of --seed 2" in said("--seed", "2")
    with pytest.raises(SystemExit):
        said("sofmax")
