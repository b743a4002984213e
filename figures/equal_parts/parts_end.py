"""The last block of a sequence: unseen logits, weights of zero, and values that are not numbers."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SOFT, arrow, box, canvas, save, words

SEEN, SHOWN = 6, 16  # Tokens that count, of those of the block that are drawn; pages of 4.


def draw():
    fig, ax = canvas(7.8, 3.2)
    wide = 0.3
    rows = (
        (2.5, "keys", lambda seen: ("k", GREEN) if seen else ("?", SOFT)),
        (1.8, "logits, masked", lambda seen: ("s", ORANGE) if seen else ("-inf", SOFT)),
        (1.1, "weights", lambda seen: ("p", BLUE) if seen else ("0", SOFT)),
        (0.4, "values", lambda seen: ("v", PINK) if seen else ("NaN", RED)),
    )
    for y, name, look in rows:
        words(ax, 1.4, y + 0.15, name, size=8.5, ha="right", weight="bold")
        for token in range(SHOWN):
            text, colour = look(token < SEEN)
            x = 1.5 + wide * token + 0.05 * (token // 4)
            box(ax, x, y, wide - 0.03, 0.3, text, colour, fill=0.3 if token < SEEN else 0.08, size=7, linewidth=0.7)
    for y in (2.48, 1.78):
        arrow(ax, (1.5 + wide * SHOWN / 2, y), (1.5 + wide * SHOWN / 2, y - 0.36), SOFT, width=1.0)
    edge = 1.5 + wide * SEEN + 0.05 * (SEEN // 4) - 0.015
    ax.plot([edge, edge], [0.3, 2.95], color=RED, linewidth=1.3, linestyle="--")
    words(ax, edge, 3.05, "kv_len", size=8.5, colour=RED)
    words(ax, 6.7, 0.93, "0 x NaN\n= NaN", size=9.5, ha="left", colour=RED, weight="bold")
    words(ax, 6.7, 0.42, "so zeros\nreplace them", size=8, ha="left")
    words(ax, 6.7, 2.3, "whatever a key\nholds, its logit\nis replaced", size=8, ha="left")
    words(ax, 1.5, 0.16, "pages of 4 tokens: the second is half full, the others are free or belong to other sequences",
          size=7.5, ha="left", colour=SOFT)  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())
