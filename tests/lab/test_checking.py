"""`lab.check` accepts right kernels and rejects wrong ones, each for the reason that it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lab_kernels import add_one, add_one_reference, half_written, matmul, no_wait, out_of_bounds

import lab
from lab import checking
from tests.arrays import array

X = jax.random.normal(jax.random.key(0), (128, 128))


@pytest.fixture(autouse=True)
def interpreted(no_gpu):
    """These run in the interpreter on every machine; the last test asks for a GPU."""


def matmul_reference(a, b):
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a.astype(wide), b.astype(wide), precision="highest")  # Not TF32, on a GPU.


def fails(fn, reference, *args, match, **kwargs):
    with pytest.raises(lab.CheckError, match=match):
        lab.check(fn, reference, *args, **kwargs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_kernel_passes(dtype, capsys):
    report = lab.check(add_one, add_one_reference, X.astype(dtype))
    assert not report.failed
    assert report.compiled.spill_bytes == 0
    np.testing.assert_array_equal(report.output, X.astype(dtype) + 1)
    assert capsys.readouterr().out == f"{report}\n"


def test_a_reference_may_be_numpys_or_look_at_values():
    lab.check(add_one, lambda x: np.asarray(x) + 1, X)
    lab.check(add_one, lambda x: x + 1 if (x < 1e9).all() else x, X)
    lab.check(add_one, lambda x: x.at[x > 0].add(1) if x[x > 1e9].size else x + 1, X)
    fails(add_one, lambda x: np.asarray(x) + 2, X, match="error")


def test_the_table():
    report = str(lab.check(add_one, add_one_reference, X))
    assert report.startswith("check add_one(f32[128,128])\n")
    for line in ("runs          ok", "races         ok", "result        ok", "compiles      ok     h200: "):
        assert f"\n  {line}" in report
    assert "\n  shared memory ok     32,776 of 232,448 bytes per block\n" in report
    for blind_spot in ("WGMMA", "blocks of a grid", "multicasts"):
        assert blind_spot in report.partition("not seen")[2]
    assert max(map(len, report.splitlines())) <= 100


# The limits, from both sides: a little less passes, a little more does not. ------------------------------------------


def compare(out, exact, rounded, dtype):
    """The line that `check` prints of these results, whose values are those of `dtype`."""
    item = checking._compare_leaf(array(out, dtype), np.asarray(exact, np.float64), jnp.asarray(rounded), None)
    return item.verdict, item.text


@pytest.mark.parametrize("dtype, floor", [("float32", 4 * 2**-23), ("float16", 2**-12), ("bfloat16", 2**-9)])
def test_an_error_below_the_roundings_of_the_dtype_passes(dtype, floor):
    """The reference has no error. If 100 of 1600 elements are off by four times the limit, the error is the limit."""
    exact = np.ones(1600)
    for count, passes in ((90, True), (110, False)):
        out = exact.copy()
        out[:count] += 4 * floor
        verdict, text = compare(out, exact, exact, dtype)
        assert (verdict == "ok") == passes and ("exceeds" in text) != passes, text


def test_an_error_up_to_half_as_large_again_as_the_references_passes():
    ones = np.ones(1000)
    for factor, passes in ((1.4, True), (1.6, False)):
        verdict, text = compare(ones * (1 + 1e-3 * factor), ones, ones * (1 + 1e-3), "float32")
        assert (verdict == "ok") == passes and ("exceeds" in text) != passes, text


def test_an_element_may_be_off_by_ten_times_the_limits_share_of_the_largest():
    exact = np.ones(100_000)
    exact[7] = 3.0
    for factor, passes in ((9, True), (11, False)):
        out = exact.copy()
        out[5] += factor * 1.5e-3 * 3.0
        verdict, text = compare(out, exact, exact * (1 + 1e-3), "float32")
        assert (verdict == "ok") == passes and ("far off" in text) != passes, text


def test_half_precision_is_held_to_its_own_roundings():
    x = X.astype(jnp.bfloat16)
    fails(lambda x: add_one(x) * jnp.bfloat16(1.01), add_one_reference, x, gpu=None, match="exceeds")


@pytest.mark.parametrize("measuring", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_equal_runs_on_a_gpu_say_nothing_of_races(monkeypatch, equal, measuring):
    runs = iter(range(100))
    value = lambda x: x + (0 if equal else next(runs))
    fn = lambda x: jax.pure_callback(value, jax.ShapeDtypeStruct((4,), jnp.float32), x)
    monkeypatch.setattr(checking.interpreter, "on_gpu", lambda *_: True)
    monkeypatch.setenv("COOKBOOK_MEASURE", "1" if measuring else "0")
    looked_for = ("ok", "none among") if measuring else ("-", "not checked")
    items, _ = checking._run(fn, [np.zeros(4, np.float32)])
    assert items[-1].name == "races"
    assert items[-1].verdict == (looked_for[0] if equal else "FAILED")
    assert ("5 equal runs" if equal else "5 runs of the same input differ") in items[-1].text
    items, _ = checking._run(fn, [np.zeros(4, np.float32)], is_ordered=False)
    assert items[-1].verdict == looked_for[0] and looked_for[1] in items[-1].text
    assert ("5 equal runs" if equal else "5 runs differ") in items[-1].text


def test_a_matmul_passes_at_half_precision():
    a, b = (jax.random.normal(jax.random.key(i), (128, 128), jnp.float16) for i in (1, 2))
    lab.check(matmul, matmul_reference, a, b)


def test_a_wrong_result_is_rejected():
    fails(lambda x: add_one(x) * 1.001, add_one_reference, X, match="result: .* exceeds")


def test_one_wrong_element_is_rejected():
    x = jax.random.normal(jax.random.key(0), (4096, 256), jnp.bfloat16)  # Its share of the error is within the limit.
    fails(lambda x: add_one(x).at[1000, 200].add(0.6), add_one_reference, x, match="far off")


def test_lost_precision_is_rejected():
    a, b = (jax.random.normal(jax.random.key(i), (128, 128)) for i in (1, 2))
    fails(
        lambda a, b: matmul(a.astype(jnp.float16), b.astype(jnp.float16)).astype(jnp.float32),
        matmul_reference,
        a,
        b,
        match="result: .* exceeds",
    )


def test_a_race_is_rejected_though_the_result_is_right():
    fails(no_wait, add_one_reference, X, match="races: read at lab_kernels.py")


def test_a_race_is_found_on_a_gpu_host(monkeypatch):
    monkeypatch.setattr(checking.interpreter, "on_gpu", lambda *_: True)
    monkeypatch.delenv("COOKBOOK_MEASURE", raising=False)
    (race,) = checking._races_at_home(no_wait, (X,), "5 equal runs")
    assert race.verdict == "FAILED" and race.text.startswith("read at lab_kernels.py")
    (none,) = checking._races_at_home(add_one, (X,), "5 equal runs")
    assert none.verdict == "ok" and "5 equal runs on the GPU" in none.text
    large = jax.ShapeDtypeStruct((checking.ON_CPU_MAX + 1,), jnp.float32)  # To interpret it would take minutes.
    (unseen,) = checking._races_at_home(add_one, (large,), "5 equal runs")
    assert unseen.verdict == "-" and "more than 262,144 elements; 5 equal runs" in unseen.text
    (stuck,) = checking._races_at_home(lambda x: 1 / 0, (X,), "5 equal runs")
    assert stuck.verdict == "FAILED" and "ZeroDivisionError" in stuck.text


def test_a_nan_where_the_reference_has_none_is_rejected():
    fails(lambda x: add_one(x).at[3, 4].set(jnp.nan), add_one_reference, X, match=r"1 of 16384 .* \[3, 4\] is nan")


def test_a_number_where_the_reference_has_nan_is_rejected():
    x = X.at[3, 4].set(jnp.nan)
    lab.check(add_one, add_one_reference, x)
    fails(lambda x: jnp.nan_to_num(add_one(x)), add_one_reference, x, match="are not NaN or infinite as the reference")


def test_an_infinity_of_the_wrong_sign_is_rejected():
    x = X.at[3, 4].set(jnp.inf)
    fails(lambda x: add_one(x).at[3, 4].set(-jnp.inf), add_one_reference, x, match=r"\[3, 4\] is -inf in place of inf")


def test_outputs_left_unwritten_are_rejected():
    fails(half_written, add_one_reference, X, match="8192 of 16384 elements .*never written")


def test_wrong_integers_are_rejected():
    x = jnp.arange(128 * 128, dtype=jnp.int32).reshape(128, 128)
    lab.check(add_one, lambda x: x + 1, x)
    fails(add_one, lambda x: x + 2, x, match="16384 elements differ")
    fails(half_written, lambda x: x + 1, x, match="8192 elements differ")


def test_a_wrong_shape_or_structure_is_rejected():
    fails(lambda x: add_one(x)[1:], add_one_reference, X, match="shape")
    fails(lambda x: (add_one(x), x), add_one_reference, X, match="the kernel returns")


def test_a_tolerance_replaces_the_limit():
    wrong = lambda x: add_one(x) * 1.001  # noqa: E731
    lab.check(wrong, add_one_reference, X, tolerance=1e-2)
    fails(wrong, add_one_reference, X, tolerance=1e-4, match="exceeds 1.0e-04")
    two = lambda fn: lambda x: (fn(x), fn(x))
    fails(two(wrong), two(add_one_reference), X, tolerance=(1e-2, None), match="exceeds")


def test_a_kernel_that_only_the_interpreter_accepts_is_rejected():
    fails(
        lambda x: add_one(jnp.concatenate([x, x[:, :1]], 1)[:, :129])[:, :128], add_one_reference, X, match="compiles: "
    )


def test_a_kernel_that_fails_to_run_is_rejected():
    def fn(x):
        raise ValueError("no such tile")

    fails(fn, add_one_reference, X, match="runs: ValueError: no such tile")
    with pytest.raises(lab.CheckError, match=r"(?i)\nruns: \w+Error: .*out.of.bounds") as failed:
        lab.check(out_of_bounds, add_one_reference, X, gpu=None)
    assert "Traceback" not in str(failed.value)


def test_spills_and_remarks_are_shown_not_rejected():
    a = jax.random.normal(jax.random.key(0), (256, 256), jnp.float16)
    report = lab.check(lambda a: matmul(a, a, tile_n=256), lambda a: matmul_reference(a, a), a, tolerance=1e-2)
    assert "bytes spilled" in str(report) and "serialized" in str(report)


def test_without_the_wheels_the_rest_is_still_checked(monkeypatch):
    def missing(*args):
        raise lab.ToolchainMissing('pip install "pallas-cookbook[aot]"')

    monkeypatch.setattr(checking, "compile_for", missing)
    report = lab.check(add_one, add_one_reference, X)
    assert report.compiled is None and "compiles      -      not tried: pip install" in str(report)
    fails(no_wait, add_one_reference, X, match="races")


def test_for_another_gpu_and_for_none():
    assert "b200: " in str(lab.check(add_one, add_one_reference, X, gpu="b200"))
    report = lab.check(add_one, add_one_reference, X, gpu=None)
    assert report.compiled is None and "\n  compiles      -      not tried: gpu=None\n" in str(report)
    fails(no_wait, add_one_reference, X, gpu=None, match="races")


def test_several_outputs_have_a_line_each():
    report = lab.check(lambda x: (add_one(x), add_one(x)), lambda x: (add_one_reference(x),) * 2, X)
    assert [item.name for item in report.items].count("result") == 2


def test_notebooks_show_the_table_once(capsys):
    report = lab.check(add_one, add_one_reference, X)
    capsys.readouterr()
    assert report._ipython_display_() is None and capsys.readouterr().out == ""


@pytest.mark.parametrize("gpu, where", [("b200", "the GPU interpreter"), ("h200", None), (None, None)])
def test_a_kernel_for_a_newer_gpu_than_this_is_interpreted(monkeypatch, gpu, where):
    """An H200 is pretended, on which XLA's addition stands for the kernel."""
    monkeypatch.setattr(checking.interpreter, "on_gpu", lambda gpu="h200": gpu == "h200")
    items, _ = checking._run(lambda x: x + 1, [X], gpu)
    assert items[0].verdict == "ok" and (where or jax.devices()[0].device_kind) in items[0].text


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="without a GPU the CPU computes all")
@pytest.mark.parametrize("size, platform", [(checking.ON_CPU_MAX, "cpu"), (checking.ON_CPU_MAX + 1, "gpu")])
def test_the_cpu_computes_small_references(size, platform):
    x, offset = jnp.ones(size), jnp.float32(2)
    assert {device.platform for device in x.devices() | offset.devices()} == {"gpu"}
    (device,) = checking._compute(lambda x: x + offset, [x]).devices()
    assert device.platform == platform


def test_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    if not lab.on_gpu():
        pytest.skip("needs a Hopper or newer GPU")
    monkeypatch.setenv("COOKBOOK_MEASURE", "0")
    assert "not checked" in str(lab.check(add_one, add_one_reference, X))
    monkeypatch.setenv("COOKBOOK_MEASURE", "1")
    assert "5 equal runs on the GPU" in str(lab.check(add_one, add_one_reference, X))
    # Unwritten memory is NaN, or what an earlier run left there.
    fails(half_written, add_one_reference, jnp.ones((8192, 128)), match="never written|runs of the same input differ")
