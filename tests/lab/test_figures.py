"""Roofline, ladder, timeline and the chapters' figures: what is in them, and that the same data draws the same file."""

import functools
import io
import json
import math
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler
from lab_kernels import add_one

import lab
from figures import _draw, _stepper
from lab import plot, results, roofline
from lab.timeline import lanes_of
from lab.toolchain import CHIPS, GPUS


def measurement(ms, problem="matmul/4096x4096x4096/bf16", **kwargs):
    return lab.Measurement(problem, "cookbook", ms, flops=2 * 4096**3, nbytes=3 * 2 * 4096**2, **kwargs)


@pytest.fixture(autouse=True)
def of_an_h200(monkeypatch):
    """Bounds are an H200's, whatever GPU this machine has."""
    monkeypatch.setenv("COOKBOOK_GPU", "h200")


# Roofline


def test_every_peak_has_its_source():
    for gpu, peaks in roofline.PEAKS.items():
        for peak in peaks.values():
            assert peak.value > 0 and all(word in peak.source.upper() for word in gpu.upper().split("-"))
        assert peaks.keys() == roofline.PEAKS["h200"].keys()
    for gpu, facts in GPUS.items():
        assert roofline.peak("hbm", gpu).value == facts["bandwidth"]


@pytest.mark.parametrize(
    "device_kind, gpu, num_sms, hbm, bf16",
    [
        ("NVIDIA H100 PCIe", "h100-pcie", 114, 2.0e12, 756.5e12),
        ("NVIDIA H100 NVL", "h100-nvl", 132, 3.9e12, 835.5e12),
        ("NVIDIA H100 80GB HBM3", "h100", 132, 3.35e12, 989e12),
        ("NVIDIA H200", "h200", 132, 4.8e12, 989e12),
        ("NVIDIA H200 NVL", "h200-nvl", 132, 4.8e12, 835.5e12),
        ("NVIDIA GH200 480GB", "gh200", 132, 4.0e12, 989e12),
        ("NVIDIA GH200 144G HBM3e", "gh200-144g", 132, 4.9e12, 989e12),
        ("NVIDIA B200", "b200", 148, 8.0e12, 2250e12),
    ],
)
def test_cards_of_one_chip_are_told_apart(monkeypatch, device_kind, gpu, num_sms, hbm, bf16):
    monkeypatch.delenv("COOKBOOK_GPU")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=device_kind)])
    bound = roofline.bound(bf16, hbm / 2)
    assert bound.gpu == gpu and f" on {gpu}, " in repr(bound)
    assert (bound.compute_seconds, bound.memory_seconds) == (1, 0.5)
    assert roofline.figure().axes[0].get_title(loc="left").startswith(f"Roofline of {gpu.upper()},")
    assert CHIPS[gpu]["num_sms"] == num_sms


def test_the_peak_of_f32_is_that_of_the_clock():
    """An SM has 128 CUDA cores, each of which multiplies and adds in a cycle. Datasheets round the peaks."""
    assert CHIPS.keys() == roofline.PEAKS.keys()
    for gpu, chip in CHIPS.items():
        assert roofline.peak("f32", gpu).value == pytest.approx(256e9 * chip["num_sms"] * chip["clock_ghz"], rel=0.006)


def test_a_gpu_without_peaks_is_named(monkeypatch):
    monkeypatch.delenv("COOKBOOK_GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mig = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    monkeypatch.setattr(jax, "devices", lambda: [mig])
    with pytest.warns(UserWarning, match="NVIDIA H100 80GB HBM3 MIG 1g.10gb has no peaks here: bounds are those of an"):
        assert roofline.bound(1, 1).gpu == "h200"
    provenance = dict(gpu=mig.device_kind, date="2026-11-25")
    with pytest.raises(ValueError, match="'h100-80gb-hbm3-mig-1g.10gb' has no peaks here; .* must be one of 'h200'"):
        roofline.compare(measurement(1.0, recorded=True, provenance=provenance))


def test_a_recorded_figure_is_compared_with_the_bound_of_its_gpu():
    figure = functools.partial(lab.Measurement, "add/1/bf16", "cookbook", nbytes=3.35e9, recorded=True)
    bounds = [
        roofline.compare(figure(median_ms=2.0, provenance=dict(gpu=name, date="2026-11-25"))).bound
        for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    ]
    assert [bound.gpu for bound in bounds] == ["h100", "h200"]
    assert [bound.ms for bound in bounds] == pytest.approx([1.0, 3.35 / 4.8])


def test_a_matmul_is_bound_by_compute_and_a_softmax_by_memory():
    matmul = roofline.bound(2 * 4096**3, 3 * 2 * 4096**2, "bf16")
    assert matmul.limited_by == "compute" and matmul.seconds == pytest.approx(2 * 4096**3 / 989e12)
    softmax = roofline.bound(5 * 16384 * 8192, 4 * 16384 * 8192, "f32")
    assert softmax.limited_by == "memory" and softmax.ms == pytest.approx(0.112, abs=1e-3)
    assert "bound by memory" in repr(softmax)


@pytest.mark.parametrize("dtype, name", [(jnp.bfloat16, "bf16"), (jnp.float8_e4m3fn, "fp8"), ("float32", "f32")])
def test_dtypes_have_peaks(dtype, name):
    assert roofline.peak(dtype) == roofline.PEAKS["h200"][name]


def test_bounds_are_of_the_gpu_that_the_environment_names(monkeypatch):
    assert roofline.bound(1, 1).gpu == "h200"
    monkeypatch.setenv("COOKBOOK_GPU", "b200")
    assert roofline.bound(1, 1).gpu == "b200" and roofline.bound(1, 1, gpu="h100").gpu == "h100"
    monkeypatch.setenv("COOKBOOK_GPU", "a100")
    with pytest.raises(ValueError, match="'a100' has no peaks here"):
        roofline.bound(1, 1)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'fp4' has no peak on h200; it must be one of 'fp8'"):
        roofline.peak("fp4")
    with pytest.raises(ValueError, match="'a100' has no peaks here"):
        roofline.bound(1, 1, gpu="a100")
    with pytest.raises(ValueError, match="nor both zero"):
        roofline.bound(0, 0)
    with pytest.raises(ValueError, match="neither flops nor nbytes"):
        roofline.compare(lab.Measurement("x/y/bf16", "cookbook", 1.0))


def test_predicted_against_measured():
    compared = roofline.compare(measurement(0.2))
    assert compared.fraction == pytest.approx(0.139 / 0.2, abs=1e-3)
    assert repr(compared) == "predicted 0.139 ms (compute), took 0.2 ms: 69% of the bound"
    provenance = dict(gpu="NVIDIA H200", date="2026-11-20")
    recorded = repr(roofline.compare(measurement(0.2, recorded=True, stale=True, provenance=provenance)))
    assert "recorded on NVIDIA H200, 2026-11-20, STALE" in recorded
    assert "no recorded figure" in repr(roofline.compare(measurement(math.nan)))


def test_measured_ceilings_come_from_the_results(results_folder, monkeypatch):
    assert roofline.ceiling("hbm") is None
    monkeypatch.setattr(results, "machine", lambda: dict(gpu="NVIDIA H200", date="2026-11-20"))
    monkeypatch.setattr(results, "this_gpu", lambda: "h200")
    results.write("ceiling/stream", "XLA", ms=1.0, min_ms=1.0, spread=0.0, nbytes=4.38e9)
    assert roofline.ceiling("hbm").value == pytest.approx(4.38e12)
    labels = [line.get_label() for line in roofline.figure([measurement(0.2)]).axes[0].lines]
    assert labels == ["datasheet", "measured ceiling of HBM", "matmul/4096x4096x4096/bf16, cookbook"]


def test_the_roofline_leaves_out_what_was_not_measured(results_folder):
    lines = roofline.figure([measurement(math.nan), ("a", 1e9, 1e9, 1.0)]).axes[0].lines
    assert [line.get_label() for line in lines] == ["datasheet", "a"]
    assert (lines[1].get_xdata()[0], lines[1].get_ydata()[0]) == (1.0, 1.0)


# Ladder


def test_the_ladder_shows_rungs_and_peers(tmp_path):
    bars = [("one", 400.0), ("two", math.nan)], [("cuBLAS", 786.0)]
    draw = lambda: plot.ladder(*bars, bound=989.0, note="first\n" + "so " * 50)
    ax = draw().axes[0]
    unit, first, *note = ax.get_xlabel().split("\n")
    assert (unit, first) == ("TFLOP/s", "first")
    assert " ".join(note).split() == ["so"] * 50 and max(map(len, note)) < 80
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one", "two", "cuBLAS"]
    assert [text.get_text() for text in ax.texts] == ["400  (40%)", "not measured", "786  (79%)", "bound 989"]
    for name in ("a.svg", "b.svg"):
        plot.save(draw(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_importing_lab_neither_starts_jax_nor_imports_matplotlib():
    code = (
        "import sys, lab, jax\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized() and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Timeline


def chrome_trace(blocks=2, warpgroups=3, sms=(7, 8)):
    """JAX's trace of a kernel in which each warpgroup enters "role" and, inside, "copy" twice."""
    spec = profiler.ProfilerSpec(32, "unused")
    role, copy = spec.intern_name("role"), spec.intern_name("copy")
    buffer = np.zeros((blocks, warpgroups, 32), np.uint32)
    for block, wg in np.ndindex(blocks, warpgroups):
        clock = np.array([0, 198, 396, 594, 792, 990])
        tags = [role, copy, copy | spec.EXIT, copy, copy | spec.EXIT, role | spec.EXIT]
        entries = np.stack([tags, clock], axis=1).ravel()
        buffer[block, wg, :3] = 1000 + 100 * block + 10 * wg, sms[block], len(entries)
        buffer[block, wg, 3 : 3 + len(entries)] = entries
    file = io.StringIO()
    spec.dump(buffer, file, grid=(blocks, 1, 1), block=(128 * warpgroups, 1, 1))
    return json.loads(file.getvalue())


def test_a_trace_becomes_one_lane_a_warpgroup():
    lanes = lanes_of(chrome_trace(), clock_ghz=1.98, blocks=1)
    assert [(lane["block"], lane["warpgroup"]) for lane in lanes] == [(0, 0), (0, 1), (0, 2)]
    (role, *role_at), (copy, *copy_at), _ = lanes[1]["spans"]
    assert (role, copy) == ("role", "copy")
    # The second warpgroup starts 10 ns after the first, 198 cycles are 0.1 µs, less JAX's estimate of the overhead.
    assert role_at == pytest.approx([0.010, 0.47, 0], abs=0.04)
    assert copy_at == pytest.approx([0.11, 0.1, 1], abs=0.04)
    assert len(lanes_of(chrome_trace(), 1.98, blocks=2)) == 6
    assert lanes_of({"traceEvents": []}, 1.98, 1) == []


def test_neighbouring_blocks_may_share_an_sm():
    lanes = lanes_of(chrome_trace(blocks=3, warpgroups=2, sms=(7, 7, 8)), clock_ghz=1.98, blocks=2)
    assert [(lane["block"], lane["warpgroup"]) for lane in lanes] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def record(monkeypatch):
    monkeypatch.setattr(results, "machine", lambda: dict(gpu="NVIDIA H200", date="2026-11-20"))
    monkeypatch.setattr(results, "this_gpu", lambda: "h200")
    results.write_timeline("06_pipelining/x", {"lanes": lanes_of(chrome_trace(), 1.98, 2), "clock_ghz": 1.755}, "5e1f")


def test_a_stored_trace_is_drawn_and_marked_as_recorded(results_folder, no_gpu, monkeypatch):
    record(monkeypatch)
    ax = lab.timeline(add_one, None, problem="06_pipelining/x", blocks=2).axes[0]
    assert ax.get_title(loc="left") == "x, recorded on NVIDIA H200, 2026-11-20"
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(labels) == 6 and labels[4] == "block 1, warpgroup 1"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["role", "copy"]
    assert len(ax.collections) == 12  # Two names in each of six lanes.
    labels = lab.timeline(add_one, None, problem="06_pipelining/x").axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["warpgroup 0", "warpgroup 1", "warpgroup 2"]


def test_the_same_trace_is_the_same_file(results_folder, no_gpu, monkeypatch):
    record(monkeypatch)
    first = (results_folder / "h200/timelines/06_pipelining__x.json.gz").read_bytes()
    record(monkeypatch)
    assert (results_folder / "h200/timelines/06_pipelining__x.json.gz").read_bytes() == first


def test_a_stale_trace_says_so(results_folder, no_gpu, monkeypatch):
    record(monkeypatch)
    trace = results.read_timeline("06_pipelining/x")
    trace["provenance"]["stale"] = True  # As tools/stale.py says.
    results.save_timeline(results.ROOT / "h200/timelines/06_pipelining__x.json.gz", trace)
    ax = lab.timeline(add_one, None, problem="06_pipelining/x").axes[0]
    assert "STALE" in ax.get_title(loc="left")


def test_a_trace_can_be_drawn_into_given_axes(results_folder, no_gpu, monkeypatch):
    record(monkeypatch)
    with plot.figure(ncols=2) as (fig, (left, right)):
        assert lab.timeline(add_one, None, problem="06_pipelining/x", ax=right) is fig
    assert right.collections and not left.collections
    assert right.get_xlabel() == "µs, at 1.755 GHz"  # The clock of the GPU that was traced.


def test_clocks_of_a_step_are_the_median_of_a_stored_trace(results_folder, monkeypatch):
    monkeypatch.setattr(results, "machine", lambda: dict(gpu="NVIDIA H200", date="2026-11-20"))
    monkeypatch.setattr(results, "this_gpu", lambda: "h200")
    wait, work = [["wait", 0.0, 0.1, 0]], [["work", start, 0.5, 0] for start in (0.0, 1.0, 3.0, 4.5)]
    lanes = [{"block": 0, "warpgroup": i, "spans": spans} for i, spans in enumerate((wait, work))]
    results.write_timeline("06_pipelining/x", {"lanes": lanes, "clock_ghz": 2.0}, "5e1f")
    assert lab.step_clocks("06_pipelining/x", "work") == pytest.approx(3000)
    assert math.isnan(lab.step_clocks("06_pipelining/x", "wait"))
    assert math.isnan(lab.step_clocks("06_pipelining/unknown", "work"))
    trace = lab.chrome_trace("06_pipelining/x")
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert spans[-1] == dict(pid=0, tid=1, ph="X", name="work", ts=4.5, dur=0.5) and len(spans) == 5
    assert trace["otherData"]["gpu"] == "NVIDIA H200" and lab.chrome_trace("06_pipelining/unknown") is None


def test_no_trace_is_said_in_the_figure(results_folder, no_gpu):
    fig = lab.timeline(add_one, None, problem="06_pipelining/unknown")
    assert "no recorded timeline" in fig.axes[0].get_title(loc="left")
    fig.savefig(io.BytesIO())


def test_a_kernel_is_traced_on_a_gpu(gpu, results_folder, monkeypatch):
    monkeypatch.setenv("COOKBOOK_RECORD", "1")
    fig = lab.timeline(add_one, jnp.ones((256, 128)), problem="add_one/trace", blocks=2)
    scopes = [text.get_text() for text in fig.axes[0].get_legend().get_texts()]
    assert [scope for scope in scopes if scope != "Init"] == ["load", "compute", "store"]  # Init is Mosaic's own.
    trace = results.read_timeline("add_one/trace", results.this_gpu())
    assert [lane["block"] for lane in trace["lanes"]] == [0, 1]
    assert all(duration >= 0 for lane in trace["lanes"] for _, _, duration, _ in lane["spans"])
    with pytest.raises(ValueError, match="wrote no trace"):
        lab.timeline(lambda x: x + 1, jnp.ones(8), problem="add_one/none")


# Map of errors


def test_an_error_map_counts_and_places_wrong_tiles():
    expected = np.random.default_rng(0).standard_normal((256, 192))
    out = expected.copy()
    out[70, 130] += 1.0
    out[200:210, 5] = np.nan
    fig = plot.error_map(out, expected, tile=(64, 64), title="a kernel")
    assert fig.get_suptitle() == "a kernel: 2 of 12 tiles are wrong"
    tiles, elements = (axes.images[0].get_array() for axes in fig.axes[:2])
    assert tiles.shape == (4, 3) and np.argwhere(tiles.mask).tolist() == [[3, 0]]
    assert np.argwhere(tiles.filled(0) > 0.05).tolist() == [[1, 2]]
    assert fig.axes[1].get_title(loc="left") == "tile (1, 2): its elements"
    assert np.argwhere(elements.filled(0) > 0.05).tolist() == [[6, 2]]
    assert [text.get_text() for text in fig.axes[0].texts] == [f"{tiles[1, 2]:.2g}", "nan"]


def test_an_error_map_of_a_right_result():
    expected = np.array([[np.nan, np.inf], [1.0, -2.0]])
    fig = plot.error_map(expected.copy(), expected, tile=(1, 2))
    assert fig.get_suptitle() == "0 of 2 tiles are wrong"
    close = plot.error_map(expected[1:] * 1.01, expected[1:], tile=(1, 1))
    assert close.get_suptitle() == "0 of 2 tiles are wrong"
    assert (
        plot.error_map(expected[1:] * 1.01, expected[1:], tile=(1, 1), limit=1e-3).get_suptitle().startswith("2 of 2")
    )


def test_tiles_that_are_cut_are_tiles():
    expected = np.ones((100, 70))
    out = expected.copy()
    out[99, 69] = 0.0
    tiles = plot.error_map(out, expected, tile=(64, 64)).axes[0].images[0].get_array()
    assert tiles.shape == (2, 2) and np.argwhere(tiles > 0).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    "out, expected, tile, said",
    [
        (
            np.ones((4, 4)),
            np.ones((4, 5)),
            (2, 2),
            r"out.shape=\(4, 4\), expected.shape=\(4, 5\); must be two matrices",
        ),
        (np.ones(4), np.ones(4), (2, 2), "must be two matrices"),
        (np.ones((4, 4)), np.ones((4, 4)), (0, 2), r"tile=\(0, 2\); must be the rows and columns"),
        (np.ones((4, 4)), np.ones((4, 4)), (2,), "must be the rows and columns"),
    ],
)
def test_an_error_map_refuses(out, expected, tile, said):
    with pytest.raises(ValueError, match=said):
        plot.error_map(out, expected, tile=tile)


# Figures of the chapters


def test_each_figure_has_a_file_and_each_file_a_figure():
    pictures = [picture for chapter in _draw.chapters() for picture in _draw.pictures(chapter)]
    assert {picture.path for picture in pictures} == set(_draw.FOLDER.rglob("*.svg"))


@pytest.mark.parametrize("chapter", ["decode_step", "engine"], ids=["drawing", "chart"])
def test_a_chapter_draws_the_same_files_again(chapter, tmp_path, monkeypatch):
    saved = []
    for picture in 2 * _draw.pictures(chapter):
        monkeypatch.setattr(picture, "path", tmp_path / picture.path.name)
        picture.save()
        saved.append(picture.path.read_bytes())
    assert len(saved) == 2 and saved[0] == saved[1] and b"<svg" in saved[0]


def test_a_figure_of_what_a_chapter_computes_has_no_file():
    from figures import serving

    assert not serving.schedule_plot.saved and not serving.schedule_plot.path.exists()


STEPPERS = _stepper.steppers()


@pytest.mark.parametrize("picture", STEPPERS, ids=lambda picture: picture.path.stem)
def test_a_stepper_has_a_caption_for_each_frame_and_shows_the_first(picture):
    steps = picture.draw()
    assert len(steps.captions) >= 3 and all(caption.endswith(".") for caption in steps.captions)
    assert len(set(steps.captions)) == len(steps.captions)
    frames = re.findall(r'class="frame" data-frame="(\d+)"( style="display:none")?', steps.svg)
    assert {int(frame) for frame, _ in frames} == set(range(len(steps.captions)))
    assert all(bool(hidden) == (frame != "0") for frame, hidden in frames)
    ids = re.findall(r' id="([^"]+)"', steps.svg)
    assert len(ids) == len(set(ids)) and all(one.startswith(f"{steps.name}-") for one in ids)
    assert set(re.findall(r'(?:href="|url\()#([\w-]+)', steps.svg)) == set(ids)
    assert len(steps._repr_html_()) < 200_000
    assert picture.draw().svg == steps.svg


def test_steps_are_shown_as_text_and_escaped_as_html():
    steps = _stepper.Steps("a", 'Of "x".', "<svg ></svg>", ["a < b.", "then b."])
    assert repr(steps) == "1. a < b.\n2. then b."
    assert "<li>a &lt; b.</li>" in steps._repr_html_() and "&quot;x&quot;. 2 steps." in steps._repr_html_()
