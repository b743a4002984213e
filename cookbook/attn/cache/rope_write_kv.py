# SPDX-License-Identifier: Apache-2.0
"""Rotates the queries and keys of new tokens, and writes keys and values into a paged KV cache: one kernel.

    q[t] = rotated(qkv[t, :N_q])
    k_pages[slot] = rotated(qkv[t, N_q : N_q + H])
    v_pages[slot] = qkv[t, N_q + H :]

    rotated(x)[i] = x[i] * cos[t, i] - x[i + D/2] * sin[t, i]        for i < D/2, of each head
    rotated(x)[i + D/2] = x[i + D/2] * cos[t, i] + x[i] * sin[t, i]

with slot = slot_mapping[t], place slot % page_size of page slot // page_size. Rows of pages of 8-bit floats are divided
by a scale of their head, cut at 448 and rounded to e4m3. With `q_norm` and `k_norm` the heads of
queries and keys are first divided by the root of their mean square and multiplied by these, as in Qwen3.

Shapes: qkv (T, N_q + 2 H, D), as one product with joined weights gives it; cos, sin (T, D/2) float32; k_pages, v_pages
(P, page_size, H, D); slot_mapping (T,) int32; q_norm, k_norm (D,); q (T, N_q, D). D is 64, 128 or 256; qkv and pages
are all bfloat16, float16 or float32, or pages are float8_e4m3fn. The arithmetic is float32, rounded once, to what pages
hold; values are moved bit by bit to pages of their dtype.

Role table: one warpgroup per block does everything for one token. It loads its slot and all its heads straight into
registers, the two halves of a head in one thread, and stores what it made of them. No barrier orders data: nothing is
shared. A slot below 0 (padding) or beyond the cache is skipped, as in `write_kv`; its queries are rotated all the same.

Bound by: memory (each value is read once and written once); for few tokens, the latency of one load and one store.

In place: an array of pages becomes a Ref inside, and XLA copies it first unless it is donated, or was made in the same
`jit` and is not used afterwards. Slots should be distinct (`cookbook.write_kv.check_slots`).

Not supported: rotation of neighbouring pairs or of a part of a head, differentiation, `jax.vmap`.
Chapter: notebooks/22_decode_step.ipynb. Source: Su et al., "RoFormer" (2021); Hugging Face's halves of a head.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import checks, references
from ..core import E4M3
from .pages_fp8 import page_scales, rounded

LANES, WARPS = 32, 4  # Threads of a warp, and warps of a warpgroup.
HEAD_DIMS = 64, 128, 256
VALUES_MAX = 32768  # Values of a token: 256 per thread.


def rope_write_kv_reference(
    qkv, cos, sin, k_pages, v_pages, slot_mapping, *, k_scale=None, v_scale=None, q_norm=None, k_norm=None, eps=1e-6
):
    def rotated(x, norm):
        x = x.astype(jnp.float32)
        if norm is not None:
            x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * norm.astype(jnp.float32)
        a, b = jnp.split(x, 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    num_kv = k_pages.shape[2]
    q, k, v = jnp.split(qkv, (qkv.shape[1] - 2 * num_kv, qkv.shape[1] - num_kv), axis=1)
    k_pages = references.written(k_pages, rotated(k, k_norm), slot_mapping, k_scale)
    v_pages = references.written(v_pages, v, slot_mapping, v_scale)
    return rotated(q, q_norm).astype(qkv.dtype), k_pages, v_pages


@dataclasses.dataclass(frozen=True)
class Heads:
    """Neighbouring heads of a token, and how the warpgroup holds them: `rows` at a time, `vec` values per load."""

    first: int
    count: int
    half: int  # Values of half a head.
    itemsize: int

    @property
    def vec(self) -> int:
        """Up to 16 bytes, but fewer if then some warps had no head."""
        least = self.half // LANES
        return max(
            (v for v in (1, 2, 4, 8) if least <= v <= 16 // self.itemsize and self._rows(v) <= self.count),
            default=least,
        )

    def _rows(self, vec: int) -> int:
        return WARPS * LANES * vec // self.half

    @property
    def rows(self) -> int:
        """Heads of a piece; 1 if there are fewer than four, and then each warp holds the same one."""
        return self._rows(self.vec) if self._rows(self.vec) <= self.count else 1

    @property
    def starts(self) -> list[int]:
        """The heads from which pieces begin. The last one is shifted back to end with the heads; what it shares with
        the one before is stored twice, by the same block and with the same bits."""
        return [min(i, self.count - self.rows) for i in range(0, self.count, self.rows)]

    @property
    def layout(self):
        """Each thread has `vec` neighbouring values of a half; of the other half the same."""
        if self.rows == 1:
            tiling = plgpu.Tiling(((1, self.half), (self.vec,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(WARPS),), lane_dims=(-2,), vector_dim=-1)
        return _device.lanes_layout(self.half // self.vec, self.half, self.vec)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.half

    def at(self, ref, row, start: int, part: int):
        """Half `part` of the heads from `start` on, of a row of (rows, heads, D) values."""
        return ref.at[row, pl.ds(start, self.rows), pl.ds(part * self.half, self.half)]

    def load(self, qkv_gmem, token):
        """Both halves of each piece."""
        load = lambda *where: _device.load(self.at(qkv_gmem, token, *where), self.layout)
        return [(load(self.first + start, 0), load(self.first + start, 1)) for start in self.starts]

    def shared(self, values_gmem):
        """Values that all heads share, as float32."""
        values = _device.load(values_gmem, self.layout.reduce(0))
        return _device.spread(values.astype(jnp.float32), 1, self.shape)

    def divided(self, pieces, scales_gmem):
        """Pieces as pages of 8-bit floats have them; `scales_gmem` has a number for each head."""

        def of_piece(start, halves):
            scales = _device.load(scales_gmem.at[pl.ds(start, self.rows)], self.layout.reduce(1))
            return rounded(halves, [_device.spread(scales, 0, self.shape)] * 2)

        return [of_piece(start, halves) for start, halves in zip(self.starts, pieces, strict=True)]

    def store(self, out_gmem, row, pieces):
        for start, halves in zip(self.starts, pieces, strict=True):
            for part, value in enumerate(halves):
                _device.store(self.at(out_gmem, row, start, part), value.astype(out_gmem.dtype))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of one launch."""

    num_slots: int
    q: Heads
    k: Heads
    v: Heads
    eps: float


def _normalised(heads: Heads, pieces, norm_gmem, eps: float):
    """The heads over the root of their mean square, times the norm's scale."""
    scales = [heads.shared(norm_gmem.at[pl.ds(part * heads.half, heads.half)]) for part in range(2)]
    normalised = []
    for halves in pieces:
        squares = jnp.sum(halves[0] * halves[0] + halves[1] * halves[1], axis=1)
        inverse = _device.spread(lax.rsqrt(squares * (0.5 / heads.half) + eps), 0, heads.shape)
        normalised.append([x * inverse * scale for x, scale in zip(halves, scales, strict=True)])
    return normalised


def _rotated(heads: Heads, pieces, cos_gmem, sin_gmem, norm_gmem, eps: float):
    pieces = [[x.astype(jnp.float32) for x in halves] for halves in pieces]
    if norm_gmem is not None:
        pieces = _normalised(heads, pieces, norm_gmem, eps)
    cos, sin = heads.shared(cos_gmem), heads.shared(sin_gmem)
    return [(a * cos - b * sin, b * cos + a * sin) for a, b in pieces]


def _kernel(qkv_gmem, cos_gmem, sin_gmem, slots_gmem, norms, scales, k_pages_gmem, v_pages_gmem, q_gmem, *, plan: Plan):
    token = lax.axis_index("block")
    slot = slots_gmem[token]
    q, k, v = (heads.load(qkv_gmem, token) for heads in (plan.q, plan.k, plan.v))
    # It waits for no copy, as there is none; but the compiler moves no load across it, to where its value is used.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    q_norm, k_norm = norms or (None, None)
    angles = cos_gmem.at[token], sin_gmem.at[token]
    k = _rotated(plan.k, k, *angles, k_norm, plan.eps)
    if scales:
        k, v = plan.k.divided(k, scales[0]), plan.v.divided(v, scales[1])

    @pl.when((slot >= 0) & (slot < plan.num_slots))
    def _():
        plan.k.store(k_pages_gmem, slot, k)
        plan.v.store(v_pages_gmem, slot, v)

    plan.q.store(q_gmem, token, _rotated(plan.q, q, *angles, q_norm, plan.eps))


@functools.partial(jax.jit, static_argnames=("eps", "params"))
def _call(qkv, cos, sin, k_pages, v_pages, slot_mapping, norms, scales, eps: float, params):
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv = k_pages.shape[2]
    num_q = num_heads - 2 * num_kv
    heads = lambda first, count: Heads(first, count, head_dim // 2, qkv.dtype.itemsize)
    slots = k_pages.shape[0] * k_pages.shape[1]
    plan = Plan(slots, heads(0, num_q), heads(num_q, num_kv), heads(num_q + num_kv, num_kv), eps)
    by_slot = [pages.reshape(slots, num_kv, head_dim) for pages in (k_pages, v_pages)]
    k_slots, v_slots = (_host.ref_of("rope_write_kv", pages) for pages in by_slot)
    q = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((num_tokens, num_q, head_dim), qkv.dtype),
        grid=(num_tokens,),
        grid_names=("block",),
        compiler_params=params,
    )(qkv, cos, sin, slot_mapping, norms, scales, k_slots, v_slots)
    q, k_slots, v_slots = _host.apart((q, jax.freeze(k_slots), jax.freeze(v_slots)))
    return q, k_slots.reshape(k_pages.shape), v_slots.reshape(v_pages.shape)


def _check(qkv, cos, sin, k_pages, v_pages, slot_mapping, norms):
    op = f"{_host.PACKAGE}.rope_write_kv"
    for name, x, axes in (
        ("qkv", qkv, "T, N_q + 2 H, D"), ("cos", cos, "T, D/2"), ("sin", sin, "T, D/2"),
        ("k_pages", k_pages, "P, page_size, H, D"), ("v_pages", v_pages, "P, page_size, H, D"),
        ("slot_mapping", slot_mapping, "T"), *((name, x, "D") for name, x in norms.items()),
    ):  # fmt: skip
        if x.ndim != len(axes.split(", ")):
            raise ValueError(f"{op}: {name} has shape {x.shape}; must be ({axes}): reshape it")
    num_tokens, num_heads, head_dim = qkv.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{op}: {head_dim=} of {qkv.shape=}; must be 64, 128 or 256: rotate in JAX, use write_kv")
    if num_heads <= 2 * k_pages.shape[2]:
        raise ValueError(f"{op}: {qkv.shape=} must have query heads beside 2 x {k_pages.shape[2]} of keys and values")
    if num_heads * head_dim > VALUES_MAX:
        raise ValueError(f"{op}: a token has {num_heads * head_dim} values; must be at most {VALUES_MAX}: split qkv")
    for name, x, shape in (
        ("cos", cos, (num_tokens, head_dim // 2)), ("sin", sin, (num_tokens, head_dim // 2)),
        ("k_pages", k_pages, (*k_pages.shape[:3], head_dim)), ("v_pages", v_pages, k_pages.shape),
        ("slot_mapping", slot_mapping, (num_tokens,)), *((name, x, (head_dim,)) for name, x in norms.items()),
    ):  # fmt: skip
        if x.shape != shape:
            raise ValueError(f"{op}: {name} has shape {x.shape}; must be {shape}, to go with {qkv.shape=}")
    for name, x in dict(qkv=qkv, **norms).items():
        if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise ValueError(f"{op}: {name}.dtype is {x.dtype}; must be bfloat16, float16 or float32: cast it")
    for name, x, dtype in (
        ("k_pages", k_pages, E4M3 if v_pages.dtype == E4M3 else qkv.dtype),
        ("v_pages", v_pages, E4M3 if k_pages.dtype == E4M3 else qkv.dtype), ("cos", cos, jnp.float32),
        ("sin", sin, jnp.float32), ("slot_mapping", slot_mapping, jnp.int32),
    ):  # fmt: skip
        if x.dtype != dtype:
            raise ValueError(f"{op}: {name}.dtype is {x.dtype}; must be {jnp.dtype(dtype)}: cast it")
    if k_pages.shape[0] * k_pages.shape[1] >= 2**31:
        raise ValueError(f"{op}: {k_pages.shape=} has 2**31 slots or more, beyond int32: use fewer pages")


def rope_write_kv(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pages: jax.Array | jax.Ref,
    v_pages: jax.Array | jax.Ref,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    **others,
) -> jax.Array | tuple[jax.Array, ...]:
    """Rotates queries and keys by their tokens' positions, and writes keys and values into a paged cache, in place.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      qkv: (T, N_q + 2 H, D) bfloat16, float16 or float32: heads of queries, of keys, of values. D is 64, 128 or 256.
      cos, sin: (T, D/2) float32: of the angles of each token's position.
      k_pages, v_pages: (P, page_size, H, D), of the dtype of `qkv`, or float8_e4m3fn.
      slot_mapping: (T,) int32, for each token page * page_size + offset; others are skipped, as in `write_kv`.
      k_scale, v_scale: with pages of float8_e4m3fn, by what rows are divided before they are cut at 448 and rounded: a
        float above 0, or (H,) of them; None for 1. A NaN stays one.
      q_norm, k_norm: (D,) of any of these dtypes: scales of the heads' RMS normalisation before; or None, both of them.
      eps: added to the mean of squares.
      others: arguments that other libraries have, such as `interleaved`, if they are None.

    Returns:
      The rotated queries, (T, N_q, D); and (k_pages, v_pages), written. Donate them to `jax.jit` (`donate_argnums`), or
      XLA copies both caches first.

    Raises:
      ValueError: a rank, shape or dtype is not supported, one norm is given alone, or pages vary over a mesh that
        `jax.shard_map` checks (give it check_vma=False); RuntimeError: no GPU.
    """
    checks.elsewhere("rope_write_kv", others)
    arrays = checks.arrays(
        "rope_write_kv", qkv=qkv, cos=cos, sin=sin, k_pages=k_pages, v_pages=v_pages, slot_mapping=slot_mapping
    )
    norms = {name: x for name, x in (("q_norm", q_norm), ("k_norm", k_norm)) if x is not None}
    if len(norms) == 1:
        raise ValueError(
            f"{_host.PACKAGE}.rope_write_kv: {next(iter(norms))} is given alone; give q_norm and k_norm, or none"
        )
    norms = {name: _host.as_array("rope_write_kv", name, x) for name, x in norms.items()}
    eps = _host.option("rope_write_kv", "eps", eps, float)
    _check(*arrays, norms)
    scales = page_scales("rope_write_kv", arrays[3], k_scale, v_scale)
    if 0 in (*arrays[0].shape, *arrays[3].shape):
        return (jnp.zeros_like(arrays[0][:, : arrays[0].shape[1] - 2 * arrays[3].shape[2]]), *arrays[3:5])
    _host.require_target("rope_write_kv")
    arrays[:5] = _host.without_gradient("rope_write_kv", "rope_write_kv_reference, of the same module,", *arrays[:5])
    call = functools.partial(_call, eps=eps, params=_host.compiler_params())
    return call(*arrays, tuple(norms.values()), scales)


def bytes_moved(num_tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Each value of qkv is read and written once, with pages of its dtype; angles and slots are read once."""
    return num_tokens * ((num_q_heads + 2 * num_kv_heads) * 2 * head_dim * itemsize + 4 * head_dim + 4)
