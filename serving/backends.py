"""The decoder's operations, twice: as this package's kernels, and as plain XLA, to compare them with.

Both take the same arguments and give the same results, but for rounding:

    cookbook    this package's kernels, on a GPU or inside `lab.interpret()`; weights of 16 bits or packed ones of 4
                (MXFP4 with bfloat16), pages of 16 bits or with bfloat16 of e4m3, heads of 64, 128 or 256, pages of 16,
                32, 64, 128 or 256 tokens
    xla         products and reductions as XLA makes them, packed weights widened in each step; attention on gathered
                pages: the keys and values of each token's whole block table are copied together, and masked; any device
                and float dtype
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import cookbook
from cookbook.attn.cache.rope_write_kv import rope_write_kv_reference
from cookbook.gemm.dense.matmul_int4_weights import group_size_of
from cookbook.gemm.experts.moe import biased, unweighted
from cookbook.gemm.experts.route import route_reference
from cookbook.gemm.grouped.swiglu import swiglu
from cookbook.rows.rms_norm import rms_norm_reference
from cookbook.rows.rms_norm_of_parts import rms_norm_of_parts, rms_norm_of_parts_reference
from serving.quantized import Packed
from serving.weights import Int8

ROWS_AT_ONCE = 16  # Tokens of a mixed step whose gathered keys and values are in memory together.
# Pages of the narrowest block table: fewer widths are fewer compilations. A kernel reads a table as far as its sequence
# goes, and XLA gathers all of it.
TABLE_WIDTHS_MIN = dict(cookbook=64, xla=16)


class Backend(NamedTuple):
    """The functions of a backend, with the arguments and results of this package's kernels."""

    # (rows, weight, out_dtype, bias or None): the product with a weight of (outputs, inputs), or Int8 or Packed.
    linear: Callable
    gated: Callable  # (rows, weight): silu of the first half of the product, times the other half.
    rms_norm: Callable
    rms_norm_of_parts: Callable
    experts: Callable  # As `cookbook.moe`, but what `rms_norm_of_parts` adds up: rows, each token's, and their weights.
    rope_write_kv: Callable
    paged_attention: Callable
    ragged_paged_attention: Callable


def backend(name: str) -> Backend:
    """The backend "cookbook" or "xla".

    Raises:
      ValueError: there is no such backend.
    """
    if name == "cookbook":
        return Backend(
            _kernel_linear, _kernel_gated, cookbook.rms_norm, rms_norm_of_parts, unweighted, cookbook.rope_write_kv,
            cookbook.paged_attention, cookbook.ragged_paged_attention,
        )  # fmt: skip
    if name == "xla":
        return Backend(
            _linear, _gated, _rms_norm, _rms_norm_of_parts, _experts, rope_write_kv_reference, _paged_attention,
            _ragged_paged_attention,
        )  # fmt: skip
    raise ValueError(f'backend = {name!r}; must be "cookbook" or "xla"')


def _kernel_linear(x, weight, out_dtype, bias=None):
    if bias is not None and isinstance(weight, (Int8, Packed)):
        return (_kernel_linear(x, weight, jnp.float32) + bias).astype(out_dtype)
    if isinstance(weight, Int8):
        return cookbook.matmul_int8_weights(x, weight.values, weight.scales, transpose_w=True, out_dtype=out_dtype)
    if isinstance(weight, Packed):
        how = dict(zeros=weight.zeros, group_size=group_size_of(x.shape[1], len(weight.scales)))
        return cookbook.matmul_int4_weights(x, weight.words, weight.scales, **how, out_dtype=out_dtype)
    return cookbook.matmul(x, weight, bias=bias, transpose_b=True, out_dtype=out_dtype)


def _kernel_gated(x, weight):
    if isinstance(weight, (Int8, Packed)):
        return swiglu(_kernel_linear(x, weight, x.dtype).astype(jnp.float32)).astype(x.dtype)
    gate, up = jnp.split(weight, 2)  # No copy: the kernel reads both as they lie,
    if gate.size * gate.dtype.itemsize % 256:  # unless one lies where XLA hands over no slice.
        gate, up = jax.lax.optimization_barrier((gate, up))
    return cookbook.glu(x, gate, up, transpose_weights=True)


def _linear(x, weight, out_dtype, bias=None):
    weight = weight.floats(x.shape[1], x.dtype) if isinstance(weight, Packed) else weight
    values, scales = weight if isinstance(weight, Int8) else (weight, None)
    sums = jnp.promote_types(x.dtype, jnp.float32)
    out = jax.lax.dot_general(
        x, values.astype(x.dtype), (((1,), (1,)), ((), ())), precision="highest", preferred_element_type=sums
    )
    out = out if scales is None else out * scales
    return (out if bias is None else out + bias).astype(out_dtype)


def _gated(x, weight):
    return swiglu(_linear(x, weight, jnp.float32)).astype(x.dtype)


def _rms_norm(x, scale, *, eps, out_dtype, residual=None):
    if residual is None:
        return rms_norm_reference(x, scale, eps).astype(out_dtype)
    y, total = rms_norm_reference(x, scale, eps, residual)
    return y.astype(out_dtype), total.astype(residual.dtype)


def _rms_norm_of_parts(x, rows, weights, residual, scale, *, eps, out_dtype):
    y, total = rms_norm_of_parts_reference(x, rows, weights, residual, scale, eps)
    return y.astype(out_dtype), total.astype(residual.dtype)


def _experts(
    x, router_logits, w_gate_up, w_down, *, top_k, renormalize, b_gate_up=None, b_down=None, swiglu_limit=None
):  # fmt: skip
    """As `unweighted`, with XLA's grouped products."""
    if isinstance(w_gate_up, Packed):
        inner = w_gate_up.scales.shape[-1] // 2
        w_gate_up, w_down = w_gate_up.floats(x.shape[1], x.dtype), w_down.floats(inner, x.dtype)
    routing = route_reference(router_logits, top_k, renormalize)
    product = lambda a, b, bias: biased(
        jax.lax.ragged_dot(a, b, routing.group_sizes, precision="highest", preferred_element_type=jnp.float32),
        bias, routing.experts,
    )  # fmt: skip
    inner = swiglu(product(x[routing.sources // top_k], w_gate_up, b_gate_up), swiglu_limit)
    return product(inner.astype(x.dtype), w_down, b_down), routing.rows, routing.weights


def _paged_attention(q, k_pages, v_pages, block_tables, kv_lens, *, local_window_size=None, sinks=None):
    """As `cookbook.paged_attention`: a query a sequence."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    gathered = lambda pages: pages[block_tables].reshape(num_rows, -1, num_kv_heads, head_dim).astype(q.dtype)
    k, v = gathered(k_pages), gathered(v_pages)
    q = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    product = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    s = product("rkgh,rskh->rkgs", q, k) * head_dim**-0.5
    token = jnp.arange(k.shape[1])
    seen = token < kv_lens[:, None]
    if local_window_size is not None:
        seen &= token >= kv_lens[:, None] - 1 - local_window_size
    seen = seen[:, None, None]
    s = jnp.where(seen, s, -jnp.inf)
    if sinks is None:
        p = jax.nn.softmax(s, axis=-1)
    else:
        sinks = jnp.broadcast_to(sinks.astype(s.dtype).reshape(num_kv_heads, -1, 1), (*s.shape[:3], 1))
        p = jax.nn.softmax(jnp.concatenate([s, sinks], axis=-1), axis=-1)[..., :-1]
    p = jnp.where(seen, p, 0.0)
    v = jnp.where(seen[:, 0, 0, :, None, None], v, 0)  # Behind its tokens a row sees other requests' values: 0 * NaN.
    return product("rkgs,rskh->rkgh", p.astype(v.dtype), v).astype(v.dtype).reshape(num_rows, num_heads, head_dim)


def _ragged_paged_attention(q, k_pages, v_pages, block_tables, kv_lens, cu_seqlens_q, **how):
    """As `cookbook.ragged_paged_attention`: each token is a row of `_paged_attention`, which sees what is before it."""
    row = jnp.arange(q.shape[0])
    sequence = jnp.searchsorted(cu_seqlens_q[1:], row, side="right")
    behind = cu_seqlens_q[sequence + 1] - row - 1  # Tokens of its sequence that come after it.
    length = jnp.where(row < cu_seqlens_q[-1], kv_lens[sequence] - behind, 0)
    attend = lambda args: _paged_attention(args[0][None], k_pages, v_pages, args[1][None], args[2][None], **how)[0]
    return jax.lax.map(attend, (q, block_tables[sequence], length), batch_size=ROWS_AT_ONCE)
