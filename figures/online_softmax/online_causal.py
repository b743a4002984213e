"""Which blocks of keys a block of 64 queries computes under a causal mask, and which of them it masks."""

import matplotlib.patches as patches

from figures._draw import save
from lab import plot

BLOCK_Q, BLOCK_KV, NUM = 64, 128, 512


def draw():
    with plot.figure(7.5, 3.7) as (fig, ax):
        counts = {"whole": 0, "cut": 0, "skipped": 0}
        colours = {"whole": plot.COLOURS[4], "cut": plot.COLOURS[1], "skipped": plot.CARD}
        for first_q in range(0, NUM, BLOCK_Q):
            end, whole = -(-(first_q + BLOCK_Q) // BLOCK_KV), (first_q + 1) // BLOCK_KV
            for block in range(NUM // BLOCK_KV):
                kind = "whole" if block < whole else "cut" if block < end else "skipped"
                counts[kind] += 1
                place = (block * BLOCK_KV, first_q)
                look = dict(facecolor=colours[kind], edgecolor=plot.INK, linewidth=0.8)
                ax.add_patch(patches.Rectangle(place, BLOCK_KV, BLOCK_Q, **look))
        ax.plot((0, NUM), (0, NUM), color=plot.BOUND, linewidth=2)
        texts = {"whole": "computed", "cut": "computed and masked", "skipped": "neither loaded nor computed"}
        for kind, text in texts.items():
            look = dict(facecolor=colours[kind], edgecolor=plot.INK, label=f"{counts[kind]} {text}")
            ax.add_patch(patches.Rectangle((0, 0), 0, 0, **look))
        ax.set(xlim=(0, NUM), ylim=(NUM, 0), xlabel="keys, 128 a block", ylabel="queries, 64 a block", aspect="equal")
        ax.set_xticks(range(0, NUM + 1, BLOCK_KV))
        ax.set_yticks(range(0, NUM + 1, BLOCK_Q))
        ax.grid(visible=False)
        ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
        ax.set_title("Causal: a query sees the keys left of the diagonal", fontsize=10)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
