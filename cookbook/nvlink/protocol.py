# SPDX-License-Identifier: Apache-2.0
"""Protocols of the kernels across GPUs, as data: who sends what where, which signal announces it, who waits for it.

A protocol gives a role's actions, in order, on device `d` of `n`. The kernels carry them out on traced integers. Block
b of a collective talks only to block b of its peers; the blocks of a product share one set of semaphores.

The protocols rest on five rules of the machine:

* No device's block begins before every device is ready to launch: XLA has the devices wait for each other before a
  kernel that uses peers' memory (`skip_device_barrier=False`). Operands are written by then, outputs are allocated, and
  semaphores are zero.
* A kernel learns its peers' addresses when it runs, and so do its copies of contiguous bytes. A descriptor of TMA gets
  them when it is written: when the host launches the kernel, or records it in a CUDA graph. XLA records a program again
  when the device's own buffers have moved, but not when a peer's have. So every copy to or from a peer is of contiguous
  bytes, without a descriptor.
* A store to a peer has arrived once `Flush` says so. A signal alone does not wait for the stores before it.
* A signal releases what its warpgroup stored and flushed before it. A wait acquires it. Data that has arrived is then
  loaded by TMA, whose accesses PTX counts to another proxy than the wait's. JAX gives kernels no fence between the two
  for memory: that the loads see it is an assumption, which no run has contradicted.
* A kernel that ends gives its buffers and its semaphores back. Nobody may use them after that, so a kernel ends only
  when all that its peers send to it has come, and when they have read all that they load from it.
"""

import dataclasses
from typing import Any

from .. import _device


@dataclasses.dataclass(frozen=True)
class Send:
    """Starts to store a piece of data in a peer's buffer."""

    peer: Any
    buffer: str
    slot: tuple  # Where in the buffer.
    data: tuple  # Name of the data, for the reader and the simulator: (device it comes from, piece).
    when: Any = True  # Whether the action happens at all.


@dataclasses.dataclass(frozen=True)
class Load:
    """Starts to load a piece of data from a peer's operand into a buffer of this device."""

    peer: Any
    source: tuple  # Where in the operand. The data is called (peer, *source).
    buffer: str
    slot: tuple
    when: Any = True


@dataclasses.dataclass(frozen=True)
class Flush:
    """Waits until at most the `pending` latest sends and loads of this role are still in flight."""

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
    """Waits until a semaphore of this device is at least `count`, and subtracts that unless it `keeps` it."""

    semaphore: str
    index: Any = 0
    count: int = 1
    when: Any = True
    keeps: bool = False


@dataclasses.dataclass(frozen=True)
class Read:
    """Reads `data` from a buffer of this device."""

    buffer: str
    slot: tuple
    data: tuple
    when: Any = True


def peer(d, n: int, offset: int):
    """The device `offset` places after `d`. Each sends to the next one first, so that no device gets all at once."""
    return _device.rem(d + offset, n)


def everybody(d, n: int) -> list:
    """All devices, in the order in which device `d` serves them: itself last."""
    return [peer(d, n, k) for k in [*range(1, n), 0]]


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Every device pushes its shard to all: role "send" to the peers, "keep" to the device's own result.

    No place is written twice, so no piece needs a signal.

    | semaphore | signalled by | how often | waited for by |
    |---|---|---|---|
    | arrived | each peer, when all its pieces have arrived | n - 1 | the end of "send" |
    """

    n: int

    def send(self, d, to, i) -> list:
        """Piece `i` for device `to`, which may be `d` itself."""
        return [Send(to, "out", (d, i), (d, i))]

    def end(self, d) -> list:
        """The end of "send"."""
        signals = [Signal(peer(d, self.n, k), "arrived") for k in range(1, self.n)]
        return [Flush(0), *signals, Wait("arrived", count=self.n - 1)]

    def end_own(self) -> list:
        """The end of "keep"."""
        return [Flush(0)]


@dataclasses.dataclass(frozen=True)
class AllToAll(AllGather):
    """Every device pushes to each the rows that are for it, once it knows all sizes: they say where rows lie.

    | semaphore | signalled by | how often | waited for by |
    |---|---|---|---|
    | known[role] | each device: its sizes have arrived | n | each role, before it copies |
    | arrived | as in `AllGather` | | |
    """

    def announce(self, d) -> list:
        """The role "send": this device's sizes go to all, itself included. Equal sizes need no announcement."""
        peers = everybody(d, self.n)
        sends = [Send(p, "sizes", (d,), (d, "sizes")) for p in peers]
        return [*sends, Flush(0), *[Signal(p, "known", role) for role in range(2) for p in peers]]

    def learn(self, role) -> list:
        """Role 0, "send", or 1, "keep"."""
        return [Wait("known", role, count=self.n), *[Read("sizes", (q,), (q, "sizes")) for q in range(self.n)]]

    def send(self, d, to, i) -> list:
        return [Send(to, "out", (d, i), (d, to, i))]


@dataclasses.dataclass(frozen=True)
class ReduceScatter:
    """Every owner pulls from each device what that adds to the owner's shard, and adds up in the devices' order.

    The operands lie in their places from the launch on, so no piece needs a signal, and nothing of a peer is written.

    | semaphore | signalled by | how often | waited for by |
    |---|---|---|---|
    | read | each peer: it has loaded all that it needs from this device | n - 1 | the end |
    """

    n: int

    def load(self, d, i) -> list:
        """Round `i`."""
        return [Load(p, (d, i), "stage", (p, i)) for p in everybody(d, self.n)]

    def add(self, d, i) -> list:
        """Round `i`, once its pieces have arrived."""
        return [Flush(0), *[Read("stage", (q, i), (q, d, i)) for q in range(self.n)]]

    def end(self, d) -> list:
        """All rounds are added."""
        return [*[Signal(peer(d, self.n, k), "read") for k in range(1, self.n)], Wait("read", count=self.n - 1)]


@dataclasses.dataclass(frozen=True)
class GatherMatmul:
    """Shards are pushed to every device while it multiplies those that it has: its own first, then the next device's.

    In step s device d multiplies the shard of device d + s. So a sender serves the device before it first, and every
    device receives from one peer at a time, in the order in which it needs the shards.

    A shard is cut into blocks. A round sends one piece of a block, and each of `num_senders` senders sends its share of
    every block: blocks arrive in the order in which they are multiplied. The signal of a round follows the sends of
    `lag` more rounds.

    | semaphore | signalled by | how often | waited for by |
    |---|---|---|---|
    | arrived[s - 1, block] | each sender of device d + s: its share of a block has arrived | 1 | "multiply" |

    Many tiles wait for the same block, so a wait leaves the count as it is.
    """

    n: int
    num_senders: int
    num_blocks: int  # Blocks of a shard.
    rounds: int  # Rounds in which the senders send a block.
    lag: int
    keeps_own: bool = False  # Whether a device also stores its own shard beside the others', last.

    @property
    def num_rounds(self) -> int:
        return (self.n - 1 + self.keeps_own) * self.num_blocks * self.rounds

    def owner(self, d, step):
        """The device whose shard device `d` multiplies in step `step`."""
        return peer(d, self.n, step)

    def place(self, sender, i) -> tuple:
        """(step in which it is multiplied, block, piece of the block) that `sender` sends in round `i`."""
        of_block = _device.div(i, self.rounds)
        step = 1 + _device.div(of_block, self.num_blocks)
        return step, _device.rem(of_block, self.num_blocks), _device.rem(i, self.rounds) * self.num_senders + sender

    def send(self, d, sender, i) -> list:
        """The role "send", round `i`."""
        step, block, piece = self.place(sender, i)
        to = peer(d, self.n, self.n - step)
        return [Send(to, "gathered", (d, block, piece), (d, block, piece)), Flush(self.lag), *self._sent(d, i)]

    def end_send(self, d) -> list:
        last = range(max(0, self.num_rounds - self.lag), self.num_rounds)
        return [Flush(0), *(signal for i in last for signal in self._sent(d, i + self.lag))]

    def _sent(self, d, i) -> list:
        """The signal of round `i - lag`, if that was the last one of its block."""
        i = i - self.lag
        step, block, _ = self.place(0, i)
        is_last = (i >= 0) & (_device.rem(i, self.rounds) == self.rounds - 1) & (step < self.n)
        return [Signal(peer(d, self.n, self.n - step), "arrived", (step - 1, block), is_last)]

    def multiply(self, d, step, block) -> list:
        """The role "multiply": what of a tile needs `block`, in step `step`."""
        owner, is_sent = self.owner(d, step), step >= 1
        pieces = [(owner, block, piece) for piece in range(self.rounds * self.num_senders)]
        wait = Wait("arrived", (step - 1, block), self.num_senders, is_sent, keeps=True)
        return [wait, *(Read("gathered", piece, piece, is_sent) for piece in pieces)]


@dataclasses.dataclass(frozen=True)
class MatmulScatter:
    """Every device computes the tiles of all owners, its own last, and pushes the others' tiles to them.

    In step s device d computes tiles of device d + 1 + s. An owner has a slot for each tile of each other device, so
    that none is used twice; it adds to its own tile the parts of the devices after it, in their order.

    | semaphore | signalled by | how often | waited for by |
    |---|---|---|---|
    | arrived[tile] | each other device: its part of the sum of the tile is in its slot | n - 1 | the tile's owner |

    Both warpgroups of the owner wait for a tile, so a wait leaves the count as it is.
    """

    n: int

    def owner(self, d, step):
        """The device whose tiles device `d` computes in step `step`."""
        return peer(d, self.n, step + 1)

    def send(self, d, step, tile) -> list:
        """A tile is computed. (The kernel sends it in several stores.)"""
        owner = self.owner(d, step)
        return [Send(owner, "parts", (self.n - 2 - step, tile), (d, owner, tile), step < self.n - 1)]

    def sent(self, d, step, tile) -> list:
        """Announces a tile."""
        is_sent = step < self.n - 1
        return [Flush(0, is_sent), Signal(self.owner(d, step), "arrived", tile, is_sent)]

    def receive(self, d, step, tile) -> list:
        """An own tile is computed, and the others' parts of its sum are to be added."""
        is_own = step == self.n - 1
        reads = [
            Read("parts", (slot, tile), (peer(d, self.n, slot + 1), d, tile), is_own) for slot in range(self.n - 1)
        ]
        return [Wait("arrived", tile, self.n - 1, is_own, keeps=True), *reads]
