"""Dependent launches: every kernel waits for the one before it, and products load weights before they wait."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import _host, glu, matmul, rms_norm
from cookbook.gemm import kernel
from tests.arrays import array
from tests.gemm.structures import STRUCTURES

BF16 = jnp.bfloat16
ready = functools.partial(_host.dependent_launches, weights_ready=True)


def operands(m, n, k, count=1):
    """x (M, K), and weights (N, K)."""
    rng = np.random.default_rng(m + n)
    return [array(rng.normal(size=size) + 0.1, BF16) for size in ((m, k), *[(n, k)] * count)]


def product(x, w):
    return jnp.einsum("mk,nk->mn", *(v.astype(jnp.float32) for v in (x, w)), precision="highest")


@pytest.mark.parametrize("name", ["clusters of 2 x 2", "a part without a step", "tail of thirds", "swapped tiles of 8"])
def test_products_that_load_ahead(name):
    """More tiles than blocks: the ring goes on where the first steps ended. Interpreted kernels do not wait."""
    (m, n, k), _, config = STRUCTURES[name]
    run = functools.partial(matmul, transpose_b=True, config=config)
    with ready():
        lab.check(run, product, *operands(m, n, k), gpu="h200")


def test_gated_units_that_load_ahead():
    unit = lambda x, gate, up: jax.nn.silu(product(x, gate)) * product(x, up)
    with ready():
        lab.check(functools.partial(glu, transpose_weights=True), unit, *operands(130, 136, 200, 2), gpu="h200")


def test_a_mutant_of_the_first_steps_is_caught(run_only, monkeypatch, found_if):
    """Other copies of a tile's first steps: those of the step after."""
    right = kernel.copy_step
    shifted = lambda plan, *args: right(plan, *args[:-2], args[-2] + 64 * (args[-1] == "b"), args[-1])
    jax.clear_caches()
    with found_if(True), ready():
        monkeypatch.setattr(kernel, "copy_step", lambda *args: (shifted if len(args) == 9 else right)(*args))
        lab.check(functools.partial(matmul, transpose_b=True), product, *operands(24, 40, 264), gpu=None)
    jax.clear_caches()


# Few rows: Llama 3.2 1B's products of a step of 64 sequences.
STEP = {
    "qkv": (functools.partial(matmul, transpose_b=True), (64, 3072, 2048), 1),
    "gate, up": (functools.partial(glu, transpose_weights=True), (64, 8192, 2048), 2),
    "down": (functools.partial(matmul, transpose_b=True, out_dtype=jnp.float32), (64, 2048, 8192), 1),
}


@pytest.mark.parametrize("name", STEP)
def test_weights_are_on_their_way_before_the_wait(name):
    """In the machine code; and two blocks fit on an SM, so that there is room for these weights."""
    fn, (m, n, k), count = STEP[name]
    args = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((m, k), *[(n, k)] * count)]
    with ready():
        found = lab.compile_for("h200", lambda *args: fn(*args), *args)
    order = re.findall(r"griddepcontrol\.\w+|cp\.async\.bulk\.tensor\.2d\.shared", found.ptx)
    assert order[0] == "griddepcontrol.launch_dependents" and order.count("griddepcontrol.wait") == 1
    before = order.index("griddepcontrol.wait") - 1
    assert before >= 4 * count and len(order) - before > before, order  # Slots of weights, then those of x.
    assert found.spill_bytes == 0 and found.blocks_per_sm == 2


def test_other_kernels_wait_first_and_none_outside():
    args = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((64, 2048), (2048,), (8, 2048))]

    def fn(x, scale, w):
        y = rms_norm(x, scale)
        return matmul(y, w, transpose_b=True)

    waits = lambda: re.findall(r"griddepcontrol_\w+", str(jax.make_jaxpr(lambda *args: fn(*args))(*args)))
    with _host.building_for(_host.Target("h200", 132)):
        assert waits() == []
        with _host.dependent_launches():
            assert waits() == 2 * ["griddepcontrol_launch_dependents", "griddepcontrol_wait"]
    with lab.interpret(), _host.dependent_launches():
        assert waits() == []
