"""Figures of chapter 0: start here."""

from figures import _course
from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SOFT, arrow, box, drawing, words
from lab import roofline

COLUMNS = {  # Where a chapter's box stands on the map, from the left; its row follows from what it needs.
    "00": 3.0, "01": 3.0, "21": 4.4, "02": 3.0, "03": 4.7, "04": 2.5, "05": 2.5, "06": 2.5, "07": 2.5, "10": 4.7,
    "20": 0.0, "18": 1.1, "08": 2.8, "11": 5.5, "12": 6.7, "18b": 0.0, "19": 0.96, "09": 1.92, "16": 2.88, "13": 4.8,
    "11b": 5.76, "17": 6.72, "19b": 0.96, "09b": 1.92, "16b": 2.88, "13b": 4.8, "17b": 6.72, "14": 5.0, "15": 4.5,
    "14b": 5.7, "15b": 4.5, "22": 3.5, "23": 3.84, "23b": 3.6, "09c": 1.4, "17c": 6.72, "24": 5.9,
}  # fmt: skip
WIDE, TALL, ROW = 0.93, 0.46, 0.72


@drawing(7.8, 0.55 + ROW * 14)
def course_map(ax):
    """The chapters: an arrow leads from each to those that need it."""
    colours = {"memory": ORANGE, "compute": BLUE, "both": GREEN}
    middle = {n: (0.58 + 0.99 * COLUMNS[n], 0.35 + ROW * (13.5 - _course.depth(n))) for n in _course.chapters()}
    for number, (x, y) in middle.items():
        for other in _course.direct_needs(number):
            x_from, y_from = middle[other]
            arrow(ax, (x_from, y_from - TALL / 2), (x, y + TALL / 2), SOFT, width=0.9)
    for number, (x, y) in middle.items():
        chapter = _course.chapters()[number]
        box(ax, x - WIDE / 2, y - TALL / 2, WIDE, TALL, colour="white", fill=1)
        box(ax, x - WIDE / 2, y - TALL / 2, WIDE, TALL, colour=colours[chapter.bound], fill=0.15)
        words(ax, x, y + 0.11, number, 9.5, weight="bold", colour=colours[chapter.bound])
        words(ax, x, y - 0.1, chapter.title, 6.5)
    words(ax, 0.12, 0.2, "its kernels are bound by", 8, ha="left", colour=SOFT)
    for i, (bound, text) in enumerate((("memory", "moving bytes"), ("compute", "arithmetic"), ("both", "either"))):
        box(ax, 1.75 + 1.2 * i, 0.12, 0.18, 0.16, colour=colours[bound], fill=0.3)
        words(ax, 2.0 + 1.2 * i, 0.2, text, 8, ha="left", colour=SOFT)


@drawing(7.8, 3.1)
def three_ways(ax):
    """One kernel, three ways to run it, and what each of them shows."""
    ways = (  # Colour, name, call, where it runs, what it shows, and what it does not.
        (BLUE, "on the GPU", "lab.run, lab.measure", "an H100\nor H200", "the result\nand its true speed", "races"),
        (GREEN, "interpreted", "lab.run, lab.interpret", "any CPU", "the result\nand races",
         "speed; what the\ncompiler rejects"),
        (ORANGE, "compiled only", 'lab.compile_for("h200", …)', "any CPU", "machine code,\nregisters, spills",
         "results; speed"),
    )  # fmt: skip
    box(ax, 0.25, 1.2, 1.45, 0.95, "your kernel\n(one Python\nfunction)", INK, fill=0.08, size=9.5)
    for text, x in (("where", 4.2), ("shows you", 5.5), ("does not show", 6.98)):
        words(ax, x, 2.93, text, 8, colour=SOFT)
    for i, (colour, name, call, where, shows, hides) in enumerate(ways):
        y = 2.0 - 0.92 * i
        arrow(ax, (1.7, 1.68), (2.05, y + 0.38), colour)
        box(ax, 2.05, y, 5.5, 0.78, colour=colour, fill=0.1)
        words(ax, 2.18, y + 0.52, name, 10, ha="left", weight="bold", colour=colour)
        words(ax, 2.18, y + 0.22, call, 7.2, ha="left", family="DejaVu Sans Mono")
        words(ax, 4.2, y + 0.4, where, 8.2)
        words(ax, 5.5, y + 0.4, shows, 8.2)
        words(ax, 6.98, y + 0.4, hides, 8.2, colour=SOFT)


@drawing(7.8, 1.75)
def race(ax):
    """Two copies and a kernel that waits for one of them: the other may end before the read or after it."""
    for text, y in (("copy of y", 1.4), ("warpgroup", 0.9), ("copy of x", 0.4)):
        words(ax, 1.1, y + 0.14, text, 8.5, ha="right")
    box(ax, 1.95, 1.4, 2.3, 0.28, "y_gmem to y_smem", ORANGE, fill=0.35, size=8)
    box(ax, 1.2, 0.9, 0.8, 0.28, "starts both", INK, fill=0.08, size=7.5)
    box(ax, 2.05, 0.9, 2.2, 0.28, "waits for y", SOFT, size=8)
    box(ax, 4.4, 0.9, 1.5, 0.28, "reads x and y", BLUE, fill=0.35, size=8)
    box(ax, 5.98, 0.9, 1.4, 0.28, "writes x + y", GREEN, size=8)
    arrow(ax, (4.25, 1.54), (4.45, 1.18), INK, "the barrier of y orders these two", at=(5.55, 1.52))
    box(ax, 1.95, 0.4, 1.7, 0.28, "x_gmem to x_smem", ORANGE, fill=0.35, size=8)
    box(ax, 3.65, 0.4, 3.73, 0.28, "may end before the read, or after it", ORANGE, fill=0.08, size=8, linestyle="--")
    words(ax, 4.65, 0.18, "no wait orders this copy and the read", 8.5, colour=RED)


NUM_SMS, CLOCK_GHZ, L2_MB, HBM_GB = 132, 1.98, 60, 141  # NVIDIA H200 (SXM); L2 as CUDA reports it.


@drawing(7.8, 4.7)
def gpu(ax):
    """A GPU in one picture: the chip with its memories on the left, one SM enlarged on the right."""
    _chip(ax)
    _sm(ax)


def _chip(ax):
    hbm_tbps = roofline.PEAKS["h200"]["hbm"].value / 1e12
    words(ax, 0.25, 4.5, f"The chip: {NUM_SMS} SMs", 10.5, ha="left", weight="bold")
    for i in range(NUM_SMS):
        x, y = 0.27 + 0.232 * (i % 12), 4.1 - 0.185 * (i // 12)
        box(ax, x, y, 0.19, 0.14, colour=BLUE, fill=0.75 if i == 23 else 0.18, linewidth=0.7)
    box(ax, 0.25, 1.35, 2.8, 0.42, f"L2 cache, {L2_MB} MB", ORANGE)
    box(ax, 0.25, 0.25, 2.8, 0.62, f"HBM: the GPU's memory, {HBM_GB} GB\n“GMEM”, where JAX arrays live", RED)
    arrow(ax, (1.0, 0.87), (1.0, 1.35), RED, f"{hbm_tbps} TB/s for all SMs together", offset=(1.15, 0), style="<|-|>")
    arrow(ax, (1.0, 1.77), (1.0, 2.2), ORANGE, style="<|-|>")
    ax.plot((3.01, 3.55), (4.055, 4.32), color=BLUE, linewidth=0.8, linestyle=":")
    ax.plot((3.01, 3.55), (3.915, 0.25), color=BLUE, linewidth=0.8, linestyle=":")


def _sm(ax):
    smem_tbps = NUM_SMS * 128 * CLOCK_GHZ / 1e3  # 32 banks of 4 bytes a clock.
    register_tbps = NUM_SMS * 128 * 12 * CLOCK_GHZ / 1e3  # Each of 128 multiply-adds reads three 4-byte registers.
    box(ax, 3.55, 0.25, 4.0, 4.07, colour=BLUE, fill=0.05)
    words(ax, 3.7, 4.5, "One SM (streaming multiprocessor)", 10.5, ha="left", weight="bold")
    for i in range(4):
        x = 3.7 + 0.94 * i
        box(ax, x, 2.02, 0.88, 2.16, colour=SOFT, fill=0.06)
        box(ax, x + 0.06, 3.82, 0.76, 0.3, "scheduler", SOFT, size=7.5)
        box(ax, x + 0.06, 2.98, 0.76, 0.76, colour=BLUE)
        words(ax, x + 0.44, 3.48, "32 lanes\n(CUDA cores)", 7.5)
        box(ax, x + 0.06, 2.58, 0.76, 0.32, "tensor core", PINK, size=7.5)
        box(ax, x + 0.06, 2.1, 0.76, 0.4, "registers\n64 KB", GREEN, size=7.5)
    box(ax, 3.76, 3.06, 3.58, 0.2, colour=INK, fill=0.8, linewidth=0)
    words(ax, 5.55, 3.16, "one warpgroup: 4 warps of 32 threads, one on each quarter", 7, colour="white")
    box(ax, 3.7, 0.72, 2.75, 0.5, "shared memory “SMEM”, 228 KB", ORANGE)
    box(ax, 6.55, 0.72, 0.85, 0.5, "TMA\n(copies)", INK, size=7.5)
    arrow(ax, (5.0, 1.22), (5.0, 2.02), ORANGE, style="<|-|>")
    words(ax, 5.12, 1.66, f"{smem_tbps:.1f} TB/s\n(registers to lanes: {register_tbps:.0f})", 8, ha="left")
    words(ax, 6.55, 1.66, f"all SMs together,\nat {CLOCK_GHZ} GHz", 7.6, ha="left", colour=SOFT)
    arrow(ax, (3.05, 1.66), (4.1, 2.02), INK, style="<|-|>")
    arrow(ax, (3.05, 1.46), (4.1, 1.22), INK, style="<|-|>")
    words(ax, 3.68, 1.74, "load", 7.6, ha="left")
    words(ax, 3.68, 1.5, "TMA", 7.6, ha="left")
    words(ax, 5.55, 0.47, "registers belong to a thread, SMEM to the block that runs here", 7.6, colour=SOFT)


@drawing(7.8, 1.75)
def rung(ax):
    """The five steps of every rung of a chapter's ladder."""
    moves = (
        ("see", "a picture or a trace:\nwhere does time go?", ORANGE),
        ("predict", "how much will\none change give?", RED),
        ("change", "one knob,\na few lines", BLUE),
        ("check", "right? races?\nregisters?", GREEN),
        ("measure", "was the\nprediction right?", PINK),
    )
    for i, (name, text, colour) in enumerate(moves):
        x = 0.25 + 1.5 * i
        box(ax, x, 0.6, 1.28, 0.95, colour=colour)
        words(ax, x + 0.64, 1.32, name, 10.5, weight="bold", colour=colour)
        words(ax, x + 0.64, 0.92, text, 8)
        if i:
            arrow(ax, (x - 0.22, 1.07), (x, 1.07), SOFT)
    ax.plot((6.89, 6.89, 0.89, 0.89), (0.6, 0.3, 0.3, 0.5), color=SOFT, linewidth=1.4)
    arrow(ax, (0.89, 0.45), (0.89, 0.6), SOFT)
    words(ax, 3.9, 0.15, "the gap between predicted and measured is the problem of the next rung", 8, colour=SOFT)
