"""The order of peers on four GPUs: who sends to whom in each turn, and what each GPU's link takes in meanwhile."""

from figures._draw import save
from lab import plot

DEVICES = 4
ORDERS = {
    "everybody begins with GPU 0": lambda d, n: [p for p in range(n) if p != d],
    "everybody begins with the next GPU": lambda d, n: [(d + k) % n for k in range(1, n)],
}


def schedule(order, n: int = DEVICES) -> list[tuple[int, int, float, float]]:
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


def draw():
    with plot.figure(7.8, 2.9, ncols=2, sharey=True) as (fig, axes):
        for ax, (title, order) in zip(axes, ORDERS.items(), strict=True):
            placed = schedule(order)
            for sender, receiver, start, end in placed:
                share = sum(r == receiver and s < (start + end) / 2 < e for _, r, s, e in placed)
                slot = sum(r == receiver and s < (start + end) / 2 < e and q < sender for q, r, s, e in placed)
                height = 0.8 / share
                y = receiver - 0.4 + slot * height
                ax.barh(y + height / 2, end - start, left=start, height=height, color=plot.COLOURS[sender], alpha=0.7,
                        edgecolor=plot.CARD)  # fmt: skip
                ax.text((start + end) / 2, y + height / 2, f"from {sender}", ha="center", va="center", fontsize=6.5)
            over = max(end for *_, end in placed)
            ax.axvline(over, color=plot.BOUND, linewidth=1.3)
            ax.set_yticks(range(DEVICES), [f"GPU {d} receives" for d in range(DEVICES)])
            ax.set(xlim=(0, 6.4), ylim=(DEVICES - 0.5, -0.5))
            ax.set_title(f"{title}: {over:.1f}", fontsize=8.5)
            ax.set_xlabel("time, in shards of one link", fontsize=8)
            ax.grid(axis="y", visible=False)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
