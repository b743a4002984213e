"""Where kernels run: the interpreter's races and recovery, on either JAX version."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from lab_kernels import add_one, no_wait, num_sms_built_for, out_of_bounds

import lab
from cookbook import _host
from lab import interpreter

X = jax.random.normal(jax.random.key(0), (128, 128))


def test_a_right_kernel_runs_without_races():
    with lab.interpret() as seen:
        out = add_one(X)
        assert not seen.races_found
    np.testing.assert_array_equal(out, X + 1)
    assert not seen.races_found


def test_a_race_is_caught_though_the_result_is_right():
    with lab.interpret() as seen:
        out = no_wait(X)
    np.testing.assert_array_equal(out, X + 1)
    assert seen.races_found


def test_a_race_names_both_source_lines():
    with lab.interpret() as seen:
        no_wait(X)
    (race,) = seen.races
    assert "`o_gmem[rows] = x_smem[...] + 1`" in race
    assert "`plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, barrier)`" in race


def test_races_found_covers_every_kernel_not_the_last_alone():
    with lab.interpret() as seen:
        no_wait(X)
        add_one(X)
        assert seen.races_found
    with lab.interpret() as clean:
        add_one(X)
    assert seen.races_found and not clean.races_found


def test_one_line_is_printed_of_a_race_whatever_jax_prints(capfd):
    with lab.interpret() as seen:
        no_wait(X)
    assert capfd.readouterr() == (f"race: {seen.races[0]}\n", "")
    with lab.interpret():
        add_one(X)
    assert capfd.readouterr() == ("", "")


# Deadlocks -----------------------------------------------------------------------------------------------------------


def two_roles(x, *, freed_steps=4, grid=(1,)):
    """A copy: warpgroup 1 brings four tiles through two slots, of which warpgroup 0 frees the first `freed_steps`.

    In block 0 it frees them all.
    """

    def body(x_gmem, o_gmem, x_smem, filled, freed):
        wg, freed_here = lax.axis_index("wg"), jnp.where(lax.axis_index("block") == 0, 4, freed_steps)

        @pl.when(wg == 1)
        def _():
            @pl.loop(0, 4)
            def _(i):
                slot = lax.rem(i, 2)
                pl.when(i >= 2)(lambda: plgpu.barrier_wait(freed.at[slot]))
                plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * 32, 32)], x_smem.at[slot], filled.at[slot])

            pl.loop(2, 4)(lambda i: plgpu.barrier_wait(freed.at[lax.rem(i, 2)]))

        @pl.when(wg == 0)
        def _():
            @pl.loop(0, 4)
            def _(i):
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(filled.at[slot])
                o_gmem[pl.ds(i * 32, 32)] = x_smem[slot]
                plgpu.commit_smem()
                pl.when(i < freed_here)(lambda: plgpu.barrier_arrive(freed.at[slot]))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=grid,
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((2, 32, 128), x.dtype), *2 * [plgpu.Barrier(num_barriers=2)]],
    )(x)


@pytest.mark.parametrize("detect_races", [True, False])
def test_a_deadlock_is_ended_and_says_who_waits_where(detect_races, capfd):
    with pytest.raises(lab.Deadlock) as found, lab.interpret(detect_races=detect_races):
        jax.block_until_ready(two_roles(X, freed_steps=1, grid=(2,)))
    first, compute, memory = str(found.value).splitlines()
    assert first == "every warpgroup waits, or has ended."
    assert "warpgroup 0 of block 1 waits at test_interpreter.py:" in compute
    assert "`plgpu.barrier_wait(filled.at[slot])` for phase 1 of barrier 1 of 4" in compute
    assert "0 of 1 arrivals. Arrived so far: warpgroup 1 of block 1 at test_interpreter.py:" in compute
    assert "warpgroup 1 of block 1 waits" in memory and "barrier_wait(freed.at[slot]))`" in memory
    assert "for phase 0 of barrier 3 of 4" in memory and memory.endswith("Nobody has ever arrived there.")
    assert capfd.readouterr() == ("", ""), "JAX logs a stack for each warpgroup"
    with lab.interpret() as seen:
        np.testing.assert_array_equal(two_roles(X), X)
    assert not seen.races_found


def one_waits(x, barrier, **launch):
    """A warpgroup, or a block of a cluster, waits at a barrier of two arrivals, at which only the other one arrives."""

    def body(x_gmem, o_gmem, barrier):
        is_first = lax.axis_index("member") == 0
        pl.when(is_first)(lambda: plgpu.barrier_wait(barrier))
        pl.when(jnp.logical_not(is_first))(lambda: plgpu.barrier_arrive(barrier))
        o_gmem[...] = x_gmem[...]

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, scratch_types=[barrier], **launch)(x)


@pytest.mark.parametrize(
    "barrier, launch, said",
    [
        (
            plgpu.Barrier(num_arrivals=2),
            dict(num_threads=2, thread_name="member"),
            "has 1 of 2 arrivals. Arrived so far: warpgroup 1 at .*\n *warpgroup 1 has ended.",
        ),
        (
            plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=1),
            dict(cluster=(2,), cluster_names=("member",)),
            "warpgroup 0 of block 0 waits at .* of a barrier of the cluster, which has 1 of 2 arrivals",
        ),
    ],
)
def test_a_warpgroup_that_has_ended_comes_no_more(barrier, launch, said):
    with pytest.raises(lab.Deadlock, match=said), lab.interpret():
        jax.block_until_ready(one_waits(X, barrier, **launch))


def multicasts(x):
    """Blocks of a cluster read x through a slot, by multicast along both axes: four times, block 3 x[0, 0] times."""

    def body(x_gmem, o_gmem, first_smem, second_smem, filled, freed):
        block = 2 * lax.axis_index("m") + lax.axis_index("n")
        rounds = jnp.where(block == 3, x_gmem[0, 0].astype(jnp.int32), 4)

        @pl.when(lax.axis_index("role") == 0)
        def _():
            @pl.loop(0, rounds)
            def _(i):
                pl.when(i > 0)(lambda: plgpu.barrier_wait(freed))
                plgpu.copy_gmem_to_smem(x_gmem, first_smem, filled, collective_axes="m")
                plgpu.copy_gmem_to_smem(x_gmem, second_smem, filled, collective_axes="n")

            plgpu.barrier_wait(freed)

        @pl.when(lax.axis_index("role") == 1)
        def _():
            @pl.loop(0, rounds)
            def _(_):
                plgpu.barrier_wait(filled)
                o_gmem[block] = first_smem[...] + second_smem[...]
                plgpu.commit_smem()
                plgpu.barrier_arrive(freed)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4, *x.shape), x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype)] * 2
        + [plgpu.Barrier(num_arrivals=2), plgpu.ClusterBarrier(collective_axes=("m", "n"), num_arrivals=1)],
        cluster=(2, 2),
        cluster_names=("m", "n"),
        num_threads=2,
        thread_name="role",
    )(x)


def test_a_block_waits_for_the_slow_one_whose_data_it_gets(monkeypatch):
    """Its neighbour's neighbour: nothing but the data keeps the others of a cluster of 2 x 2 from running ahead."""
    arrive = interpreter._Watch.arrive

    def late(self, original, barrier, thread, *rest):
        time.sleep(0.02 * ((thread.block_id, thread.warpgroup_id) == (2, 1)))
        return arrive(self, original, barrier, thread, *rest)

    monkeypatch.setattr(interpreter._Watch, "arrive", late)
    x = X.at[0, 0].set(4)
    with lab.interpret() as seen:
        np.testing.assert_array_equal(multicasts(x), jnp.stack([2 * x] * 4))
    assert not seen.races_found


def test_a_block_that_leaves_a_multicast_out_is_a_deadlock():
    said = "warpgroup 0 of block 0, 1 waits at .*copy_gmem_to_smem.* which has 1 of 2 arrivals"
    launch = jax.jit(multicasts)  # Traced once.
    with lab.interpret():
        jax.block_until_ready(launch(X.at[0, 0].set(4)))
    with pytest.raises(lab.Deadlock, match=said), lab.interpret():
        jax.block_until_ready(launch(X.at[0, 0].set(3)))


def test_a_slow_warpgroup_is_no_deadlock(monkeypatch):
    monkeypatch.setattr(interpreter._Watch, "_LOOK", 1e-4)
    for _ in range(3):
        with lab.interpret():
            np.testing.assert_array_equal(two_roles(X), X)


def test_check_names_a_deadlock(no_gpu, capsys):
    with pytest.raises(lab.CheckError, match="runs: Deadlock: every warpgroup waits"):
        lab.check(lambda x: two_roles(x, freed_steps=0, grid=(2,)), lambda x: x, X, gpu=None)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
def test_a_kernel_stores_a_whole_number(dtype):
    """The interpreter gets numbers as Python's, and an array takes those of its own dtype alone."""

    def kernel(x_gmem, o_gmem):
        i = lax.axis_index("row")
        o_gmem[i] = x_gmem[i] + x_gmem[0]

    x = jnp.asarray([2**31 - 9, 3, 4], dtype)
    with lab.interpret():
        out = plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct(x.shape, dtype), grid=(3,), grid_names=("row",))(x)
    np.testing.assert_array_equal(out, x + x[0])


def test_race_detection_can_be_off():
    with lab.interpret(detect_races=False) as seen:
        no_wait(X)
    assert not seen.races_found


def test_the_interpreter_works_after_an_exception_in_a_kernel():
    with pytest.raises(Exception, match="(?i)out.of.bounds|callback"), lab.interpret():
        jax.block_until_ready(out_of_bounds(X))
    with lab.interpret() as seen:
        np.testing.assert_array_equal(add_one(X), X + 1)
    assert not seen.races_found


def test_the_interpreter_works_after_a_kernel_was_interrupted():
    with pytest.raises(KeyboardInterrupt), lab.interpret():
        interpreter.gpu_callbacks._shared_memory = "what the kernel left behind"
        raise KeyboardInterrupt
    with lab.interpret():
        np.testing.assert_array_equal(add_one(X), X + 1)


def test_jax_is_left_as_it_was():
    with lab.interpret():
        add_one(X)
    assert interpreter.gpu_callbacks.GPURaceDetectionState is interpreter._Races.__base__


def test_the_context_ends_with_an_exception_of_the_caller():
    with pytest.raises(KeyError), lab.interpret():
        raise KeyError
    assert _host._target.get() is None


def test_a_jitted_kernel_is_traced_again_for_the_interpreter(no_gpu):
    jitted = jax.jit(num_sms_built_for)
    x = jnp.zeros((128,), jnp.int32)
    lab.compile_for("h200", jitted, x)
    assert int(lab.run(jitted, x)[0]) == 4


def test_run_raises_on_a_race(no_gpu):
    np.testing.assert_array_equal(lab.run(add_one, X), X + 1)
    with pytest.raises(RuntimeError, match="no_wait has a race: read at lab_kernels.py"):
        lab.run(no_wait, X)


def test_on_a_gpu_the_kernel_itself_runs(gpu):
    np.testing.assert_array_equal(lab.run(add_one, X), X + 1)
    with lab.interpret():
        np.testing.assert_array_equal(add_one(X), X + 1)


def test_other_callbacks_get_what_jax_gives_them():
    from jax.experimental import io_callback

    seen = []

    @jax.jit
    def told(x):
        io_callback(lambda *args: seen.append(args), None, x, x.sum())
        io_callback([].append, None, x)  # A function of no module.
        return x + 1

    told(jnp.arange(3))
    jax.effects_barrier()
    with lab.interpret():
        told(jnp.arange(3))
    assert [[type(arg) for arg in args] for args in seen[1:]] == [[type(arg) for arg in seen[0]]]
