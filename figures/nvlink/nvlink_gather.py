"""All-gather by push on four GPUs: each has its own shard, and stores it into its place in everybody's output."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, SOFT, arrow, box, canvas, save, words

DEVICES = 4
COLOURS = (BLUE, ORANGE, GREEN, PINK)


def draw():
    fig, ax = canvas(7.8, 3.3)
    width, gap = 1.45, 0.42
    for d in range(DEVICES):
        x = 0.35 + d * (width + gap)
        words(ax, x + width / 2, 3.1, f"GPU {d}", size=9.5, weight="bold")
        box(ax, x + 0.3, 2.35, width - 0.6, 0.42, f"shard {d}", COLOURS[d], fill=0.4, size=8)
        box(ax, x, 0.6, width, 0.62, colour=SOFT, fill=0.03)
        part = width / DEVICES
        for q in range(DEVICES):
            own = q == d
            box(ax, x + q * part + 0.03, 0.66, part - 0.06, 0.5, f"{q}", COLOURS[q], fill=0.4 if own else 0.2, size=8)
    for d in range(DEVICES):
        for k in range(1, DEVICES):
            p = (d + k) % DEVICES
            start = 0.35 + d * (width + gap) + width / 2
            end = 0.35 + p * (width + gap) + (d + 0.5) * width / DEVICES
            full = k == 1
            arrow(ax, (start, 2.33), (end, 1.2), COLOURS[d], width=1.7 if full else 0.8, alpha=1.0 if full else 0.45)
    words(ax, 0.1, 0.28, "Thick: the first round of each. At any time every GPU receives from one other, and sends to"
          " one.", size=8, ha="left", colour=SOFT)  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())
