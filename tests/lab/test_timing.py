"""Times of kernels that several GPUs run together. Those of one GPU are tested in test_results.py."""

import math

import jax
import pytest

import lab
from lab import results, timing


def test_waiting_for_the_slowest_device_does_not_count():
    kernels = [("gather", 5.0), ("multiply", 2.0), ("gather", 3.0), ("multiply", 2.5)]
    assert timing.least_over_devices(kernels, 2) == 3.0 + 2.0
    assert timing.least_over_devices(kernels[::-1], 2) == 5.0  # In any order.


def test_a_kernel_that_a_call_launches_twice_counts_twice():
    assert timing.least_over_devices([("gather", 5.0), ("gather", 3.0), ("gather", 4.0), ("gather", 3.5)], 2) == 7.0
    short_and_long = [("kernel", 2.0), ("kernel", 9.0), ("kernel", 9.5), ("kernel", 2.5)]
    assert timing.least_over_devices(short_and_long, 2) == 11.0


def test_a_kernel_of_some_devices_alone_counts():
    assert timing.least_over_devices([("gather", 5.0), ("copy", 1.0), *[("gather", 4.0)] * 3], 4) == 5.0


def test_figures_of_hosts_lie_in_folders_of_their_own(monkeypatch, results_folder, no_gpu):
    machine = dict(gpu="NVIDIA H200", date="2026-11-23")
    monkeypatch.setattr(results, "machine", lambda: machine)
    monkeypatch.setattr(results, "this_gpu", lambda: "h200")
    figures = dict(ms=0.5, min_ms=0.4, spread=0.01, nbytes=1e9)
    results.write("all_gather/64MB/bf16", "xla", devices=2, gpus=2, **figures)
    results.write("add/64/f32", "xla", **figures)
    assert results.hosts() == [2] and results.topics("h200x2") == ["all_gather"] and results.topics() == ["add"]
    row = lab.measure(None, problem="all_gather/64MB/bf16", impl="xla", devices=2)
    assert row.median_ms == 0.5 and "[recorded on 2 NVIDIA H200, 2026-11-23]" in repr(row)
    for devices in (1, 4):
        assert math.isnan(lab.measure(None, problem="all_gather/64MB/bf16", impl="xla", devices=devices).median_ms)


def test_a_host_with_fewer_gpus_shows_the_recorded_figure(monkeypatch, results_folder):
    monkeypatch.setattr(lab.interpreter, "on_gpu", lambda *_: True)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert math.isnan(lab.measure(lambda: 1 / 0, problem="all_gather/64MB/bf16", devices=2).median_ms)
    assert results.value("nvlink/peer_copy", lambda: 1 / 0, devices=2) is None


@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_timed(monkeypatch, devices):
    """CUPTI's records of a call, one device's or all devices', become one time."""
    from jax.experimental.mosaic.gpu import profiler

    def measure(fn, *, aggregate=True, iterations=1):
        assert aggregate == (devices == 1) and (aggregate or iterations == 1)
        kernels = [("a", 3.0), ("b", 1.0), ("a", 2.0), ("b", 4.0)]
        return lambda *args: (fn(*args), [7.0] * iterations if aggregate else kernels)

    monkeypatch.setattr(profiler, "measure", measure)
    assert timing.median_ms(lambda x: x, (jax.numpy.ones(3),), 5, devices) == (7.0 if devices == 1 else 3.0)
