"""A GPU in one picture: the chip with its memories on the left, one SM enlarged on the right."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SOFT, arrow, box, canvas, save, words
from lab import roofline

NUM_SMS, CLOCK_GHZ, L2_MB, HBM_GB = 132, 1.98, 50, 141  # NVIDIA H200 (SXM) datasheet.
HBM_TBPS = roofline.PEAKS["h200"]["hbm"].value / 1e12
SMEM_TBPS = NUM_SMS * 128 * CLOCK_GHZ / 1e3  # 32 banks of 4 bytes a clock.
REGISTER_TBPS = roofline.PEAKS["h200"]["f32"].value / 2 * 12 / 1e12  # Each multiply-add reads three 4-byte registers.


def draw():
    fig, ax = canvas(7.8, 4.7)
    _chip(ax)
    _sm(ax)
    return fig


def _chip(ax):
    words(ax, 0.25, 4.5, f"The chip: {NUM_SMS} SMs", size=10.5, ha="left", weight="bold")
    for i in range(NUM_SMS):
        x, y = 0.27 + 0.232 * (i % 12), 4.1 - 0.185 * (i // 12)
        box(ax, x, y, 0.19, 0.14, colour=BLUE, fill=0.75 if i == 23 else 0.18, linewidth=0.7)
    box(ax, 0.25, 1.35, 2.8, 0.42, f"L2 cache, {L2_MB} MB", ORANGE)
    box(ax, 0.25, 0.25, 2.8, 0.62, f"HBM: the GPU's memory, {HBM_GB} GB\n“GMEM”, where JAX arrays live", RED)
    arrow(ax, (1.0, 0.87), (1.0, 1.35), RED, f"{HBM_TBPS} TB/s for all SMs together", offset=(1.15, 0), style="<|-|>")
    arrow(ax, (1.0, 1.77), (1.0, 2.2), ORANGE, style="<|-|>")
    ax.plot((3.01, 3.55), (4.055, 4.32), color=BLUE, linewidth=0.8, linestyle=":")
    ax.plot((3.01, 3.55), (3.915, 0.25), color=BLUE, linewidth=0.8, linestyle=":")


def _sm(ax):
    box(ax, 3.55, 0.25, 4.0, 4.07, colour=BLUE, fill=0.05)
    words(ax, 3.7, 4.5, "One SM (streaming multiprocessor)", size=10.5, ha="left", weight="bold")
    for i in range(4):
        x = 3.7 + 0.94 * i
        box(ax, x, 2.02, 0.88, 2.16, colour=SOFT, fill=0.06)
        box(ax, x + 0.06, 3.82, 0.76, 0.3, "scheduler", SOFT, size=7.5)
        box(ax, x + 0.06, 2.98, 0.76, 0.76, colour=BLUE)
        words(ax, x + 0.44, 3.48, "32 lanes\n(CUDA cores)", size=7.5)
        box(ax, x + 0.06, 2.58, 0.76, 0.32, "tensor core", PINK, size=7.5)
        box(ax, x + 0.06, 2.1, 0.76, 0.4, "registers\n64 KB", GREEN, size=7.5)
    box(ax, 3.76, 3.06, 3.58, 0.2, colour=INK, fill=0.8, linewidth=0)
    words(ax, 5.55, 3.16, "one warpgroup: 4 warps of 32 threads, one on each quarter", size=7, colour="white")
    box(ax, 3.7, 0.72, 2.75, 0.5, "shared memory “SMEM”, 228 KB", ORANGE)
    box(ax, 6.55, 0.72, 0.85, 0.5, "TMA\n(copies)", INK, size=7.5)
    arrow(ax, (5.0, 1.22), (5.0, 2.02), ORANGE, style="<|-|>")
    words(ax, 5.12, 1.66, f"SMEM {SMEM_TBPS:.0f} TB/s\nregisters {REGISTER_TBPS:.0f} TB/s", size=8, ha="left")
    words(ax, 6.55, 1.66, f"all SMs together,\nat {CLOCK_GHZ} GHz", size=7.6, ha="left", colour=SOFT)
    arrow(ax, (3.05, 1.66), (4.1, 2.02), INK, style="<|-|>")
    arrow(ax, (3.05, 1.46), (4.1, 1.22), INK, style="<|-|>")
    words(ax, 3.68, 1.74, "load", size=7.6, ha="left")
    words(ax, 3.68, 1.5, "TMA", size=7.6, ha="left")
    words(ax, 5.55, 0.47, "registers belong to a thread, SMEM to the block that runs here", size=7.6, colour=SOFT)


if __name__ == "__main__":
    save(__file__, draw())
