# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits from checkpoints, in the words that the kernels read: done once, before anything is multiplied.

`four_bits.py` says how they lie. Each function is made of array operations, so it runs anywhere, also inside `jax.jit`
(but for `g_idx`, whose values are checked); pass NumPy arrays to leave the checkpoint on the host until then.
"""

import jax
import jax.numpy as jnp

from ... import _host
from .four_bits import E2M1, E2M1_BIAS, PAIRS, UNIT, WORDS

NIBBLES = 8  # Weights in a 32-bit word of a checkpoint.
E2M1_MAGNITUDES = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0  # The codes 0 to 7; 8 to 15 are the same, negative.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # Which of 8 columns each nibble of a word holds, from the lowest one on.


def pack_int4(w: jax.Array) -> jax.Array:
    """Integers from -8 to 7 as `cookbook.matmul_int4_weights` reads them.

    Args:
      w: (..., K, N); int8, from -8 to 7. Inside `jax.jit` nobody can look: there the lowest four bits count.

    Returns:
      (..., ceil(N / 64), ceil(K / 64), 512); uint32. `cookbook.unpack_int4` is the inverse.

    Raises:
      ValueError: a rank or dtype is not supported, or an integer has more than 4 bits.
    """
    w = _of_kind("pack_int4", "w", w, "int8", jnp.int8)
    if w.ndim < 2:
        raise ValueError(f"{_host.PACKAGE}.pack_int4: {w.shape=}; must be (..., K, N)")
    if (
        w.size
        and not isinstance(w, jax.core.Tracer)
        and not (-8 <= (low := int(w.min())) <= (high := int(w.max())) <= 7)
    ):
        raise ValueError(
            f"{_host.PACKAGE}.pack_int4: w has integers from {low} to {high}; must be from -8 to 7: scale w"
        )
    return _words((w.mT + 8).astype(jnp.uint8) & 15, _of_integers)


def unpack_int4(words: jax.Array, k: int, n: int) -> jax.Array:
    """(..., K, N) int8 integers from -8 to 7, of what `cookbook.pack_int4` made of them.

    Args:
      words: (..., ceil(N / 64), ceil(K / 64), 512); uint32.
      k, n: K and N.

    Raises:
      ValueError: a rank or dtype is not supported, or `words` are of another K or N.
    """
    words = _of_kind("unpack_int4", "words", words, "uint32", jnp.uint32)
    if words.shape[-3:] != shape_of(n, k):
        raise ValueError(
            f"{_host.PACKAGE}.unpack_int4: {words.shape=}, {k=}, {n=}; must end with {shape_of(n, k)}, blocks of 64 by "
            "64"
        )
    return integers(words)[..., :n, :k].mT.astype(jnp.int8) - 8


def pack_int4_gptq(qweight, qzeros, scales, *, g_idx=None, zeros_less_one: bool = True):
    """The weights of a layer of a GPTQ checkpoint.

    Args:
      qweight: (K / 8, N); int32, of 8 values of K each, the first one lowest.
      qzeros: (G, N / 8); int32, of the zero points of 8 columns each, the first one lowest.
      scales: (G, N), of a floating dtype.
      g_idx: (K,), the group of each row, which must be in order; None for that.
      zeros_less_one: qzeros hold the zero points less 1, as the format "gptq" does; False for "gptq_v2".

    Returns:
      (w, scales, zeros), the arguments of `cookbook.matmul_int4_weights` of `group_size` K / G. Where all zeros are 8,
      as in symmetric checkpoints, leave them out: the kernel is faster then.

    Raises:
      ValueError: a rank, shape or dtype is not supported, or rows are not in the order of their groups.
    """
    op = "pack_int4_gptq"
    qweight = _of_kind(op, "qweight", qweight, "int32", jnp.int32, 2)
    k, n = qweight.shape[0] * NIBBLES, qweight.shape[1]
    zeros, scales = _of_groups(op, qzeros, scales, n, k, range(NIBBLES))
    if g_idx is not None:
        expected = jnp.arange(k) // (k // len(scales))
        if jnp.shape(g_idx) != (k,) or not bool((jnp.asarray(g_idx) == expected).all()):
            raise ValueError(
                f"{_host.PACKAGE}.{op}: g_idx must be None or arange({k}) // {k // len(scales)}, groups in order: sort "
                "the rows of unpacked weights by it, and x's columns alike"
            )
    values = nibbles(qweight.T, range(NIBBLES)).reshape(n, k)
    return _words(values, _of_integers), scales, (zeros + int(zeros_less_one)).astype(jnp.uint8)


def pack_int4_awq(qweight, qzeros, scales):
    """The weights of a layer of an AWQ checkpoint.

    Args:
      qweight: (K, N / 8); int32, of 8 columns each, in AWQ's order: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on.
      qzeros: (G, N / 8); int32, of zero points in the same order.
      scales: (G, N), of a floating dtype.

    Returns:
      (w, scales, zeros), the arguments of `cookbook.matmul_int4_weights` of `group_size` K / G.

    Raises:
      ValueError: a rank, shape or dtype is not supported.
    """
    op = "pack_int4_awq"
    qweight = _of_kind(op, "qweight", qweight, "int32", jnp.int32, 2)
    k, n = qweight.shape[0], qweight.shape[1] * NIBBLES
    zeros, scales = _of_groups(op, qzeros, scales, n, k, AWQ_ORDER)
    return _words(nibbles(qweight, AWQ_ORDER).reshape(k, n).T, _of_integers), scales, zeros


def pack_mxfp4(blocks, scales):
    """e2m1 weights and their e8m0 scales, as gpt-oss has them, as `cookbook.matmul_mxfp4_weights` reads them.

    Args:
      blocks: (..., N, K / 32, 16); uint8, of two values of K each, the first one in the lower bits.
      scales: (..., N, K / 32); uint8, the exponent of two of a scale, plus 127.

    Returns:
      (w, scales): (..., ceil(N / 64), ceil(K / 64), 512) uint32 and (..., ceil(K / 64), N) uint16. Scales from 2^-92
      to 2^20 are exact; weights of smaller ones lose bits. Products with larger ones may not be finite, and with the
      NaN 255 they are not.

    Raises:
      ValueError: a rank, shape or dtype is not supported.
    """
    op = "pack_mxfp4"
    blocks, scales = (_of_kind(op, name, x, "uint8", jnp.uint8) for name, x in (("blocks", blocks), ("scales", scales)))
    if blocks.ndim < 3 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {blocks.shape=}, {scales.shape=}; must be (..., N, K / 32, 16) and (..., N, K / 32)"
        )
    values = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape[:-1], 32 * scales.shape[-1])
    exponents = jnp.clip(scales.astype(jnp.int32) + E2M1_BIAS, 0, 255).astype(jnp.uint16)
    exponents = jnp.pad(exponents, [(0, 0)] * (scales.ndim - 1) + [(0, scales.shape[-1] % 2)])
    pairs = exponents.reshape(*exponents.shape[:-1], exponents.shape[-1] // 2, 2)
    return _words(values, _of_e2m1), (pairs[..., 0] | pairs[..., 1] << 8).mT


def shape_of(n: int, k: int) -> tuple[int, int, int]:
    """The shape of packed weights: blocks of columns, blocks of K, words of a block."""
    return -(-n // UNIT), -(-k // UNIT), WORDS


def _of_integers(pairs):
    """A word of four words of pairs, whose halves are numbers of 4 bits."""
    return sum(pair << (4 * i) for i, pair in enumerate(pairs))


def _of_e2m1(pairs):
    """As `_of_integers`, so that `E2M1.fours` has the values."""
    codes = [(pair & 0x00070007) << 2 | (pair & 0x00080008) << 4 for pair in pairs]
    first, last = codes[0] | codes[1] << 8, codes[2] | codes[3] << 8
    words, from_left = first, jnp.uint32(0x10101010)  # Bits of `last` that are held two places to their left.
    # Each bit of `last` is the xor of the bit that holds it and of another, which may hold a bit of `last` too. Such
    # chains have at most eight bits, and each turn corrects one more bit of every chain.
    for _ in range(8):
        wrong = last ^ E2M1.fours(words)[1]
        words = words ^ (wrong & ~from_left) >> 2 ^ (wrong & from_left) << 2
    return words


def in_blocks(words):
    """(..., N, 8 ceil(K / 64)) words, 8 for each 64 of K of a column: word 2 lane + part of each; as the kernels want
    them, (..., ceil(N / 64), ceil(K / 64), 512)."""
    *lead, n, count = words.shape
    across, along = -(-n // UNIT), count // 8
    words = jnp.pad(words, [(0, 0)] * len(lead) + [(0, -n % UNIT), (0, 0)])
    words = words.reshape(*lead, across, 4, 2, 8, along, 4, 2)  # (block, warp, next, row, block of K, lane, part).
    return _moved(words, (0, 4, 1, 3, 5, 2, 6)).reshape(*lead, across, along, WORDS)


def of_columns(blocks):
    """The inverse of `in_blocks`, of all columns of all blocks."""
    *lead, across, along, _ = blocks.shape
    blocks = blocks.reshape(*lead, across, along, 4, 8, 4, 2, 2)  # (block, block of K, warp, row, lane, next, part).
    return _moved(blocks, (0, 2, 5, 3, 1, 4, 6)).reshape(*lead, across * UNIT, along * 8)


def _moved(x, order):
    lead = x.ndim - len(order)
    return x.transpose(*range(lead), *(lead + axis for axis in order))


def _words(values, of_pairs):
    """(..., N, K) values of 4 bits in blocks of words, which `of_pairs` makes of their pairs."""
    *rows, k = values.shape
    along = -(-k // UNIT)
    values = jnp.pad(values.astype(jnp.uint32), [(0, 0)] * len(rows) + [(0, -k % UNIT)])
    units = values.reshape(*rows, along, 2, PAIRS, 4, 2)  # (block, part, pair, lane, half) of K.
    pairs = units[..., 0] | units[..., 1] << 16
    words = of_pairs([pairs[..., i, :] for i in range(PAIRS)])  # (block, part, lane).
    return in_blocks(words.swapaxes(-1, -2).reshape(*rows, 8 * along))


def _values(blocks, pairs_of):
    """The inverse of `_words`: `pairs_of` makes the pairs of words."""
    *rows, count = (words := of_columns(blocks)).shape
    words = words.reshape(*rows, count // 8, 4, 2).swapaxes(-1, -2)
    pairs = jnp.stack(pairs_of(words), axis=-2)
    return jnp.stack([pairs & 0xFFFF, pairs >> 16], axis=-1).reshape(*rows, count * 8)


def integers(words):
    """(..., N, K) integers from 0 to 15 of packed ones, N and K multiples of 64."""
    return _values(words, lambda words: [words >> (4 * i) & 0x000F000F for i in range(PAIRS)])


def e2m1(words):
    """(..., N, K) float32 values of packed e2m1 values, N and K multiples of 64."""
    codes = _values(words, lambda words: [fours >> by & 0x009C009C for fours in E2M1.fours(words) for by in (0, 8)])
    values = jnp.array(E2M1_MAGNITUDES, jnp.float32)[codes >> 2 & 7]
    return jnp.where(codes >> 7 & 1, -values, values)


def nibbles(words, order):
    """(..., 8) values of 4 bits of int32 words, of which nibble i holds number `order[i]`."""
    places = [4 * list(order).index(i) for i in range(NIBBLES)]
    return words[..., None].astype(jnp.uint32) >> jnp.array(places, jnp.uint32) & 15


def _of_groups(op: str, qzeros, scales, n: int, k: int, order):
    """The (G, N) zero points, uint8, and scales of a checkpoint."""
    qzeros, scales = _of_kind(op, "qzeros", qzeros, "int32", jnp.int32, 2), _host.as_array(op, "scales", scales)
    if n % NIBBLES or scales.ndim != 2 or scales.shape[1] != n or qzeros.shape != (len(scales), n // NIBBLES):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {qzeros.shape=}, {scales.shape=} beside {n} columns; must be (G, N / 8) and (G, N)"
        )
    if not len(scales) or k % len(scales):
        raise ValueError(f"{_host.PACKAGE}.{op}: {scales.shape=}; G must divide K, {k}")
    return nibbles(qzeros, order).reshape(scales.shape).astype(jnp.uint8), scales


def _of_kind(op: str, name: str, x, kind: str, dtype, rank: int | None = None):
    x = _host.as_array(op, name, x)
    if x.dtype != dtype or (rank is not None and x.ndim != rank):
        rule = f"must be {kind}" + (f" of rank {rank}" if rank else "")
        raise ValueError(f"{_host.PACKAGE}.{op}: {name} has shape {x.shape} and dtype {x.dtype}; {rule}")
    return x
