"""Figures of chapter 15: serving."""

import itertools

import numpy as np

from figures._chart import chart, first_free, label, lanes, numbered, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, PINK, RED, SOFT, arrow, box, drawing, words
from lab import plot
from serving import PageAllocator, Request, Scheduler


def _key(ax, entries, y):
    """Small boxes of (x, colour, opacity) and what they stand for."""
    for x, colour, fill, text in entries:
        box(ax, x, y, 0.2, 0.2, "", colour, fill=fill)
        words(ax, x + 0.28, y + 0.1, text, 8, ha="left")


@drawing(7.8, 3.1)
def serving_request(ax):
    """One request, step by step: the prompt at once, then one token a step; below a position, what the cache holds."""
    prompt, new = 6, 4
    side = 0.44
    left, top = 1.35, 2.2
    for position in range(prompt + new - 1):
        words(ax, left + side * (position + 0.5), top + 0.6, f"{position}", 7.5, colour=SOFT)
    words(ax, left - 0.15, top + 0.6, "position", 8, ha="right", colour=SOFT)
    for step in range(new):
        y = top - 0.52 * step
        start, end = (0, prompt) if step == 0 else (prompt + step - 1, prompt + step)
        words(ax, left - 0.15, y + side / 2, f"step {step + 1}", ha="right")
        for position in range(end):
            colour = GREEN if position < start else ORANGE if step == 0 else BLUE
            fill = 0.12 if position < start else 0.45
            box(ax, left + side * position, y, side - 0.05, side - 0.05, "", colour, fill=fill)
        at = left + side * end
        arrow(ax, (at, y + 0.2), (at + 0.42, y + 0.2), width=1.1, mutation_scale=10)
        words(ax, at + 0.5, y + 0.2, f"new token {step + 1}", 8, ha="left")
    _key(ax, (
        (0.6, ORANGE, 0.45, "computed: the prompt"),
        (2.75, BLUE, 0.45, "computed: the token sampled last"),
        (5.45, GREEN, 0.12, "in the cache, read"),
    ), 0.16)  # fmt: skip


def row(ax, boxes, xs, y):
    for (text, chapter, colour), x in zip(boxes, xs, strict=True):
        box(ax, x, y, 0.92, 0.58, text, colour, fill=0.2, size=8)
        words(ax, x + 0.46, y + 0.7, chapter, 7, colour=SOFT)
    for x, following in itertools.pairwise(xs):
        arrow(ax, (x + 0.93, y + 0.29), (following - 0.01, y + 0.29), INK, width=1.0)


def residual(ax, y, x_end):
    """The residual stream: in at the left, the sum at the right."""
    ax.plot([0.42, 0.42, x_end], [y + 0.29, y + 1.0, y + 1.0], color=INK, linewidth=1.0)
    arrow(ax, (0.42, y + 0.29), (0.84, y + 0.29), INK, width=1.0)
    arrow(ax, (x_end, y + 1.0), (x_end, y + 0.43), INK, width=1.0)
    words(ax, x_end, y + 0.29, "+", 13)


@drawing(7.8, 3.9)
def serving_step(ax):
    """One layer of the model: which kernel does what, which chapter built it, and where the cache comes in."""
    attention = (  # Text, its chapter, colour.
        ("rms_norm", "chapter 3", ORANGE),
        ("matmul\nq, k, v", "chapter 8", BLUE),
        ("rope_\nwrite_kv", "exercise 1", GREEN),
        ("attention\nover pages", "chapters 13, 14", PINK),
        ("matmul\no", "chapter 8", BLUE),
    )
    mlp = (
        ("rms_norm", "chapter 3", ORANGE),
        ("gated\ngate, up", "chapter 16b", ORANGE),
        ("matmul\ndown", "chapter 8", BLUE),
    )
    wide = [0.85 + 1.3 * i for i in range(5)]
    y = 2.45
    row(ax, attention, wide, y)
    residual(ax, y, 7.45)
    arrow(ax, (wide[-1] + 0.93, y + 0.29), (7.35, y + 0.29), INK, width=1.0)
    words(ax, 0.2, y + 0.29, "x", 11)
    box(ax, wide[2] - 0.35, 1.6, 2.95, 0.38, "cache: pages of keys and values", GREEN, fill=0.12, size=8)
    arrow(ax, (wide[2] + 0.46, y - 0.01), (wide[2] + 0.46, 1.99), GREEN, width=1.1)
    arrow(ax, (wide[3] + 0.46, 1.99), (wide[3] + 0.46, y - 0.01), PINK, width=1.1)
    y = 0.25
    row(ax, mlp, wide[:3], y)
    residual(ax, y, wide[3] + 0.25)
    arrow(ax, (wide[2] + 0.93, y + 0.29), (wide[3] + 0.15, y + 0.29), INK, width=1.0)
    words(ax, 0.2, y + 0.29, "x", 11)
    arrow(ax, (wide[3] + 0.36, y + 0.29), (wide[3] + 0.75, y + 0.29), INK, width=1.0)
    words(ax, wide[3] + 0.85, y + 0.29, "to the next layer", 8, ha="left")


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
    return [(request, place, start) for place, start, _, request in first_free(WANTED, PLACES)]


@chart(7.8, 3.6, nrows=2, sharex=True)
def serving_batches(axes):
    """Four places of a batch over steps: batches that wait for their longest, and places that are refilled at once."""
    titles = "batches: all wait for the longest", "continuous: a place is refilled at once"
    for ax, placed, title in zip(axes, (together(), refilled()), titles, strict=True):
        end = max(start + WANTED[request] for request, _, start in placed)
        ax.barh(range(PLACES), end, height=0.78, color="none", edgecolor="#C9C9C4", hatch="////", linewidth=0)
        for request, place, start in placed:
            look = dict(left=start, height=0.78, edgecolor="white")
            ax.barh(place, WANTED[request], color="white", **look)
            ax.barh(place, WANTED[request], color=(BLUE, ORANGE)[request // PLACES % 2], alpha=0.45, **look)
            label(ax, start + WANTED[request] / 2, place, f"{request}")
        busy = sum(WANTED) / (PLACES * end)
        label(ax, end + 0.3, PLACES / 2 - 0.5, f"{end} steps,\n{busy:.0%} of the\nplaces in use", ha="left")
        tracks(ax, numbered("place", PLACES), title, grid=False)
    axes[-1].set_xlim(0, 29)
    axes[-1].set_xlabel("step; numbers are requests in the order of arrival, hatched places are empty", color=SOFT)


NUM_PAGES, PAGE_SIZE, STEPS = 10, 4, 13
REQUESTS = ((9, 9), (6, 7), (11, 9), (5, 6))  # Tokens of the prompt, and new ones.


def history():
    """For each step: the pages as {page: (request, tokens)}, pages that are kept, and the requests that gave way."""
    allocator = PageAllocator(NUM_PAGES, PAGE_SIZE)
    scheduler = Scheduler(allocator, max_seqs=4, max_tokens_per_step=64)
    requests = [Request(tuple(100 * i + j for j in range(length)), new) for i, (length, new) in enumerate(REQUESTS)]
    for request in requests:
        scheduler.submit(request)
    seen = []
    for step in range(STEPS):
        before = [request.num_preempted for request in requests]
        chunks = scheduler.schedule()
        gave_way = [i for i, request in enumerate(requests) if request.num_preempted > before[i]]
        held = {}
        for chunk in chunks:
            for j, page in enumerate(chunk.request.pages):
                held[page] = requests.index(chunk.request), min(chunk.end - j * PAGE_SIZE, PAGE_SIZE)
        seen.append((held, [page for page in allocator._cached if page not in held], gave_way))
        scheduler.complete(chunks, [1010 + 10 * step + i for i in range(len(chunks))])
    return seen


@chart(7.8, 4.0)
def serving_pool(ax):
    """A cache of ten small pages over the steps of a real schedule: who holds a page, and how many tokens are in it."""
    colours = (BLUE, ORANGE, GREEN, PINK)
    kept_look = dict(color=PALE, edgecolor=SOFT, hatch="....", lw=0)
    for step, (held, kept, gave_way) in enumerate(history(), 1):
        for page in range(NUM_PAGES):
            if page in held:
                request, tokens = held[page]
                ax.barh(page, 0.9, left=step - 0.45, height=0.86, color=colours[request], alpha=0.5)
                label(ax, step, page, f"{tokens}")
            elif page in kept:
                ax.barh(page, 0.9, left=step - 0.45, height=0.86, **kept_look)
        for request in gave_way:
            label(ax, step, -0.85, f"{'ABCD'[request]} gives way")
    for name, colour, (prompt, _) in zip("ABCD", colours, REQUESTS, strict=True):
        ax.barh(0, 0, color=colour, alpha=0.5, label=f"{name}, {prompt} tokens of prompt")
    ax.barh(0, 0, label="held by nobody, contents kept", **kept_look)
    ax.legend(loc="upper center", bbox_to_anchor=(0.47, -0.14), ncols=3, fontsize=8)
    title = f"Pages of {PAGE_SIZE} tokens; a number is how many are in the page; white pages are free"
    tracks(ax, numbered("page", NUM_PAGES), title, grid=False)
    ax.set(xticks=range(1, STEPS + 1), xlim=(0.4, STEPS + 0.6), ylim=(NUM_PAGES - 0.5, -1.3), xlabel="step")


# The tokens of each page, in the order in which pages are drawn.
CONTENTS = {4: "text, part 1", 1: "text, part 2", 6: "A's question", 2: "B's question", 7: "B's answer"}


@drawing(7.8, 3.3)
def serving_sharing(ax):
    """Two requests that begin alike: block tables, the pages that both hold, and how many hold each."""
    a_pages, b_pages = (4, 1, 6), (4, 1, 2, 7)
    at = {page: 1.2 + 1.32 * i for i, page in enumerate(CONTENTS)}
    for page, x in at.items():
        shared = page in a_pages and page in b_pages
        colour = GREEN if shared else BLUE if page in a_pages else ORANGE
        box(ax, x, 1.35, 1.16, 0.62, f"page {page}\n{CONTENTS[page]}", colour, fill=0.3 if shared else 0.16, size=8)
        words(ax, x + 1.05, 1.2, f"held by {1 + shared}", 7.5, ha="right")
    words(ax, 0.98, 1.66, "cache", ha="right", colour=SOFT)
    for name, pages, colour, y in (("A", a_pages, BLUE, 2.72), ("B", b_pages, ORANGE, 0.26)):
        words(ax, 0.98, y + 0.17, f"{name}'s\nblock table", 8.5, ha="right", colour=colour)
        for i, page in enumerate(pages):
            x = at[page] + 0.38
            box(ax, x, y, 0.4, 0.34, f"{page}", colour, fill=0.12)
            if i:
                before = at[pages[i - 1]] + 0.78
                ax.plot([before, x], [y + 0.17] * 2, color=colour, linewidth=0.8, linestyle=":")
            start, end = (y, 1.99) if y > 1 else (y + 0.34, 1.07)
            arrow(ax, (x + 0.2, start), (x + 0.2, end), colour, width=1.1)


@drawing(7.8, 3.5)
def serving_hash(ax):
    """The name of a page: of its tokens alone, two different pages have one name; chained, they do not."""
    texts = (("A", "We sell fishing gear.", BLUE, "3f", "c8"), ("B", "We sell curtains.", ORANGE, "b1", "5d"))
    for i, (prompt, text, colour, first, second) in enumerate(texts):
        y = 2.45 - 1.5 * i
        words(ax, 0.62, y + 0.27, f"prompt\n{prompt}", colour=colour)
        box(ax, 1.15, y, 1.75, 0.54, text, colour, size=8.5)
        box(ax, 3.95, y, 1.75, 0.54, "What is a hook?", GREEN, fill=0.2, size=8.5)
        box(ax, 1.6, y - 0.68, 0.85, 0.36, f"name {first}", INK, fill=0.05, size=8)
        box(ax, 4.4, y - 0.68, 0.85, 0.36, f"name {second}", INK, fill=0.05, size=8)
        arrow(ax, (2.02, y - 0.01), (2.02, y - 0.31), colour, width=1.1)
        arrow(ax, (4.82, y - 0.01), (4.82, y - 0.31), GREEN, width=1.1)
        arrow(ax, (2.46, y - 0.5), (4.38, y - 0.5), INK, "goes into the next name", size=7.5, offset=(0.0, 0.1))
        words(ax, 5.95, y + 0.27, "tokens alone: name e4", 8, ha="left", colour=RED)
        words(ax, 5.95, y - 0.5, f"with what is before:\nname {second}", 8, ha="left")
    words(ax, 2.02, 3.25, "page 0 of the prompt", 8, colour=SOFT)
    words(ax, 4.82, 3.25, "page 1 of the prompt", 8, colour=SOFT)


def steps(chunks: list[int], count: int):
    """(start, length, tokens of the prompt) of `count` steps, one after the other, two before the prompt comes."""
    alone, a_token = 1.0, 0.055  # Length of a step that decodes, and of a token of a prompt.
    placed, at = [], 0.0
    for tokens in ([0, 0, *chunks] + [0] * count)[:count]:
        length = max(alone, 0.35 + a_token * tokens)
        placed.append((at, length, tokens))
        at += length
    return placed


@chart(7.8, 3.5, nrows=2, sharex=True)
def serving_chunks(axes):
    """A long prompt meets sequences that decode: computed at once, and in chunks. Times are made up."""
    plans = (
        ("the whole prompt in one step: all wait for it", [240], 12),
        ("in chunks, under a budget: everybody gets a token in each step", [30] * 8, 14),
    )
    for ax, (title, chunks, count) in zip(axes, plans, strict=True):
        for at, length, tokens in steps(chunks, count):
            ax.barh(0, length, left=at, height=0.62, color=BLUE, alpha=0.25, edgecolor="white")
            ax.plot([at + length], [0], "o", color=BLUE, markersize=4)
            if tokens:
                ax.barh(1, length, left=at, height=0.62, color=ORANGE, alpha=0.5, edgecolor="white")
                last = at + length
                text, size = (f"{tokens} tokens", 8) if tokens > 100 else (f"{tokens}", 7)
                label(ax, at + length / 2, 1, text, size)
        ax.plot([last], [1], "o", color=ORANGE, markersize=5)
        label(ax, last + 0.25, 1, "its first token", ha="left")
        lanes(ax, ("those who decode", "the prompt"), title)
        ax.set(xlim=(0, 25), ylim=(1.55, -0.55))
    axes[-1].set_xlabel("time; a dot is a new token")


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


@chart(height=7.2, saved=False, nrows=3, sharex=True, gridspec_kw=dict(height_ratios=(4, 1.3, 1)))
def schedule_plot(axes, steps, count: int):
    """A schedule, drawn from its steps: a row a request, a column a step. Its chapter makes the steps: no SVG.

    The requests; below them the tokens of each step, by what they are, and the pages that are held.
    """
    plot_colours = (plot.CARD, "#E4E4DF", "#E69F00", "#0072B2", "#CC79A7", "#D55E00")
    labels = ("done", "waits", "prompt", "decodes", "preempted, waits again", "computed again")
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    top, middle, low = axes
    image, twice = states(steps, count)
    top.imshow(image, aspect="auto", interpolation="nearest", cmap=ListedColormap(plot_colours), vmin=0, vmax=5)
    top.set(ylabel="request")
    top.grid(visible=False)
    named = zip(plot_colours[1:], labels[1:], strict=True)
    top.legend(handles=[Patch(facecolor=colour, label=label) for colour, label in named], loc="upper right")
    decoding = np.array([sum(end - start == 1 for _, start, end in step.chunks) for step in steps])
    every = np.array([sum(end - start for _, start, end in step.chunks) for step in steps])
    parts = decoding, every - decoding - twice, twice
    of_parts = [plot_colours[i] for i in (3, 2, 5)]
    middle.stackplot(np.arange(len(steps)), *np.maximum(parts, 0), colors=of_parts, step="mid")
    middle.set(ylabel="tokens")
    low.plot([step.held for step in steps], color=INK, linewidth=0.8)
    low.set(ylabel="pages held", xlabel="step", ylim=(0, None))
