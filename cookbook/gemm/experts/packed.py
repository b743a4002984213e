# SPDX-License-Identifier: Apache-2.0
"""Experts' weights of 4 bits: a tuple of arrays in place of one of floats.

    (w, scales)            MXFP4, scales uint16: what `pack_mxfp4` returns
    (w, scales)            integers from -8 to 7, scales of a floating dtype, a row of them for each group along K
    (w, scales, zeros)     integers from 0 to 15 with zero points: what `pack_int4_gptq` and `pack_int4_awq` return

Shapes: w (E, ceil(N / 64), ceil(K / 64), 512), scales and zeros (E, groups, N). The size of a group follows from how
many there are.
"""

import jax
import jax.numpy as jnp

from ... import _host
from ..dense.matmul_int4_weights import group_size_of, weights_reference
from ..dense.matmul_mxfp4_weights import widened
from ..dense.pack import shape_of
from ..dense.split_rows import SplitRows
from ..grouped.ragged_dot_int4_weights import checked as checked_int4
from ..grouped.ragged_dot_int4_weights import default_config as default_config
from ..grouped.ragged_dot_int4_weights import grouped
from ..grouped.ragged_dot_mxfp4_weights import checked as checked_mxfp4
from ..grouped.ragged_dot_mxfp4_weights import default_config as default_mxfp4


def arrays_of(op: str, name: str, w):
    """`w` as an array, or as a tuple of arrays; zeros of None are left out."""
    if not isinstance(w, tuple):
        return _host.as_array(op, name, w)
    if not 2 <= len(w) <= 3:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name} has {len(w)} parts; must be an array, or (w, scales) or (w, scales, zeros) "
            "as the packers return them"
        )
    return tuple(_host.as_array(op, f"{name}[{i}]", part) for i, part in enumerate(w) if part is not None)


def is_mxfp4(w: tuple) -> bool:
    return w[1].dtype == jnp.uint16


def floats(w: tuple, k: int, dtype):
    """(E, K, N) weights; MXFP4's are exact."""
    if is_mxfp4(w):
        return widened(*w, dtype)[:, :k]

    def of_expert(words, scales, zeros=None):
        return weights_reference(words, scales, zeros, group_size_of(k, len(scales)), k, dtype)

    return jax.vmap(of_expert)(*w)


def takes_halves(w, rows: int, k: int, num_sms: int) -> bool:
    """Whether the product of so many rows of K and `w` is one in FP8, of `SplitRows`."""
    if not isinstance(w, tuple) or not is_mxfp4(w) or 0 in (rows, k, *w[1].shape):
        return False
    return default_mxfp4(rows, w[1].shape[-1], k, len(w[0]), num_sms).fp8


def product(rows, w: tuple, k: int, group_sizes, group_offset, bias):
    """As `ragged_dot`, with packed weights, plus the bias of each row's expert in float32, if there is one.

    `rows` of K values may be `SplitRows` where `takes_halves` says so.
    """
    if isinstance(rows, SplitRows):
        whole = jax.ShapeDtypeStruct((len(rows.halves), k), jnp.bfloat16)
        sizes, _, *others = checked_mxfp4("moe", whole, *w)
        operands = sizes, rows, *others
        return grouped("moe", *operands, group_sizes, group_offset, bias=bias, out_dtype=whole.dtype)
    if is_mxfp4(w):
        operands = checked_mxfp4("moe", rows, *w)
    else:
        words, scales, *zeros = w
        group_size = group_size_of(rows.shape[1], scales.shape[-2] if scales.ndim == 3 else 0)
        operands = checked_int4("moe", rows, words, scales, zeros[0] if zeros else None, group_size)
    return grouped("moe", *operands, group_sizes, group_offset, bias=bias)


def sizes_of(op: str, x, w_gate_up, w_down) -> tuple[int, int]:
    """E and I of checked weights; the products check the rest."""
    if not (isinstance(w_gate_up, tuple) and isinstance(w_down, tuple)):
        raise ValueError(f"{_host.PACKAGE}.{op}: w_gate_up and w_down must both be arrays, or both be packed")
    for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if is_mxfp4(w) and len(w) == 3:
            raise ValueError(
                f"{_host.PACKAGE}.{op}: {name} has scales of uint16, as MXFP4, and zeros; must be (w, scales), because "
                "e2m1 values have no zero points, or integers with scales of a floating dtype"
            )
    hidden = x.shape[-1] if x.ndim else 0
    dtypes = (jnp.bfloat16,) if is_mxfp4(w_gate_up) or is_mxfp4(w_down) else (jnp.bfloat16, jnp.float16)
    if x.dtype not in dtypes:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise ValueError(f"{_host.PACKAGE}.{op}: {x.dtype=}; must be {names} beside these weights: cast it")
    gate_up, down = w_gate_up[1], w_down[1]
    shapes = f"{_host.PACKAGE}.{op}: w_gate_up[1].shape={gate_up.shape}, w_down[1].shape={down.shape}"
    if gate_up.ndim != 3 or down.ndim != 3:
        raise ValueError(f"{shapes}; scales must be (E, groups, columns), a matrix of weights for each expert")
    count, _, columns = gate_up.shape
    if hidden % 8:
        raise ValueError(f"{_host.PACKAGE}.{op}: x has rows of {hidden} values; must be a multiple of 8: pad them")
    if columns % 16 or (down.shape[0], down.shape[2]) != (count, hidden):
        raise ValueError(
            f"{shapes}; must be (E, groups, 2I) and (E, groups, {hidden}), of an I that is a multiple of 8: pad it"
        )
    for name, w, n, k in (("w_gate_up", w_gate_up, columns, hidden), ("w_down", w_down, hidden, columns // 2)):
        if w[0].shape != (blocks := (count, *shape_of(n, k))):
            raise ValueError(
                f"{_host.PACKAGE}.{op}: {name}[0].shape={w[0].shape}; must be {blocks}, blocks of 64 by 64 beside "
                "these scales: pack both together"
            )
    return count, columns // 2
