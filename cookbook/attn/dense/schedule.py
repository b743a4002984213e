# SPDX-License-Identifier: Apache-2.0
"""Which block of threads computes which tiles of dense attention, worked out by NumPy before the kernel is launched."""

import functools
import heapq

import numpy as np

TILE_COST = 1.5  # Steps that a tile costs beside its own.
MANY = 16  # Tiles of a block from which on it does not matter that not all blocks are done at the same time.


@functools.lru_cache
def dealt_out(steps: tuple[int, ...], num_heads: int, heads_together: int, num_blocks: int) -> tuple[float, np.ndarray]:
    """(time, table): when the last block is done, in steps; and for each block an int32 row: how many tiles it has,
    their numbers, and zeros after them.

    Tile `head * len(steps) + i` takes `steps[i]`. Among every `heads_together` heads the longest tiles come first; each
    tile goes to the block that is done with its tiles first.
    """
    heads, i = np.divmod(np.arange(num_heads * len(steps)), len(steps))
    order = np.lexsort((heads, -np.array(steps)[i], heads // heads_together))
    tiles: list[list[int]] = [[] for _ in range(min(num_blocks, len(order)))]
    done = [(0.0, block) for block in range(len(tiles))]
    for tile in order:
        time, block = heapq.heappop(done)
        tiles[block].append(tile)
        heapq.heappush(done, (time + steps[i[tile]] + TILE_COST, block))
    table = np.zeros((len(tiles), 2 + max(map(len, tiles))), np.int32)
    for row, mine in zip(table, tiles, strict=True):
        row[: 1 + len(mine)] = len(mine), *mine
    return max(done)[0], table


def table(steps: tuple[int, ...], num_heads: int, num_blocks: int) -> tuple[float, np.ndarray]:
    """`dealt_out` such that blocks work on few heads at a time, so that the L2 cache keeps the heads' keys."""
    heads_together = max(1, round(num_blocks / len(steps)))
    deals = [
        dealt_out(steps, num_heads, heads_together * times, num_blocks)
        for times in ((1, 2, 4) if len(set(steps)) > 1 else (1,))
    ]
    # Fewer heads at a time stay in the L2 cache better: twice as many have to gain half a percent.
    return min((time * (1 + 0.005 * i), i, (time, table)) for i, (time, table) in enumerate(deals))[-1]


def time(steps: tuple[int, ...], num_heads: int, num_blocks: int) -> float:
    """When the last block is done, in steps; where each has many tiles, by their sum."""
    if num_heads * len(steps) > MANY * num_blocks:
        return num_heads * sum(count + TILE_COST for count in steps) / num_blocks
    return table(steps, num_heads, num_blocks)[0]
