"""Figures of chapter 15b: engine."""

from figures._chart import bar, chart, lanes
from figures._draw import BLUE, INK, ORANGE

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


@chart(7.8, 3.5, nrows=2, sharex=True)
def engine_ahead(axes):
    """Host and device over a few steps: the host waits for the tokens of each, or is a step ahead; made-up times."""
    plans = (("the host waits for the tokens of each step", waiting()), ("the host is a step ahead", ahead()))
    look = dict(height=0.62, size=9, ink=INK, clip=False, alpha=0.4, edgecolor="white", linewidth=None)
    for ax, (title, placed) in zip(axes, plans, strict=True):
        for i, (host, device) in enumerate(placed, 1):
            bar(ax, 0, host, host + HOST, f"{i}", ORANGE, **look)
            bar(ax, 1, device, device + DEVICE, f"{i}", BLUE, **look)
            ax.plot([device + DEVICE], [1], "o", color=BLUE, markersize=4)
        lanes(ax, ("host: schedule, pack, send off", "device: compute"), title)
        ax.set(xlim=(0, STEPS * (HOST + DEVICE) + 0.3), ylim=(1.55, -0.55))
    axes[-1].set_xlabel("time; a dot: the tokens of the step are known")
