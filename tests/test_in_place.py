"""Kernels that change an operand in place, called on a part of a larger array in the same `jit`.

XLA calls a kernel on a slice as it lies in its array, and then forgets that the kernel changes it: it would write into
the array that was sliced, and what it returns would be memory that nobody wrote. So the slice has to be a launch of its
own, which XLA's program for an H200 shows without one.
"""

import jax
import jax.numpy as jnp
import pytest

import cookbook
import lab
from cookbook import _host

BF16, F32, INT32 = jnp.bfloat16, jnp.float32, jnp.int32


def aval(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


PAGES = [aval(BF16, 12, 32, 2, 64)] * 2
STEP = [aval(BF16, 12, 2, 64)] * 3  # q, k and v of gated_delta_rule_step and kda_step.
STATE = aval(F32, 12, 2, 64, 64)
# An op, its operands, and which of them are changed.
CASES = {
    "write_kv": (cookbook.write_kv, [*[aval(BF16, 8, 2, 64)] * 2, *PAGES, aval(INT32, 8)], (2, 3)),
    "rope_write_kv": (
        cookbook.rope_write_kv, [aval(BF16, 8, 6, 64), *[aval(F32, 8, 32)] * 2, *PAGES, aval(INT32, 8)], (3, 4),
    ),
    "ssd_step": (
        cookbook.ssd_step,
        [STEP[0], aval(F32, 12, 2), aval(F32, 2), *[aval(BF16, 12, 1, 64)] * 2, STATE], (5,),
    ),
    "causal_conv1d_step": (
        cookbook.causal_conv1d_step, [aval(BF16, 12, 128), aval(BF16, 12, 128, 3), aval(BF16, 128, 4)], (1,),
    ),
    "gated_delta_rule_step": (cookbook.gated_delta_rule_step, [*STEP, *[aval(F32, 12, 2)] * 2, STATE], (5,)),
    "kda_step": (cookbook.kda_step, [*STEP, aval(F32, 12, 2, 64), aval(F32, 12, 2), STATE], (5,)),
}  # fmt: skip


def launches_of_parts(op: str, is_updated: bool):
    """The launches of a call on element 1 of stacked arrays, whose results may be put back there."""
    fn, args, changed = CASES[op]
    stacked = [aval(x.dtype, 4, *x.shape) if i in changed else x for i, x in enumerate(args)]

    def call(*args):
        parts = [x[1] if i in changed else x for i, x in enumerate(args)]
        results = jax.tree.leaves(fn(*parts))[-len(changed) :]
        if not is_updated:
            return results
        return [args[i].at[1].set(result) for i, result in zip(changed, results, strict=True)]

    return lab.launches("h200", call, *stacked, donate_argnums=changed if is_updated else ())


@pytest.mark.parametrize("is_updated", [False, True])
@pytest.mark.parametrize("op", CASES)
def test_a_slice_is_a_launch_of_its_own(op, is_updated):
    launches = launches_of_parts(op, is_updated)
    kernels = [i for i, launch in enumerate(launches) if launch.is_kernel]
    assert len(kernels) == 1
    assert kernels[0] >= 1 and len(launches) - kernels[0] > is_updated, launches


@pytest.mark.parametrize("op", CASES)
def test_the_test_sees_a_call_on_a_slice(op, monkeypatch):
    monkeypatch.setattr(_host, "apart", lambda arrays: arrays)
    jax.clear_caches()
    launches = launches_of_parts(op, False)
    jax.clear_caches()
    assert [launch.is_kernel for launch in launches] == [True], launches
