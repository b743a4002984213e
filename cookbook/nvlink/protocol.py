"""Protocols of the kernels across GPUs, as data: who sends what where, which signal announces it, who waits for it.

A protocol gives a role's actions, in order, on device `d` of `n`. The kernels carry them out on traced integers, one
block of a grid beside the others: block b of a device talks only to block b of its peers. The simulator of the tests
carries them out on Python's, in many random orders.

The protocols rest on four rules of the machine:

* No device's block begins before every device is ready to launch: XLA has the devices wait for each other before a
  kernel that uses peers' memory (`skip_device_barrier=False`). Outputs are allocated by then, and semaphores zero.
* A store to a peer has arrived once `Flush` says so. A signal alone does not wait for the stores before it.
* A signal releases what its warpgroup stored and flushed before it. A wait acquires it.
* A kernel that ends gives its buffers and its semaphores back. Nobody may store to them or signal them after that, so
  a block ends only when all that its peers send to it has come, and it leaves its semaphores at zero.
"""

import dataclasses
from typing import Any

from .. import _mgpu


@dataclasses.dataclass(frozen=True)
class Send:
    """Starts to store a piece of data in a peer's buffer."""

    peer: Any
    buffer: str
    slot: tuple  # Where in the buffer.
    data: tuple  # Name of the data, for the reader and the simulator: (device it comes from, piece).
    when: Any = True  # Whether the action happens at all.


@dataclasses.dataclass(frozen=True)
class Flush:
    """Waits until at most the `pending` latest sends of this role are still in flight."""

    pending: int
    when: Any = True


@dataclasses.dataclass(frozen=True)
class Signal:
    """Adds one to a peer's semaphore."""

    peer: Any
    semaphore: str
    index: Any = 0
    when: Any = True


@dataclasses.dataclass(frozen=True)
class Wait:
    """Waits until a semaphore of this device is at least `count`, and subtracts that."""

    semaphore: str
    index: Any = 0
    count: int = 1
    when: Any = True


@dataclasses.dataclass(frozen=True)
class Read:
    """Reads `data` from a buffer of this device."""

    buffer: str
    slot: tuple
    data: tuple
    when: Any = True


def peer(d, n: int, offset: int):
    """The device `offset` places after `d`. Each sends to the next one first, so that no device gets all at once."""
    return _mgpu.rem(d + offset, n)


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Every device pushes its shard to all. One role, "send": a round sends one piece of the shard to each device.

    | semaphore | signalled by | how often | waited for by |
    |---|---|---|---|
    | arrived | each peer, when all its pieces have arrived | n - 1 | the end |
    """

    n: int

    def send(self, d, i) -> list:
        """Round `i`: the device's own output is served like the others', last."""
        return [Send(peer(d, self.n, k), "out", (d, i), (d, i)) for k in [*range(1, self.n), 0]]

    def end(self, d) -> list:
        signals = [Signal(peer(d, self.n, k), "arrived") for k in range(1, self.n)]
        return [Flush(0), *signals, Wait("arrived", count=self.n - 1)]


@dataclasses.dataclass(frozen=True)
class ReduceScatter:
    """Every device pushes to each owner what it adds to the owner's shard; the owner adds up in the devices' order.

    A round sends one piece to each owner's `stage`, which has `num_slots` slots for each sender. A device sends to
    itself as well, so that the addends come from one buffer and 0 + 1 + ... + (n - 1) is the order on every device.
    The signals of a round follow the sends of the next, which keeps two rounds in flight.

    | semaphore | signalled by | how often | waited for by |
    |---|---|---|---|
    | arrived[q] | device q, "send": a piece is in its slot | each round | "add" |
    | freed[p] | device p, "add": a slot of this device there is read | each round but the last `num_slots` | "send" |
    """

    n: int
    num_slots: int

    def __post_init__(self):
        if self.num_slots < 2:
            raise ValueError(f"{self.num_slots=}: must be 2 or more, since two rounds are in flight")

    def send(self, d, i) -> list:
        """The role "send", round `i`."""
        slot, peers = _mgpu.rem(i, self.num_slots), self._peers(d)
        credits = [Wait("freed", p, when=i >= self.num_slots) for p in peers]
        sends = [Send(p, "stage", (d, slot), (d, p, i)) for p in peers]
        return [*credits, *sends, Flush(self.n, when=i >= 1), *self._arrived(d, when=i >= 1)]

    def end_send(self, d, num_rounds) -> list:
        return [Flush(0), *self._arrived(d, when=num_rounds >= 1)]

    def add(self, d, i, num_rounds) -> list:
        """The role "add", round `i`."""
        slot = _mgpu.rem(i, self.num_slots)
        waits = [Wait("arrived", q) for q in range(self.n)]
        reads = [Read("stage", (q, slot), (q, d, i)) for q in range(self.n)]
        freed = [Signal(q, "freed", d, when=i + self.num_slots < num_rounds) for q in range(self.n)]
        return [*waits, *reads, *freed]

    def _peers(self, d) -> list:
        return [peer(d, self.n, k) for k in [*range(1, self.n), 0]]

    def _arrived(self, d, when) -> list:
        return [Signal(p, "arrived", d, when) for p in self._peers(d)]


@dataclasses.dataclass(frozen=True)
class RingAllGather:
    """Shards go round a ring while they are multiplied: in step s a device has the shard of the s-th device after it.

    It multiplies a block of rows and sends it on to the device before it, which needs that shard next. `num_slots`
    slots of `ring` hold the shards that have come; n - 1 of them need no reuse.

    | semaphore | signalled by | how often | waited for by |
    |---|---|---|---|
    | arrived[slot, block] | the next device: a block of rows is in the slot | each use of the slot | the product |
    | freed[slot, block] | the device before: it has read and sent the block | each use but the last | the send |
    """

    n: int
    num_slots: int
    num_blocks: int  # Blocks of rows of a shard.

    def __post_init__(self):
        if not 1 <= self.num_slots <= max(1, self.n - 1) or (self.n > 2 and self.num_slots < 2):
            raise ValueError(f"{self.num_slots=}: must be from 2 to {max(1, self.n - 1)}, the steps that receive")

    def owner(self, d, s):
        """The device whose shard device `d` multiplies in step `s`."""
        return _mgpu.rem(d + s, self.n)

    def block(self, d, s, b) -> list:
        """Step `s`, block of rows `b`: wait for it, multiply it, pass it on."""
        held, sent = _mgpu.rem(s + self.num_slots - 1, self.num_slots), _mgpu.rem(s, self.num_slots)
        to, data, passes_on = peer(d, self.n, self.n - 1), (self.owner(d, s), b), s < self.n - 1
        return [
            Wait("arrived", (held, b), when=s >= 1),
            Read("ring", (held, b), data, when=s >= 1),
            Wait("freed", (sent, b), when=passes_on & (s >= self.num_slots)),
            Send(to, "ring", (sent, b), data, when=passes_on),
            Flush(0, when=passes_on),
            Signal(to, "arrived", (sent, b), when=passes_on),
            # The slot was filled in step s - 1, and its next use is `num_slots` steps later.
            Signal(peer(d, self.n, 1), "freed", (held, b), when=(s >= 1) & (s - 1 + self.num_slots < self.n - 1)),
        ]


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Every device pushes to each the rows that are for it, once it knows all sizes: they say where rows lie.

    Role "send" copies to the peers, "keep" the rows that stay. No place is written twice, so no piece needs a signal.

    | semaphore | signalled by | how often | waited for by |
    |---|---|---|---|
    | known[role] | each device: its sizes have arrived | n | each role, before it copies |
    | arrived | each peer, when all its rows have arrived | n - 1 | the end of "send" |
    """

    n: int

    def announce(self, d) -> list:
        """The role "send": this device's sizes go to all, itself included. Equal sizes need no announcement."""
        sends = [Send(p, "sizes", (d,), (d, "sizes")) for p in self._everybody(d)]
        return [*sends, Flush(0), *[Signal(p, "known", role) for role in range(2) for p in self._everybody(d)]]

    def learn(self, role) -> list:
        """Role 0, "send", or 1, "keep"."""
        return [Wait("known", role, count=self.n), *[Read("sizes", (q,), (q, "sizes")) for q in range(self.n)]]

    def send(self, d, to, i) -> list:
        """Piece `i` for device `to`, which may be `d` itself."""
        return [Send(to, "out", (d, i), (d, to, i))]

    def end(self, d) -> list:
        """The end of "send"."""
        signals = [Signal(peer(d, self.n, k), "arrived") for k in range(1, self.n)]
        return [Flush(0), *signals, Wait("arrived", count=self.n - 1)]

    def end_own(self) -> list:
        """The end of "keep"."""
        return [Flush(0)]

    def _everybody(self, d) -> list:
        return [peer(d, self.n, k) for k in [*range(1, self.n), 0]]


def programs(protocol, d: int, num_rounds: int) -> dict[str, list]:
    """All actions of each role on device `d`, without those that do not happen: for the simulator and for reading."""
    n = protocol.n
    match protocol:
        case AllGather():
            roles = {"send": [*_rounds(num_rounds, lambda i: protocol.send(d, i)), *protocol.end(d)]}
        case ReduceScatter():
            send = [*_rounds(num_rounds, lambda i: protocol.send(d, i)), *protocol.end_send(d, num_rounds)]
            roles = {"send": send, "add": _rounds(num_rounds, lambda i: protocol.add(d, i, num_rounds))}
        case RingAllGather():
            each = lambda s: _rounds(protocol.num_blocks, lambda b: protocol.block(d, s, b))
            roles = {"multiply": _rounds(n, each)}
        case AllToAll():
            pieces = lambda to: _rounds(num_rounds, lambda i: protocol.send(d, to, i))
            to_peers = [action for k in range(1, n) for action in pieces(peer(d, n, k))]
            send = [*protocol.announce(d), *protocol.learn(0), *to_peers, *protocol.end(d)]
            roles = {"send": send, "keep": [*protocol.learn(1), *pieces(d), *protocol.end_own()]}
    return {role: [action for action in actions if action.when] for role, actions in roles.items()}


def _rounds(count: int, actions) -> list:
    return [action for i in range(count) for action in actions(i)]
