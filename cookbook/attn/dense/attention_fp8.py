# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 in 8-bit floats, forward: softmax(scale q kᵀ) v of scaled e4m3.

    out = softmax(mask(cap(scale (q q_descale) (k k_descale)ᵀ))) (v v_descale),    lse = log sum exp of the same logits

Shapes: q (B, T, N, H), k and v (B, S, K, H), float8_e4m3fn; out (B, T, N, H), bfloat16 or float16; lse (B, T, N). N is
a multiple of K: query head n reads key head n // (N // K). Descales are float32, one number or one for each batch and
key head, (B, K), as FlashAttention-3 has them: a query head is scaled as the key head that it reads. Positions count
from the start of both sequences: with `is_causal` query i sees keys 0 to i.

`kernel_fp8.py` has the kernel. Weights are rounded to e4m3, too, at 256 times their size; their sums are of the numbers
before they are rounded, and all sums over keys are float32.

Bound by: with heads of 128 the tensor cores and the exponentials alike, 512 clocks each for 64 queries and 128 keys;
with heads of 64 the exponentials. Before the kernel, v is transposed by a pass over it.

Not supported: segment ids, gradients, e5m2, heads of other sizes than 64, 128 and 256.
Sources: Shah et al., "FlashAttention-3" (2024); for the sums, DeepSeek-AI, "DeepSeek-V3" (2024), section 3.3.2.
"""

import jax
import jax.numpy as jnp

from ... import _device, _host
from .. import checks, references
from ..core import HEAD_DIMS, Problem
from . import kernel_fp8
from .kernel_fp8 import Config
from .plan import Plan


def attention_fp8_reference(
    q, k, v, *, q_descale, k_descale, v_descale, scale=None, is_causal=False, local_window_size=None,
    logits_soft_cap=None,
):  # fmt: skip
    """(out, lse) in at least float32."""
    distance = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None]
    seen = references.visible(distance, is_causal, local_window_size)[None]

    def dequantized(x, descale):
        descale = jnp.broadcast_to(jnp.asarray(descale), (k.shape[0], k.shape[2]))
        descale = jnp.repeat(descale, x.shape[2] // k.shape[2], axis=1)[:, None, :, None]
        return x.astype(jnp.promote_types(descale.dtype, jnp.float32)) * descale

    q, k, v = (dequantized(x, descale) for x, descale in ((q, q_descale), (k, k_descale), (v, v_descale)))
    return references.attend(q, k, v, seen, scale, logits_soft_cap)


def default_config(head_dim: int, is_cut: bool) -> Config:
    """The configuration for heads of this size, with a causal mask or a window if it `is_cut`: the fastest of those
    tried on an H200, with 16384 positions, and heads of 128 with 4096 too. For heads of 64 one serves both: without a
    mask, 192 keys per block were a little faster, and spilled."""
    if head_dim <= 64:
        return Config(num_stages=4, compute_wgs=3, in_turns=False)
    if head_dim <= 128:
        return Config(block_kv=256, overlap=False) if is_cut else Config(compute_wgs=3, overlap=False)
    return Config(block_kv=96 if is_cut else 128, overlap=False)


def _check(q, k, v) -> None:
    checks.check_operands("attention_fp8", "batch, positions, heads, head_dim", is_fp8=True, q=q, k=k, v=v)
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(
            f"{_host.PACKAGE}.attention_fp8: head_dim={q.shape[3]}; must be one of {HEAD_DIMS}: pad it with zeros"
        )


def _descale(name: str, descale, shape: tuple[int, ...]):
    """A descale of one number, or of this shape, as float32 of this shape."""
    descale = _host.as_array("attention_fp8", name, descale)
    if not jnp.issubdtype(descale.dtype, jnp.floating) or descale.shape not in ((), (1,), shape):
        raise ValueError(
            f"{_host.PACKAGE}.attention_fp8: {name} is {descale.dtype} {descale.shape}; must be one float, or "
            f"{shape}, one for each batch and key head"
        )
    return jnp.broadcast_to(descale.astype(jnp.float32), shape)


def attention_fp8(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_descale: jax.Array,
    k_descale: jax.Array,
    v_descale: jax.Array,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: _host.Window | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    out_dtype: _host.DType = jnp.bfloat16,
    config: Config | None = None,
    **others,
) -> jax.Array | tuple[jax.Array, ...]:
    """Scaled dot-product attention of 8-bit floats; bitwise reproducible from run to run. It has no gradient.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      q: (B, T, N, H), or (T, N, H), and then nothing has a batch; float8_e4m3fn; H 64, 128 or 256.
      k, v: (B, S, K, H); float8_e4m3fn; K divides N.
      q_descale, k_descale, v_descale: what a stored 1 stands for, above 0: a float, or (B, K) of them.
      scale: what logits are multiplied by; None for 1 / sqrt(H). All numbers may be Python's, NumPy's or JAX's.
      is_causal: query i sees keys up to i.
      local_window_size: (left, right): query i sees keys i - left to i + right; None for a side without bound, one
        number for both.
      logits_soft_cap: c, so that logits become c tanh(logits / c); None for none.
      return_lse: also return the logarithms of the sums of exponentials.
      out_dtype: bfloat16 or float16.
      config: blocks, stages and warpgroups; None chooses by H and by whether there is a mask.
      others: arguments that other libraries have, such as `mask` and `bias`, if they are None.

    Returns:
      (B, T, N, H), of `out_dtype`; with `return_lse` also (B, T, N), float32, natural logarithms. A query that sees no
      key gives zeros, and -inf.

    Raises:
      ValueError: a shape, dtype or option is not supported, or it is differentiated; RuntimeError: no GPU.
    """
    op = "attention_fp8"
    checks.elsewhere(op, others)
    return_lse = checks.flag(op, "return_lse", return_lse)
    q, k, v = checks.arrays(op, q=q, k=k, v=v)
    is_one = q.ndim == 3
    given = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    descales = [_descale(name, x, (*k.shape[:-3], *k.shape[-2:-1])) for name, x in given.items()]
    if is_one:
        q, k, v, *descales = (x[None] for x in (q, k, v, *descales))
    _check(q, k, v)
    positions = checks.num_positions(op, q.shape[1], k.shape[1])
    how = checks.options(op, q.shape[3], is_causal, scale, logits_soft_cap, local_window_size, positions)
    config = _host.require_config(op, config, Config)
    out_dtype = _host.require_float(op, out_dtype)  # By its name too.
    if out_dtype == jnp.float32:
        raise ValueError(f"{_host.PACKAGE}.{op}: {out_dtype=}; must be bfloat16 or float16: cast the result of one")
    if 0 in (*q.shape, *k.shape):
        out, lse = checks.empty_results(q, None, out_dtype)
    else:
        out, lse = _run(q, k, v, descales, how, config, out_dtype, return_lse)
    results = (out, lse)[: 1 + return_lse]
    results = tuple(x[0] for x in results) if is_one else results
    return results if return_lse else results[0]


def _run(q, k, v, descales, how: dict, config: Config | None, out_dtype, return_lse: bool):
    """(out, lse), lse None unless it is asked for."""
    target = _host.require_tensor_cores("attention_fp8")
    problem = Problem(q.shape[2], k.shape[2], q.shape[3], q.dtype, **how, interpreted=target.interpreted)
    config = config or default_config(q.shape[3], problem.has_window)
    if config.overlap and problem.head_dim > kernel_fp8.STRIP:
        raise ValueError(
            f"{_host.PACKAGE}.attention_fp8: {config} overlaps products, whose sums do not fit into registers for "
            f"head_dim={problem.head_dim}: overlap=False"
        )
    plan = Plan(problem, q.shape[0], q.shape[1], k.shape[1], False, config)
    checks.check_smem("attention_fp8", config, _device.smem_bytes(kernel_fp8.scratch(plan, out_dtype)), q.shape[3])
    operands = _host.alike(*_host.without_gradient("attention_fp8", f"{_host.PACKAGE}.attention", q, k, v, *descales))
    how = dict(params=_host.compiler_params(approx_math=True), return_lse=return_lse, out_dtype=out_dtype)
    out, lse = kernel_fp8.forward(*operands, plan=plan, num_sms=target.num_sms, **how)
    return out, lse.swapaxes(1, 2) if return_lse else None


attention_fp8.Config = Config  # `cookbook.attention_fp8` is this function, not its module.


def flops(batch: int, num_q: int, num_kv: int, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
    """Floating-point operations of the two products; half as many with a causal mask."""
    return 4 * batch * num_heads * num_q * num_kv * head_dim // (2 if is_causal else 1)


def bytes_moved(batch: int, num_q: int, num_kv: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """q, k and v, of 8 bits, and out, of 16, each once; v is transposed before, read and written once more."""
    return batch * head_dim * (3 * num_q * num_heads + 4 * num_kv * num_kv_heads)
