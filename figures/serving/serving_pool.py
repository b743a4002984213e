"""A cache of ten small pages over the steps of a real schedule: who holds which page, and how many tokens are in it."""

from figures._draw import BLUE, GREEN, ORANGE, PALE, PINK, SOFT, save
from lab import plot
from serving import PageAllocator, Request, Scheduler

NUM_PAGES, PAGE_SIZE, STEPS = 10, 4, 13
REQUESTS = ((9, 9), (6, 7), (11, 9), (5, 6))  # Tokens of the prompt, and new ones.
COLOURS = (BLUE, ORANGE, GREEN, PINK)


def history():
    """For each step: the pages as {page: (request, tokens)}, pages that are kept, and the requests that gave way."""
    allocator = PageAllocator(NUM_PAGES, PAGE_SIZE)
    scheduler = Scheduler(allocator, max_seqs=4, max_tokens_per_step=64)
    requests = [Request(tuple(100 * i + j for j in range(length)), new) for i, (length, new) in enumerate(REQUESTS)]
    for request in requests:
        scheduler.submit(request)
    token, seen = 1000, []
    for _ in range(STEPS):
        before = [request.num_preempted for request in requests]
        chunks = scheduler.schedule()
        gave_way = [i for i, request in enumerate(requests) if request.num_preempted > before[i]]
        held = {}
        for chunk in chunks:
            for j, page in enumerate(chunk.request.pages):
                held[page] = requests.index(chunk.request), min(chunk.end - j * PAGE_SIZE, PAGE_SIZE)
        kept = [page for page in allocator._cached if page not in held]
        seen.append((held, kept, gave_way))
        token += 10
        scheduler.complete(chunks, [token + i for i in range(len(chunks))])
    return seen


def draw():
    seen = history()
    with plot.figure(7.8, 4.0) as (fig, ax):
        for step, (held, kept, gave_way) in enumerate(seen, 1):
            for page in range(NUM_PAGES):
                if page in held:
                    request, tokens = held[page]
                    ax.barh(page, 0.9, left=step - 0.45, height=0.86, color=COLOURS[request], alpha=0.5)
                    ax.text(step, page, f"{tokens}", ha="center", va="center", fontsize=8)
                elif page in kept:
                    ax.barh(page, 0.9, left=step - 0.45, height=0.86, color=PALE, edgecolor=SOFT, hatch="....", lw=0)
            for request in gave_way:
                ax.text(step, -0.85, f"{'ABCD'[request]} gives way", ha="center", va="center", fontsize=8)
        for request, colour in enumerate(COLOURS):
            ax.barh(0, 0, color=colour, alpha=0.5, label=f"{'ABCD'[request]}, {REQUESTS[request][0]} tokens of prompt")
        ax.barh(0, 0, color=PALE, edgecolor=SOFT, hatch="....", lw=0, label="held by nobody, contents kept")
        ax.legend(loc="upper center", bbox_to_anchor=(0.47, -0.14), ncols=3, fontsize=8)
        ax.set_yticks(range(NUM_PAGES), [f"page {page}" for page in range(NUM_PAGES)])
        ax.set_xticks(range(1, STEPS + 1))
        ax.set(xlim=(0.4, STEPS + 0.6), ylim=(NUM_PAGES - 0.5, -1.3), xlabel="step")
        ax.grid(visible=False)
        ax.set_title(
            f"Pages of {PAGE_SIZE} tokens; a number is how many are in the page; white pages are free", fontsize=9
        )
    return fig


if __name__ == "__main__":
    save(__file__, draw())
