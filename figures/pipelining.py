"""Figures of chapter 6: pipelining."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from figures._chart import LOAD, MULTIPLY, bar, chart, label, numbered, tile, tracks
from figures._draw import BLUE, GREEN, INK, RED, SKY, places
from lab import plot


def _windows(ax, left, top, rows, columns, name, windows):
    """A matrix cut into tiles; `windows` are those that the pipeline visits, in order."""
    for row, column in places(rows, columns):
        tile(ax, left + column, top + row, 1, 1, "none", edgecolor=plot.FAINT)
    for ki, (row, column) in enumerate(windows):
        colour, ink = ((BLUE, plot.CARD), (SKY, INK))[ki % 2]
        text = f"ki={ki}"
        if len(windows) == 1:
            colour, text = RED, "tile"
        tile(ax, left + column, top + row, 1, 1, colour, text, ink=ink, edgecolor=plot.CARD)
    ax.text(left, top - 0.25, name, fontweight="bold")


@chart(height=3.3)
def pipeline_blockspec(ax):
    """Two block specs: the shape of a window, and where it stands at each step of the pipeline's grid."""
    steps = 5
    _windows(ax, 0, 0, 3, steps, "A (M, K)", [(1, ki) for ki in range(steps)])
    _windows(ax, 6.2, 0, steps, 4, "B (K, N)", [(ki, 2) for ki in range(steps)])
    _windows(ax, 11.5, 0, 3, 4, "C (M, N)", [(1, 2)])
    ax.text(0, 3.3, "BlockSpec((tile_m, TILE_K),\n    lambda ki: (mi, ki))", family="monospace", va="top", fontsize=8)
    ax.text(11.5, 3.3, "stays in registers\nfor all steps", va="top", fontsize=8)
    text = "BlockSpec((TILE_K, tile_n),\n    lambda ki: (ki, ni))"
    ax.text(6.2, steps + 0.3, text, family="monospace", va="top", fontsize=8)
    ax.set(xlim=(-0.2, 15.8), ylim=(steps + 1.3, -0.6), aspect="equal")
    ax.axis("off")


STAGES = 3
# In units of one step's product: about as measured, and short enough for three stages to keep a product queued.
LOAD_TIME, FAST_LOAD_TIME = 2.2, 1.5


def _units(load: float) -> str:
    return f"time, in units of one step's product (a load takes {load})"


@chart(height=6.6, nrows=3, sharex=True)
def pipeline_stage_lifetime(axes):
    """Owners of a stage of a ring in time: three ways to release it, one of them a race that nothing reports."""
    cases = (
        (0, 0, "delay_release=0, wgmma_wait(0): right, but the tensor core idles between two steps"),
        (1, 1, "delay_release=1, wgmma_wait(1): right; product i + 1 is queued before product i ends"),
        (0, 1, "delay_release=0, wgmma_wait(1): WRONG; TMA writes where the tensor core still reads"),
    )
    for ax, (delay_release, wait, title) in zip(axes, cases, strict=True):
        _lifetimes(ax, schedule(9, STAGES, delay_release=delay_release, wait=wait, load=FAST_LOAD_TIME, gap=0.3))
        tracks(ax, _ring_of(STAGES), title)
    axes[-1].set(xlim=(0, 8.8), xlabel=_units(FAST_LOAD_TIME))


def _ring_of(stages: int) -> list[str]:
    """The rows of a schedule of a ring: its stages, and the tensor core."""
    return [*numbered("stage", stages), "tensor core"]


@dataclasses.dataclass(frozen=True)
class Step:
    """Start and end of a step's load and of its product, in units of one product."""

    load_start: float
    load_end: float
    mma_start: float
    mma_end: float


def schedule(steps: int, stages: int, *, delay_release=0, wait=0, load=LOAD_TIME, gap=0.0) -> list[Step]:
    """Simulates one block: the loads overlap each other, the products run one after another.

    Args:
      steps: of the pipeline.
      stages: of the ring.
      delay_release: the stage refilled after a step is that of so many steps before.
      wait: products that may still run when the warpgroup goes on.
      load: time from the start of a copy to its arrival.
      gap: time from the wait to the first work of the next product.
    """
    load_start, mma_start, mma_end = {step: 0.0 for step in range(min(stages, steps))}, {}, {-1: 0.0}
    free = 0.0  # When the warpgroup comes to the next step.
    for step in range(steps):
        issued = max(free, load_start[step] + load) + gap
        mma_start[step] = max(issued, mma_end[step - 1])
        mma_end[step] = mma_start[step] + 1
        free = max(issued, mma_end.get(step - wait, 0.0))
        if step >= delay_release:
            load_start[step - delay_release + stages] = free
    return [Step(load_start[i], load_start[i] + load, mma_start[i], mma_end[i]) for i in range(steps)]


def _lifetimes(ax, run):
    """Light: a copy is in flight. Dark: the tensor core reads. Orange: both."""
    for i, step in enumerate(run):
        stage = i % STAGES
        reader_end = run[i - STAGES].mma_end if i >= STAGES else 0.0
        clash = step.load_start < reader_end
        if clash:
            bar(ax, stage, step.load_start, reader_end, f"{i - STAGES} and {i}", RED)
        bar(ax, stage, max(step.load_start, reader_end), step.load_end, "" if clash else f"load {i}", LOAD)
        if i + STAGES >= len(run) or run[i + STAGES].load_start >= step.mma_end:
            bar(ax, stage, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
        bar(ax, STAGES, step.mma_start, step.mma_end, f"{i}", MULTIPLY)


@chart(height=4.4, nrows=2, sharex=True, height_ratios=(2, 4))
def pipeline_schedule(axes):
    """A ring of one stage and one of three: how `plgpu.emit_pipeline` overlaps loads with products, by simulation."""
    for ax, stages in zip(axes, (1, 3), strict=True):
        run = schedule(7, stages)
        for i, step in enumerate(run):
            bar(ax, i % stages, step.load_start, step.load_end, f"load {i}", LOAD)
            bar(ax, i % stages, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
            bar(ax, stages, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
        title = f"max_concurrent_steps={stages}: 7 steps take {run[-1].mma_end:.1f}"
        tracks(ax, _ring_of(stages), title, 11)
    axes[1].axvspan(0, LOAD_TIME, color=plot.FAINT, alpha=0.5, zorder=0)
    label(axes[1], LOAD_TIME / 2, 3, "prologue")
    axes[1].set_xlabel(_units(LOAD_TIME))
    axes[0].set_xlim(0, schedule(7, 1)[-1].mma_end)


def run(blocks: int, steps: int = 4, load: float = LOAD_TIME) -> list[tuple[int, int, float, float, float]]:
    """(block, step, load start, product start, product end) of blocks that have one stage each."""
    free, waiting = 0.0, [(0.0, block, 0) for block in range(blocks)]
    done = []
    while waiting:
        waiting.sort(key=lambda one: (one[0] + load, one[1]))
        load_start, block, step = waiting.pop(0)
        start = max(free, load_start + load)
        free = start + 1
        done.append((block, step, load_start, start, free))
        if step + 1 < steps:
            waiting.append((free, block, step + 1))
    return done


@chart(height=3.6, nrows=2, sharex=True, height_ratios=(2, 3))
def pipeline_two_blocks(axes):
    """Two blocks on one SM take turns at the tensor core: one loads while the other multiplies."""
    for ax, blocks in zip(axes, (1, 2), strict=True):
        for block, step, load_start, start, end in run(blocks):
            bar(ax, block, load_start, load_start + LOAD_TIME, f"load {step}", LOAD)
            for lane in (block, blocks):
                bar(ax, lane, start, end, f"{step}", (BLUE, GREEN)[block])
        title = f"{blocks} block{'s' * (blocks > 1)} on the SM, one stage each"
        tracks(ax, [*numbered("block", blocks), "tensor core"], title, 11)
    axes[1].set_xlabel(_units(LOAD_TIME))


GRID, WAVE = (64, 64), 132  # 8192x8192 in tiles of 128x128; one block on each SM of an H100 or H200.
ORDERS = ((1, 64, "row by row"), (0, 8, "strips of 8 rows"), (0, 16, "strips of 16 rows"))


def tiles(grid: tuple[int, int], minor_dim: int, tile_width: int):
    """(row, column) of the tile of each block, in the order of the blocks."""
    blocks = jnp.arange(grid[0] * grid[1])
    rows, columns = jax.jit(jax.vmap(lambda i: plgpu.planar_snake(i, grid, minor_dim, tile_width)))(blocks)
    return np.asarray(rows), np.asarray(columns)


def panels(grid, minor_dim, tile_width, wave=WAVE) -> list[tuple[int, int]]:
    """For each wave of blocks: how many rows of tiles of A and how many columns of tiles of B it reads."""
    rows, columns = tiles(grid, minor_dim, tile_width)
    starts = range(0, len(rows), wave)
    return [(len(set(rows[i : i + wave].tolist())), len(set(columns[i : i + wave].tolist()))) for i in starts]


@chart(height=3.3, ncols=3)
def pipeline_order(axes):
    """The order in which the blocks of a grid take tiles of the output, and the panels that one wave reads.

    The first waves in colour, the path of the blocks as a line; the panels are those of the second wave.
    """
    waves, size = 6, 2 * WAVE  # Drawn, with two blocks on each SM.
    for ax, (minor_dim, tile_width, name) in zip(axes, ORDERS, strict=True):
        rows, columns = tiles(GRID, minor_dim, tile_width)
        for wave in range(waves):
            part = slice(wave * size, (wave + 1) * size)
            ax.plot(columns[part], rows[part], "s", markersize=2.1, color=plot.COLOURS[wave])
        ax.plot(columns[: waves * size], rows[: waves * size], color=INK, linewidth=0.4)
        of_a, of_b = panels(GRID, minor_dim, tile_width, size)[1]
        ax.set_title(f"{name}\n({minor_dim}, {tile_width}): {of_a} + {of_b} panels", fontsize=8.5)
        ax.set(xlim=(-1, GRID[1]), ylim=(GRID[0], -1), aspect="equal", xticks=(0, 32, 63), yticks=(0, 32, 63))
        ax.grid(visible=False)
    axes[0].set_ylabel("row of tiles")
    axes[1].set_xlabel("column of tiles")
