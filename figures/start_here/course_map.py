"""The chapters as steps: each builds on the one below and adds one idea."""

from figures._draw import BLUE, GREEN, INK, ORANGE, SOFT, box, canvas, save, words

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
COLOURS = {"memory": ORANGE, "compute": BLUE, "both": GREEN}


def draw():
    step, rise = 0.08, 0.4
    fig, ax = canvas(7.8, 0.75 + rise * len(CHAPTERS))
    for i, (name, title, adds, bound) in enumerate(CHAPTERS):
        x, y = 0.25 + step * i, 0.5 + rise * i
        box(ax, x, y, 7.3 - step * i, rise - 0.07, colour=COLOURS[bound], fill=0.13)
        words(ax, x + 0.24, y + 0.165, name.split("_")[0], size=11, weight="bold", colour=COLOURS[bound])
        words(ax, x + 0.54, y + 0.165, title, size=9.5, ha="left", weight="bold")
        words(ax, x + 2.15, y + 0.165, adds, size=8.2, ha="left", colour=INK)
    words(ax, 0.25, 0.24, "the bound of a chapter's kernels:", size=8, ha="left", colour=SOFT)
    for i, (bound, text) in enumerate((("memory", "moving bytes"), ("compute", "arithmetic"), ("both", "both"))):
        box(ax, 2.75 + 1.3 * i, 0.16, 0.18, 0.16, colour=COLOURS[bound], fill=0.3)
        words(ax, 3.0 + 1.3 * i, 0.24, text, size=8, ha="left", colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
