"""Arguments that the ops of this family take and refuse: windows of any size, nothing at all, other libraries' names.

Traced for an H200, but for one test: no kernel runs.
"""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import operands
from test_in_jax import ATTENTIONS, OPS, SLOTS, pages

import cookbook
import lab
from cookbook import _host, attention, attention_fp8, merge_attention, rope_write_kv, varlen_attention
from cookbook.attn import checks
from cookbook.attn.dense.attention import attention_reference
from cookbook.attn.dense.attention_fp8 import Config as Fp8Config
from tests.arrays import array
from tests.lowering import H200

E4M3 = jnp.float8_e4m3fn
ONES = dict(q_descale=1.0, k_descale=1.0, v_descale=1.0)
CALLS = {name: OPS[name] for name in ATTENTIONS} | dict(
    attention_fp8=lambda q, k, v, **how: attention_fp8(*(x.astype(E4M3) for x in (q, k, v)), **ONES, **how)
)


def program(fn, *args) -> str:
    """The program that is traced for an H200."""
    with _host.building_for(H200):
        return str(jax.make_jaxpr(fn)(*args))


def traced(name: str, **how) -> str:
    return program(functools.partial(CALLS[name], **how), *operands(70, 70))


# Windows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_windows_beyond_all_keys_are_none(name):
    whole = traced(name)
    for window in (70, 2**31 - 1, 2**31, np.int64(2**62), 10**30, (2**31, 2**31), (None, 2**33)):
        assert traced(name, local_window_size=window) == whole, window
    assert traced(name, local_window_size=9) != whole


def test_one_side_may_be_beyond_all_keys():
    window = functools.partial(checks.options, "attention", 64, False, None, None, positions=70)
    assert [window((2**40, 3))[side] for side in ("left", "right")] == [None, 3]
    assert [window((69, 2**40))[side] for side in ("left", "right")] == [69, None]


def test_references_take_windows_of_any_size():
    args = operands(20, 30)
    whole, _ = attention_reference(*args)
    np.testing.assert_array_equal(attention_reference(*args, local_window_size=2**40)[0], whole)


# Nothing --------------------------------------------------------------------------------------------------------------


def test_no_keys_are_zeros_and_sinks():
    """And gradients: of a sink that is all of its lse, of queries of which nothing comes."""
    query, key, value = operands(5, 0, heads=4, kv_heads=2, batch=3)
    sinks = jnp.array([1.0, -2.0, 3.0, -jnp.inf])
    out, lse = attention(query, key, value, return_lse=True)
    assert out.shape == query.shape and out.dtype == query.dtype and (out == 0).all()
    assert lse.shape == (3, 5, 4) and (lse == -jnp.inf).all()
    _, lse = attention(query, key, value, sinks=sinks, return_lse=True)
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, (3, 5, 4)))
    total = lambda query, sinks: attention(query, key, value, sinks=sinks, return_lse=True)[1][..., :3].sum()
    d_query, d_sinks = jax.grad(total, (0, 1))(query, sinks)
    assert (d_query == 0).all() and d_sinks.tolist() == [15, 15, 15, 0]


def test_no_queries_have_zeros_as_gradients_of_keys():
    query, key, value = operands(0, 7)
    grads = jax.grad(lambda *args: attention(*args).astype(jnp.float32).sum(), (0, 1, 2))(query, key, value)
    assert [x.shape for x in grads] == [x.shape for x in (query, key, value)] and not any(x.any() for x in grads)


def test_no_sequences_and_no_pages():
    """Starts of no sequence, tables of no column, and a cache of no page, whose ids are all of pages of zeros."""
    q, k, v = (x[0] for x in operands(7, 9))
    one, none = jnp.array([0], jnp.int32), jnp.zeros((0,), jnp.int32)
    out, lse = varlen_attention(q, k, v, one, one, return_lse=True)
    assert out.shape == q.shape and not out.any() and (lse == -jnp.inf).all()
    caches = [jnp.zeros((4, 16, 1, 64), jnp.bfloat16)] * 2
    out, lse = cookbook.paged_attention(
        q, *caches, jnp.zeros((7, 0), jnp.int32), jnp.zeros(7, jnp.int32), return_lse=True
    )
    assert out.shape == q.shape and not out.any() and (lse == -jnp.inf).all()
    out = cookbook.paged_attention(q[:0], *caches, jnp.zeros((0, 3), jnp.int32), none)
    assert out.shape == (0, 2, 64)
    out = cookbook.ragged_paged_attention(q, *caches, jnp.zeros((0, 3), jnp.int32), none, one)
    assert out.shape == q.shape and not out.any()
    with pytest.raises(ValueError, match="causal=False; must be causal: gather"):
        cookbook.ragged_paged_attention(q, *caches, jnp.zeros((0, 3), jnp.int32), none, one, causal=False)
    tables, lens = jnp.zeros((7, 3), jnp.int32), jnp.full((7,), 40, jnp.int32)
    assert "bf16[2,16,1,64]" in program(cookbook.paged_attention, q, *(x[:0] for x in caches), tables, lens)


def test_query_heads_without_key_heads_are_refused():
    query, key, value = operands(5, 7)
    with pytest.raises(ValueError, match="2 query heads are not a multiple of 0 key heads"):
        attention(query, key[:, :, :0], value[:, :, :0])


@pytest.mark.parametrize("name", CALLS)
def test_results_alone_come_out_of_kernels(name):
    """Called eagerly, `jax_debug_nans` and `jax_debug_infs` look at all that a program returns: neither at pieces that
    nobody wrote, nor at an lse that nobody asked for."""
    with _host.building_for(H200):
        jaxpr = jax.make_jaxpr(CALLS[name])(*operands(70, 70))
    launches = [eqn.outvars for eqn in jaxpr.eqns if "mpmd_map" in str(eqn)]
    assert launches == [jaxpr.jaxpr.outvars]


# Other libraries' arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_what_jax_says_is_taken_or_refused_by_name(name):
    how = dict(mask=None, bias=None, query_seq_lengths=None, implementation=None, precision=None, softcap=None)
    assert traced(name, **how) == traced(name)
    for argument in checks.ELSEWHERE:
        with pytest.raises(ValueError, match=rf"cookbook.{name}: {argument}=.*must be left out or None: \w"):
            CALLS[name](*operands(70, 70), **{argument: jnp.ones(3)})
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'masks'"):
        CALLS[name](*operands(70, 70), masks=None)


def test_all_of_jaxs_arguments_are_known():
    taken = {*inspect.signature(attention).parameters, *checks.ELSEWHERE}
    assert {*inspect.signature(jax.nn.dot_product_attention).parameters} <= taken


def test_writers_refuse_by_name():
    k = operands(5, 70)[1]
    new = k[0, :5], k[0, :5], pages(k), pages(k), jnp.array(SLOTS, jnp.int32)
    with pytest.raises(ValueError, match="cookbook.write_kv: kv_cache_dtype='fp8'; must be left out or None: leave it"):
        cookbook.write_kv(*new, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="cookbook.rope_write_kv: interleaved=True; .* use write_kv"):
        rope_write_kv(*[k] * 6, interleaved=True)


def test_residuals_are_lse():
    both = [program(functools.partial(attention, **{name: True}), *operands(70, 70))
            for name in ("return_lse", "return_residual")]  # fmt: skip
    assert both[0] == both[1]


def test_one_sequence_without_a_batch():
    """As `jax.nn.dot_product_attention` takes it; the kernel is that of a batch of one."""
    args = operands(70, 90)
    ids = [np.repeat([0, 1], (n // 2, n - n // 2)) for n in (70, 90)]
    how = dict(is_causal=True, return_lse=True)
    alone = lab.run(
        lambda *args: attention(*args, segment_ids=ids[0].tolist(), kv_segment_ids=ids[1], **how),
        *(x[0] for x in args),
    )
    batch = lab.run(lambda *args: attention(*args, segment_ids=ids[0][None], kv_segment_ids=ids[1][None], **how), *args)
    for a, b in zip(alone, batch, strict=True):
        np.testing.assert_array_equal(a, b[0])
    grads = jax.eval_shape(
        lambda *args: jax.grad(lambda q: attention(q, *args[1:]).astype(jnp.float32).sum())(args[0]),
        *(jax.ShapeDtypeStruct((0, *x.shape[2:]), x.dtype) for x in args),
    )
    assert grads.shape == (0, 2, 64)


def test_8_bit_floats_without_a_batch():
    q, k, v = (x.astype(E4M3)[0] for x in operands(70, 90, heads=4, kv_heads=2))
    each = dict.fromkeys(ONES, jnp.array([1.0, 2.0]))
    with _host.building_for(H200):
        out, lse = jax.eval_shape(functools.partial(attention_fp8, **each, return_lse=True), q, k, v)
    assert out.shape == (70, 4, 64) and lse.shape == (70, 4)


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "how, message",
    [
        (dict(logits_soft_cap=math.inf), "logits_soft_cap=inf; must be finite"),
        (dict(logits_soft_cap=0), "logits_soft_cap=0.0; must be above 0: None stands for no cap"),
        (dict(scale=math.inf), "scale=inf; must be finite"),
        (dict(scale=math.nan), "scale=nan; must be finite"),
        (dict(scale=-1), "scale=-1.0; must be above 0: None stands for 1"),
        (dict(local_window_size=9.0), "local_window_size=9.0; must be one int: pass 9"),
        (dict(local_window_size=-1), "local_window_size=-1; .*: None stands for all"),
        (dict(return_lse=1), "return_lse=1; must be one bool"),
        (dict(config=4), "config=4; must be a cookbook"),
        (dict(config=dict(block_kv=64)), "config={.*}; must be a cookbook"),
        (dict(config=cookbook.write_kv.Config(1)), "config=Config.*; must be a cookbook"),
    ],
    ids=str,
)
def test_options_say_what_to_do(name, how, message):
    with _host.building_for(H200), pytest.raises(ValueError, match=f"cookbook.{name}: {message}"):
        CALLS[name](*operands(70, 70), **how)


@pytest.mark.parametrize("name", ["attention", "varlen_attention", "ragged_paged_attention"])
def test_a_configuration_of_8_bit_floats_is_another_kernels(name):
    with pytest.raises(ValueError, match=f"must be a cookbook.{name}.Config"):
        CALLS[name](*operands(70, 70), config=Fp8Config(block_kv=96, overlap=False))


@pytest.mark.parametrize("name", CALLS)
def test_traced_flags_are_refused_by_name(name):
    with _host.building_for(H200), pytest.raises(ValueError, match=f"cookbook.{name}: return_lse is traced"):
        jax.jit(lambda flag: CALLS[name](*operands(70, 70), return_lse=flag))(True)


@pytest.mark.parametrize("out_dtype", [4, None, "float32", "junk"])
def test_dtypes_of_results(out_dtype):
    with pytest.raises(ValueError, match=r"cookbook.attention_fp8: out_dtype=.*; must be bfloat16.*: cast"):
        CALLS["attention_fp8"](*operands(70, 70), out_dtype=out_dtype)


def test_more_positions_than_32_bits_count():
    q, kv = (jax.ShapeDtypeStruct((1, n, 1, 8), jnp.bfloat16) for n in (1, 2**31 - 1000))
    with _host.building_for(H200), pytest.raises(ValueError, match="1 queries and 2147482648 keys; must be fewer than"):
        jax.eval_shape(attention, q, kv, kv)


# Merged results -------------------------------------------------------------------------------------------------------


def test_gradients_where_both_parts_are_empty():
    """One such row poisoned all keys: its gradients are zero, and other rows' are what they are without it."""
    rng = np.random.default_rng(0)
    outs, lses = rng.normal(size=(2, 3, 8)), rng.normal(size=(2, 3))
    lses[:, 1], lses[0, 2] = -np.inf, -np.inf
    parts = [array(x, jnp.float32) for x in (outs[0], lses[0], outs[1], lses[1])]

    def loss(*parts):
        out, lse = merge_attention(*parts)
        return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum()

    grads = jax.grad(loss, (0, 1, 2, 3))(*parts)
    for grad in grads:
        assert jnp.isfinite(grad).all() and not grad[1].any()
    assert not grads[0][2].any() and grads[1][2] == 0 and grads[3][2] == 1 and (grads[2][2] == 2 * outs[1, 2]).all()
    share = 1 / (1 + np.exp(lses[1, 0] - lses[0, 0]))
    out = share * outs[0, 0] + (1 - share) * outs[1, 0]
    np.testing.assert_allclose(grads[0][0], 2 * share * out, rtol=1e-5)
    wanted = share + 2 * share * (1 - share) * (out @ (outs[0, 0] - outs[1, 0]))
    np.testing.assert_allclose(grads[1][0], wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_part_without_keys_does_not_count(dtype):
    """Nor do its NaN; those of a part with keys do, though its weight may round to zero."""
    nan, ones = jnp.full((2, 8), jnp.nan, dtype), jnp.ones((2, 8), dtype)
    empty, full, low = jnp.full((2,), -jnp.inf), jnp.array([3.0, -4.0]), jnp.full((2,), -300.0)
    for parts in ((nan, empty, ones, full), (ones, full, nan, empty)):
        out, lse = merge_attention(*parts)
        assert out.dtype == dtype and (out == 1).all() and (lse == full).all()
        loss = lambda *parts: merge_attention(*parts)[0].astype(jnp.float32).sum()
        assert all(jnp.isfinite(grad).all() for grad in jax.grad(loss, (0, 1, 2, 3))(*parts))
    assert jnp.isnan(merge_attention(nan, low, ones, full)[0]).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(lse_a=np.zeros((4, 3))), "transpose an lse"),
        (dict(out_b=np.zeros((3, 4, 9))), "must be"),
        (dict(out_a=None), "out_a=None; must be an array"),
        (dict(lse_b=np.zeros((3, 4), int)), "must be floats: cast them"),
    ],
    ids=str,
)
def test_what_does_not_merge(change, message):
    part = np.zeros((3, 4, 8), np.float32), np.zeros((3, 4), np.float32)
    args = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), part * 2, strict=True)) | change
    with pytest.raises(ValueError, match=f"cookbook.merge_attention: .*{message}"):
        merge_attention(**args)
