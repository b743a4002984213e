"""`copy_rows`: every row at its places, bit for bit."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import _host
from cookbook.gemm.experts.copy_rows import copy_rows
from tests.arrays import array


@pytest.mark.parametrize(
    "tokens, cols, copies, dtype",
    [(40, 64, 2, jnp.bfloat16), (7, 520, 3, jnp.float16), (19, 2048, 4, jnp.bfloat16), (3, 8 * 61, 1, jnp.bfloat16),
     (1, 24, 5, jnp.bfloat16)],
)  # fmt: skip
def test_every_row_is_at_its_places(tokens, cols, copies, dtype, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(copy_rows), "BLOCKS", 4)  # Some blocks have several rows.
    rng = np.random.default_rng(tokens)
    x = array(rng.standard_normal((tokens, cols)), dtype).at[0, :2].set(array([jnp.nan, -0.0], dtype))
    places = rng.permutation(tokens * copies).reshape(tokens, copies).astype(np.int32)
    out = lab.run(lambda x, places: copy_rows(x, places, params=_host.compiler_params()), x, jnp.asarray(places))
    expected = np.zeros((tokens * copies, cols), np.uint16)
    expected[places.ravel()] = np.repeat(np.asarray(x).view(np.uint16), copies, axis=0)
    np.testing.assert_array_equal(np.asarray(out).view(np.uint16), expected)


def test_compiled():
    x, places = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((8192, 8), jnp.int32)
    fn = lambda x, places: copy_rows(x, places, params=_host.compiler_params())
    compiled = lab.compile_for("h200", fn, x, places)
    assert compiled.spill_bytes == 0
    assert compiled.blocks_per_sm >= 6  # Others copy while one waits for its rows.
