"""A long prompt meets sequences that decode: computed at once, and in chunks. Times are made up."""

from figures._draw import BLUE, INK, ORANGE, save
from lab import plot

ALONE, A_TOKEN = 1.0, 0.055  # Length of a step that decodes, and of a token of a prompt.


def steps(chunks: list[int], count: int):
    """(start, length, tokens of the prompt) of `count` steps, one after the other, two before the prompt comes."""
    placed, at = [], 0.0
    for tokens in ([0, 0, *chunks] + [0] * count)[:count]:
        length = max(ALONE, 0.35 + A_TOKEN * tokens)
        placed.append((at, length, tokens))
        at += length
    return placed


def draw():
    plans = (
        ("the whole prompt in one step: all wait for it", [240], 12),
        ("in chunks, under a budget: everybody gets a token in each step", [30] * 8, 14),
    )
    with plot.figure(7.8, 3.5, nrows=2, sharex=True) as (fig, axes):
        for ax, (title, chunks, count) in zip(axes, plans, strict=True):
            last = None
            for at, length, tokens in steps(chunks, count):
                ax.barh(0, length, left=at, height=0.62, color=BLUE, alpha=0.25, edgecolor="white")
                ax.plot([at + length], [0], "o", color=BLUE, markersize=4)
                if tokens:
                    ax.barh(1, length, left=at, height=0.62, color=ORANGE, alpha=0.5, edgecolor="white")
                    last = at + length
                    if tokens > 100:
                        ax.text(at + length / 2, 1, f"{tokens} tokens", ha="center", va="center", fontsize=8)
                    else:
                        ax.text(at + length / 2, 1, f"{tokens}", ha="center", va="center", fontsize=7)
            ax.plot([last], [1], "o", color=ORANGE, markersize=5)
            ax.text(last + 0.25, 1, "its first token", fontsize=8, va="center", color=INK)
            ax.set_yticks((0, 1), ("those who decode", "the prompt"))
            ax.set_ylim(1.55, -0.55)
            ax.set_xlim(0, 25)
            ax.set_xticks([])
            ax.grid(visible=False)
            ax.set_title(title, fontsize=9)
        axes[-1].set_xlabel("time; a dot is a new token")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
