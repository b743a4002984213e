"""A causal mask aligned at the ends: as many queries as keys, fewer, and more."""

import matplotlib.patches as patches

from figures._draw import save
from lab import plot

CASES = (
    ("T = S = 6\na whole prompt", 6, 6),
    ("T = 3, S = 6\nthe last chunk of a prompt", 3, 6),
    ("T = 1, S = 6\na token of an answer", 1, 6),
    ("T = 6, S = 4\nmore queries than keys", 6, 4),
)


def draw():
    with plot.figure(7.8, 2.75, ncols=len(CASES)) as (fig, axes):
        for ax, (title, num_q, num_kv) in zip(axes, CASES, strict=True):
            for i in range(num_q):
                for j in range(num_kv):
                    sees = j <= num_kv - num_q + i
                    colour = plot.COLOURS[4] if sees else plot.CARD
                    ax.add_patch(patches.Rectangle((j, i), 1, 1, facecolor=colour, edgecolor=plot.INK, linewidth=0.8))
                if num_kv - num_q + i < 0:
                    ax.text(num_kv + 0.25, i + 0.5, "nothing", fontsize=7, va="center", color=plot.BOUND)
            ax.set(xlim=(-0.1, 6.6), ylim=(6.1, -0.1), aspect="equal", xlabel="keys")
            ax.set_xticks([j + 0.5 for j in range(num_kv)], range(num_kv), fontsize=7)
            ax.set_yticks([i + 0.5 for i in range(num_q)], range(num_q), fontsize=7)
            ax.tick_params(length=0)
            ax.grid(visible=False)
            for side in ("left", "bottom"):
                ax.spines[side].set_visible(False)
            ax.set_title(title, fontsize=8, fontweight="normal")
        axes[0].set_ylabel("queries")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
