"""The judge's own rules: the kernel does all of the work."""

import threading
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_exercises_00 import turned_down

from cookbook import add, fuse

from exercises import judge  # noqa: E402 isort: skip (the import above puts `notebooks` on the path)


def kernel(x, compute=lambda x: x):
    def body(x, o):
        o[...] = compute(x[...])

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@judge.checker
def doubled(answer):
    x = judge.normal(1, (256,))
    judge.require_close(judge.run_kernel(answer, x), 2.0 * jnp.asarray(x), 1e-6, "x")
    return "Doubled."


@pytest.mark.parametrize(
    "answer, primitive",
    [
        (lambda x: kernel(x) * 2, "mul"),
        (lambda x: kernel(x + x), "add"),
        (lambda x: jax.jit(lambda x: kernel(x) * 2)(x), "mul"),
        (lambda x: kernel(jnp.pad(x, 128), lambda x: 2 * x)[128:-128], "pad"),
        (lambda x: kernel(jnp.cumsum(x)), "cumsum"),
    ],
)
def test_what_xla_computes_is_no_answer(answer, primitive):
    turned_down(doubled(answer), f"{primitive} is computed outside of the kernel")


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: kernel(x, lambda x: 2 * x),
        jax.jit(lambda x: kernel(x.reshape(2, 128), lambda x: x + x).reshape(-1)),
        lambda x: kernel(x.astype(jnp.float32), lambda x: 2 * x).T,
    ],
)
def test_shapes_and_dtypes_may_change_outside(answer):
    assert doubled(answer)


@pytest.mark.parametrize(
    "answer, said",
    [
        (lambda x: 2 * x, "must be a kernel"),
        (lambda x: add(x, x), "cookbook.add is the package's kernel: write one of your own"),
        (fuse(lambda x: 2 * x), "is the package's kernel: write one of your own"),
    ],
)
def test_what_launches_no_kernel_of_its_own_is_no_answer(answer, said):
    turned_down(doubled(answer), said)


def loop(x):
    while True:
        pass


def deaf_loop(x, left=3):
    """Nothing reaches it at first: it may be in C++, which loses what its callbacks raise."""
    while left:
        try:
            while True:
                pass
        except BaseException:
            left -= 1


@pytest.mark.parametrize("answer", [loop, deaf_loop])
def test_code_that_never_ends_is_stopped(monkeypatch, answer):
    monkeypatch.setattr(judge, "SECONDS", 1)
    before = threading.active_count()
    turned_down(doubled(answer), f"{answer.__name__} has not ended after 1 s: is there a loop that never ends?")
    assert threading.active_count() == before, "the answer's thread is still there"


def test_a_right_answer_after_one_that_never_ends(monkeypatch):
    with monkeypatch.context() as short:
        short.setattr(judge, "SECONDS", 1)
        turned_down(doubled(loop), "has not ended")
    assert doubled(lambda x: kernel(x, lambda x: 2 * x))


def test_speed_is_said_on_a_gpu_alone(monkeypatch):
    aval = jax.ShapeDtypeStruct((256,), jnp.float32)
    monkeypatch.setattr(judge.lab, "on_gpu", lambda: False)
    assert judge.speed(None, None, aval) == ""
    taken = iter((0.5, 0.25))  # Milliseconds: the answer's first, then the package's.

    def measure(fn, *args):
        assert (fn(*args) == 2 * args[0]).all()
        return types.SimpleNamespace(median_ms=next(taken))

    monkeypatch.setattr(judge.lab, "on_gpu", lambda: True)
    monkeypatch.setattr(judge.lab, "measure", measure)
    said = judge.speed(lambda x: 2 * x, lambda x: x + x, aval)
    assert said == " On this GPU it takes 0.5 ms; the package's kernel takes 0.25 ms."
