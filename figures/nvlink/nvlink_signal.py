"""A store and its signal over time: without a flush, with one after each store, and with one that is a round late."""

from figures._draw import lanes, save
from lab import plot

STORE, FLIGHT, SIGNAL = 1.0, 2.2, 1.2  # Time to hand a piece to TMA, until it is written, until a signal is seen.
ROUNDS = 4


def schedule(kind: str) -> list[tuple[int, float, float, float, float]]:
    """(round, start of the store, arrival of the data, the signal is sent, the signal is seen) of each round."""
    now, found, pending = 0.0, [], []
    for i in range(ROUNDS):
        start = now
        now += STORE
        arrival = now + FLIGHT * (1.35 if kind == "no flush" and i == 1 else 1)
        pending.append((i, start, arrival))
        if kind == "no flush":
            found.append((*pending.pop(), now, now + SIGNAL))
        while len(pending) > (kind == "a round late"):
            now = max(now, pending[0][2])
            found.append((*pending.pop(0), now, now + SIGNAL))
    for late in pending:
        now = max(now, late[2])
        found.append((*late, now, now + SIGNAL))
    return found


def draw():
    kinds = {
        "no flush": "no flush: signals overtake the data, and somebody reads too early",
        "at once": "flush after each store: right, and one piece in flight",
        "a round late": "flush and signal follow the next store: right, and two pieces in flight",
    }
    names = ("GPU 0, its warpgroup", "on NVLink", "GPU 1 sees the signal")
    with plot.figure(7.8, 4.9, nrows=3, sharex=True) as (fig, axes):
        for ax, (kind, title) in zip(axes, kinds.items(), strict=True):
            for i, start, arrival, sent, seen in schedule(kind):
                colour = plot.COLOURS[i]
                ax.barh(0, STORE, left=start, height=0.6, color=colour, alpha=0.85, edgecolor=plot.CARD)
                ax.text(start + STORE / 2, 0, f"{i}", ha="center", va="center", fontsize=7.5, color=plot.CARD)
                ax.barh(0, 0.1, left=sent, height=0.75, color=plot.INK)
                low = 0.82 if i % 2 else 1.18
                ax.barh(low, arrival - start - STORE, left=start + STORE, height=0.32, color=colour, alpha=0.6)
                early = seen < arrival
                ax.plot(
                    [sent + 0.05, seen], [0.1, 2], color=plot.BOUND if early else plot.INK, linewidth=0.9, alpha=0.7
                )
                ax.plot(seen, 2, "X" if early else "o", color=plot.BOUND if early else colour, markersize=7)
                if early and i == ROUNDS - 1:
                    ax.text(seen + 0.25, 2, "too early", va="center", fontsize=7, color=plot.BOUND)
            lanes(ax, names, title)
        axes[-1].set_xlabel("time; bars: stores, and their data in flight; black: the signal is sent")
        axes[-1].set_xlim(-0.2, 15.2)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
