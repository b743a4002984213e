"""Problems of kernels across GPUs: whether they fit their implementations, and what is said of their figures."""

import dataclasses
import math
import pathlib
import sys

import jax
import pytest

import cookbook
import lab
from bench import __main__ as bench
from bench import collectives
from cookbook import _host

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("tools", "site")]
CASES = {case.problem: case for case in collectives.cases(2)}
SHARES = dict(xla=0.9, jax_mgpu=0.8, matmul=1.05)  # Rates over ours, as if measured.


def some(cases):
    return [case for case in cases if case.size not in collectives.SIZES or case.size == "64KB"]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_all_implementations_of_a_problem_return_the_same(n):
    mesh = jax.sharding.AbstractMesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for case in some(collectives.cases(n)):
        shapes = {}
        for impl, fn in case.impls.items():
            if impl != "jax_mgpu":  # It asks JAX for the GPUs that there are.
                with _host.building_for(_host.Target("NVIDIA H200", 132)):
                    shapes[impl] = jax.eval_shape(case.sharded(impl, fn, mesh), *case.avals)
        for impl, out in shapes.items():
            assert impl in case.parts or (out.shape, out.dtype) == (shapes["xla"].shape, shapes["xla"].dtype), impl
        assert case.targets.keys() <= {*case.impls, "rate", "peer_copy"}


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in collectives.OPS if hasattr(cookbook, op)])
def test_kernels_compile_as_they_are_timed(op):
    case = next(case for case in some(collectives.cases(4)) if case.op == op)
    fn = lambda *args: case.sharded("cookbook", case.impls["cookbook"])(*args)
    assert lab.compile_for("h200", fn, *case.avals, devices=4).spill_bytes == 0


@pytest.mark.parametrize("n", [2, 3, 8])
def test_problems_have_names_and_bytes_of_their_own(n):
    cases = collectives.cases(n)
    assert len({case.problem for case in cases}) == len(cases) and {case.op for case in cases} <= {*collectives.OPS}
    by_name = {case.problem: case for case in cases}
    assert by_name["all_gather/1MB/bf16"].nbytes == (n - 1) * 2**20
    assert by_name["reduce_scatter/64MB/bf16"].nbytes == pytest.approx((n - 1) * 2**26 / n, rel=1e-3)
    sizes = collectives.routed(n, 32_768)
    assert sizes.shape == (n, n) and (sizes.sum(1) == 32_768).all()
    assert by_name["all_to_all/4096_top8_hidden7168/bf16"].nbytes == 2 * 7168 * max(
        max(sizes[:, d].sum(), sizes[d].sum()) - sizes[d, d] for d in range(n)
    )


def test_verdicts():
    case, copy = CASES["all_gather/64MB/bf16"], dict(both_ways=380.0)
    ms = lambda gbps: case.nbytes / gbps / 1e6
    assert collectives.verdict(case, dict(cookbook=ms(365), xla=ms(360)), copy) is True
    assert collectives.verdict(case, dict(cookbook=ms(365), xla=ms(370)), copy) is False
    assert collectives.verdict(case, dict(cookbook=ms(355), xla=ms(350)), copy) is False
    assert collectives.verdict(case, dict(cookbook=ms(365), xla=ms(350)), None) is None
    assert collectives.verdict(case, dict(cookbook=ms(365)), copy) is None
    assert collectives.verdict(case, dict(xla=ms(365)), copy) is None
    assert collectives.wanted(case) == "1 × xla and 0.95 × peer copy"
    case = CASES["all_to_all/4096_top8_hidden7168/bf16"]
    assert collectives.verdict(case, dict(cookbook=case.nbytes / 301e6, xla=9.0), None) is True
    assert collectives.verdict(case, dict(cookbook=case.nbytes / 299e6, xla=9.0), None) is False


@pytest.fixture
def figures(monkeypatch, results_folder, no_gpu):
    """Figures as if recorded on a host with 2 GPUs."""
    machine = dict(gpu="NVIDIA H200", driver="580.1", jax="0.11.2", jaxlib="0.11.2", ptxas="13.0", date="2026-11-23")
    monkeypatch.setattr(lab.results, "machine", lambda: machine)
    monkeypatch.setattr(lab.results, "this_gpu", lambda: "h200")
    for case in CASES.values():
        for impl in case.impls:
            ms = case.nbytes / 370e6 / SHARES.get(impl, 1.0)
            lab.results.write(case.problem, impl, ms=ms, min_ms=ms, spread=0.01, flops=case.flops, nbytes=case.nbytes,
                              devices=2, gpus=2, wall_ms=2 * ms)  # fmt: skip
    topic = lab.results.load("nvlink", "h200x2")
    topic["values"] = {collectives.PEER_COPY: dict(value=dict(both_ways=380.0), provenance=machine)}
    lab.results.save("nvlink", "h200x2", topic)


def run(monkeypatch, capsys, *args) -> str:
    monkeypatch.setattr(sys, "argv", ["bench", *args])
    assert bench.main() == 0
    return capsys.readouterr().out


def test_without_several_gpus_it_says_so(monkeypatch, capsys, results_folder, no_gpu):
    said = run(monkeypatch, capsys, "all_gather")
    assert said == (
        "Kernels across GPUs need a host with 2 to 8 Hopper or newer GPUs, and here is none: none are recorded.\n"
    )


def test_without_several_gpus_it_prints_what_is_recorded(monkeypatch, capsys, figures):
    said = run(monkeypatch, capsys, "all_gather")
    assert "here is none: these are the recorded figures." in said and "reduce_scatter" not in said
    assert "2 GPUs: copies to the next one, all at the same time, run at 380 GB/s each" in said
    ms = 2**26 / 370e6
    assert (
        "all_gather/64MB/bf16, 2 GPUs\n"
        f"    cookbook    {1e3 * ms:10.1f} us   370.0 GB/s           wall {2e3 * ms:.1f} us\n"
        f"    xla         {1e3 * ms / 0.9:10.1f} us   333.0 GB/s 1.111 x   wall {2e3 * ms / 0.9:.1f} us\n"
        "    target reached: 1 × xla and 0.95 × peer copy\n"
    ) in said
    assert said.endswith("every target reached\n")
    assert "all_to_all/4096_top8_hidden7168/bf16, 2 GPUs" in run(monkeypatch, capsys, "all_to_all")


def test_ops_that_are_still_to_come_have_no_problems(monkeypatch):
    monkeypatch.delattr(cookbook, "all_to_all")
    assert "all_to_all" not in {case.op for case in collectives.cases(2)}


def test_a_table_says_on_how_many_gpus(figures):
    import measured
    import render_readme

    page = measured.results_page()
    assert "## 2 GPUs of one host" in page and "GPU: 2 NVIDIA H200;" in page and "at 380 GB/s each" in page
    assert "### all_gather\n" in page and "| 370 GB/s |" in page
    assert '<span class="met">met</span> | `all_gather/64MB/bf16` | 370 GB/s | 1 × xla and 0.95 × peer copy |' in page
    table = render_readme._table()
    assert "| `all_gather_matmul/m8192_n3584_k8192/bf16` | 2652 TFLOP/s per GPU | xla 2387 TFLOP/s per GPU |" in table
    assert "| 2 NVIDIA H200 |" in table


def test_a_peer_that_fails_or_is_wrong_is_said_and_not_timed(monkeypatch, capsys):
    """On one CPU, in place of several GPUs."""
    timed = []

    def measure(fn, *args, impl, devices, **figures):
        timed.append(impl)
        return lab.Measurement("", impl, 1.0, nbytes=1)

    monkeypatch.setattr(lab, "measure", measure)
    monkeypatch.setattr(lab.timing, "median_ms", lambda fn, args, iterations, devices: 1.0)

    def refuses(x):
        raise ValueError("not this shape")

    impls = {"cookbook": lambda x: x, "xla": lambda x: x + 0, "wrong": lambda x: 2 * x, "refuses": refuses}
    impls["several"] = [refuses, lambda x: x * 1]
    case = dataclasses.replace(CASES["all_gather/64KB/bf16"], n=1, impls=impls, targets=dict(xla=1.0))
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = collectives._measure(case, mesh, iterations=2)
    assert list(rows) == timed == ["xla", "cookbook", "several"]
    said = capsys.readouterr().out
    assert "wrong: wrong by 1, and so not timed" in said and "refuses: ValueError: not this shape" in said
    assert collectives._print(case, rows, None) is True


@pytest.mark.several_gpus
@pytest.mark.parametrize("n", [2, 4])
def test_times_on_a_host_with_several_gpus(n, gpu, results_folder, monkeypatch):
    if jax.device_count() != n:
        pytest.skip(f"needs a host with {n} Hopper or newer GPUs")
    monkeypatch.setattr(collectives, "SIZES", {"1MB": 2**20})
    monkeypatch.setattr(collectives, "_exchange", lambda n, *_: collectives._equal_exchange(n, 64, 1, 256))
    monkeypatch.setenv("COOKBOOK_RECORD", "1")
    collectives.run("all_gather", iterations=3)
    row = lab.results.read("all_gather/1MB/bf16", gpu=f"h200x{n}")
    assert 1e-3 < row["ms"] < 1 and row["provenance"]["gpus"] == n and row["provenance"]["wall_ms"] > row["ms"] / 2
    assert math.isfinite(lab.results.stored(collectives.PEER_COPY, f"h200x{n}")["both_ways"])
