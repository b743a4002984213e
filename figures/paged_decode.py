"""Figures of chapter 13: paged decode."""

from figures._chart import chart, label, lanes, tile
from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SOFT, arrow, box, drawing, words
from figures._stepper import stepper
from lab import plot

LENGTHS, MOST, PAGE = (13, 30, 5, 18), 32, 4  # Tokens.
COLOURS = (BLUE, ORANGE, GREEN, PINK)
ORDER = (5, 17, 2, 11, 20, 0, 8, 14, 3, 22, 9, 6, 16, 1, 12, 19, 7, 23, 10)  # Which page is handed out next.


@drawing(7.8, 3.55)
def paged_waste(ax):
    """A cache with room for the longest sequence in each row, and the same tokens in pages."""
    _reserved(ax)
    _pages(ax)


def _reserved(ax):
    words(ax, 0.2, 3.35, "room for the longest sequence, for each one", ha="left", weight="bold")
    for seq, (length, colour) in enumerate(zip(LENGTHS, COLOURS, strict=True)):
        y, width = 2.9 - 0.28 * seq, 0.15
        words(ax, 0.2, y + 0.1, f"sequence {seq}", 8, ha="left", colour=colour)
        box(ax, 1.15, y, MOST * width, 0.2, colour=SOFT, fill=0.05, linewidth=0.8)
        box(ax, 1.15, y, length * width, 0.2, colour=colour, fill=0.45, linewidth=0.8)
    used = sum(LENGTHS)
    words(ax, 6.1, 2.65, f"{used} tokens\nin {len(LENGTHS)} x {MOST} = {len(LENGTHS) * MOST}", 8.5, ha="left")
    words(ax, 6.1, 2.2, f"{used / len(LENGTHS) / MOST:.0%} used", 8.5, ha="left", weight="bold")


def _pages(ax):
    pages, columns = 24, 12
    words(ax, 0.2, 1.75, f"pages of {PAGE} tokens, handed out as sequences grow", ha="left", weight="bold")
    cell, gap, order = 0.088, 0.04, iter(ORDER)
    owner = {
        next(order): (seq, min(PAGE, length - first))
        for seq, length in enumerate(LENGTHS)
        for first in range(0, length, PAGE)
    }
    for page in range(pages):
        x, y = 1.15 + (page % columns) * (PAGE * cell + gap), 1.2 - (page // columns) * 0.5
        box(ax, x, y, PAGE * cell, 0.3, colour=SOFT, fill=0.05 if page in owner else 0.02, linewidth=0.8)
        if page in owner:
            seq, tokens = owner[page]
            box(ax, x, y, tokens * cell, 0.3, colour=COLOURS[seq], fill=0.45, linewidth=0.8)
        words(ax, x + PAGE * cell / 2, y - 0.09, str(page), 6.5, colour=SOFT)
    used, held = sum(LENGTHS), len(owner) * PAGE
    words(ax, 6.35, 1.32, f"{used} tokens in\n{len(owner)} pages = {held}", 8.5, ha="left")
    words(ax, 6.35, 0.9, f"{used / held:.0%} used", 8.5, ha="left", weight="bold")
    words(ax, 6.35, 0.65, f"{pages - len(owner)} pages are free", 8.5, ha="left", colour=SOFT)
    words(ax, 1.15, 0.28, "only the last page of a sequence has unused room", 8, ha="left", colour=SOFT)


GROUP, SHOWN = 4, 16  # Query heads that share keys; rows drawn.


@drawing(7.8, 3.2)
def paged_rows(ax):
    """The query heads that share keys are rows of one WGMMA: 4 of its 64 rows are useful."""
    _queries(ax)
    _tile(ax, 2.75, "q of the group", "64 x head_dim", BLUE, 1.0)
    words(ax, 3.95, 1.55, "x", 12)
    box(ax, 4.15, 1.05, 1.35, 1.0, "keys of\n64 tokens,\ntransposed", GREEN, fill=0.3, size=8.5)
    words(ax, 4.82, 0.86, "head_dim x 64", 8, colour=SOFT)
    words(ax, 5.7, 1.55, "=", 12)
    _tile(ax, 5.95, "logits", "64 x 64", ORANGE, 1.35)
    words(ax, 2.75, 0.2, f"{GROUP} rows are query heads; {64 - GROUP} are discarded", 8.5, ha="left")


def _queries(ax):
    words(ax, 0.2, 2.98, "one token's query heads", ha="left", weight="bold")
    for head in range(12):
        y, colour = 2.65 - 0.19 * head, BLUE if head < GROUP else SOFT
        box(ax, 0.2, y, 0.85, 0.14, colour=colour, fill=0.45 if head < GROUP else 0.1, linewidth=0.6)
        words(ax, 1.12, y + 0.07, f"head {head}", 7, ha="left", colour=colour)
    words(ax, 0.62, 0.42, "...", colour=SOFT)
    arrow(ax, (1.62, 2.38), (2.72, 2.6), BLUE, "heads 0 to 3\nread the same\nkeys: a group", 7.5, at=(2.05, 1.75))


def _tile(ax, x, name, sides, colour, width):
    words(ax, x + width / 2, 2.98, name, 8.5, weight="bold")
    for row in range(SHOWN):
        y = 2.72 - 0.14 * row
        if row == SHOWN - 3:
            words(ax, x + width / 2, y + 0.05, "...", colour=SOFT)
            continue
        look = (
            dict(colour=colour, fill=0.5, linewidth=0.5) if row < GROUP else dict(colour=SOFT, fill=0.04, linewidth=0.3)
        )
        box(ax, x, y, width, 0.1, **look)
    words(ax, x + width / 2, 0.48, sides, 8, colour=SOFT)


IDS, COPY, COMPUTE, END = 0.8, 1.0, 0.85, 12.0


def schedule(stages: int) -> list[tuple[float, float, float]]:
    """For each step: when its page ids are asked for, when its copies start, when its products start."""
    freed, memory, compute, found = {}, 0.0, 0.0, []
    while compute < END:
        stage = len(found) % stages
        ask = max(memory, freed.get(stage, 0.0))
        start = max(compute, ask + IDS + COPY)
        memory, compute = ask + IDS, start + COMPUTE
        freed[stage] = compute
        found.append((ask, ask + IDS, start))
    return found


@chart(7.8, 3.7, nrows=2, sharex=True, height_ratios=(3, 5))
def paged_ring(axes):
    """Block of keys after block of keys: everything in turn, and with a memory warpgroup and a ring; made-up times."""
    cases = ("rung 1: one warpgroup, everything in turn", 1), ("rung 2: a memory warpgroup and a ring of stages", 3)
    for ax, (title, stages) in zip(axes, cases, strict=True):
        for step, (ask, copy, start) in enumerate(schedule(stages)):
            for lane, at, length, colour in (
                (0, ask, IDS, ORANGE),
                (1 + step % stages, copy, COPY, GREEN),
                (1 + stages, start, COMPUTE, BLUE),
            ):
                look = dict(color=colour, alpha=0.4 if step % 2 else 0.75, edgecolor="white")
                ax.barh(lane, length, left=at, height=0.74, **look)
                if at + length / 2 < END - 0.1:
                    label(ax, at + length / 2, lane, str(step))
        names = ["copies"] if stages == 1 else [f"copies, stage {stage}" for stage in range(stages)]
        lanes(ax, ["page ids", *names, "products, softmax"], title)
        ax.set_xlim(0, END)
    axes[-1].set_xlabel("time of one block of threads; the numbers are blocks of keys", fontsize=8)


MINE, NEXT, FREE = (7, 2, 5), 8, (0, 8)  # Pages of the sequence, the page that it gets next, and the free pages.
DECODE = (  # Tokens; the token that is written, if any; whether the pages are read; the caption.
    (
        10,
        None,
        False,
        "A sequence of 10 tokens has pages 7, 2 and 5. Its row of the block table keeps their order.",
    ),
    (11, 10, False, "A decoding step writes token 10: column 10 // 4 = 2 holds page 5, and the offset is 10 % 4 = 2."),
    (
        11,
        None,
        True,
        "Attention reads the row and copies page after page. It masks the slot after token 10.",
    ),
    (12, 11, False, "The next step writes token 11 into the last slot of page 5. Now all three pages are full."),
    (13, 12, False, "Token 12 needs column 3. Page 8 is free, so its number goes into the table. Nothing else moves."),
    (0, None, False, "The sequence ends. Its four pages are free at once, for any other sequence."),
)


@stepper(7.8, 2.85)
def pages_in_steps(ax):
    """A sequence that decodes: its tokens, its row of the block table, and its pages in the cache."""
    cell = 0.15
    token_x = lambda t: 1.6 + 0.36 * t + 0.15 * (t // PAGE)
    page_x = lambda page: 1.15 + 0.66 * page
    middle = lambda column: token_x(PAGE * column) + 0.36 * PAGE / 2
    for y, text in ((2.5, "tokens of the\nsequence"), (1.75, "row of the\nblock table"), (0.63, "the cache")):
        words(ax, 0.15, y, text, ha="left", weight="bold")
    for page in range(10):
        other = page not in (*MINE, *FREE)
        for offset in range(PAGE):
            colour = SOFT if other else plot.CARD
            look = dict(alpha=0.4) if other else {}
            tile(ax, page_x(page) + cell * offset, 0.45, cell, 0.36, colour, edgecolor=SOFT, linewidth=0.6, **look)
        words(ax, page_x(page) + 2 * cell, 0.32, f"page {page}", 7.5, colour=SOFT)
    words(ax, 7.7, 0.1, "grey: pages of other sequences; white: free slots", 8, ha="right", colour=SOFT)
    yield
    for tokens, new, reads, caption in DECODE:
        pages = (*MINE, NEXT)[: -(-tokens // PAGE)]
        for t in range(tokens):
            column, offset = divmod(t, PAGE)
            colour, ink = (RED, plot.CARD) if t == new else (COLOURS[column], INK)
            tile(ax, token_x(t), 2.35, 0.34, 0.32, colour, str(t), 8.5, ink=ink, alpha=0.85)
            tile(ax, page_x(pages[column]) + cell * offset, 0.45, cell, 0.36, colour, edgecolor=SOFT, linewidth=0.6)
        for column in range(4):
            page = str(pages[column]) if column < len(pages) else "-"
            tile(ax, middle(column) - 0.25, 1.6, 0.5, 0.32, plot.CARD, page, 10, edgecolor=INK)
            written = new is not None and column == new // PAGE
            if written or (reads and column < len(pages)):
                at = page_x(pages[column]) + (cell * (new % PAGE + 0.5) if written else 2 * cell)
                arrow(ax, (middle(column), 1.58), (at, 0.84), RED if written else COLOURS[column])
        if reads:
            words(ax, 0.15, 1.2, "1. page ids\n2. TMA copies", 9, ha="left")
        if new is not None:
            page, offset = pages[new // PAGE], new % PAGE
            arrow(ax, (token_x(new) + 0.17, 2.33), (middle(new // PAGE), 1.95), RED)
            words(ax, 0.15, 1.2, f"slot {page} x {PAGE} + {offset} = {page * PAGE + offset}", 9, ha="left", colour=RED)
        yield caption
