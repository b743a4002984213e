"""Figures of chapter 18b: overlap."""

import dataclasses

import numpy as np

from figures._chart import bar, chart, tracks
from figures._draw import INK, RED, Picture
from lab import plot, roofline

TILE = 128, 256  # Rows and columns.
NUM_SMS = 132


@dataclasses.dataclass(frozen=True)
class Problem:
    """Each of n devices has (m, k) rows and a (k, cols) matrix."""

    n: int
    m: int
    k: int
    cols: int

    @property
    def row_blocks(self) -> int:
        return self.m // TILE[0]

    @property
    def columns(self) -> int:
        return self.cols // TILE[1]


@dataclasses.dataclass(frozen=True)
class Rung:
    name: str
    senders: int = 8  # SMs that do not multiply; 0: the gather is a kernel of its own, before the product.
    wait_for: str = "shard"  # Or "block": of rows.
    alive: bool = False  # Whether the pipeline goes on from one shard into the next.


RUNGS = (
    Rung("gather, then multiply", senders=0),
    Rung("overlap by shard"),
    Rung("overlap by block of rows", wait_for="block"),
    Rung("the pipeline kept alive", wait_for="block", alive=True),
    Rung("sixteen senders", senders=16, wait_for="block", alive=True),
    Rung("a signal every fourth block", senders=16, wait_for="block", alive=True),
)
WIDE, NARROW = Problem(2, 1408, 4096, 4096), Problem(2, 15872, 2048, 1024)


def arrivals(problem: Problem, link=None, latency_us=1.0) -> np.ndarray:
    """(n - 1, blocks of rows) µs at which they are there: in order, as fast as the link takes them in."""
    link = link or roofline.peak("nvlink").value
    sent = (np.arange((problem.n - 1) * problem.row_blocks) + 1) * TILE[0] * problem.k * 2
    return (sent / link * 1e6 + latency_us).reshape(problem.n - 1, -1)


def schedule(problem: Problem, rung: Rung, *, flops=None, latency_us=1.0, **link):
    """(step, block of an SM, start, end) of each tile in µs, as blocks with fixed tiles reach them."""
    flops = flops or roofline.peak("bf16").value  # All SMs together.
    tile_us = 2 * TILE[0] * TILE[1] * problem.k / (flops / NUM_SMS) * 1e6
    arrived, sms = arrivals(problem, latency_us=latency_us, **link), NUM_SMS - rung.senders
    per_shard = problem.row_blocks * problem.columns
    phases = [range(problem.n * per_shard)]
    if rung.senders and not rung.alive:
        phases = [range(s * per_shard, (s + 1) * per_shard) for s in range(problem.n)]
    free, found = np.zeros(sms), []
    if not rung.senders:
        free += arrived[-1, -1]
    for phase in phases:
        free += latency_us  # The ring is empty, and its first loads take a trip to memory.
        for number in phase:
            sm, (step, tile) = (number - phase[0]) % sms, divmod(number, per_shard)
            ready = 0.0
            if step and rung.senders:
                ready = arrived[step - 1, -1 if rung.wait_for == "shard" else tile // problem.columns]
            start = max(free[sm], ready)
            free[sm] = start + tile_us
            found.append((step, sm, start, free[sm]))
    return found


def predicted_us(problem: Problem, rung: Rung, **how) -> float:
    return max(end for *_, end in schedule(problem, rung, **how))


@Picture
def overlap_model(rungs=RUNGS[:4], problem: Problem = NARROW, **how):
    """A model of the all-gather matmul's rungs, nothing measured: which SMs multiply whose shard, when its rows arrive.

    Two GPUs side by side; a pair of panels for each rung: what the link brings, and how many SMs multiply.
    """
    ends = [predicted_us(problem, rung, **how) for rung in rungs]
    of_link = {name: value for name, value in how.items() if name != "flops"}
    grid = dict(nrows=2 * len(rungs), ncols=2, sharex=True, height_ratios=[0.22, 1] * len(rungs))
    with plot.figure(7.8, 0.75 + 1.45 * len(rungs), **grid) as (fig, axes):
        for r, rung in enumerate(rungs):
            placed = schedule(problem, rung, **how)
            for d in range(2):
                link, busy = axes[2 * r, d], axes[2 * r + 1, d]
                _draw_link(link, problem, d, **of_link)
                _draw_busy(busy, problem, d, placed, max(ends), gathers_first=not rung.senders)
                busy.axvline(ends[r], color=RED, linewidth=1.3)
                link.set_title(f"GPU {d}: {rung.name}" + (f", {ends[r]:.0f} µs" if d == 0 else ""), fontsize=8.5)
        for ax in axes[-1]:
            ax.set_xlabel("µs, by the model", fontsize=8)
        for owner in range(problem.n):
            axes[0, 0].plot([], [], "s", color=plot.COLOURS[owner], label=f"shard {owner}")
        fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower right", ncols=problem.n, fontsize=8)
    return fig


def _draw_link(ax, problem, d, **how):
    at = arrivals(problem, **how)
    for step in range(problem.n - 1):
        start = at[step - 1, -1] if step else 0
        colour = plot.COLOURS[(d + step + 1) % problem.n]
        ax.barh(0, at[step, -1] - start, left=start, height=0.7, color=colour, alpha=0.75, edgecolor=plot.CARD)
    ax.set(ylim=(-0.5, 0.5), yticks=[0])
    ax.set_yticklabels(["link in"], fontsize=7.5)
    ax.tick_params(axis="both", length=0)
    ax.grid(visible=False)


def _draw_busy(ax, problem, d, placed, end, gathers_first):
    """How many SMs multiply, in the colours of the shards."""
    times = np.linspace(0, 1.06 * end, 900)
    bottom = np.zeros_like(times)
    for step in range(problem.n):
        mine = np.array([(start, end) for s, _, start, end in placed if s == step])
        top = bottom + (mine[:, :1] <= times).sum(0) - (mine[:, 1:] <= times).sum(0)
        owner = (step if gathers_first else d + step) % problem.n  # A gathered array has one order.
        ax.fill_between(times, bottom, top, step="mid", alpha=0.75, linewidth=0, color=plot.COLOURS[owner])
        bottom = top
    ax.axhline(NUM_SMS, color=INK, linewidth=0.6, linestyle=":")
    ax.set(ylim=(0, 1.12 * NUM_SMS), xlim=(0, 1.06 * end), yticks=(0, NUM_SMS))
    ax.set_ylabel("SMs", fontsize=7.5)
    ax.grid(visible=False)


DEVICES = 4
ORDERS = {
    "everybody begins with GPU 0": lambda d, n: [p for p in range(n) if p != d],
    "everybody begins with the next GPU": lambda d, n: [(d + k) % n for k in range(1, n)],
}


def peers_schedule(order, n: int = DEVICES) -> list[tuple[int, int, float, float]]:
    """(sender, receiver, start, end) of each shard, where a link takes one shard a unit of time, in and out.

    Shards that come to one GPU at the same time share its link; a sender goes on when its own shard has arrived.
    """
    left = {d: list(order(d, n)) for d in range(n)}
    work, started = {d: 1.0 for d in range(n)}, {d: 0.0 for d in range(n)}
    now, found = 0.0, []
    while any(left.values()):
        senders = [d for d in left if left[d]]
        load = {p: sum(left[d][0] == p for d in senders) for p in range(n)}
        step = min(work[d] * load[left[d][0]] for d in senders)
        now += step
        for d in senders:
            work[d] -= step / load[left[d][0]]
        for d in senders:
            if work[d] < 1e-9:
                found.append((d, left[d].pop(0), started[d], now))
                work[d], started[d] = 1.0, now
    return found


@chart(7.8, 2.9, ncols=2, sharey=True)
def overlap_peers(axes):
    """The order of peers on four GPUs: who sends to whom in each turn, and what each GPU's link takes in meanwhile."""
    for ax, (title, order) in zip(axes, ORDERS.items(), strict=True):
        placed = peers_schedule(order)
        for sender, receiver, start, end in placed:
            middle = (start + end) / 2
            sharing = [q for q, r, s, e in placed if r == receiver and s < middle < e]
            height = 0.8 / len(sharing)
            y = receiver - 0.4 + (sum(q < sender for q in sharing) + 0.5) * height
            look = dict(alpha=0.7, linewidth=None, clip=False, ink=INK)
            bar(ax, y, start, end, f"from {sender}", plot.COLOURS[sender], height, 6.5, **look)
        over = max(end for *_, end in placed)
        ax.axvline(over, color=RED, linewidth=1.3)
        tracks(ax, [f"GPU {d} receives" for d in range(DEVICES)], f"{title}: {over:.1f}", 8.5)
        ax.set(xlim=(0, 6.4), ylim=(DEVICES - 0.5, -0.5))
        ax.set_xlabel("time, in shards of one link", fontsize=8)
