"""From the course to a server: the steps of a lift, and what each is checked by."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, SKY, arrow, box, canvas, save, words

STEPS = (  # (what one does, how, what checks it, colour)
    ("copy", "the family, _host.py\nand _numerics.py", "a process that sees\nnothing else", BLUE),
    ("call", "jit, vmap, grad, scan,\nshard_map", "jnp, and the operations\naround the kernel", SKY),
    ("choose", "the default, or a search\non your GPU", "registers, spills,\nshared memory", GREEN),
    ("ship", "an executable or\nan exported program", "another process\nloads it", ORANGE),
    ("guard", "lab.check, compile_for,\nmake fuzz, make bench", "CI fails where\none of them fails", PINK),
)
WIDTH, GAP = 1.62, 0.2


def draw():
    fig, ax = canvas(0.75 + len(STEPS) * (WIDTH + GAP), 2.75)
    words(ax, 0.36, 1.72, "do", size=8.5, weight="bold")
    words(ax, 0.36, 0.55, "check", size=8.5, weight="bold")
    for i, (name, how, check, colour) in enumerate(STEPS):
        x = 0.7 + i * (WIDTH + GAP)
        words(ax, x + WIDTH / 2, 2.5, f"{i + 1}. {name}", size=10, weight="bold", colour=colour)
        box(ax, x, 1.35, WIDTH, 0.8, how, colour, size=8)
        box(ax, x, 0.2, WIDTH, 0.7, check, colour, fill=0.05, size=8, linestyle="--")
        arrow(ax, (x + WIDTH / 2, 1.35), (x + WIDTH / 2, 0.92), colour)
        if i:
            arrow(ax, (x - GAP, 1.75), (x - 0.01, 1.75), INK)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
