"""The family at home in JAX: numbers, arrays, segments of any kind, 64 bits. `tests/in_jax` has what all ops share."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import SMALL, operands

import lab
from cookbook import _host, attention, paged_attention, ragged_paged_attention, varlen_attention, write_kv
from tests.arrays import array
from tests.lowering import H200, lowered

STARTS, LENS, TABLES, SLOTS = [0, 5, 12], [20, 7], [[3, 0], [1, 2]], [4, -1, 16, 2, 0]
OPS = dict(
    attention=attention,
    varlen_attention=lambda q, k, v, **how: varlen_attention(q[0], k[0], v[0], STARTS, STARTS, **how),
    paged_attention=lambda q, k, v, **how: paged_attention(q[0, :2], pages(k), pages(v), TABLES, LENS, **how),
    ragged_paged_attention=lambda q, k, v, **how: ragged_paged_attention(
        q[0], pages(k), pages(v), TABLES, LENS, STARTS, **how
    ),
    write_kv=lambda q, k, v: write_kv(k[0, :5], v[0, :5], pages(k), pages(v), SLOTS),
)
ATTENTIONS = [name for name in OPS if name != "write_kv"]


def pages(x):
    return x[0, :64].reshape(4, 16, *x.shape[2:])


def equal(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


# Numbers and arrays ---------------------------------------------------------------------------------------------------


def program(fn, *args) -> str:
    """The program of `fn(*args)` for a GPU, without addresses."""
    with _host.building_for(H200):
        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(fn)(*args)))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_numbers_of_any_kind(name):
    args = operands(70, 70)
    traced = lambda **how: program(functools.partial(OPS[name], **how), *args)
    assert traced(scale=np.float32(0.5), logits_soft_cap=jnp.float32(3), local_window_size=np.int64(9)) == traced(
        scale=0.5, logits_soft_cap=3.0, local_window_size=9
    )


@pytest.mark.parametrize("name", OPS)
def test_numpys_arrays(name):
    args = [np.asarray(x) for x in operands(70, 70)]
    assert "mpmd_map" in program(lambda: OPS[name](*args))  # STARTS and the like are lists.


def test_lists():
    zeros = np.zeros((1, 2, 1, 8)).tolist()
    for call in (lambda: attention(zeros, zeros, zeros), lambda: attention("q", zeros, zeros)):
        with pytest.raises(ValueError, match=r"cookbook.attention: query(.dtype = float32|=.*must be an array)"):
            call()


# Segments -------------------------------------------------------------------------------------------------------------


def ids(*numbers, dtype=np.int64):
    """Two segments of 30 and 40 rows, or keys."""
    return np.repeat(np.array(numbers, dtype), (30, 40))[None]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "rows, keys",
    [
        (ids(0, 2**40), None),
        (ids(2**40, 0), ids(2**40, 0)),
        (ids(-1, 1), ids(-1, 1, dtype=np.int8)),
        (ids(0, 2**32 - 1, dtype=np.uint32), None),
        (ids(0, 2**32 - 1, dtype=np.uint32), ids(0, 2**32 - 1)),
        (ids(5, 2**63, dtype=np.uint64), None),
    ],
    ids=lambda x: "" if x is None else f"{x.dtype}_{x[0, -1]}",
)
def test_segments_of_any_integers(x64, rows, keys):
    args = operands(70, 70)
    wanted = lab.run(functools.partial(attention, segment_ids=ids(0, 1, dtype=np.int32), config=SMALL), *args)
    with jax.enable_x64(x64):
        rows, keys = module_ids(rows, rows if keys is None else keys)
    equal(lab.run(functools.partial(attention, segment_ids=rows, kv_segment_ids=keys, config=SMALL), *args), wanted)


def module_ids(rows, keys):
    from cookbook.attn import checks

    return checks.segment_ids("attention", rows, keys, rows.shape, keys.shape)


@pytest.mark.parametrize("x64", [False, True])
def test_segments_in_jax_arrays(x64):
    """Under jit too, where their numbers are not known, and those of JAX's that queries and keys do not share."""
    with jax.enable_x64(x64):
        small, wide = array(ids(1, 2), jnp.int8), array(ids(1, 2), jnp.uint32)
        for fn in (module_ids, jax.jit(module_ids)):
            rows, keys = fn(small, wide)
            assert rows.dtype == keys.dtype == jnp.int32
            equal(rows[:, :, None] == keys[:, None], ids(0, 1)[:, :, None] == ids(0, 1)[:, None])


def test_segments_without_a_common_dtype():
    with pytest.raises(ValueError, match="cookbook.attention: segment ids of uint64 and int64 share no integers: cast"):
        module_ids(ids(0, 2**63, dtype=np.uint64), ids(0, 2**40))


# 64 bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_lowers_under_x64(name):
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    how = {} if name == "write_kv" else dict(scale=np.float64(0.5))
    with jax.enable_x64(True):
        assert lowered(functools.partial(OPS[name], **how), x, x, x)


@pytest.mark.slow
def test_gradients_lower_under_x64():
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((1, 128), jnp.int64)
    loss = lambda q, k, v, segments: attention(q, k, v, segment_ids=segments).astype(jnp.float32).sum()
    with jax.enable_x64(True):
        assert lowered(jax.grad(loss, (0, 1, 2)), x, x, x, segments)


# Gradients that are refused -------------------------------------------------------------------------------------------


def test_gradients_of_write_kv_to_refs_are_refused_by_name():
    def loss(k):
        refs = [jax.new_ref(pages(k)) for _ in range(2)]
        write_kv(k[0, :5], k[0, :5], *refs, SLOTS)
        return refs[0][...].astype(jnp.float32).sum()

    with pytest.raises(ValueError, match="cookbook.write_kv has no gradient"), lab.interpret():
        jax.grad(loss)(operands(70, 70)[1])
