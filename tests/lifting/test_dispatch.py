"""Chapter 21's `kernel_or_xla`: which of the two a program contains, and that the log says so once."""

import functools
import logging
import pathlib

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType

import cookbook
from cookbook import _host

CHAPTER = pathlib.Path(__file__).resolve().parents[2] / "notebooks/21_lifting.ipynb"
HOPPER, AMPERE, BLACKWELL = ("NVIDIA H200", "9.0"), ("NVIDIA A100", "8.0"), ("NVIDIA B200", "10.0")
ROWS, SQUARE, HEADS = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(48, 300), (256, 256), (2, 256, 4, 64)])
OPS = {
    "softmax": (cookbook.softmax, jax.nn.softmax, [ROWS]),
    "matmul": (cookbook.matmul, jnp.matmul, [SQUARE] * 2),
    "attention": (cookbook.attention, jax.nn.dot_product_attention, [HEADS] * 3),
}


@pytest.fixture
def dispatch(caplog):
    """The chapter's function. `caplog` gets its lines."""
    (code,) = (cell.source for cell in nbformat.read(CHAPTER, as_version=4).cells if cell.id == "dispatch")
    names = dict(functools=functools, logging=logging, jax=jax, their_host=_host)
    exec(code, names)
    with caplog.at_level(logging.INFO, "kernels"):
        yield names["kernel_or_xla"]


@pytest.fixture
def softmax(dispatch):
    return dispatch("softmax", cookbook.softmax, jax.nn.softmax)


def kernels(fn, *avals) -> tuple[int, int]:
    """How many the program for CUDA has, and that for a CPU."""
    traced = jax.jit(lambda *args: fn(*args)).trace(*avals)
    texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")]
    return tuple(text.count("stablehlo.custom_call @mosaic_gpu") for text in texts)


def lines(caplog) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "kernels"]


@pytest.mark.parametrize("op", OPS)
def test_the_kernel_on_cuda_and_xla_on_a_cpu(dispatch, pretend_gpu, caplog, op):
    pretend_gpu(*HOPPER)
    kernel, xla, avals = OPS[op]
    assert kernels(dispatch(op, kernel, xla), *avals) == (1, 0)
    assert lines(caplog) == [("INFO", f"{op}: the kernel on CUDA, XLA on other platforms")]


@pytest.mark.parametrize("op", OPS)
def test_xla_on_an_a100(dispatch, pretend_gpu, caplog, op):
    kernel, xla, avals = OPS[op]
    pretend_gpu(*HOPPER)
    kernels(dispatch(op, kernel, xla), *avals)  # Whose traces must not be found again.
    caplog.clear()
    pretend_gpu(*AMPERE)
    assert kernels(dispatch(op, kernel, xla), *avals) == (0, 0)
    ((level, message),) = lines(caplog)
    assert level == "WARNING" and message.startswith(f"{op}: XLA, because cookbook.{op} ")
    assert "NVIDIA A100 has 8.0" in message


def test_each_op_knows_where_it_runs(dispatch, pretend_gpu, caplog):
    """A B200 has no WGMMA, and runs kernels that need no tensor cores."""
    pretend_gpu(*BLACKWELL)
    assert {op: kernels(dispatch(op, *OPS[op][:2]), *OPS[op][2]) for op in ("softmax", "matmul")} == {
        "softmax": (1, 0),
        "matmul": (0, 0),
    }
    assert [level for level, _ in lines(caplog)] == ["INFO", "WARNING"]
    assert "For it there is cookbook.blackwell.matmul" in lines(caplog)[1][1]


def test_xla_without_a_gpu(softmax, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert kernels(softmax, ROWS) == (0, 0)
    ((level, message),) = lines(caplog)
    assert level == "WARNING" and "cookbook.softmax is a GPU kernel and JAX sees no GPU" in message


@pytest.mark.parametrize(
    "op, avals, reason",
    [
        ("softmax", [((16, 70_000), "bfloat16")], "x has rows of 70000; at most 65536 were tested"),
        ("softmax", [((16, 300), "float8_e4m3fn")], "x.dtype is float8_e4m3fn; must be float32"),
        ("matmul", [((16, 64), "bfloat16"), ((64, 16), "float32")], "dtype"),
        ("attention", [((2, 256, 4, 63), "bfloat16")] * 3, "63"),
    ],
)
def test_xla_for_arguments_that_the_kernel_refuses(dispatch, pretend_gpu, caplog, op, avals, reason):
    pretend_gpu(*HOPPER)
    avals = [jax.ShapeDtypeStruct(*aval) for aval in avals]
    assert kernels(dispatch(op, *OPS[op][:2]), *avals) == (0, 0)
    ((level, message),) = lines(caplog)
    assert level == "WARNING" and message.startswith(f"{op}: XLA, because cookbook.{op}: ") and reason in message


def test_each_reason_is_logged_once(softmax, pretend_gpu, caplog):
    pretend_gpu(*HOPPER)
    wide, wider = (jax.ShapeDtypeStruct((16, cols), jnp.bfloat16) for cols in (70_000, 80_000))
    for aval in (ROWS, wide, SQUARE, ROWS, wider, wide):
        kernels(softmax, aval)
    assert [message.partition(";")[0] for _, message in lines(caplog)] == [
        "softmax: the kernel on CUDA, XLA on other platforms",
        "softmax: XLA, because cookbook.softmax: x has rows of 70000",
        "softmax: XLA, because cookbook.softmax: x has rows of 80000",
    ]


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, TypeError])
def test_a_bug_of_the_kernel_is_no_refusal(dispatch, pretend_gpu, caplog, kind):
    def broken(x):
        raise kind("the kernel is broken")

    pretend_gpu(*HOPPER)
    with pytest.raises(kind, match="the kernel is broken"):
        kernels(dispatch("broken", broken, jnp.sin), ROWS)
    assert lines(caplog) == []


def test_a_call_that_both_refuse_raises_xlas_error(dispatch, pretend_gpu, caplog):
    pretend_gpu(*HOPPER)
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions to have the same shape"):
        kernels(dispatch("matmul", *OPS["matmul"][:2]), SQUARE, ROWS)
    assert [level for level, _ in lines(caplog)] == ["WARNING"]


def test_both_return_the_same_types(dispatch, pretend_gpu, caplog):
    pretend_gpu(*HOPPER)
    with pytest.raises(TypeError, match="float32"):
        kernels(dispatch("softmax", cookbook.softmax, lambda x: jax.nn.softmax(x.astype(jnp.float32))), ROWS)
    assert lines(caplog) == []


def test_it_stands_under_transformations(softmax, pretend_gpu):
    """The gradient has a kernel forward and one backward. Results are XLA's: nothing runs on a pretended GPU."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 48, 300)), jnp.float32)
    aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
    loss = lambda fn: lambda x: (fn(x) ** 2).sum()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    by_row = lambda fn: jax.shard_map(fn, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    pretend_gpu(*HOPPER)
    for under, count in [(jax.vmap, 1), (lambda fn: jax.grad(loss(fn)), 2), (by_row, 1)]:
        assert kernels(under(softmax), aval) == (count, 0)
        call = export.export(jax.jit(under(softmax)), platforms=["cpu"])(aval)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            np.testing.assert_allclose(
                jax.jit(call.call)(np.asarray(x)), under(jax.nn.softmax)(x), rtol=1e-5, atol=1e-6
            )


def test_a_program_is_for_one_platform(softmax, pretend_gpu):
    """Pallas lowers a kernel for one platform at a time, as the chapter says."""
    pretend_gpu(*HOPPER)
    with pytest.raises(NotImplementedError, match="multi-platform"):
        export.export(jax.jit(softmax), platforms=["cpu", "cuda"])(ROWS)


def test_this_machine(softmax, caplog):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(48, 300)), jnp.float32)
    np.testing.assert_allclose(softmax(x), jax.nn.softmax(x), rtol=1e-5, atol=1e-7)
    on_gpu = jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) >= 9
    assert [level for level, _ in lines(caplog)] == ["INFO" if on_gpu else "WARNING"]
