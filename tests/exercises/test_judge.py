"""The judge's own rules: the kernel does all of the work, in an order that a GPU keeps."""

import functools
import pathlib
import re
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import add, fuse

sys.path.append(str(pathlib.Path(__file__).parents[2] / "notebooks"))

from exercises import judge  # noqa: E402


def turned_down(verdict, said: str):
    assert not verdict, verdict
    assert repr(verdict).startswith("Not yet: ") and said in verdict.text, verdict


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
    turned_down(doubled(answer), f"{answer.__name__} has not ended after 1 s: is there a loop that never ends")
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


# The order of a kernel's work


BF16 = jnp.bfloat16
SQUARE = jax.ShapeDtypeStruct((64, 256), BF16)


def of_tiles(body, *scratch, wgs=1):
    """A kernel of (64, 256), four tiles of 64 columns: `body(x_gmem, o_gmem, *scratch)`."""
    threads = dict(num_threads=wgs, thread_name="wg") if wgs > 1 else {}
    return lambda x: plgpu.kernel(body, out_type=x, scratch_types=scratch, **threads)(x)


def tile(i):
    return slice(None), pl.ds(i * 64, 64)


SLOT = plgpu.SMEM((64, 64), BF16)
TENSOR = plgpu.Barrier(orders_tensor_core=True)
BARRIER = plgpu.Barrier()


def squares(x_gmem, o_gmem, slot, loaded, *, running=0, arrived=True):
    """The product of each tile with itself, all through one slot."""

    def multiply(acc):
        @pl.loop(0, 4)
        def _(i):
            plgpu.copy_gmem_to_smem(x_gmem.at[tile(i)], slot, loaded)
            if arrived:
                plgpu.barrier_wait(loaded)
            plgpu.wgmma(acc, slot, slot)
            plgpu.wgmma_wait(running)

        return acc[...]

    o_gmem[tile(0)] = pl.run_scoped(multiply, plgpu.ACC((64, 64))).astype(BF16)


def handed_over(x_gmem, o_gmem, slot, stored, *, barrier=True, commit=True):
    """One warpgroup stores a tile, and the other multiplies it."""
    wg = lax.axis_index("wg")

    @pl.when(wg == 1)
    def _():
        slot[...] = x_gmem[tile(0)]
        if commit:
            plgpu.commit_smem()
        if barrier:
            plgpu.barrier_arrive(stored)

    @pl.when(wg == 0)
    def _():
        def multiply(acc):
            if barrier:
                plgpu.barrier_wait(stored)
            plgpu.wgmma(acc, slot, slot)
            return acc[...]

        o_gmem[tile(0)] = pl.run_scoped(multiply, plgpu.ACC((64, 64))).astype(BF16)


def on_blackwell(x_gmem, o_gmem, slot, loaded, ended, *, wait=True):
    """The product of each tile with itself, in tensor memory."""

    def multiply(acc):
        @pl.loop(0, 4)
        def _(i):
            plgpu.copy_gmem_to_smem(x_gmem.at[tile(i)], slot, loaded)
            plgpu.barrier_wait(loaded)
            plgpu.tcgen05_mma(acc, slot, slot, ended, accumulate=i > 0)
            if wait:
                plgpu.barrier_wait(ended)

        o_gmem[tile(0)] = plgpu.async_load_tmem(acc).astype(BF16)

    pl.run_scoped(multiply, plgpu.TMEM((64, 64), jnp.float32))


def played(body, *scratch, wgs=1, **how):
    return judge.play_kernel(of_tiles(functools.partial(body, **how), *scratch, wgs=wgs), SQUARE)


@pytest.mark.parametrize(
    "body, scratch, wgs, how, said",
    [
        (squares, (SLOT, BARRIER), 1, dict(running=1), "wgmma_wait(n) leaves the last n products running"),
        (squares, (SLOT, BARRIER), 1, dict(arrived=False), "before its tiles have arrived"),
        (handed_over, (SLOT, BARRIER), 2, dict(commit=False), "commit what you have stored"),
        (handed_over, (SLOT, BARRIER), 2, dict(barrier=False), "no barrier is between the two"),
        (on_blackwell, (SLOT, BARRIER, TENSOR), 1, dict(wait=False), "a product of tcgen05 may still read the stage"),
    ],
)
def test_orders(body, scratch, wgs, how, said):
    """Other rules are tried by wrong answers of the exercises."""
    kernels = played(body, *scratch, wgs=wgs)
    assert all(block.is_whole for kernel in kernels for block in kernel)
    judge.require_order(kernels)
    judge.require_rings(kernels)
    with pytest.raises(judge.NotYet, match=re.escape(said)):
        judge.require_order(played(body, *scratch, wgs=wgs, **how))


def test_launches_are_counted():
    with pytest.raises(judge.NotYet, match="launches 2 kernels, and 1 is asked for"):
        judge.require_launches(judge.play_kernel(lambda x: kernel(kernel(x)), jnp.ones(256)))
    turned_down(doubled(lambda x: kernel(kernel(x), lambda x: 2 * x)), "launches 2 kernels")


def test_what_depends_on_values_that_are_not_followed_is_not_judged():
    def body(x_gmem, o_gmem, slot, loaded):
        pl.when(x_gmem[0, 0] > 0)(lambda: squares(x_gmem, o_gmem, slot, loaded, running=1))

    ((block,),) = played(body, SLOT, BARRIER)
    assert not block.is_whole and block.fault is None


def test_numbers_of_an_operand_are_followed():
    def body(table_gmem, x_gmem, o_gmem, slot, loaded):
        pl.when(table_gmem[0] == 3)(lambda: squares(x_gmem, o_gmem, slot, loaded, running=table_gmem.shape[0]))

    answer = lambda table, x: plgpu.kernel(body, out_type=x, scratch_types=(SLOT, BARRIER))(table, x)
    for number, is_wrong in ((3, True), (4, False)):
        ((block,),) = judge.play_kernel(answer, jnp.asarray([number]), SQUARE)
        assert block.is_whole and bool(block.fault) == is_wrong


@pytest.mark.parametrize(
    "out, said",
    [
        ([1.0, jnp.nan, jnp.inf], None),
        ([1.0, 0.0, jnp.inf], "element (1,) is 0; it must be nan"),
        ([1.0, jnp.nan, 7.0], "element (2,) is 7; it must be inf"),
        ([2.0, jnp.nan, jnp.inf], "element (0,) is 2; it must be 1"),
    ],
)
def test_what_is_not_finite_must_be_the_same(out, said):
    check = lambda: judge.require_close(jnp.asarray(out), np.asarray([1.0, np.nan, np.inf]), 1e-3, "x")
    if said is None:
        check()
        return
    with pytest.raises(judge.NotYet, match=re.escape(said)):
        check()
