"""The KV head that each query head reads: as many, fewer, one."""

from figures._draw import BLUE, ORANGE, SOFT, arrow, box, canvas, save, words

CASES = ((8, "MHA: 8 and 8"), (2, "GQA: 8 and 2"), (1, "MQA: 8 and 1"))


def draw():
    fig, ax = canvas(7.6, 2.2)
    for case, (kv_heads, name) in enumerate(CASES):
        left = 0.2 + 2.55 * case
        words(ax, left + 1.1, 2.02, name, weight="bold")
        group, width = 8 // kv_heads, 2.2 / kv_heads
        for kv_head in range(kv_heads):
            box(
                ax,
                left + kv_head * width + 0.02,
                0.25,
                width - 0.05,
                0.35,
                str(kv_head),
                colour=ORANGE,
                size=8,
                fill=0.3,
            )
        for head in range(8):
            x = left + 0.275 * head
            box(ax, x + 0.02, 1.35, 0.225, 0.35, str(head), colour=BLUE, size=8, fill=0.25)
            arrow(ax, (x + 0.13, 1.33), (left + (head // group + 0.5) * width, 0.63), SOFT, width=0.9)
    words(ax, 3.8, 0.08, "above: query heads; below: KV heads", size=8, colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
