"""When keys and values are copied: three orders of the same work, for one warpgroup. Widths are not measured."""

from figures._draw import save
from figures.pipelining.pipeline_schedule import LOAD, MULTIPLY, bar
from lab import plot

SOFTMAX = plot.COLOURS[1]
LOAD_TIME, PRODUCT, NUMBERS = 1.3, 1.0, 1.05
TITLES = {
    "in turn": "in turn: everything waits for the copies",
    "early": "early: the next block's, as soon as its slot is free",
    "two slots": "two slots: the next block's, a whole step ahead",
}


def schedule(copies: str, steps: int):
    """(name, lane, start, end) of every piece of work."""
    work, now = [], 0.0
    k_ready, v_ready = {0: LOAD_TIME}, {0: LOAD_TIME}
    starts = {"k": {0: 0.0}, "v": {0: 0.0}}

    def load(what, ready, block, at):
        starts[what][block], ready[block] = at, at + LOAD_TIME

    for i in range(steps):
        if copies == "in turn":
            load("k", k_ready, i, now), load("v", v_ready, i, now)
        if copies == "two slots":
            load("k", k_ready, i + 1, now), load("v", v_ready, i + 1, now)
        begin = max(now, k_ready[i])
        s_end = begin + PRODUCT
        work.append((f"q k{i}", 2, begin, s_end))
        if copies == "early":
            load("k", k_ready, i + 1, s_end)
        p_end = s_end + NUMBERS
        work.append(("softmax", 3, s_end, p_end))
        begin = max(p_end, v_ready[i])
        now = begin + PRODUCT
        work.append((f"p v{i}", 2, begin, now))
        if copies == "early":
            load("v", v_ready, i + 1, now)
    for lane, what in enumerate("kv"):
        work += [(f"{what}{i}", lane, at, at + LOAD_TIME) for i, at in starts[what].items() if i < steps]
    return work


def draw(steps: int = 3):
    with plot.figure(height=6.0, nrows=3, sharex=True) as (fig, axes):
        for ax, (copies, title) in zip(axes, TITLES.items(), strict=True):
            work = schedule(copies, steps)
            for name, lane, start, end in work:
                shift = 0.19 * (1 if int(name[1:]) % 2 else -1) if lane < 2 and copies == "two slots" else 0.0
                colour = (LOAD, LOAD, MULTIPLY, SOFTMAX)[lane]
                bar(ax, lane + shift, start, end, name, colour, height=0.37 if shift else 0.74)
            ax.set_yticks(range(4), ["copies of k", "copies of v", "tensor cores", "CUDA cores"])
            ax.set_ylim(3.6, -0.6)
            ax.grid(axis="y", visible=False)
            ax.set_title(f"{title}; {steps} steps take {max(end for *_, end in work):.1f}", fontsize=9)
        axes[0].set_xlim(0, max(end for *_, end in schedule("in turn", steps)))
        axes[-1].set_xlabel("time, in units of one product; the copies are assumed to take 1.3")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
