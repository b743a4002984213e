# SPDX-License-Identifier: Apache-2.0
"""Where the rows of an all-to-all lie, worked out from everybody's sizes, of traced integers or of Python's.

The rows that one device sends to another are a segment. They lie one after the other in the sender's x and in the
receiver's result. Each block copies some pieces of each segment.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from .. import _device, _host
from .._device import Index
from . import core, protocol
from .core import Config


def cut(sizes, room: int):
    """`sizes` cut, in order, to what fits into `room` rows. Negative sizes count as 0."""
    sizes = jnp.clip(sizes, 0, min(room, jnp.iinfo(sizes.dtype).max)).astype(jnp.int32)
    ends = jnp.minimum(jnp.cumsum(sizes), room)
    return jnp.diff(ends, prepend=0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of an exchange. A row is cut into `parts` units of `width` values, and all is counted in units."""

    n: int  # Devices.
    rows: int  # Rows of x.
    capacity: int  # Rows of the result.
    width: int
    parts: int
    pieces: tuple[int, ...]  # Units that one copy may have, powers of 2, the largest first.
    num_blocks: int

    @property
    def values(self) -> int:
        """Values of a row."""
        return self.parts * self.width

    def shares(self, segments, block) -> "Shares":
        return Shares(self, tuple(segments), block)


def plan(n: int, rows: int, capacity: int, values: int, dtype, config: Config) -> Plan:
    """The plan for rows of `values` values. Small problems are cut finer, so that every block has a piece."""
    of = 16 // dtype.itemsize  # TMA copies multiples of 16 bytes.
    divisors = [width for width in range(of, min(values, core.WIDTH) + 1, of) if values % width == 0]
    if not divisors or divisors[-1] < min(values, 64):
        values = _host.padded_shape((values,), (of if values <= core.WIDTH else core.WIDTH,))[0]
        divisors = [min(values, core.WIDTH)]
    width, parts = divisors[-1], values // divisors[-1]
    fits = config.stage_bytes // (2 * width * dtype.itemsize)  # The two warpgroups share a stage.
    if fits < 1:
        raise ValueError(
            f"{config.stage_bytes=}: must be at least {2 * width * dtype.itemsize} for rows of {values} values of "
            f"{dtype}: {width} values a piece"
        )
    share = pl.cdiv(max(rows, capacity) * parts, n * config.num_blocks)
    most = min(fits, max(share, parts), 256)
    least = min(most, parts)  # No segment is shorter than a row.
    pieces = [2**i for i in range(most.bit_length() - 1, least.bit_length() - 2, -1)]
    return Plan(n, rows, capacity, width, parts, tuple(pieces), config.num_blocks)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Units that lie one after the other in the array of one device and in the result of another."""

    peer: Index
    source: Index
    target: Index
    length: Index


def _pair(plan: Plan, sizes, q, p):
    """The rows that device `q` sends to device `p`: (where they begin in x, where in the result, how many fit)."""
    start = sum((r < p) * sizes(q, r) for r in range(plan.n))
    before = jnp.minimum(sum((r < q) * sizes(r, p) for r in range(plan.n)), plan.capacity)
    return start, before, jnp.minimum(sizes(q, p), plan.capacity - before)


def routes(plan: Plan, sizes, d, is_transposed: bool):
    """(what device `d` sends to its peers; what it writes itself: the rows that stay, and zeros after each part).

    `sizes(q, p)` rows go from device q to device p; with `is_transposed` they go back, to where they came from. Zeros
    are read from beyond the end of the array, where TMA finds nothing else.
    """
    scale = lambda *rows: [row * plan.parts for row in rows]

    def to(p):
        start, before, length = _pair(plan, sizes, p, d) if is_transposed else _pair(plan, sizes, d, p)
        source, target = (before, start) if is_transposed else (start, before)
        return Segment(p, *scale(source, target, length))

    def zeros():
        """After each device's rows, up to the next one's."""
        own = lambda q: _pair(plan, sizes, d, q) if is_transposed else _pair(plan, sizes, q, d)
        parts = [(start if is_transposed else before, length) for start, before, length in map(own, range(plan.n))]
        starts = [start for start, _ in parts[1:]] + [plan.rows if is_transposed else plan.capacity]
        beyond = plan.capacity if is_transposed else plan.rows
        for (start, length), after in zip(parts, starts, strict=True):
            yield Segment(d, *scale(beyond, start + length, after - start - length))

    return [to(protocol.peer(d, plan.n, k)) for k in range(1, plan.n)], [to(d), *zeros()]


@dataclasses.dataclass(frozen=True)
class Shares:
    """The pieces of several segments that one block copies, numbered from 0.

    The pieces of a segment have the largest size that is no longer than it. The last one is shifted back to end with
    the segment; what it shares with the piece before is copied twice. Blocks begin with different segments, so that a
    device sends to all others at the same time.
    """

    plan: Plan
    segments: tuple[Segment, ...]
    block: Index

    @functools.cached_property
    def _columns(self):
        """(size of a piece, this block's first piece, its pieces before) of each segment; and all its pieces."""
        columns, before = [], 0
        for k, segment in enumerate(self.segments):
            size = self.plan.pieces[-1]
            for larger in self.plan.pieces[-2::-1]:
                size = jnp.where(segment.length >= larger, larger, size)
            first = _device.rem(self.block + k, self.plan.num_blocks)
            number = _device.div(segment.length + size - 1, size)
            columns.append((size, first, before))
            before = before + _device.div(number - first + self.plan.num_blocks - 1, self.plan.num_blocks)
        return columns, before

    @property
    def num_rounds(self):
        return self._columns[1]

    def piece(self, t):
        """(peer, first unit in the source, first unit in the target, units, its number) of round `t`."""
        columns, total = self._columns
        turn = _device.rem(self.block, len(self.segments))
        begin = sum((turn == k) * before for k, (_, _, before) in enumerate(columns))
        t = _device.rem(t + begin, total)
        chosen = [(*vars(s).values(), *column) for s, column in zip(self.segments, columns, strict=True)]
        found = chosen[0]
        for values in chosen[1:]:
            found = [jnp.where(t >= values[-1], value, old) for value, old in zip(values, found, strict=True)]
        peer, source, target, length, size, first, before = found
        number = first + (t - before) * self.plan.num_blocks
        start = jnp.minimum(number * size, length - size)
        return peer, source + start, target + start, size, number
