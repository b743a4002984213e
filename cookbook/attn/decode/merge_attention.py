# SPDX-License-Identifier: Apache-2.0
"""Results over disjoint keys, merged into the result over all of them.

    lse = log(sum exp(lse_i)),    out = sum exp(lse_i - lse) out_i

`merge_attention` merges two results of any of the ops. A sink counts in each result that was given it: give it to one.

    here          vLLM (merge_attn_states)             FlashInfer (merge_state)
    out_a, lse_a  prefix_output, prefix_lse (N, T), ln  v_a, s_a (T, N), log2
    out_b, lse_b  suffix_output, suffix_lse (N, T), ln  v_b, s_b (T, N), log2
"""

import jax
import jax.numpy as jnp
from jax import lax

from ... import _host
from .. import checks


def merge_attention(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) over the keys of both, of results over disjoint keys: out (..., H), lse (...), natural logarithms.

    Every op here returns such results with `return_lse=True`. A result over no keys has an lse of -inf: it does not
    count, even if its out is NaN, and its gradients are zero.

    Raises:
      ValueError: these are no floats of such shapes.
    """
    op = "merge_attention"
    out_a, lse_a, out_b, lse_b = parts = checks.arrays(op, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    shapes = [x.shape for x in parts]
    if not out_a.ndim or shapes != [shapes[0], shapes[0][:-1]] * 2:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {out_a.shape=}, {lse_a.shape=}, {out_b.shape=}, {lse_b.shape=}; must be (..., H), "
            "(...), and the same: transpose an lse (heads, tokens)"
        )
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in parts):
        raise ValueError(f"{_host.PACKAGE}.{op}: {[x.dtype.name for x in parts]}; must be floats: cast them")
    return _merged(*parts)


@jax.jit
def _merged(out_a, lse_a, out_b, lse_b):
    """One program: in what it computes on the way there are infinities, which `jax_debug_infs` would find."""
    lses = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (lse_a, lse_b)]
    top = lax.stop_gradient(jnp.maximum(*lses))
    top = jnp.where(jnp.isneginf(top), 0.0, top)  # Both are empty.
    weights = [jnp.exp(lse - top) for lse in lses]
    total = sum(weights)
    total = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(jnp.isneginf(lses[0]) & jnp.isneginf(lses[1]), -jnp.inf, top + jnp.log(total))

    def share(weight, lse, out):
        out = jnp.where(jnp.isneginf(lse)[..., None], 0.0, out.astype(jnp.float32))
        return (weight / total)[..., None] * out

    out = sum(share(*part) for part in zip(weights, lses, (out_a, out_b), strict=True))
    return out.astype(out_a.dtype), lse
