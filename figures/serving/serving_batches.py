"""Four places of a batch over steps: batches that wait for their longest, and places that are refilled at once."""

from figures._draw import BLUE, ORANGE, SOFT, save
from lab import plot

WANTED = (6, 2, 9, 3, 4, 8, 1, 2, 5, 1, 3, 7)  # Steps of each request, in the order of arrival.
PLACES = 4


def together() -> list[tuple[int, int, int]]:
    """(request, place, start): each batch starts when the one before is done."""
    placed, start = [], 0
    for first in range(0, len(WANTED), PLACES):
        batch = range(first, min(first + PLACES, len(WANTED)))
        placed += [(request, request - first, start) for request in batch]
        start += max(WANTED[request] for request in batch)
    return placed


def refilled() -> list[tuple[int, int, int]]:
    """The same, where a request starts in the first place that is free."""
    placed, free_from = [], [0] * PLACES
    for request, steps in enumerate(WANTED):
        place = min(range(PLACES), key=lambda place: free_from[place])
        placed.append((request, place, free_from[place]))
        free_from[place] += steps
    return placed


def draw():
    with plot.figure(7.8, 3.6, nrows=2, sharex=True) as (fig, axes):
        titles = "batches: all wait for the longest", "continuous: a place is refilled at once"
        for ax, placed, title in zip(axes, (together(), refilled()), titles, strict=True):
            end = max(start + WANTED[request] for request, _, start in placed)
            ax.barh(range(PLACES), end, height=0.78, color="none", edgecolor="#C9C9C4", hatch="////", linewidth=0)
            for request, place, start in placed:
                colour = (BLUE, ORANGE)[request // PLACES % 2]
                ax.barh(place, WANTED[request], left=start, height=0.78, color="white", edgecolor="white")
                ax.barh(place, WANTED[request], left=start, height=0.78, color=colour, alpha=0.45, edgecolor="white")
                ax.text(start + WANTED[request] / 2, place, f"{request}", ha="center", va="center", fontsize=8)
            busy = sum(WANTED) / (PLACES * end)
            ax.text(
                end + 0.3, PLACES / 2 - 0.5, f"{end} steps,\n{busy:.0%} of the\nplaces in use", va="center", fontsize=8
            )
            ax.set_yticks(range(PLACES), [f"place {place}" for place in range(PLACES)])
            ax.set_ylim(PLACES - 0.4, -0.6)
            ax.grid(visible=False)
            ax.set_title(title, fontsize=9)
            ax.set_xlim(0, 29)
        axes[-1].set_xlabel("step; numbers are requests in the order of arrival, hatched places are empty", color=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
