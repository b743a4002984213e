"""Figures of chapter 21: lifting."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, words

STEPS = (  # (what one does, how, what checks it, colour)
    ("copy", "make lift: its files,\nlicence and version", "a process that sees\nnothing else", BLUE),
    ("call", "jit, vmap, grad, scan,\nshard_map", "jnp, and the operations\naround the kernel", SKY),
    ("choose", "the default, or a search\non your GPU", "the time of each,\nthe program it makes", GREEN),
    ("ship", "an exported program,\nwithout its source", "another process\nloads it", ORANGE),
    ("guard", "lab.check, compile_for,\nmake fuzz, make bench", "CI fails where\none of them fails", PINK),
)
WIDTH, GAP = 1.62, 0.2


@drawing(0.75 + len(STEPS) * (WIDTH + GAP), 2.75)
def lifting_path(ax):
    """From the course to a server: the steps of a lift, and what each is checked by."""
    words(ax, 0.36, 1.72, "do", 8.5, weight="bold")
    words(ax, 0.36, 0.55, "check", 8.5, weight="bold")
    for i, (name, how, check, colour) in enumerate(STEPS):
        x = 0.7 + i * (WIDTH + GAP)
        words(ax, x + WIDTH / 2, 2.5, f"{i + 1}. {name}", 10, weight="bold", colour=colour)
        box(ax, x, 1.35, WIDTH, 0.8, how, colour, size=8)
        box(ax, x, 0.2, WIDTH, 0.7, check, colour, fill=0.05, size=8, linestyle="--")
        arrow(ax, (x + WIDTH / 2, 1.35), (x + WIDTH / 2, 0.92), colour)
        if i:
            arrow(ax, (x - GAP, 1.75), (x - 0.01, 1.75), INK)


SHARDING_WIDTH = 2.35


def panel(ax, x, title, cost, colour):
    words(ax, x + SHARDING_WIDTH / 2, 3.15, title, 9.5, weight="bold", colour=colour)
    words(ax, x + SHARDING_WIDTH / 2, 2.85, cost, 8)
    for gpu, left in enumerate((x, x + 1.25)):
        box(ax, left, 2.0, 1.1, 0.6, f"rows of GPU {gpu}", BLUE, size=8)


@drawing(8.3, 3.4)
def lifting_sharding(ax):
    """A kernel on an array that two GPUs share: with jit alone, on an explicit mesh, and under shard_map."""
    panel(ax, 0.25, "jax.jit, automatic mesh", "an all-gather first", ORANGE)
    panel(ax, 3.0, "jax.jit, explicit mesh", "an error", RED)
    panel(ax, 5.75, "jax.shard_map", "nothing is sent", GREEN)
    for left in (0.25, 1.5):
        box(ax, left, 1.0, 1.1, 0.6, "kernel:\nall rows", ORANGE, size=8)
        box(ax, left, 0.2, 1.1, 0.4, "half is dropped", SOFT, fill=0.08, size=7.5)
        arrow(ax, (left + 0.55, 1.0), (left + 0.55, 0.62), ORANGE)
    for start, end in ((0.8, 0.8), (2.05, 2.05), (1.0, 1.85), (1.85, 1.0)):
        arrow(ax, (start, 2.0), (end, 1.62), ORANGE)
    box(ax, 3.0, 1.0, SHARDING_WIDTH, 0.6, "refused while it is traced:\nJAX does not guess", RED, size=8)
    arrow(ax, (3.55, 2.0), (3.55, 1.62), RED)
    arrow(ax, (4.8, 2.0), (4.8, 1.62), RED)
    for left in (5.75, 7.0):
        box(ax, left, 1.0, 1.1, 0.6, "kernel:\nits own rows", GREEN, size=8)
        box(ax, left, 0.2, 1.1, 0.4, "its own result", GREEN, fill=0.05, size=7.5)
        arrow(ax, (left + 0.55, 2.0), (left + 0.55, 1.62), GREEN)
        arrow(ax, (left + 0.55, 1.0), (left + 0.55, 0.62), GREEN)
