# SPDX-License-Identifier: Apache-2.0
"""Pages of 8-bit floats: their scales, and how kernels round to them and widen them."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..core import E4M3

E4M3_MAX = 448.0


def page_scales(op: str, k_pages, k_scale, v_scale) -> tuple:
    """(k_scale, v_scale) of 8-bit pages, each float32 (kv_heads,), or () for others.

    Raises:
      ValueError: they are no floats, one or one for each head; or pages have no scale.
    """
    given, num_heads = dict(k_scale=k_scale, v_scale=v_scale), k_pages.shape[2]
    if k_pages.dtype != E4M3:
        for name, scale in given.items():
            if scale is not None:
                raise ValueError(
                    f"{_host.PACKAGE}.{op}: {name} is for pages of float8_e4m3fn; these are {k_pages.dtype}"
                )
        return ()
    return tuple(head_scale(op, name, scale, num_heads) for name, scale in given.items())


def head_scale(op: str, name: str, scale, num_heads: int):
    """The number that a stored 1 of each head stands for, float32 (num_heads,); 1 where `scale` is None."""
    scale = _host.as_array(op, name, 1.0 if scale is None else scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating) or scale.shape not in ((), (1,), (num_heads,)):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name} is {scale.dtype} {scale.shape}; must be one float, or {num_heads}, one for "
            "each head"
        )
    return jnp.broadcast_to(scale.astype(jnp.float32), (num_heads,))


def rounded(values, scales):
    """Values as the cache has them."""
    wide = [value.astype(jnp.float32) / scale for value, scale in zip(values, scales, strict=True)]
    # Without it a GPU would cut at the end of e4m3, too, and the interpreter make NaN of what is beyond.
    return [jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(E4M3) for x in wide]


def widen(narrow, wide, seen=None, rows: int = 64):
    """Copies rows of e4m3 as wider numbers; with `seen`, (first, end), zeros in place of the rows outside. A thread
    takes 8 neighbours, which it reads as one word of 8 bytes."""
    columns = min(128, narrow.shape[1])  # The part of a row that is swizzled together.
    layout = _device.lanes_layout(columns // 8, columns, 8)
    for row in range(0, narrow.shape[0], rows):
        some = pl.ds(row, rows)
        values = plgpu.load(narrow.at[some], layout=layout).astype(jnp.float16)
        if wide.dtype != jnp.float16:
            values = values.astype(jnp.float32).astype(wide.dtype)
        if seen is not None:
            index = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout) + row
            values = jnp.where((index >= seen[0]) & (index < seen[1]), values, jnp.zeros((), values.dtype))
        wide[some] = values
