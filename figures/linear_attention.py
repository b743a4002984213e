"""Figures of chapter 17: linear attention."""

from figures._chart import chart, label, tile, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, SOFT, arrow, box, drawing, words
from figures._stepper import stepper
from lab import plot
from lab.roofline import peak

CHUNKS = 4


@drawing(7.8, 4.1)
def recurrent_state(ax):
    """Causal attention twice: as a matrix of all pairs of tokens, and as a state that goes from token to token."""
    tokens, cell = 10, 0.27
    left, bottom, side = 0.75, 0.55, tokens * cell
    words(ax, left + side / 2, 3.85, "a matrix: T x T numbers", 9.5, weight="bold")
    for t in range(tokens):
        for s in range(t + 1):
            x, y = left + s * cell, bottom + (tokens - 1 - t) * cell
            box(ax, x, y, cell - 0.03, cell - 0.03, colour=BLUE, fill=0.3, linewidth=0.6)
    words(ax, left + side / 2, 3.45, "keys s", 8.5)
    words(ax, left - 0.15, bottom + side / 2, "queries t", 8.5, rotation=90)
    words(ax, left + side / 2, 0.25, "token t meets t keys: work grows with T²", 8, colour=SOFT)
    middle = 2.15
    words(ax, 6.0, 3.85, "a state: N x P numbers", 9.5, weight="bold")
    for i, when in enumerate(("before t", "after t", "after t + 1")):
        x = 4.35 + 1.15 * i
        box(ax, x, middle - 0.35, 0.55, 0.7, "S", ORANGE, fill=0.35, size=11, weight="bold")
        words(ax, x + 0.275, middle + 0.52, when, 8)
        if i < 2:
            arrow(ax, (x + 0.57, middle), (x + 1.13, middle), ORANGE, text="+ v kᵀ", offset=(0.0, 0.14))
            arrow(ax, (x + 0.86, 3.15), (x + 0.86, middle + 0.3), BLUE)
            words(ax, x + 0.86, 3.29, ("k[t], v[t]", "k[t+1], v[t+1]")[i], 8)
        if i:
            arrow(ax, (x + 0.275, middle - 0.37), (x + 0.275, 1.12), GREEN)
            words(ax, x + 0.275, 0.97, ("y[t] = S q[t]", "y[t+1]")[i - 1], 8)
    words(ax, 6.0, 0.25, "every token meets one state: work grows with T", 8, colour=SOFT)


NUM_SMS = 132  # On an H100 and on an H200.
TENSOR, LANES = 4096, 128  # Operations of the tensor cores, and instructions, per cycle of an SM.
CLOCK = peak("bf16").value / NUM_SMS / TENSOR  # Hz, at which the data sheet counts.
ROLES = dict(leave="state", state="state", outputs="output", store="output")


def schedule(steps: dict[str, float], *, apart: bool, chunks: int) -> list[tuple[str, str, float, float]]:
    """[(role, step, start, end)] for `steps` of so many cycles. With `apart` the state has a warpgroup
    of its own, which may be two chunks ahead; without, one warpgroup does the steps in their order."""
    bars, free, read = [], {"state": 0.0, "output": 0.0}, []
    for chunk in range(chunks):
        left = 0.0
        for name, length in steps.items():
            role = ROLES[name]
            lane = role if apart else "output"
            start = free[lane]
            if apart and name == "leave" and chunk >= 2:
                start = max(start, read[chunk - 2])
            if name == "outputs":
                start = max(start, left)
            end = free[lane] = start + length
            bars.append((role, name, start, end))
            left = end if name == "leave" else left
            read += [end] if name == "outputs" else []
    return bars


@chart(height=2.9, saved=False, nrows=2, sharex=True, height_ratios=(1, 2))
def recurrent_schedule(axes, steps: dict[str, float]):
    """The steps of a chunk, of so many cycles, done by one warpgroup in a row, and by two of which one runs ahead."""
    for ax, apart in zip(axes, (False, True), strict=True):
        lanes = ("state", "output") if apart else ("all of it",)
        for role, name, start, end in schedule(steps, apart=apart, chunks=5):
            _bar(ax, lanes.index(role) if apart else 0, start, end, name, role)
        of = lambda role: sum(length for name, length in steps.items() if ROLES[name] == role)
        took = max(of("state"), of("output")) if apart else sum(steps.values())
        title = "two warpgroups, the state ahead" if apart else "one warpgroup, one step after the other"
        tracks(ax, lanes, f"{title}: {took:,.0f} cycles per chunk")
    axes[-1].set_xlim(0, 2.6 * sum(steps.values()))
    axes[-1].set_xlabel("cycles; drawn from the trace of rung 2, without memory", fontsize=8)


def _bar(ax, lane, start, end, text, role):
    colour = {"output": BLUE, "state": ORANGE}[role]
    ax.barh(lane, end - start, left=start, height=0.72, color=colour, alpha=0.5, edgecolor=plot.CARD, linewidth=0.8)
    label(ax, (start + end) / 2, lane, text, 7.5, clip_on=True)


@drawing(7.8, 4.3)
def recurrent_parts(ax):
    """One sequence in three parts: states from zero, their sums, and the outputs, each part with a block of its own."""
    parts = 3
    wide, gap, left = 0.44, 0.22, 1.75
    at = lambda part: left + part * (CHUNKS * wide + gap)
    for y, name, what in (
        (3.3, "pass 1", "reads k, v"),
        (2.1, "combine", "XLA, in float32"),
        (0.75, "pass 2", "reads q, k, v"),
    ):
        words(ax, 0.15, y + 0.1, name, ha="left", weight="bold")
        words(ax, 0.15, y - 0.13, what, 8, ha="left", colour=SOFT)
    for part in range(parts):
        x = at(part)
        words(ax, x + CHUNKS * wide / 2, 4.05, f"part {part}: a block", 8.5, weight="bold")
        for i in range(CHUNKS):
            box(ax, x + i * wide, 3.1, wide - 0.04, 0.42, "+ vᵀk", BLUE, fill=0.25, size=7)
            box(ax, x + i * wide, 0.5, wide - 0.04, 0.42, "y", GREEN, fill=0.3, size=8)
        words(ax, x - 0.03, 3.68, "from 0", 7.5, ha="left", colour=SOFT)
        end = x + CHUNKS * wide - 0.2
        state = f"d{part} S + L{part}" if part else "L0"
        box(ax, end - 0.3, 1.85, 0.6, 0.5, state, ORANGE, fill=0.3, size=7)
        arrow(ax, (end, 3.08), (end, 2.37), BLUE, text=f"L{part}", offset=(0.17, 0.0))
        if part + 1 < parts:
            next_end = at(part + 1) + CHUNKS * wide - 0.52
            arrow(ax, (end + 0.32, 2.1), (next_end, 2.1), ORANGE, text="S", offset=(0, 0.13))
            arrow(ax, (end + 0.1, 1.83), (at(part + 1) + 0.12, 0.95), ORANGE)
    words(ax, at(1) + 0.02, 1.28, "the state before part 1", 7.5, ha="left", colour=SOFT)
    text = "d: the decay of a whole part. L: its state, had it begun from zero."
    words(ax, left, 0.18, text, 8, ha="left", colour=SOFT)


CHUNK, TOKENS = 4, 12
PARTS = (  # The chunk; the part that is done; the caption.
    (0, "pairs", "Chunk 0 has nothing before it. Its 4 tokens meet each other as 10 pairs."),
    (0, "state", "Then one product adds v kᵀ of its 4 tokens to S. From now on S stands for tokens 0 to 3."),
    (1, "pairs", "Chunk 1 does the same: its tokens meet each other as pairs."),
    (1, "past", "All earlier tokens are in S. One product of q and S replaces the 16 pairs that reach back."),
    (1, "state", "S takes in chunk 1 and keeps its size, although it stands for 8 tokens now."),
    (2, "pairs", "Chunk 2 has 10 pairs again, like each chunk."),
    (
        2,
        "past",
        "Its product with S replaces 32 pairs and costs no more than that of chunk 1, so work grows with T.",
    ),
)


@stepper(7.8, 3.1)
def chunks_in_steps(ax):
    """Linear attention over three chunks of four tokens: pairs inside of a chunk, and a state for all before it."""
    left, top, cell = 0.95, 2.7, 0.2
    at = lambda t, s: (left + cell * s, top - cell * (t + 1))
    for t in range(TOKENS):
        tile(ax, *at(t, 0), cell * (t + 1), cell, PALE, edgecolor=plot.CARD, linewidth=0.6, zorder=0)
    for chunk in range(TOKENS // CHUNK):
        words(ax, left - 0.1, top - cell * CHUNK * (chunk + 0.5), f"chunk {chunk}", 8.5, ha="right")
        look = dict(edgecolor=SOFT, linewidth=0.8)
        tile(ax, *at(CHUNK * chunk + 3, CHUNK * chunk), cell * CHUNK, cell * CHUNK, "none", **look)
    words(ax, left + cell * TOKENS / 2, 2.88, "keys s", 8.5)
    words(ax, 0.1, 2.88, "queries t", 8.5, ha="left")
    words(ax, 5.9, 2.88, "the state", weight="bold")
    yield
    pairs = products = 0
    for i, (chunk, part, caption) in enumerate(PARTS):
        pairs += CHUNK * (CHUNK + 1) // 2 * (part == "pairs")
        products += part != "pairs"
        for done, what, _ in PARTS[: i + 1]:
            now = dict(alpha=1.0 if (done, what) == (chunk, part) else 0.4)
            first = CHUNK * done
            if what == "past":
                tile(ax, *at(first + CHUNK - 1, 0), cell * first, cell * CHUNK, ORANGE, "q Sᵀ", 9, **now)
            for t in range(CHUNK if what == "pairs" else 0):
                tile(ax, *at(first + t, first), cell * (t + 1), cell, BLUE, edgecolor=plot.CARD, linewidth=0.6, **now)
        seen = CHUNK * (chunk + (part == "state"))
        text = f"S\ntokens 0 to {seen - 1}" if seen else "S\nempty"
        colour = ORANGE if seen else PALE
        tile(ax, 5.1, 1.6, 1.6, 0.95, colour, text, 9.5, edgecolor=INK, linewidth=0.8, alpha=0.7)
        first = CHUNK * chunk
        if part == "state":
            arrow(ax, (at(0, first + CHUNK)[0] + 0.1, at(first + 1, 0)[1]), (5.05, 1.9), ORANGE, width=2)
            words(ax, 5.9, 1.35, f"+ v kᵀ of tokens {first} to {first + CHUNK - 1}", 9)
        elif part == "past":
            end = at(0, first)[0], at(first + 1, 0)[1]
            arrow(ax, (5.05, 1.9), (end[0] + cell * CHUNK + 0.1, end[1]), ORANGE, width=2)
            words(ax, 5.9, 1.35, f"read by tokens {first} to {first + CHUNK - 1}", 9)
        words(ax, 4.9, 0.8, f"pairs so far: {pairs}", 9.5, ha="left", colour=BLUE)
        words(ax, 4.9, 0.5, f"products with the state: {products}", 9.5, ha="left")
        yield caption
