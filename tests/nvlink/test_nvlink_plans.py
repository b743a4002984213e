"""The default plans of the products and collectives for 2 and 4 devices, lowered for an H200, sizes drawn at random."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
from tests.lowering import lowered
from tests.nvlink.test_matmuls import OPS as PRODUCTS

SHARDED = jax.P("x")
FEW = 5  # Programs of each case.


def lower(fn, n: int, ins, out, shapes, dtype):
    mesh = jax.sharding.AbstractMesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=out)
    lowered(fn, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("op", PRODUCTS)
def test_default_plans_of_products(op, n):
    """Each with another configuration than those before."""
    rng, seen = np.random.default_rng(n), set()
    default_config = inspect.getmodule(getattr(cookbook, op)).default_config
    *ins, out = PRODUCTS[op]
    while len(seen) < FEW:
        m, *sides = (int(2.0 ** rng.uniform(0, most)) for most in (13, 10, 10))
        k, cols = (8 * side for side in sides)
        dtype = (jnp.bfloat16, jnp.float16)[len(seen) % 2]
        gathers = op == "all_gather_matmul"
        config = default_config(m if gathers else n * m, cols, k, n, dtype)
        if config not in seen:
            seen.add(config)
            shapes = ((n * m, k), (k, n * cols)) if gathers else ((n * m, n * k), (n * k, cols))
            lower(lambda lhs, rhs: getattr(cookbook, op)(lhs, rhs, "x"), n, tuple(ins), out, shapes, dtype)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
def test_default_plans_of_collectives(op, n):
    """Sizes decide how many rows a piece has, and what is padded."""
    rng = np.random.default_rng(n)
    for dtype in (jnp.float32, jnp.bfloat16):
        shape = (n * n * int(2.0 ** rng.uniform(0, 12)), int(2.0 ** rng.uniform(0, 12)))
        lower(lambda x: getattr(cookbook, op)(x, "x"), n, SHARDED, SHARDED, [shape], dtype)


def test_more_units_than_indices_reach_are_refused():
    with pytest.raises(ValueError, match=r"cookbook.all_to_all: rows=\d+; must be below 2\*\*31 - 1024: pass parts"):
        lower(lambda x: cookbook.all_to_all(x, "x"), 2, SHARDED, SHARDED, [(2**32, 4)], jnp.float32)
