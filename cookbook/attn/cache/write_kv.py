# SPDX-License-Identifier: Apache-2.0
"""Writes the keys and values of new tokens into a paged KV cache, in place.

    k_pages[slot // page_size, slot % page_size] = k_new[t]     for slot = slot_mapping[t], and so for v

Shapes: k_new, v_new (T, H, D); k_pages, v_pages (P, page_size, H, D), vLLM's layout; slot_mapping (T,) int32. D is a
multiple of 8 and H * D at most 65536; the rest is free. bfloat16, float16 or float32, one dtype for all four: bits are
moved, not values, so a NaN stays the NaN that it was. Or the cache is float8_e4m3fn: rows are divided by their heads'
scales, cut at 448, the largest number, and rounded.

A slot below 0 (padding) or beyond the cache is skipped: each store stands under a comparison of its slot with both
bounds, so no address is made of such a slot. The row of k_new and v_new is read all the same.

Other names of the arguments:

    here           flash-attn (with_kvcache)  vLLM (reshape_and_cache_flash)  FlashInfer (append_paged_kv_cache)
    k_new, v_new   k, v                       key, value                      append_key, append_value
    k_pages        k_cache                    key_cache                       paged_kv_cache[0], "NHD"
    v_pages        v_cache                    value_cache                     paged_kv_cache[1], "NHD"
    slot_mapping   cache_seqlens              slot_mapping                    batch_indices, positions, kv_indices

Role table: one warpgroup per block takes a few tokens. It loads their slots, and their rows straight into registers
without waiting for the slots; then it stores each row where its slot says. No barrier orders data: nothing is shared,
so shared memory would be a detour.

Bound by: memory (each new row is read once and written once); for few tokens, the latency of one load and one store.
Rows of fewer than 1024 16-bit values are moved in words of less than 16 bytes per thread.

In place: the kernel writes to Refs. An array becomes one inside, and XLA copies it first unless it is donated, or was
made in the same `jit` and is not used afterwards. A `jax.new_ref` of the caller's is never copied.

Slots should be distinct. Which of two tokens with one slot wins is undefined, and the slot may get parts of both: it
depends on the order in which blocks run, and for the later one to win each block would have to read all slots.
`cookbook.write_kv.check_slots` finds such tokens, on the host.

Under `jax.shard_map`, with `check_vma=False`. Not supported: tokens and cache of different dtypes of 16 or 32 bits,
differentiation, `jax.vmap`.
Source: `reshape_and_cache_flash` of vLLM.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import checks, references
from ..core import E4M3
from .pages_fp8 import page_scales, rounded

WARPGROUP = 128  # Threads in a warpgroup.
LOADS = 8  # Loads of k that a thread has in flight, and as many of v: 64 registers at 16 bytes a load.


def write_kv_reference(k_new, v_new, k_pages, v_pages, slot_mapping, *, k_scale=1.0, v_scale=1.0):
    """(k_pages, v_pages) with the new rows in their slots."""
    of = lambda pages, new, scale: references.written(pages, new, slot_mapping, scale)
    return of(k_pages, k_new, k_scale), of(v_pages, v_new, v_scale)


@dataclasses.dataclass(frozen=True)
class Config:
    block_tokens: int  # Tokens per block. More: more loads in flight at a time. 1: few tokens spread over all SMs.

    def __post_init__(self):
        if not 1 <= self.block_tokens <= LOADS:
            raise ValueError(f"{self.block_tokens=}: must be from 1 to {LOADS}; a thread holds a part of each row")


def default_config(num_tokens: int, cols: int, itemsize: int) -> Config:
    """The configuration for `num_tokens` rows of `cols` values of `itemsize` bytes, worked out, not measured.

    Up to 2048 tokens, one per block: an SM holds 16 blocks of 128 threads and an H200 2112, so all start at once.
    Above, four per block: latency is covered by about 25 KB of loads in flight on each SM (4.8 TB/s for 0.7 us over 132
    SMs), and 16 blocks with four rows of k and v have 32 KB at only 128 16-bit values per row. Long rows need no
    company.
    """
    return Config(4 if num_tokens > 2048 and 4 * len(pieces(cols, itemsize)) <= LOADS else 1)


def pieces(cols: int, itemsize: int) -> list[tuple[int, int]]:
    """A row as (start, length) of what the warpgroup moves at once: 16 bytes per thread while as much is left, then
    8, and so on down to one value. The last piece is shifted back to end with the row; what it shares with the one
    before is stored twice, by the same block and with the same bits."""
    shortest = min(WARPGROUP, 1 << (cols.bit_length() - 1))
    found, start, length = [], 0, WARPGROUP * 16 // itemsize
    while start < cols:
        while length > max(cols - start, shortest):
            length //= 2
        start = min(start, cols - length)
        found.append((start, length))
        start += length
    return found


def _layout(length: int):
    if length >= WARPGROUP:
        return plgpu.Layout.WG_STRIDED((length,), length // WARPGROUP)
    # Too short for all threads: what one warp holds, or some of its lanes, the others hold and store as well.
    lanes = min(length, 32)
    lane_dims = (-2,) if lanes == 32 else (plgpu.Replicated(32 // lanes), -2)
    tiling = plgpu.Tiling(((length,), (length // lanes,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=lane_dims, vector_dim=-1)


def _check(k_new, v_new, k_pages, v_pages, slot_mapping):
    op, new, pages = f"{_host.PACKAGE}.write_kv", "T, H, D", "P, page_size, H, D"
    caches = dict(k_pages=k_pages, v_pages=v_pages)
    if isinstance(k_pages, jax.Ref) != isinstance(v_pages, jax.Ref):
        raise ValueError(f"{op}: one of k_pages and v_pages is a Ref; make both Refs (jax.new_ref) or both arrays")
    for name, x, axes in (
        ("k_new", k_new, new), ("v_new", v_new, new), *((name, x, pages) for name, x in caches.items()),
        ("slot_mapping", slot_mapping, "T"),
    ):  # fmt: skip
        if len(x.shape) != len(axes.split(", ")):
            raise ValueError(f"{op}: {name} has shape {x.shape}; must be ({axes}): reshape it")
    num_tokens, heads, head_dim = k_new.shape
    for name, x, shape in (
        ("v_new", v_new, k_new.shape),
        ("k_pages", k_pages, (*k_pages.shape[:2], heads, head_dim)),
        ("v_pages", v_pages, k_pages.shape),
        ("slot_mapping", slot_mapping, (num_tokens,)),
    ):
        if x.shape != shape:
            raise ValueError(f"{op}: {name} has shape {x.shape}; must be {shape}, to go with {k_new.shape=}")
    narrow = k_pages.dtype == E4M3 == v_pages.dtype
    for name, x in dict(k_new=k_new, v_new=v_new, **({} if narrow else caches)).items():
        if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise ValueError(f"{op}: {name}.dtype is {x.dtype}; must be bfloat16, float16 or float32: cast it")
        if x.dtype != (k_new if narrow else k_pages).dtype:
            raise ValueError(f"{op}: {name}.dtype is {x.dtype} and {k_pages.dtype=}; must be the same: cast {name}")
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(f"{op}: {slot_mapping.dtype=}; must be int32: cast it")
    if head_dim % 8:
        raise ValueError(f"{op}: {head_dim=}; must be a multiple of 8: pad the last axis (jnp.pad)")
    if heads * head_dim > 65536:
        raise ValueError(f"{op}: H * D is {heads * head_dim}; must be at most 65536: write the heads in parts")
    if k_pages.shape[0] * k_pages.shape[1] >= 2**31:
        raise ValueError(f"{op}: {k_pages.shape=} has 2**31 slots or more, beyond int32: use fewer pages")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of one launch."""

    num_tokens: int
    num_slots: int
    cols: int  # Values of a row: all heads of one token.
    itemsize: int  # Bytes of a value.
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        return pl.cdiv(self.num_tokens, self.block_tokens)

    @property
    def groups(self) -> list[list[tuple[int, int]]]:
        """The pieces of a row in groups: registers hold one group of the rows of all tokens of the block at a time."""
        all_pieces, size = pieces(self.cols, self.itemsize), LOADS // self.block_tokens
        return [all_pieces[i : i + size] for i in range(0, len(all_pieces), size)]


def _load(new_gmem, token, group):
    at = lambda start, length: new_gmem.at[token, pl.ds(start, length)]
    return [_device.load(at(*piece), _layout(piece[1])) for piece in group]


def _store(pages_gmem, slot, group, values):
    for (start, length), value in zip(group, values, strict=True):
        _device.store(pages_gmem.at[slot, pl.ds(start, length)], value)


def _is_slot(slot, num_slots: int):
    return (slot >= 0) & (slot < num_slots)


def _loads_first():
    """Waits for no copy, as there is none; but the compiler moves no load across it. It would move the rows' loads to
    where they are used, after the comparison of the slots: two latencies in place of one."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _kernel(k_new_gmem, v_new_gmem, slots_gmem, *scales_and_pages, plan: Plan):
    *scales_gmem, k_pages_gmem, v_pages_gmem = scales_and_pages
    first = lax.axis_index("block") * plan.block_tokens
    # Where the last block has fewer tokens, it takes the last one again: the same threads store the same bits.
    tokens = [jnp.minimum(first + i, plan.num_tokens - 1) for i in range(plan.block_tokens)]
    slots = [slots_gmem[token] for token in tokens]
    for group in plan.groups:
        rows = [(_load(k_new_gmem, token, group), _load(v_new_gmem, token, group)) for token in tokens]
        scales = [_load(scale, 0, group) for scale in scales_gmem]
        _loads_first()
        for slot, (k, v) in zip(slots, rows, strict=True):

            @pl.when(_is_slot(slot, plan.num_slots))
            def _(slot=slot, k=k, v=v, group=group, scales=scales):
                if scales:
                    k, v = rounded(k, scales[0]), rounded(v, scales[1])
                _store(k_pages_gmem, slot, group, k)
                _store(v_pages_gmem, slot, group, v)


@functools.partial(jax.jit, static_argnames=("config", "params"))
def _call(k_new, v_new, k_pages, v_pages, slot_mapping, scales: tuple, config: Config | None, params):
    """From arrays to arrays. The reshapes join neighbouring axes, which moves nothing."""
    num_tokens, cols, itemsize = len(k_new), k_new.shape[1] * k_new.shape[2], k_new.dtype.itemsize
    config = config or default_config(num_tokens, cols, itemsize)
    plan = Plan(num_tokens, k_pages.shape[0] * k_pages.shape[1], cols, itemsize, config.block_tokens)
    k_slots, v_slots = (_host.ref_of("write_kv", pages.reshape(-1, cols)) for pages in (k_pages, v_pages))
    _host.kernel(
        functools.partial(_kernel, plan=plan),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        compiler_params=params,
    )(
        k_new.reshape(-1, cols), v_new.reshape(-1, cols), slot_mapping,
        *[jnp.repeat(scale, k_new.shape[2])[None] for scale in scales], k_slots, v_slots,
    )  # fmt: skip
    k_slots, v_slots = _host.apart((jax.freeze(k_slots), jax.freeze(v_slots)))
    return k_slots.reshape(k_pages.shape), v_slots.reshape(v_pages.shape)


@functools.partial(jax.jit, static_argnames=("config", "params"))
def _call_on_refs(k_new, v_new, k_pages, v_pages, slot_mapping, scales: tuple, config: Config | None, params):
    """Inside `jit` a Ref is the value that it has at the time, and XLA gives all its values one buffer: no copies."""
    caches = k_pages[...], v_pages[...]
    k_pages[...], v_pages[...] = _call(k_new, v_new, *caches, slot_mapping, scales, config, params)


def write_kv(
    k_new: jax.Array,
    v_new: jax.Array,
    k_pages: jax.Array | jax.Ref,
    v_pages: jax.Array | jax.Ref,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    config: Config | None = None,
    **others,
) -> tuple[jax.Array, jax.Array] | None:
    """Writes the keys and values of new tokens into a paged cache, in place: `reshape_and_cache_flash` of vLLM.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      k_new, v_new: (T, H, D) bfloat16, float16 or float32, D a multiple of 8 and H * D at most 65536.
      k_pages, v_pages: (P, page_size, H, D) of the same dtype, or of float8_e4m3fn; both arrays, or both Refs
        (`jax.new_ref`).
      slot_mapping: (T,) int32, for each token page * page_size + offset. A token with a negative slot (padding), or one
        beyond the cache, is skipped. Slots should be distinct: of two tokens with one slot it is undefined which is
        written, or parts of both (`cookbook.write_kv.check_slots` looks, on the host).
      k_scale, v_scale: with pages of float8_e4m3fn, by what rows are divided before they are cut at 448 and rounded: a
        float above 0, or (H,) of them; None for 1. A NaN stays one.
      config: tokens per block; None chooses by shape.
      others: arguments that other libraries have, such as `kv_cache_dtype`, if they are None.

    Returns:
      (k_pages, v_pages), written. Donate them to `jax.jit` (`donate_argnums`), or XLA copies both caches first. With
      Refs: None, and the Refs are written; nothing is copied.

    Raises:
      ValueError: a rank, shape or dtype is not supported, one cache alone is a Ref, or caches vary over a mesh that
        `jax.shard_map` checks (give it check_vma=False); RuntimeError: no GPU.
    """
    checks.elsewhere("write_kv", others)
    config = _host.require_config("write_kv", config, Config)
    k_new, v_new, slot_mapping = checks.arrays("write_kv", k_new=k_new, v_new=v_new, slot_mapping=slot_mapping)
    by_ref = isinstance(k_pages, jax.Ref) or isinstance(v_pages, jax.Ref)
    for name, pages in dict(k_pages=k_pages, v_pages=v_pages).items():
        if isinstance(pages, jax.Ref):
            _host.require_local("write_kv", name, pages)
    if not by_ref:
        k_pages, v_pages = checks.arrays("write_kv", k_pages=k_pages, v_pages=v_pages)
    _check(k_new, v_new, k_pages, v_pages, slot_mapping)
    scales = page_scales("write_kv", k_pages, k_scale, v_scale)
    if 0 in (*k_new.shape, *k_pages.shape):
        return None if by_ref else (k_pages, v_pages)
    _host.require_target("write_kv")
    refuse = functools.partial(_host.without_gradient, "write_kv", "k_pages.at[page, offset].set(k_new)")
    k_new, v_new = refuse(k_new, v_new)
    if not by_ref:
        k_pages, v_pages = refuse(k_pages, v_pages)
    call = _call_on_refs if by_ref else _call
    return call(k_new, v_new, k_pages, v_pages, slot_mapping, scales, config, _host.compiler_params())


def check_slots(slot_mapping, num_slots: int):
    """Looks, on the host, for what `write_kv` would skip or leave undefined. Negative slots are padding, and right.

    Args:
      slot_mapping: (T,) integers, an array of NumPy's or a concrete one of JAX's.
      num_slots: P * page_size of the cache.

    Raises:
      ValueError: a slot is beyond the cache, or two tokens share one; the first such token is named.
    """
    slots = np.asarray(slot_mapping)
    if slots.ndim != 1 or slots.dtype.kind not in "iu":
        raise ValueError(f"check_slots: slot_mapping is {slots.dtype}{slots.shape}; must be a vector of integers")
    if (beyond := np.flatnonzero(slots >= num_slots)).size:
        token = beyond[0]
        raise ValueError(
            f"check_slots: slot_mapping[{token}] is {slots[token]}; must be below {num_slots=}, or negative to skip it"
        )
    first_with = np.unique(slots, return_index=True)[1]
    repeats = np.setdiff1d(np.flatnonzero(slots >= 0), first_with)
    if repeats.size:
        token = repeats[0]
        raise ValueError(
            f"check_slots: slot_mapping[{token}] is {slots[token]}, as is slot_mapping"
            f"[{np.flatnonzero(slots == slots[token])[0]}]; slots must be distinct: give all but one a negative slot"
        )


write_kv.Config, write_kv.check_slots = Config, check_slots  # `cookbook.write_kv` is that function, not its module.


def bytes_moved(num_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int, page_itemsize: int = 0) -> int:
    """Each new row of k and of v is read once and written once, in `page_itemsize` bytes per value if fewer;
    slots are read once."""
    return num_tokens * (2 * num_kv_heads * head_dim * (itemsize + (page_itemsize or itemsize)) + 4)
