"""Figures of chapter 10: online softmax."""

import numpy as np

from figures._chart import LOAD, MULTIPLY, SOFTMAX, bar, chart, legend_of, tile, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, places, words
from figures._stepper import stepper
from lab import plot


@drawing(7.8, 3.3)
def online_traffic(ax):
    """Attention with its matrix of weights in memory, and without."""
    words(ax, 0.15, 3.1, "three kernels: the matrix crosses memory four times", ha="left", weight="bold")
    box(ax, 0.15, 0.35, 4.75, 0.62, colour=SOFT)
    words(ax, 0.3, 0.17, "HBM", 8, ha="left", colour=SOFT)
    for x, name, colour in ((0.75, "$q\\,k^T$", BLUE), (2.15, "softmax", ORANGE), (3.55, "$p\\,v$", BLUE)):
        box(ax, x, 2.1, 1.1, 0.6, name, colour)
    for x, name, colour in (
        (0.2, "q, k", BLUE),
        (1.65, "s", RED),
        (3.05, "p", RED),
        (3.72, "v", BLUE),
        (4.35, "out", BLUE),
    ):
        box(ax, x, 0.45, 0.5, 0.42, name, colour, fill=0.3)
    arrow(ax, (0.5, 0.9), (0.95, 2.08), BLUE)
    arrow(ax, (1.55, 2.08), (1.8, 0.9), RED, "T x S", offset=(-0.22, 0.0))
    arrow(ax, (1.98, 0.9), (2.4, 2.08), RED)
    arrow(ax, (2.95, 2.08), (3.2, 0.9), RED, "T x S", offset=(-0.22, 0.0))
    arrow(ax, (3.38, 0.9), (3.8, 2.08), RED)
    arrow(ax, (3.97, 0.9), (4.1, 2.08), BLUE)
    arrow(ax, (4.4, 2.08), (4.6, 0.9), BLUE)
    words(ax, 5.35, 3.1, "one kernel", ha="left", weight="bold")
    box(ax, 5.35, 0.35, 2.3, 0.62, colour=SOFT)
    box(ax, 5.35, 2.1, 2.3, 0.6, colour=GREEN)
    words(ax, 6.5, 2.52, "$q\\,k^T$, softmax, $p\\,v$", 8.5)
    words(ax, 6.5, 2.27, "s and p: a step at a time, in registers", 6.8, colour=RED)
    box(ax, 5.45, 0.45, 0.8, 0.42, "q, k, v", BLUE, fill=0.3)
    box(ax, 7.0, 0.45, 0.55, 0.42, "out", BLUE, fill=0.3)
    arrow(ax, (5.85, 0.9), (5.85, 2.08), BLUE)
    arrow(ax, (7.28, 2.08), (7.28, 0.9), BLUE)


@drawing(7.8, 3.9)
def online_block(ax):
    """One step of the kernel: what lies in shared memory, what in registers, and which unit does what."""
    for y, height, name in (
        (3.0, 0.75, "HBM, L2"),
        (1.75, 0.95, "shared\nmemory"),
        (0.2, 1.25, "registers of\n128 threads"),
    ):
        box(ax, 1.0, y, 6.65, height, colour=SOFT, fill=0.06)
        words(ax, 0.5, y + height / 2, name, 8, colour=SOFT)
    box(ax, 1.15, 3.12, 0.95, 0.5, "q, 64 rows", BLUE, size=8)
    for i in range(6):
        box(ax, 2.5 + 0.43 * i, 3.12, 0.38, 0.5, f"k{i}", GREEN, fill=0.45 if i == 2 else 0.12, size=8)
        box(ax, 5.15 + 0.41 * i, 3.12, 0.36, 0.5, f"v{i}", PINK, fill=0.45 if i == 2 else 0.12, size=8)
    box(ax, 1.15, 1.95, 0.95, 0.55, "q", BLUE)
    box(ax, 2.75, 1.95, 1.3, 0.55, "k of the step", GREEN, fill=0.3, size=8)
    box(ax, 5.5, 1.95, 1.3, 0.55, "v of the step", PINK, fill=0.3, size=8)
    arrow(ax, (1.62, 3.1), (1.62, 2.52), BLUE, "once", offset=(-0.25, 0.0))
    arrow(ax, (3.55, 3.1), (3.4, 2.52), GREEN, "TMA", offset=(0.28, 0.02))
    arrow(ax, (6.15, 3.1), (6.15, 2.52), PINK, "TMA", offset=(0.25, 0.02))
    box(ax, 2.0, 0.5, 1.0, 0.6, "s\n64 x 128", ORANGE)
    box(ax, 4.05, 0.5, 1.0, 0.6, "p\n64 x 128", ORANGE)
    box(ax, 6.2, 0.5, 1.3, 0.6, "acc\n64 x head_dim", RED)
    words(ax, 1.5, 0.6, "m, l", colour=RED)
    arrow(ax, (1.75, 1.93), (2.3, 1.12), BLUE)
    arrow(ax, (3.2, 1.93), (2.65, 1.12), BLUE, "WGMMA", offset=(0.5, -0.28))
    arrow(ax, (3.02, 0.8), (4.03, 0.8), ORANGE, "softmax", offset=(0.0, 0.13))
    words(ax, 3.52, 0.62, "CUDA cores", 7, colour=ORANGE)
    arrow(ax, (5.07, 0.8), (6.18, 0.8), BLUE, "WGMMA", offset=(0.0, 0.13))
    arrow(ax, (6.4, 1.93), (6.75, 1.12), BLUE)
    words(ax, 6.85, 0.34, "times alpha, every step", 7, colour=RED)


@chart(7.5, 3.7)
def online_causal(ax):
    """Which steps a tile of 64 queries computes under a causal mask, and which of them it masks."""
    block_q, block_kv, num = 64, 128, 512
    counts = {"whole": 0, "cut": 0, "skipped": 0}
    colours = {"whole": SKY, "cut": ORANGE, "skipped": plot.CARD}
    texts = {"whole": "computed", "cut": "computed and masked", "skipped": "neither loaded nor computed"}
    for first_q in range(0, num, block_q):
        end, whole = -(-(first_q + block_q) // block_kv), (first_q + 1) // block_kv
        for block in range(num // block_kv):
            kind = "whole" if block < whole else "cut" if block < end else "skipped"
            counts[kind] += 1
            tile(ax, block * block_kv, first_q, block_kv, block_q, colours[kind], edgecolor=INK, linewidth=0.8)
    ax.plot((0, num), (0, num), color=RED, linewidth=2)
    legend_of(ax, [(colours[kind], f"{counts[kind]} {text}") for kind, text in texts.items()])
    ax.set(xlim=(0, num), ylim=(num, 0), xlabel="keys, 128 per step", ylabel="queries, 64 per tile", aspect="equal")
    ax.set(xticks=range(0, num + 1, block_kv), yticks=range(0, num + 1, block_q))
    ax.grid(visible=False)
    ax.set_title("Causal: a query sees the keys left of the diagonal", fontsize=10)


def schedule(early: bool, steps: int):
    """(name, lane, start, end) of every piece of work."""
    load_time, product, numbers = 2.1, 1.0, 1.45
    work, now = [], 0.0
    starts = {"k": {0: 0.0}, "v": {0: 0.0}}
    for i in range(steps):
        if not early:
            starts["k"][i] = starts["v"][i] = now
        s_start = max(now, starts["k"][i] + load_time)
        s_end = s_start + product
        starts["k"].setdefault(i + 1, s_end)
        p_end = s_end + numbers
        o_start = max(p_end, starts["v"][i] + load_time)
        now = o_start + product
        starts["v"].setdefault(i + 1, now)
        work += [(f"q k{i}", 2, s_start, s_end), ("softmax", 3, s_end, p_end), (f"p v{i}", 2, o_start, now)]
    for lane, what in enumerate("kv"):
        work += [(f"{what}{i}", lane, at, at + load_time) for i, at in starts[what].items() if i < steps]
    return work


@chart(height=4.2, nrows=2, sharex=True)
def online_copies(axes, steps: int = 3):
    """When keys and values are copied: two orders of the same work, for one warpgroup. Widths are as in its trace."""
    titles = "in turn: every step waits for its copies", "early: the next step's, as soon as their tile is free"
    for ax, early, title in zip(axes, (False, True), titles, strict=True):
        for name, lane, start, end in schedule(early, steps):
            bar(ax, lane, start, end, name, (LOAD, LOAD, MULTIPLY, SOFTMAX)[lane])
        tracks(ax, ["copies of k", "copies of v", "tensor cores", "CUDA cores"], title)
    axes[0].set_xlim(0, max(end for *_, end in schedule(False, steps)))
    axes[-1].set_xlabel("time, in units of one product; a copy and a softmax take as long as in the trace")


X = ((0, 1, -1, 1), (0, -1, 1, 0), (3, 2, 0, 1), (2, 4, 3, 1))  # Base-2 logits of a query, in steps of four keys.
V = ((4, 2, 0, 6), (2, 8, 4, 6), (1, 3, 5, 7), (8, 2, 4, 0))  # A column of the values.
CAPTIONS = (  # The captions.
    "The largest logit of the first step becomes m. The sum of p = 2^(x - m) is l, and the sum of p times v is acc.",
    "In the second step no logit is larger. So m stays, alpha is 1, and the step adds its terms.",
    "The third step has a larger logit. The old sums were relative to the old m, so alpha scales both of them down.",
    "The fourth step moves m once more. All 16 terms are now relative to the same m.",
)


def running():
    """For each step: the new m, alpha, its p, and l and acc before and after it."""
    m, l_i, acc = -np.inf, 0.0, 0.0
    for x, v in zip(np.array(X, float), np.array(V, float), strict=True):
        top = max(m, x.max())
        alpha, p = 2 ** (m - top), 2 ** (x - top)
        before = l_i, acc
        m, l_i, acc = top, l_i * alpha + p.sum(), acc * alpha + p @ v
        yield m, alpha, p, before, (l_i, acc)


@stepper(7.8, 3.15)
def softmax_in_steps(ax):
    """The online softmax of one query over four steps of four keys, in numbers."""
    left, cell, gap = 1.1, 0.38, 0.12
    x_of = lambda at, key: left + at * (4 * cell + gap) + key * cell
    for y, name in ((2.6, "x"), (2.25, "v"), (1.9, "p")):
        words(ax, left - 0.15, y + 0.15, name, 10, ha="right", weight="bold")
    for at in range(4):
        words(ax, x_of(at, 2), 3.02, f"step {at}", 8.5, colour=SOFT)
    for y, name in ((1.35, "m"), (0.95, "alpha"), (0.55, "l"), (0.15, "acc")):
        words(ax, left - 0.15, y + 0.1, name, 10, ha="right", weight="bold")
    yield
    steps = list(running())
    for now, caption in enumerate([*CAPTIONS, None]):
        for at, key in places(4, 4):
            seen = ORANGE if at == now else plot.FAINT if at < now else plot.CARD
            for y, values in ((2.6, X), (2.25, V)):
                look = dict(edgecolor=SOFT, linewidth=0.6)
                tile(ax, x_of(at, key), y, cell, 0.32, seen, str(values[at][key]), 8.5, **look)
        if now < 4:
            m, alpha, p, before, after = steps[now]
            for key in range(4):
                tile(ax, x_of(now, key), 1.9, cell, 0.32, SKY, f"{p[key]:g}"[:6], 7, edgecolor=SOFT, linewidth=0.6)
            old = steps[now - 1][0] if now else -np.inf
            lines = (
                f"max({old:g}, {max(X[now])}) = {m:g}",
                f"2 ^ ({old:g} - {m:g}) = {alpha:g}",
                f"{alpha:g} x {before[0]:g} + {p.sum():g} = {after[0]:g}",
                f"{alpha:g} x {before[1]:g} + {p @ np.array(V[now]):g} = {after[1]:g}",
            )
            colours = (INK, RED if 0 < alpha < 1 else INK, INK, INK)
        else:
            (l_i, acc), x, v = steps[-1][-1], np.ravel(X), np.ravel(V)
            whole = 2.0**x @ v / (2.0**x).sum()
            lines = (f"{steps[-1][0]:g}", "", f"{l_i:g}", f"{acc:g}")
            colours = (INK,) * 4
            words(ax, 3.3, 0.85, f"out = acc / l = {acc / l_i:.4f}", 12, ha="left", weight="bold", colour=BLUE)
            words(ax, 3.3, 0.5, f"softmax of all 16 at once: {whole:.4f}", ha="left")
            caption = f"After the last step acc / l is the output: {whole:.4f}, as in a softmax over all keys at once."
        for y, text, colour in zip((1.35, 0.95, 0.55, 0.15), lines, colours, strict=True):
            words(ax, left + 0.05, y + 0.1, text, 10, ha="left", colour=colour)
        yield caption
