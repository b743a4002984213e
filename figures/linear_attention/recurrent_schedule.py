"""A chunk's work in cycles of an SM, done by one warpgroup in a row, and by two of which one runs ahead."""

from figures._draw import save
from lab import plot
from lab.roofline import peak

NUM_SMS = 132  # On an H100 and on an H200.
TENSOR, SFU, LANES, SMEM_BYTES = 4096, 16, 128, 128  # Operations, exponentials, instructions and bytes in a cycle.
CLOCK = peak("bf16").value / NUM_SMS / TENSOR  # Hz, at which the data sheet counts.
SM_BYTES = peak("hbm").value / NUM_SMS / CLOCK  # Bytes that HBM gives one SM in a cycle.
US = 1e6 / CLOCK  # Microseconds a cycle.
COLOURS = {"output": plot.COLOURS[0], "state": plot.COLOURS[1], "memory": plot.COLOURS[2]}


def cycles(n: int, p: int, chunk: int = 64) -> dict[str, tuple[str, float]]:
    """(role, least cycles) of each step of a chunk. Latencies come on top."""
    product = lambda m, k, n: 2 * m * k * n / TENSOR
    return {
        "leave S": ("state", 2 * n * p / LANES + 2 * n * p / SMEM_BYTES),
        "scale v": ("state", 4 * chunk * p / LANES + 2 * chunk * p / SMEM_BYTES),
        "add to S": ("state", product(p, chunk, n) + n * p / LANES),
        "q kᵀ": ("output", product(chunk, n, chunk)),
        "weights": ("output", chunk * chunk / SFU + 6 * chunk * chunk / LANES),
        "q Sᵀ": ("output", product(chunk, n, p) + chunk * p / LANES),
        "weights v": ("output", product(chunk, chunk, p)),
        "store y": ("output", 2 * chunk * p / LANES + 2 * chunk * p / SMEM_BYTES),
    }


def bytes_of_chunk(n: int, p: int, chunk: int = 64) -> int:
    """q, k, v and y of 16 bits, and the sums of the decays."""
    return chunk * (4 * n + 4 * p + 4)


def schedule(n: int, p: int, *, apart: bool, chunks: int, wait: float) -> list[tuple[str, str, float, float]]:
    """[(role, step, start, end)]; each step is followed by `wait` cycles of latency. With `apart` the state has a
    warpgroup of its own, which may be two chunks ahead."""
    steps = list(cycles(n, p).items())
    bars, free = [], {"state": 0.0, "output": 0.0}
    left, done = [], []
    for chunk in range(chunks):
        for name, (role, length) in steps:
            lane = role if apart else "output"
            start = free[lane]
            if apart and name == "leave S" and chunk >= 2:
                start = max(start, done[chunk - 2])
            if name == "q Sᵀ":
                start = max(start, left[chunk])
            end = start + length + wait
            bars.append((role, name, start, start + length))
            free[lane] = end
            if name == "leave S":
                left.append(end)
            if name == "q Sᵀ":
                done.append(end)
    return bars


def chain(n: int, p: int, roles=("state", "output"), wait: float = 100.0) -> float:
    """Cycles of a chunk in a warpgroup that has these roles, latency included."""
    return sum(length + wait for role, length in cycles(n, p).values() if role in roles)


def draw(n: int = 128, p: int = 64, wait: float = 100.0):
    names = list(cycles(n, p))
    memory = bytes_of_chunk(n, p) / SM_BYTES
    with plot.figure(height=4.6, nrows=2, sharex=True, height_ratios=(2, 3)) as (fig, axes):
        for ax, apart in zip(axes, (False, True), strict=True):
            lanes = ["memory", *(("state", "output") if apart else ("one warpgroup",))]
            for chunk in range(4):
                _bar(
                    ax, 0, memory * chunk, memory * (chunk + 1), f"the bytes of a chunk: {memory * US:.2f} µs", "memory"
                )
            for role, name, start, end in schedule(n, p, apart=apart, chunks=7, wait=wait):
                lane = lanes.index(role) if apart else 1
                _bar(ax, lane, start, end, str(1 + names.index(name)), role)
            ax.set_yticks(range(len(lanes)), lanes)
            ax.set_ylim(len(lanes) - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
            each = (("state",), ("output",)) if apart else (("state", "output"),)
            took = max(chain(n, p, roles, wait) for roles in each) * US
            title = "two warpgroups, the state ahead" if apart else "one warpgroup, one step after the other"
            ax.set_title(f"{title}: {took:.2f} µs of work for a chunk", fontsize=9)
        axes[-1].set_xlim(0, 3.5 * memory * US)
        list_of = lambda role: ", ".join(f"{i} {x}" for i, x in enumerate(names, 1) if cycles(n, p)[x][0] == role)
        axes[-1].set_xlabel(
            f"state: {list_of('state')}\noutput: {list_of('output')}\n"
            f"µs; least cycles of each step, and {wait:.0f} cycles of latency after it (simulated)",
            fontsize=8,
        )
    return fig


def _bar(ax, lane, start, end, text, role):
    start, length = start * US, (end - start) * US
    ax.barh(lane, length, left=start, height=0.72, color=COLOURS[role], alpha=0.5, edgecolor=plot.CARD, linewidth=0.8)
    ax.text(start + length / 2, lane, text, ha="center", va="center", fontsize=7.5, clip_on=True)


if __name__ == "__main__":
    save(__file__, draw())
