"""A kernel on an array that two GPUs share: with jit alone, on an explicit mesh, and under shard_map."""

from figures._draw import BLUE, GREEN, INK, ORANGE, RED, SOFT, arrow, box, canvas, save, words

WIDTH = 2.35


def panel(ax, x, title, cost, colour):
    words(ax, x + WIDTH / 2, 3.15, title, size=9.5, weight="bold", colour=colour)
    words(ax, x + WIDTH / 2, 2.85, cost, size=8, colour=INK)
    for gpu, left in enumerate((x, x + 1.25)):
        box(ax, left, 2.0, 1.1, 0.6, f"rows of GPU {gpu}", BLUE, size=8)


def draw():
    fig, ax = canvas(8.3, 3.4)
    panel(ax, 0.25, "jax.jit, automatic mesh", "an all-gather first", ORANGE)
    panel(ax, 3.0, "jax.jit, explicit mesh", "an error", RED)
    panel(ax, 5.75, "jax.shard_map", "nothing is sent", GREEN)
    for left in (0.25, 1.5):
        box(ax, left, 1.0, 1.1, 0.6, "kernel:\nall rows", ORANGE, size=8)
        box(ax, left, 0.2, 1.1, 0.4, "half is dropped", SOFT, fill=0.08, size=7.5)
        arrow(ax, (left + 0.55, 1.0), (left + 0.55, 0.62), ORANGE)
    for start, end in ((0.8, 0.8), (2.05, 2.05), (1.0, 1.85), (1.85, 1.0)):
        arrow(ax, (start, 2.0), (end, 1.62), ORANGE)
    box(ax, 3.0, 1.0, WIDTH, 0.6, "refused while it is traced:\nJAX does not guess", RED, size=8)
    arrow(ax, (3.55, 2.0), (3.55, 1.62), RED)
    arrow(ax, (4.8, 2.0), (4.8, 1.62), RED)
    for left in (5.75, 7.0):
        box(ax, left, 1.0, 1.1, 0.6, "kernel:\nits own rows", GREEN, size=8)
        box(ax, left, 0.2, 1.1, 0.4, "its own result", GREEN, fill=0.05, size=7.5)
        arrow(ax, (left + 0.55, 2.0), (left + 0.55, 1.62), GREEN)
        arrow(ax, (left + 0.55, 1.0), (left + 0.55, 0.62), GREEN)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
