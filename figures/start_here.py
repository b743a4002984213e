"""Figures of chapter 0: start here."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SOFT, arrow, box, drawing, words
from lab import roofline

# (notebook, title, what it adds, what bounds its kernels)
CHAPTERS = (
    ("00_start_here", "Start here", "three ways to run a kernel; your roofline", "both"),
    ("01_elementwise", "Element-wise", "blocks, bytes in flight, wide loads, fusion, tails", "memory"),
    ("02_memory", "Memory", "shared memory, TMA and barriers, layouts, bank conflicts", "memory"),
    ("03_reductions", "Reductions", "values that threads must share: sums, softmax, rms_norm", "memory"),
    ("04_blocked_matmul", "Blocked matmul", "reuse: tiles raise the FLOP for each byte", "compute"),
    ("05_wgmma", "WGMMA", "the tensor core, fed by a whole warpgroup", "compute"),
    ("06_pipelining", "Pipelining", "copy the next tile while this one is multiplied", "compute"),
    ("07_warp_specialization", "Warp specialization", "a role for each warpgroup", "compute"),
    ("08_persistent_matmul", "Persistent matmul", "waves, order, clusters, the store", "compute"),
    ("09_low_precision", "Low precision", "fp8 products, formats and scales", "compute"),
    ("09b_int8_weights", "Weights of 8 bits", "few rows: int8, converted in registers", "memory"),
    ("10_online_softmax", "Online softmax", "attention in one pass", "compute"),
    ("11_flash_attention", "FlashAttention-3", "products and exponentials at once", "compute"),
    ("11b_attention_tiles", "Tiles and masks", "tile after tile; masks, KV heads, odd lengths", "compute"),
    ("12_flash_attention_backward", "Gradients", "recompute instead of storing", "compute"),
    ("13_paged_decode", "Paged decode", "one query, pages of keys", "memory"),
    ("13b_equal_parts", "Equal parts", "blocks shared out equally; dirty pages, wrong ids", "memory"),
    ("14_ragged_prefill", "Ragged prefill", "sequences of any lengths: a list of tiles", "compute"),
    ("14b_ragged_kernel", "Ragged kernel", "shared heads, the longest first, one launch", "compute"),
    ("15_serving", "Serving", "a scheduler: batches, pages, prefixes, chunks", "both"),
    ("15b_engine", "The engine", "a step ahead; faults are taken back", "both"),
    ("16_grouped_matmul", "Grouped matmul", "experts: a table of tiles", "compute"),
    ("16b_experts", "Experts", "gradients, few tokens, block scales, a layer", "both"),
    ("17_linear_attention", "Linear attention", "chunks of a recurrence, a state", "memory"),
    ("17b_delta_rule", "Delta rule", "a triangle to invert, decode in place", "both"),
    ("18_nvlink", "Across GPUs", "stores to peers, signals, collectives", "memory"),
    ("18b_overlap", "Overlap", "products that hide a gather or a scatter", "both"),
    ("19_blackwell", "Blackwell", "tensor memory, one thread, turns", "compute"),
    ("19b_pairs", "Pairs", "blocks share B, launch control, scales", "compute"),
    ("20_debugging", "Debugging", "from a symptom to the faulty line", "both"),
    ("21_lifting", "Lifting", "out of the course, into your program", "both"),
    ("22_decode_step", "A decode step", "fewer launches, the bytes that are left", "both"),
)
STEP, RISE = 0.08, 0.4


@drawing(7.8, 0.75 + RISE * len(CHAPTERS))
def course_map(ax):
    """The chapters as steps: each builds on the one below and adds one idea."""
    colours = {"memory": ORANGE, "compute": BLUE, "both": GREEN}
    for i, (name, title, adds, bound) in enumerate(CHAPTERS):
        x, y = 0.25 + STEP * i, 0.5 + RISE * i
        box(ax, x, y, 7.3 - STEP * i, RISE - 0.07, colour=colours[bound], fill=0.13)
        words(ax, x + 0.24, y + 0.165, name.split("_")[0], 11, weight="bold", colour=colours[bound])
        words(ax, x + 0.54, y + 0.165, title, 9.5, ha="left", weight="bold")
        words(ax, x + 2.15, y + 0.165, adds, 8.2, ha="left")
    words(ax, 0.25, 0.24, "the bound of a chapter's kernels:", 8, ha="left", colour=SOFT)
    for i, (bound, text) in enumerate((("memory", "moving bytes"), ("compute", "arithmetic"), ("both", "both"))):
        box(ax, 2.75 + 1.3 * i, 0.16, 0.18, 0.16, colour=colours[bound], fill=0.3)
        words(ax, 3.0 + 1.3 * i, 0.24, text, 8, ha="left", colour=SOFT)


@drawing(7.8, 3.1)
def three_ways(ax):
    """One kernel, three ways to run it, and what each of them shows."""
    ways = (  # Colour, name, call, where it runs, what it shows, and what it does not.
        (BLUE, "on the GPU", "lab.run, lab.measure", "Hopper or\nnewer", "the result\nand its true speed", "races"),
        (GREEN, "interpreted", "lab.run, lab.interpret", "any CPU", "the result\nand races",
         "speed; what the\ncompiler rejects"),
        (ORANGE, "compiled only", 'lab.compile_for("h200", …)', "any CPU", "PTX, SASS,\nregisters, spills",
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


@drawing(7.8, 2.75)
def race(ax):
    """A read that does not wait for the copy into its place, and one that does."""
    words(ax, 0.25, 2.57, "hasty: nothing orders the read after the copy", 10, ha="left", weight="bold")
    _copies(ax, 1.6)
    box(ax, 2.3, 1.6, 1.3, 0.3, "reads x_smem", RED, fill=0.35, size=8)
    box(ax, 3.68, 1.6, 1.9, 0.3, "writes the result", GREEN, size=8)
    box(ax, 5.66, 1.6, 0.6, 0.3, "waits", SOFT, size=8)
    words(ax, 6.4, 1.75, "too late", 8, ha="left")
    words(ax, 0.25, 1.17, "patient: the barrier puts the read after the copy", 10, ha="left", weight="bold")
    _copies(ax, 0.2)
    box(ax, 2.3, 0.2, 2.2, 0.3, "waits", SOFT, size=8)
    box(ax, 4.58, 0.2, 1.3, 0.3, "reads x_smem", BLUE, fill=0.35, size=8)
    box(ax, 5.96, 0.2, 1.5, 0.3, "writes the result", GREEN, size=8)
    arrow(ax, (4.5, 0.6), (4.56, 0.5), INK, "arrived", at=(4.68, 0.74), ha="left")


def _copies(ax, y):
    words(ax, 1.45, y + 0.55, "TMA (copies)", 8, ha="right")
    words(ax, 1.45, y + 0.15, "warpgroup", 8, ha="right")
    box(ax, 1.55, y, 0.67, 0.3, "starts it", INK, fill=0.08, size=8)
    box(ax, 2.1, y + 0.4, 2.4, 0.3, "x_gmem to x_smem", ORANGE, fill=0.35, size=8)
    arrow(ax, (1.95, y + 0.3), (2.1, y + 0.5), INK)


NUM_SMS, CLOCK_GHZ, L2_MB, HBM_GB = 132, 1.98, 50, 141  # NVIDIA H200 (SXM) datasheet.


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
    bytes_of_add = 12  # Each multiply-add reads three 4-byte registers.
    register_tbps = roofline.PEAKS["h200"]["f32"].value / 2 * bytes_of_add / 1e12
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
    words(ax, 5.12, 1.66, f"SMEM {smem_tbps:.0f} TB/s\nregisters {register_tbps:.0f} TB/s", 8, ha="left")
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
