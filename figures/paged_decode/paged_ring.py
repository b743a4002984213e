"""A block of keys after the other: everything in turn, and with a memory warpgroup and a ring. Times are made up."""

from figures._draw import BLUE, GREEN, ORANGE, lanes, save
from lab import plot

IDS, COPY, COMPUTE, END = 0.8, 1.0, 0.85, 12.0


def schedule(slots: int) -> list[tuple[float, float, float]]:
    """For each step: when its page ids are asked for, when its copies start, when its products start."""
    freed, memory, compute, found = {}, 0.0, 0.0, []
    while compute < END:
        slot = len(found) % slots
        ask = max(memory, freed.get(slot, 0.0))
        start = max(compute, ask + IDS + COPY)
        memory, compute = ask + IDS, start + COMPUTE
        freed[slot] = compute
        found.append((ask, ask + IDS, start))
    return found


def draw():
    cases = ("rung 1: one warpgroup, everything in turn", 1), ("rung 2: a memory warpgroup and a ring of slots", 3)
    with plot.figure(7.8, 3.7, nrows=2, sharex=True, height_ratios=(3, 5)) as (fig, axes):
        for ax, (title, slots) in zip(axes, cases, strict=True):
            for step, (ask, copy, start) in enumerate(schedule(slots)):
                for lane, at, length, colour in (
                    (0, ask, IDS, ORANGE),
                    (1 + step % slots, copy, COPY, GREEN),
                    (1 + slots, start, COMPUTE, BLUE),
                ):
                    look = dict(color=colour, alpha=0.4 if step % 2 else 0.75, edgecolor="white")
                    ax.barh(lane, length, left=at, height=0.74, **look)
                    if at + length / 2 < END - 0.1:
                        ax.text(at + length / 2, lane, str(step), ha="center", va="center", fontsize=8)
            names = ["copies"] if slots == 1 else [f"copies, slot {slot}" for slot in range(slots)]
            lanes(ax, ["page ids", *names, "products, softmax"], title)
            ax.set_xlim(0, END)
        axes[-1].set_xlabel("time of one block of threads; the numbers are blocks of keys", fontsize=8)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
