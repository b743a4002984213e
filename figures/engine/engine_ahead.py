"""Host and device over a few steps: the host waits for the tokens of each, or is a step ahead. Times are made up."""

from figures._draw import BLUE, INK, ORANGE, save
from lab import plot

HOST, DEVICE, STEPS = 2.0, 2.6, 5  # Time of a step on the host and on the device; steps drawn.


def waiting() -> list[tuple[float, float]]:
    """When each step begins on the host and on the device, if the host waits for its tokens before the next."""
    return [(i * (HOST + DEVICE), i * (HOST + DEVICE) + HOST) for i in range(STEPS)]


def ahead() -> list[tuple[float, float]]:
    """The same, if the host begins step i once it has the tokens of step i - 2."""
    placed: list[tuple[float, float]] = []
    for i in range(STEPS):
        host = placed[-1][0] + HOST if placed else 0.0
        if i >= 2:
            host = max(host, placed[i - 2][1] + DEVICE)
        placed.append((host, max(host + HOST, placed[-1][1] + DEVICE if placed else 0.0)))
    return placed


def draw():
    plans = (("the host waits for the tokens of each step", waiting()), ("the host is a step ahead", ahead()))
    with plot.figure(7.8, 3.5, nrows=2, sharex=True) as (fig, axes):
        for ax, (title, placed) in zip(axes, plans, strict=True):
            for i, (host, device) in enumerate(placed, 1):
                for row, at, length, colour in ((0, host, HOST, ORANGE), (1, device, DEVICE, BLUE)):
                    ax.barh(row, length, left=at, height=0.62, color=colour, alpha=0.4, edgecolor="white")
                    ax.text(at + length / 2, row, f"{i}", ha="center", va="center", fontsize=9, color=INK)
                ax.plot([device + DEVICE], [1], "o", color=BLUE, markersize=4)
            ax.set_yticks((0, 1), ("host: schedule, pack, send off", "device: compute"))
            ax.set_ylim(1.55, -0.55)
            ax.set_xlim(0, STEPS * (HOST + DEVICE) + 0.3)
            ax.set_xticks([])
            ax.grid(visible=False)
            ax.set_title(title, fontsize=9)
        axes[-1].set_xlabel("time; a dot: the tokens of the step are known")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
