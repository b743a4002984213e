"""Five symptoms of a kernel that fails, and what to do first and then for each."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SOFT, arrow, box, canvas, save, words

ROWS = (  # (what one sees, its colour, [(a finding, what to do first, what to do then), ...])
    (
        "it is refused",
        SOFT,
        [("", "read: the stage,\nthe last noun, our line", "the index of messages,\nlab.explain()")],
    ),
    (
        "the result\nis wrong",
        BLUE,
        [
            ("a race", "read its two lines", "what is missing\nbetween them?"),
            ("no race", "which tile?\nlab.plot.error_map", "what is the wrong tile\nmade of?"),
        ],
    ),
    (
        "it hangs",
        ORANGE,
        [
            ("interpreted", "who waits, and where", "who has passed by\nwithout arriving?"),
            ("on a GPU alone", "a process, a time limit", "waits that give up,\nand print"),
        ],
    ),
    (
        "it differs from\nrun to run",
        RED,
        [("no race seen", "count runs on a GPU", "change one thing:\nthe cure is the cause")],
    ),
    (
        "it is slow",
        GREEN,
        [
            ("the compiler knows", "remarks, spills, DEPBAR", "smaller tile,\nfewer registers"),
            ("it does not", "the timeline", "ncu: what is busy?"),
        ],
    ),
)
HEIGHT, GAP = 0.56, 0.14


def draw():
    lines = sum(len(branches) for *_, branches in ROWS)
    top = lines * (HEIGHT + GAP) + 1.0
    fig, ax = canvas(7.8, top + 0.4)
    for x, text in ((0.9, "what you see"), (4.1, "first"), (6.55, "then")):
        words(ax, x, top + 0.18, text, size=9.5, weight="bold")
    y = top
    for symptom, colour, branches in ROWS:
        height = len(branches) * (HEIGHT + GAP)
        middle = y - height / 2
        box(ax, 0.2, middle - HEIGHT / 2, 1.4, HEIGHT, symptom, colour, fill=0.25, weight="bold")
        for finding, first, then in branches:
            y -= HEIGHT + GAP
            at = y + GAP / 2 + HEIGHT / 2
            arrow(ax, (1.6, middle), (3.08, at), colour)
            if finding:
                words(ax, 2.38, at + (0.14 if at > middle - 0.01 else -0.12), finding, size=8, colour=INK)
            box(ax, 3.1, at - HEIGHT / 2, 2.0, HEIGHT, first, colour, size=8.5)
            arrow(ax, (5.1, at), (5.58, at), colour)
            box(ax, 5.6, at - HEIGHT / 2, 1.95, HEIGHT, then, colour, fill=0.06, size=8.5)
    box(ax, 0.2, 0.2, 7.35, 0.5, "", PINK, fill=0.1)
    words(
        ax,
        3.87,
        0.45,
        "always: make the failing case smaller (one block, one tile, one step), then print little",
        size=9,
    )
    return fig


if __name__ == "__main__":
    save(__file__, draw())
