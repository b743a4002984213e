"""Figures of chapter 8: persistent matmul."""

import math

from matplotlib.patches import Patch

from figures._chart import LOAD, MULTIPLY, bar, chart, label, lanes, numbered, tile, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, PINK, RED, SKY, SOFT, arrow, box, drawing, words
from figures._stepper import stepper
from figures.pipelining import panels, tiles
from lab import plot

NUM_SMS = 132  # On an H100 and on an H200.
# Sizes of o in tiles of 128 x 256, and where their text stands.
MARKED = ((128, "2048 x 2048", (200, 0.25)), (512, "4096 x 4096", (420, 0.45)), (544, "4096 x 4352", (650, 0.45)))


def busy_share(tiles: int, num_sms: int = NUM_SMS) -> float:
    """Share of the SMs' time in which they compute, if all tiles take equally long."""
    return tiles / (math.ceil(tiles / num_sms) * num_sms)


FEW_SMS, NUM_TILES = 6, 15  # SMs and tiles of the small picture.


@chart(height=3.0, ncols=2, width_ratios=(1, 1.5))
def persistent_waves(axes):
    """Waves: tiles in turn on a few SMs, and the share of the SMs' time that is used, by the number of tiles."""
    left, right = axes
    waves = math.ceil(NUM_TILES / FEW_SMS)
    for i in range(waves * FEW_SMS):
        wave, sm = divmod(i, FEW_SMS)
        idle = i >= NUM_TILES
        colour, ink = ((BLUE, plot.CARD), (SKY, INK), (GREEN, plot.CARD))[wave]
        text, ground = f"tile {i}", None
        if idle:
            colour, ink, text = plot.FAINT, INK, "idle"
            ground = dict(facecolor=plot.CARD, edgecolor="none", pad=1.5)
        tile(left, wave, sm - 0.42, 0.97, 0.84, colour, hatch="//" if idle else "")
        label(left, wave + 0.48, sm, text, 7.5, colour=ink, bbox=ground)
    title = f"{NUM_TILES} tiles, {FEW_SMS} SMs: {NUM_TILES}/{waves * FEW_SMS} busy"
    tracks(left, numbered("SM", FEW_SMS), title, grid=False)
    left.set(xlim=(0, waves), xticks=range(waves + 1), xlabel="time, in tiles")
    counts = range(1, 6 * NUM_SMS + 1)
    right.plot(counts, [busy_share(count) for count in counts], linewidth=1.2)
    for count, name, place in MARKED:
        share = busy_share(count)
        right.plot(count, share, "o", color=RED)
        line, ground = (
            dict(arrowstyle="-", color=INK, linewidth=0.8),
            dict(facecolor=plot.CARD, edgecolor="none", pad=1),
        )
        text, look = f"{name}\n{count} tiles: {share:.0%}", dict(fontsize=8, ha="center")
        right.annotate(text, (count, share), place, arrowprops=line, bbox=ground, **look)
    right.set(xlabel="tiles", ylim=(0, 1.05), xticks=[NUM_SMS * i for i in range(7)])
    right.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    right.set_title(f"Share of the time of {NUM_SMS} SMs that is used", fontsize=9)


def schedule(persistent: bool, overlap: bool) -> list[tuple[str, float, float]]:
    """(lane and text, start, end) of each event. The times are invented: they show the order, not a measurement."""
    start, first_load, multiplies, round, write, ahead = 0.5, 0.7, 3.0, 0.35, 1.1, 0.75  # Invented times.
    events, time = [], 0.0
    loaded = None  # When the load of the next tile's first step began, if that was early.
    for number in range(3):
        if not persistent or number == 0:
            events.append(("memory|start", time, time + start))
            time += start
        begin = time if loaded is None else loaded
        first = max(time, begin + first_load)
        end = first + multiplies
        events.append((f"memory|load {number}", begin, end - ahead))
        events.append((f"compute|multiply {number}", first, end))
        events.append(("compute|round", end, end + round))
        events.append((f"TMA store|write {number}", end + 0.15, end + round + write))
        loaded = end - ahead if persistent else None
        time = end + round + (0 if overlap else write)
    return events


@chart(height=5.7, nrows=3, sharex=True)
def persistent_loop(axes):
    """One SM and three tiles: a block per tile, one block that loops, and one that stores while it multiplies."""
    cases = (
        (False, False, "one block per tile: each starts, and loads its first steps, while nothing multiplies"),
        (True, False, "persistent: the next tile's first steps are loaded during the store; the store is waited for"),
        (True, True, "persistent, the store overlapped: the write to o goes on during the next tile's products"),
    )
    names = ("memory", "compute", "TMA store")
    colours = {"load": LOAD, "multiply": MULTIPLY, "round": ORANGE, "write": ORANGE, "start": plot.FAINT}
    for ax, (persistent, overlap, title) in zip(axes, cases, strict=True):
        run = schedule(persistent, overlap)
        for name, start, end in run:
            lane, text = name.split("|")
            shown = "" if text in ("round", "start") else text
            bar(ax, names.index(lane), start, end, shown, colours[text.split()[0]])
        last = ax.axvline(max(end for _, _, end in run), color=RED, linewidth=1.2, label="all is written")
        lanes(ax, names, title)
    axes[-1].set(xlim=(0, 17.2), xlabel="time (schematic)")
    parts = (plot.FAINT, "a block starts"), (ORANGE, "compute rounds into shared memory, TMA writes to o")
    known = [*(Patch(color=colour, label=text) for colour, text in parts), last]
    axes[0].figure.legend(handles=known, fontsize=8, loc="outside lower center", ncols=3)


def _column(ax, x, place, what):
    words(ax, x, 2.65, place, weight="bold")
    words(ax, x, 2.4, what, 8)


@drawing(7.8, 2.85)
def persistent_store(ax):
    """The way out: pieces of the sums are rounded, in turn, into two stages, from where TMA takes them to o."""
    _column(ax, 1.55, "registers of a compute warpgroup", "64 x 256 float32: 64 KB")
    pieces = (SOFT, "read"), (ORANGE, "being read"), (GREEN, "rounding"), (BLUE, "next")
    for piece, (colour, text) in enumerate(pieces):
        x = 0.25 + 0.66 * piece
        box(ax, x, 0.95, 0.6, 1.0, f"piece\n{piece}", colour=colour, size=8.5)
        words(ax, x + 0.3, 0.75, text, 7.5, colour=colour)
    _column(ax, 4.4, "shared memory", "2 stages of 8 KB per warpgroup")
    box(ax, 3.75, 1.63, 1.3, 0.55, "stage 0: piece 2", colour=GREEN, size=8.5)
    box(ax, 3.75, 0.9, 1.3, 0.55, "stage 1: piece 1", colour=ORANGE, size=8.5)
    _column(ax, 6.8, "o in HBM, by way of L2", "64 x 256 bfloat16: 32 KB")
    for piece, (colour, fill) in enumerate(((ORANGE, 0.3), (ORANGE, 0.15), (SKY, 0.05), (SKY, 0.05))):
        box(ax, 6.05 + 0.38 * piece, 0.95, 0.36, 1.2, f"{piece}", colour=colour, size=8.5, fill=fill)
    words(ax, 6.42, 0.75, "in flight", 7.5, colour=ORANGE)
    arrow(ax, (1.87, 1.95), (3.75, 2.08), GREEN, connectionstyle="angle,angleA=90,angleB=180,rad=4")
    words(ax, 3.2, 2.2, "round, write", 8, colour=GREEN)
    arrow(ax, (5.05, 1.17), (6.05, 1.17), ORANGE, "TMA reads", offset=(-0.02, 0.13))
    text = (
        "1. wait_smem_to_gmem(1, wait_read_only=True): TMA has read piece 0; piece 1 may still be in its stage.\n"
        "2. Piece 2 is rounded into stage 0. 3. commit_smem, and its copy starts. Then stage 1, piece 3."
    )
    words(ax, 3.9, 0.34, text, 8)


GRID, WAVE = (64, 32), 132  # 8192 x 8192 in tiles of 128 x 256; one block on each SM of an H100 or H200.
ORDERS = ((1, 32, "row by row"), (0, 8, "snake, 8 rows"), (0, 16, "snake, 16 rows"))


@chart(height=3.1, ncols=3)
def persistent_order(axes):
    """The tiles that persistent blocks compute at the same time, in three orders, and the panels that a wave reads."""
    waves = 6  # Drawn.
    for ax, (minor_dim, tile_width, name) in zip(axes, ORDERS, strict=True):
        rows, columns = tiles(GRID, minor_dim, tile_width)
        for wave in range(waves):
            part = slice(wave * WAVE, (wave + 1) * WAVE)
            ax.plot(2 * columns[part] + 0.5, rows[part], "s", markersize=2.0, color=plot.COLOURS[wave])
            ax.plot(2 * columns[part] + 1.5, rows[part], "s", markersize=2.0, color=plot.COLOURS[wave])
        one = slice(0, waves * WAVE, WAVE)  # The tiles of block 0.
        ax.plot(2 * columns[one] + 1, rows[one], "o-", color=INK, linewidth=0.7, markersize=4, mfc=plot.CARD)
        of_a, of_b = panels(GRID, minor_dim, tile_width)[1]
        ax.set_title(f"{name}\n({minor_dim}, {tile_width}): second wave reads\n{of_a} of A, {of_b} of B", fontsize=8.5)
        ax.set(xlim=(-1, 2 * GRID[1]), ylim=(GRID[0], -1), aspect="equal", yticks=(0, 32, 63))
        ax.set_xticks((1, 33, 63), (0, 16, 31))
        ax.grid(visible=False)
    axes[0].set_ylabel("row of tiles")
    axes[1].set_xlabel("column of tiles (twice as wide); circles: the tiles of block 0, one per wave")


@drawing(7.8, 4.0)
def persistent_cluster(ax):
    """Two blocks of a cluster need the same tile of B: each loads half of it and sends it to both."""
    ax.set_ylim(-0.15, 3.95)
    words(ax, 3.9, 3.82, "L2", weight="bold")
    box(ax, 0.55, 3.2, 1.5, 0.42, "A, rows of block 0", colour=BLUE, size=8)
    box(ax, 3.0, 3.2, 0.88, 0.42, "B, half 0", colour=ORANGE, size=8)
    box(ax, 3.92, 3.2, 0.88, 0.42, "B, half 1", colour=GREEN, size=8)
    box(ax, 5.75, 3.2, 1.5, 0.42, "A, rows of block 1", colour=BLUE, size=8)
    for block, left in enumerate((0.3, 4.3)):
        of_a, of_b = (left + 0.15, left + 1.35) if block == 0 else (left + 2.05, left + 0.2)  # The second is mirrored.
        box(ax, left, 0.55, 3.2, 1.85, colour=SOFT, fill=0.05)
        words(ax, (0.3, 7.5)[block], 2.55, f"block {block}", 8.5, weight="bold", ha=("left", "right")[block])
        box(ax, of_a, 1.35, 1.0, 0.8, "A\n128 x 64", colour=BLUE, size=8)
        box(ax, of_b, 1.35, 0.8, 0.8, "B\nhalf 0", colour=ORANGE, size=8)
        box(ax, of_b + 0.85, 1.35, 0.8, 0.8, "B\nhalf 1", colour=GREEN, size=8)
        box(ax, of_a, 0.7, 1.0, 0.42, "memory", colour=INK, size=8)
        box(ax, of_b, 0.7, 1.65, 0.42, "2 compute warpgroups", colour=PINK, size=8)
        arrow(ax, (of_a + 0.5, 3.2), (of_a + 0.5, 2.15), BLUE)
        arrow(ax, (3.44, 3.2), (of_b + 0.4, 2.15), ORANGE)
        arrow(ax, (4.36, 3.2), (of_b + 1.25, 2.15), GREEN)
    words(ax, 3.9, 1.75, "one read\neach,\ndelivered\ntwice", 7.5)
    # Freed: each compute warpgroup arrives in both blocks.
    for start, end, bend in ((1.9, 1.1, -0.4), (5.9, 6.7, 0.4), (2.3, 6.9, 0.22), (5.5, 0.8, -0.22)):
        arrow(ax, (start, 0.7), (end, 0.7), PINK, connectionstyle=f"arc3,rad={bend}")
    text = "freed: the compute warpgroups of both blocks arrive at the barrier of both: 4 arrivals"
    words(ax, 3.9, -0.02, text, 8, colour=PINK)


@chart(height=4.6, nrows=3)
def persistent_split(axes):
    """Three tiles with a long K on eight SMs: whole, split in two parts, and cut wherever an SM's share ends."""
    cases = (
        ("one block per tile: 3 of 8 SMs, 16 steps", 16),
        ("split_k=2: 6 of 8 SMs, 8 steps, then 2 parts are added", 8),
        ("stream-K: 8 of 8 SMs, 6 steps; tiles are cut where a share ends", 6),
    )
    steps, colours = 16, (*plot.COLOURS[:6], plot.PEER, INK)
    for ax, (title, share) in zip(axes, cases, strict=True):
        for index in range(3 * steps):
            row, step = divmod(index, steps)
            sm = index // share if steps % share else step // share * 3 + row  # Part by part.
            tile(ax, step, row - 0.4, 1, 0.8, colours[sm], alpha=0.75, edgecolor=plot.CARD)
            if index % share == 0 or step == 0:
                ink = plot.CARD if sm in (0, 5, 7) else INK
                label(ax, step + 0.12, row, f"SM {sm}", 7, ha="left", colour=ink, clip_on=True)
        tracks(ax, numbered("tile", 3), title, grid=False)
        ax.set(xlim=(0, steps), ylim=(2.5, -0.5), xticks=range(0, steps + 1, 4))
    axes[-1].set_xlabel("steps of K")


SMALL, TOGETHER = (8, 16), 16  # Tiles of o along M and N; tiles that are computed at the same time.
FRAMES = (  # The width of the snake in rows of tiles, or None; the wave; the caption.
    (None, 0, "Row by row, the 16 SMs compute a row of tiles. They share one panel of A and need all 16 panels of B."),
    (None, 1, "The next wave reads another panel of A and all of B again, from HBM if L2 has dropped it."),
    (None, 2, "Each wave reads 17 panels for its 16 tiles."),
    (4, 0, "In a snake of 4 rows, the same 16 SMs compute a square: 4 panels of A and 4 of B, each read by 4 tiles."),
    (4, 1, "The next wave is the square beside it. It needs the same 4 panels of A, which have just been read."),
    (4, 3, "At the end of the band 4 panels of A have met all of B. The next band runs back from here."),
    (
        4,
        4,
        "The second band begins with the panels of B that were read last, because the snake turns round.",
    ),
)


@stepper(7.8, 3.1)
def order_in_steps(ax):
    """Tiles that are computed at the same time, and the panels of A and B that they share, in two orders."""
    side, left, top = 0.27, 1.45, 2.35
    wide, high = side * SMALL[1], side * SMALL[0]
    for x, y, width, height in ((left, top - high, wide, high), (left - 0.7, top - high, 0.6, high)):
        tile(ax, x, y, width, height, PALE, zorder=0)
    tile(ax, left, top + 0.1, wide, 0.45, PALE, zorder=0)
    for row in range(1, SMALL[0]):
        y = [top - side * row] * 2
        ax.plot((left, left + wide), y, color=plot.CARD, linewidth=1, zorder=0.5)
        ax.plot((left - 0.7, left - 0.1), y, color=plot.CARD, linewidth=1, zorder=0.5)
    for column in range(1, SMALL[1]):
        x = [left + side * column] * 2
        ax.plot(x, (top - high, top), color=plot.CARD, linewidth=1, zorder=0.5)
        ax.plot(x, (top + 0.1, top + 0.55), color=plot.CARD, linewidth=1, zorder=0.5)
    words(ax, left - 0.78, top - high / 2, "panels\nof A", ha="right", weight="bold")
    words(ax, left - 0.1, top + 0.33, "panels of B", ha="right", weight="bold")
    words(ax, left + wide / 2, 0.09, "o, in tiles; light: computed before", 8, colour=SOFT)
    yield
    for width, wave, caption in FRAMES:
        rows, columns = tiles(SMALL, *((1, SMALL[1]) if width is None else (0, width)))
        now = slice(wave * TOGETHER, (wave + 1) * TOGETHER)
        order = list(zip(rows.tolist(), columns.tolist(), strict=True))
        for i, (row, column) in enumerate(order[: now.stop]):
            colour = BLUE if i >= now.start else SKY
            look = dict(alpha=0.35) if i < now.start else dict(alpha=0.9)
            tile(ax, left + side * column, top - side * (row + 1), side, side, colour, edgecolor=plot.CARD, **look)
        of_a, of_b = sorted(set(rows[now].tolist())), sorted(set(columns[now].tolist()))
        for row in of_a:
            tile(ax, left - 0.7, top - side * (row + 1), 0.6, side, ORANGE, edgecolor=plot.CARD)
        for column in of_b:
            tile(ax, left + side * column, top + 0.1, side, 0.45, GREEN, edgecolor=plot.CARD)
        x = left + wide + 0.2
        words(ax, x, 2.7, "row by row" if width is None else f"snake, {width} rows", 10, ha="left", weight="bold")
        words(ax, x, 2.4, f"wave {wave}", ha="left")
        words(ax, x, 1.9, f"{len(of_a)} of A", 10, ha="left", colour=ORANGE, weight="bold")
        words(ax, x, 1.62, f"{len(of_b)} of B", 10, ha="left", colour=GREEN, weight="bold")
        words(ax, x, 1.3, f"{len(of_a) + len(of_b)} panels\nfor {TOGETHER} tiles", ha="left", va="top")
        yield caption


DEALT = 14  # Tiles.
LOOP = (  # Turns that have ended; turns that run; the tail's parts; the caption.
    (0, 1, 1, "Six blocks start, one on each SM. Block b computes tile b."),
    (0, 1.85, 1, "Near the end of a tile the memory warpgroup runs ahead: it loads the first steps of tile b + 6."),
    (1, 2, 1, "The block goes on with tile b + 6. No block ends, none starts, and the first steps are there already."),
    (2, 3, 1, "Two tiles remain for the third turn. The blocks of four SMs have no tile left and end."),
    (
        3,
        3,
        1,
        "Three turns, as many waves as with a block per tile: persistent blocks do not shorten the tail.",
    ),
    (
        3,
        3,
        3,
        "The package can cut each of the last two tiles into three, and then no SM idles: tail_split=3.",
    ),
)


@stepper(7.8, 2.75)
def persistent_in_steps(ax):
    """Six persistent blocks take 14 tiles in turn, and the last turn has only two."""
    left, unit, lane = 1.75, 1.75, 0.34
    y_of = lambda sm: 2.2 - lane * sm
    for sm in range(FEW_SMS):
        words(ax, left - 0.1, y_of(sm) + 0.15, f"SM {sm}, block {sm}", ha="right")
    for turn in range(3):
        words(ax, left + unit * (turn + 0.5), 2.62, f"turn {turn}", 8.5, colour=SOFT)
    arrow(ax, (left, 0.36), (left + 3 * unit + 0.2, 0.36), SOFT, width=1)
    words(ax, left, 0.17, "time", 8, ha="left", colour=SOFT)
    yield
    for ended, until, split, caption in LOOP:
        bars, ahead = _turns(split), until % 1
        for sm, start, length, text in bars:
            if start < int(until):
                done = start + length <= ended
                colour, ink = (SKY, INK) if done else (BLUE, plot.CARD)
                tile(ax, left + unit * start, y_of(sm), unit * length - 0.03, 0.3, colour, text, 8, ink=ink)
            elif start < until:
                width = unit * (1 - ahead) + 0.1
                tile(ax, left + unit * (start - 1 + ahead), y_of(sm) - 0.02, width, 0.12, ORANGE)
        if until == 3:
            end = max(start + length for _, start, length, _ in bars)
            for sm in range(FEW_SMS):
                busy = max(start + length for other, start, length, _ in bars if other == sm)
                if busy < end:
                    tile(ax, left + unit * busy, y_of(sm), unit * (end - busy), 0.3, plot.FAINT, "idle", 8)
        if ended == 3:
            ax.plot([left + unit * end] * 2, (y_of(FEW_SMS - 1) - 0.05, 2.52), color=RED, linewidth=1.4)
            text = f"{end:g} turns: {DEALT} / {FEW_SMS * end:g} = {DEALT / FEW_SMS / end:.0%} busy"
            words(ax, 7.7, 0.17, text if split == 1 else f"at best {end:.3g} turns", 8.5, ha="right", colour=RED)
        elif ahead:
            text = "copies of the next tile's first steps"
            words(ax, left + unit * int(until) + 0.3, y_of(2) + 0.04, text, 8.5, ha="left")
        yield caption


def _turns(split: int) -> list[tuple[int, float, float, str]]:
    """(SM, start, length, text) of each tile, the last ones cut into `split`."""
    full = DEALT // FEW_SMS * FEW_SMS
    whole = [(i % FEW_SMS, i // FEW_SMS, 1.0, f"tile {i}") for i in range(full)]
    names = [f"{i}{'abc'[part]}" if split > 1 else f"tile {i}" for i in range(full, DEALT) for part in range(split)]
    return whole + [(sm, full // FEW_SMS, 1 / split, name) for sm, name in enumerate(names)]
