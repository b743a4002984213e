"""States of other libraries, and sums of decays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cookbook.recurrent import states
from tests.arrays import array

SHAPE = 2, 3, 64, 128  # (B, H, P, N)


@pytest.mark.parametrize("library, keys_first", states.KEYS_FIRST.items())
def test_states_of_other_libraries(library, keys_first):
    """A state that a library's own formula reads with a key is the state that ours reads with it."""
    rng = np.random.default_rng(0)
    ours, key = array(rng.normal(size=SHAPE), jnp.float32), rng.normal(size=SHAPE[3])
    theirs = states.states_to(library, ours)
    read = np.einsum("bhnp,n->bhp" if keys_first else "bhpn,n->bhp", np.asarray(theirs, np.float64), key)
    np.testing.assert_allclose(read, np.einsum("bhpn,n->bhp", np.asarray(ours, np.float64), key))
    back = states.states_from(library, theirs.astype(jnp.bfloat16))
    assert back.dtype == jnp.float32 and (back == ours.astype(jnp.bfloat16).astype(jnp.float32)).all()


@pytest.mark.parametrize(
    "library, shape, message",
    [("vllm", SHAPE, "library='vllm'; must be one of fla"), ("fla", (64, 64), "missing axes")],
)
def test_unknown_states_are_refused(library, shape, message):
    for convert in (states.states_from, states.states_to):
        with pytest.raises(ValueError, match=message):
            convert(library, jnp.zeros(shape))


@pytest.mark.parametrize("rows", [64, 128])
def test_sums_of_decays_do_not_depend_on_the_number_of_chunks(rows):
    rng = np.random.default_rng(1)
    logs = array(-rng.exponential(size=(3, 40, rows)), jnp.float32)
    sums = jax.jit(states.cumulative_decays)
    whole = sums(logs)
    for first, end in ((0, 1), (1, 40), (7, 8)):
        assert (sums(logs[:, first:end]) == whole[:, first:end]).all()
    exact = np.cumsum(np.asarray(logs, np.float64), axis=-1)
    assert np.abs(whole - exact).max() <= 4 * np.finfo(np.float32).eps * np.abs(exact).max()
