"""One step of the kernel: what lies in shared memory, what in registers, and which unit does what."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 3.9)
    for y, height, name in (
        (3.0, 0.75, "HBM, L2"),
        (1.75, 0.95, "shared\nmemory"),
        (0.2, 1.25, "registers of\n128 threads"),
    ):
        box(ax, 1.0, y, 6.65, height, colour=SOFT, fill=0.06)
        words(ax, 0.5, y + height / 2, name, size=8, colour=SOFT)
    box(ax, 1.15, 3.12, 0.95, 0.5, "q, 64 rows", BLUE, size=8)
    for i in range(6):
        box(ax, 2.5 + 0.43 * i, 3.12, 0.38, 0.5, f"k{i}", GREEN, fill=0.45 if i == 2 else 0.12, size=8)
        box(ax, 5.15 + 0.41 * i, 3.12, 0.36, 0.5, f"v{i}", PINK, fill=0.45 if i == 2 else 0.12, size=8)
    box(ax, 1.15, 1.95, 0.95, 0.55, "q", BLUE)
    box(ax, 2.75, 1.95, 1.3, 0.55, "k of the block", GREEN, fill=0.3, size=8)
    box(ax, 5.5, 1.95, 1.3, 0.55, "v of the block", PINK, fill=0.3, size=8)
    arrow(ax, (1.62, 3.1), (1.62, 2.52), BLUE, "once", offset=(-0.25, 0.0))
    arrow(ax, (3.55, 3.1), (3.4, 2.52), GREEN, "TMA", offset=(0.28, 0.02))
    arrow(ax, (6.15, 3.1), (6.15, 2.52), PINK, "TMA", offset=(0.25, 0.02))
    box(ax, 2.0, 0.5, 1.0, 0.6, "s\n64 x 128", ORANGE)
    box(ax, 4.05, 0.5, 1.0, 0.6, "p\n64 x 128", ORANGE)
    box(ax, 6.2, 0.5, 1.3, 0.6, "acc\n64 x head_dim", RED)
    words(ax, 1.5, 0.6, "m, l", size=9, colour=RED)
    arrow(ax, (1.75, 1.93), (2.3, 1.12), BLUE)
    arrow(ax, (3.2, 1.93), (2.65, 1.12), BLUE, "WGMMA", offset=(0.5, -0.28))
    arrow(ax, (3.02, 0.8), (4.03, 0.8), ORANGE, "softmax", offset=(0.0, 0.13))
    words(ax, 3.52, 0.62, "CUDA cores", size=7, colour=ORANGE)
    arrow(ax, (5.07, 0.8), (6.18, 0.8), BLUE, "WGMMA", offset=(0.0, 0.13))
    arrow(ax, (6.4, 1.93), (6.75, 1.12), BLUE)
    words(ax, 6.85, 0.34, "times alpha, every block", size=7, colour=RED)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
