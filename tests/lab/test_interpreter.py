"""Where kernels run: the interpreter's races and recovery, on either JAX version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lab_kernels import add_one, no_wait, num_sms_built_for, out_of_bounds

from cookbook import _mgpu, lab
from cookbook.lab import interpreter

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
    assert _mgpu._target.get() is None


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
