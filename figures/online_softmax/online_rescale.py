"""The online softmax over four blocks of keys: when the largest logit grows, what is there is scaled down."""

import numpy as np

from figures._draw import save
from lab import plot

BLOCKS, WIDTH = 4, 8


def draw():
    x = np.random.default_rng(10).normal(size=BLOCKS * WIDTH) + np.repeat([0.0, 1.6, 0.4, 3.0], WIDTH)
    ends = range(WIDTH, BLOCKS * WIDTH + 1, WIDTH)
    m = [x[:end].max() for end in ends]
    l_i = [np.exp2(x[:end] - x[:end].max()).sum() for end in ends]
    carried = [0.0] + [l_i[b - 1] * 2 ** (m[b - 1] - m[b]) for b in range(1, BLOCKS)]
    with plot.figure(height=3.9, nrows=2, sharex=True) as (fig, (top, bottom)):
        top.plot(np.arange(len(x)) + 0.5, x, "o", markersize=4, color=plot.PEER, label="logits x of a query, in base 2")
        for b in range(BLOCKS):
            line = top.plot((b * WIDTH, (b + 1) * WIDTH), (m[b],) * 2, color=plot.OURS, linewidth=2)
            alpha = 2 ** (m[b - 1] - m[b]) if b else 0.0
            text = f"alpha = {alpha:.2f}" if b else "alpha = 0 (m was -inf)"
            bottom.text(
                b * WIDTH + 4, 0.25, text, ha="center", fontsize=8, color=plot.CARD if carried[b] > 1 else plot.INK
            )
        line[0].set_label("m, the largest so far")
        middle = [b * WIDTH + WIDTH / 2 for b in range(BLOCKS)]
        bottom.bar(middle, carried, width=6.6, color=plot.OURS, label="l that was there, times alpha")
        fresh = [total - old for total, old in zip(l_i, carried, strict=True)]
        bottom.bar(middle, fresh, bottom=carried, width=6.6, color=plot.COLOURS[4], label="added by this block")
        bottom.set_xticks(middle, [f"block {b}" for b in range(BLOCKS)])
        bottom.set_ylim(0, 1.35 * max(l_i))
        top.legend(loc="upper left")
        bottom.legend(loc="upper left", ncols=2)
        top.set_title("A larger logit arrives: what was summed before is scaled down")
        for ax in (top, bottom):
            ax.grid(axis="x", visible=False)
            for b in range(1, BLOCKS):
                ax.axvline(b * WIDTH, color=plot.FAINT, linewidth=1)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
