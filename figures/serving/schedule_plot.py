"""A schedule, drawn from its steps: a row a request, a column a step. A chapter makes the steps, so there is no SVG."""

import numpy as np

from lab import plot

COLOURS = (plot.CARD, "#E4E4DF", "#E69F00", "#0072B2", "#CC79A7", "#D55E00")
LABELS = ("done", "waits", "prompt", "decodes", "preempted, waits again", "computed again")


def states(steps, count: int):
    """The activity of each of `count` requests in each step, as an index into LABELS; and each step's tokens that are
    computed a second time."""
    image, most = np.zeros((count, len(steps)), int), np.zeros(count, int)
    twice, started = np.zeros(len(steps), int), np.zeros(count, bool)
    for t, step in enumerate(steps):
        image[~started, t] = 1
        image[step.preempted, t] = 4
        for i, start, end in step.chunks:
            again = max(0, min(end, most[i]) - start)
            twice[t] += again
            image[i, t] = 5 if again else 3 if end - start == 1 else 2
            most[i], started[i] = max(most[i], end), True
    return image, twice


def draw(steps, count: int):
    """The requests; below them the tokens of each step, by what they are, and the pages that are held."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    image, twice = states(steps, count)
    heights = dict(height_ratios=(4, 1.3, 1))
    with plot.figure(height=7.2, nrows=3, sharex=True, gridspec_kw=heights) as (fig, (top, middle, low)):
        colours = ListedColormap(COLOURS)
        top.imshow(image, aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=5)
        top.set(ylabel="request")
        top.grid(visible=False)
        named = zip(COLOURS[1:], LABELS[1:], strict=True)
        top.legend(handles=[Patch(facecolor=colour, label=label) for colour, label in named], loc="upper right")
        decoding = np.array([sum(end - start == 1 for _, start, end in step.chunks) for step in steps])
        every = np.array([sum(end - start for _, start, end in step.chunks) for step in steps])
        parts = decoding, every - decoding - twice, twice
        of_parts = [COLOURS[i] for i in (3, 2, 5)]
        middle.stackplot(np.arange(len(steps)), *np.maximum(parts, 0), colors=of_parts, step="mid")
        middle.set(ylabel="tokens")
        low.plot([step.held for step in steps], color=plot.INK, linewidth=0.8)
        low.set(ylabel="pages held", xlabel="step", ylim=(0, None))
    return fig
