"""Figures of chapter 24: choosing among many without a sort."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, words


@drawing(7.8, 3.3)
def radix(ax):
    """The digits of the 50th largest key, one after the other: how many keys have each digit, and where it must be."""
    # Keys with each digit, from 3 down to 0. The next panel divides the keys of the bin that holds the 50th.
    panels = (
        ("first two bits", "", 0, (6, 140, 2050, 1900), 1),
        ("next two bits", "10", 6, (6, 14, 30, 90), 2),
        ("next two bits", "10 01", 26, (6, 7, 8, 9), 3),
    )
    for i, (title, prefix, above, counts, chosen) in enumerate(panels):
        left = 0.15 + 2.62 * i
        words(ax, left + 1.05, 3.12, title, 9.5, weight="bold")
        words(ax, left + 1.05, 2.9, f"of the keys that begin with {prefix}" if prefix else "of all 4,096 keys", 8,
              colour=SOFT)  # fmt: skip
        words(ax, left + 0.2, 2.62, "digit", 8, colour=SOFT)
        words(ax, left + 0.93, 2.62, "keys", 8, colour=SOFT)
        words(ax, left + 1.8, 2.62, "reached by", 8, colour=SOFT)
        reached = above
        for j, count in enumerate(counts):
            reached += count
            y, is_chosen = 2.2 - 0.4 * j, j == chosen
            colour = ORANGE if is_chosen else SKY if j < chosen else SOFT
            style = dict(fill=0.45 if is_chosen else 0.2 if j < chosen else 0.05, size=9)
            box(ax, left, y, 0.42, 0.3, f"{3 - j:02b}", colour, **style)
            box(ax, left + 0.5, y, 0.86, 0.3, f"{count:,}", colour, **style)
            known = f"{reached:,}" if j <= chosen else ""
            words(ax, left + 1.8, y + 0.15, known, 9.5, colour=RED if is_chosen else INK,
                  weight="bold" if is_chosen else "normal")  # fmt: skip
        if i:
            words(ax, left + 1.05, 0.72, f"{above} keys are larger than all of these", 8, colour=SOFT)
        if i < 2:
            y = 2.35 - 0.4 * chosen
            arrow(ax, (left + 2.12, y), (left + 2.56, y + 0.1), ORANGE)
    words(ax, 0.15, 0.3, "wanted: the 50th largest. In each step, the first digit that 50 keys reach is its digit: "
          "10, then 01, then 00 ...", 9, ha="left")  # fmt: skip


@drawing(7.8, 2.75)
def votes(ax):
    """A ballot: each thread of a warp learns the votes of all, counts those before its own, and has its slot."""
    votes, width, left = (0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0), 0.36, 1.75
    rows = dict(thread=2.3, vote=1.87, before=1.44, slot=1.01)
    names = dict(thread="thread", vote="its vote", before="votes before it", slot="its slot")
    for name, y in rows.items():
        words(ax, left - 0.12, y + 0.15, names[name], 9, ha="right")
    found = 0
    for i, vote in enumerate(votes):
        x = left + i * width
        words(ax, x + width / 2, rows["thread"] + 0.15, str(i), 8, colour=SOFT)
        box(ax, x + 0.02, rows["vote"], width - 0.04, 0.3, str(vote), ORANGE if vote else SOFT,
            fill=0.45 if vote else 0.04, size=9)  # fmt: skip
        words(ax, x + width / 2, rows["before"] + 0.15, str(found), 9, colour=INK if vote else SOFT)
        if vote:
            box(ax, x + 0.02, rows["slot"], width - 0.04, 0.3, str(found), GREEN, fill=0.35, size=9)
            arrow(ax, (x + width / 2, rows["slot"] - 0.03), (left + 0.7 + found * 0.62, 0.53), SOFT, width=0.8)
        found += vote
    for slot in range(found):
        box(ax, left + 0.42 + slot * 0.62, 0.2, 0.58, 0.3, f"slot {slot}", GREEN, fill=0.2, size=8)
    words(ax, left - 0.12, 0.35, "shared memory", 9, ha="right")
    words(ax, left + 3.75, 0.35, "half of a warp; one ballot, no counter", 8.5, ha="left", colour=SOFT)


@drawing(7.8, 2.7)
def parts(ax):
    """A long row as many short ones: a block finds the best of each, and one more block the best of these."""
    words(ax, 0.15, 2.5, "one row of 131,072 keys, as 32 rows of 4,096", 9, ha="left")
    for i in range(6):
        x, is_gap = 0.15 + i * 1.27, i == 4
        if is_gap:
            words(ax, x + 0.56, 2.05, "...", 12)
            words(ax, x + 0.56, 1.15, "...", 12)
            continue
        box(ax, x, 1.9, 1.15, 0.32, "4,096 keys", SKY, fill=0.25, size=8.5)
        arrow(ax, (x + 0.57, 1.87), (x + 0.57, 1.36), SOFT, width=1)
        words(ax, x + 0.65, 1.62, "a block", 7.5, ha="left", colour=SOFT)
        box(ax, x + 0.31, 1.02, 0.52, 0.3, "64", ORANGE, fill=0.4, size=8.5)
        arrow(ax, (x + 0.57, 0.99), (3.7 + (x - 3.3) * 0.13, 0.62), SOFT, width=0.8)
    box(ax, 2.85, 0.27, 1.9, 0.32, "2,048 candidates", ORANGE, fill=0.4, size=8.5)
    arrow(ax, (4.78, 0.43), (5.55, 0.43), SOFT, text="one block", size=7.5, offset=(0.0, 0.14), width=1)
    box(ax, 5.58, 0.27, 0.75, 0.32, "50", GREEN, fill=0.4, size=9)
    words(ax, 6.45, 0.43, "in order", 8.5, ha="left", colour=SOFT)


@drawing(7.8, 2.8)
def noise(ax):
    """Logits, the noise that each of three draws adds to them, and the largest sum, which is the token drawn."""
    logits = (0.95, 0.6, 0.35, 0.15)
    draws = ((0.2, 0.3, 0.15, 0.45), (0.1, 0.75, 0.3, 0.2), (0.55, 0.05, 0.25, 0.3))
    words(ax, 0.1, 0.2, "token", 8.5, ha="left", colour=SOFT)
    for i, added in enumerate(draws):
        left = 0.75 + i * 2.4
        sums = [x + y for x, y in zip(logits, added, strict=True)]
        for j, (x, y) in enumerate(zip(logits, added, strict=True)):
            at, is_drawn = left + 0.46 * j, sums[j] == max(sums)
            box(ax, at, 0.4, 0.36, x, colour=BLUE, fill=0.5, linewidth=0.6)
            box(ax, at, 0.4 + x, 0.36, y, colour=PINK, fill=0.35, linewidth=0.6)
            words(ax, at + 0.18, 0.2, str(j), 8.5)
            if is_drawn:
                words(ax, at + 0.18, 0.4 + x + y + 0.13, "drawn", 8.5, colour=RED, weight="bold")
        words(ax, left + 0.9, 2.6, f"position {i + 7}", 9)
    words(ax, 0.1, 0.85, "logit", 8.5, ha="left", colour=BLUE)
    words(ax, 0.1, 1.55, "noise", 8.5, ha="left", colour=PINK)
