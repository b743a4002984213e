"""Several GPUs that carry out a protocol, in a random order that the seed gives: processes, semaphores, buffers.

A store to a peer starts and arrives later; in between its slot holds neither the old data nor the new. A load from a
peer reads its operand when it arrives. Stores and loads arrive in any order. A semaphore is zeroed when its device is
launched and may not be touched after the device has ended. At the end it holds zero, or the count that waits waited for
which keep it. There are no proxies here (`protocol.py`): a wait orders all that comes after it.
"""

import dataclasses
import random

from cookbook import _device
from cookbook.nvlink.protocol import (
    AllGather,
    AllToAll,
    Flush,
    GatherMatmul,
    Load,
    MatmulScatter,
    Read,
    ReduceScatter,
    Send,
    Signal,
    Wait,
    everybody,
    peer,
)

BLOCKS = 3  # Blocks of a product that `programs_of` describes.


class Fault(Exception):
    """The protocol is wrong: the message begins with the kind of fault."""


IN_FLIGHT = "in flight"


@dataclasses.dataclass(frozen=True)
class Event:
    """An action of a role, or the arrival of a copy that it has started."""

    device: int  # The role's.
    role: str
    action: object
    copy: int | None = None  # The number of the send or load, among all of its role.
    arrives: bool = False


@dataclasses.dataclass
class Process:
    """A role on a device."""

    device: int
    role: str
    actions: list
    speed: float
    at: int = 0
    copies: list = dataclasses.field(default_factory=list)  # Whether each send or load has arrived, in order.

    @property
    def done(self):
        return self.at == len(self.actions)


class Simulator:
    """Runs `programs[d][role]`, a list of actions, to the end.

    Args:
      kept: buffers that hold results; all others must be read once before they are overwritten.
      launch_together: XLA's barrier before the kernel. Without it each device begins at a time of its own.

    Attributes:
      history: events so far, in order. The last one is the fault, if there is one.
      fault: the Fault that ended the run, or None.
    """

    def __init__(self, programs: list[dict[str, list]], *, seed: int, kept=(), launch_together=True):
        self.random = random.Random(seed)
        self.kept = kept
        self.history, self.fault = [], None
        speed = lambda: 4.0 ** self.random.uniform(-2, 2)  # Some are 250 times as fast as others.
        self.processes = [
            Process(d, role, actions, speed()) for d, roles in enumerate(programs) for role, actions in roles.items()
        ]
        self.network = speed()
        everyone = set(range(len(programs)))
        self.launched = everyone if launch_together else set()
        self.waiting_to_launch = everyone - self.launched
        self.ended = set()
        self.slots, self.unread, self.semaphores, self.held = {}, set(), {}, {}
        self.in_flight = []  # (process, event of the copy, key of its slot, data)

    def run(self) -> dict:
        """Contents of the result slots at the end. Raises Fault."""
        try:
            return self._run()
        except Fault as fault:
            self.fault = fault
            raise

    def _run(self) -> dict:
        while not all(process.done for process in self.processes) or self.in_flight:
            events = [(p.speed, self._step, p) for p in self.processes if self._may_step(p)]
            events += [(self.network, self._arrive, copy) for copy in self.in_flight]
            events += [(0.1, self._launch, d) for d in self.waiting_to_launch]
            if not events:
                stuck = [f"{p.role} on {p.device} at {p.actions[p.at]}" for p in self.processes if not p.done]
                raise Fault(f"deadlock: {'; '.join(stuck)}")
            _, event, argument = self.random.choices(events, [weight for weight, *_ in events])[0]
            event(argument)
        if self.unread:
            raise Fault(f"never read: {sorted(self.unread)}")
        return {key: self.slots[key] for key in self.slots if key[1] in self.kept}

    def _launch(self, d):
        self.waiting_to_launch.remove(d)
        self.launched.add(d)

    def _may_step(self, process):
        if process.done or process.device not in self.launched:
            return False
        match process.actions[process.at]:
            case Wait(semaphore, index, count):
                return self.semaphores.get((process.device, semaphore, index), 0) >= count
            case Flush(pending):
                return all(process.copies[: len(process.copies) - pending])
        return True

    def _step(self, process):
        action, d = process.actions[process.at], process.device
        process.at += 1
        event = Event(d, process.role, action, len(process.copies) if isinstance(action, Send | Load) else None)
        self.history.append(event)
        match action:
            case Send(to, buffer, slot, data):
                self._start(process, event, (to, buffer, slot), data)
            case Load(owner, source, buffer, slot):
                self._start(process, event, (d, buffer, slot), (owner, *source))
            case Signal(to, semaphore, index):
                self._require_alive(to, action)
                self.semaphores[to, semaphore, index] = self.semaphores.get((to, semaphore, index), 0) + 1
            case Wait(semaphore, index, count, keeps=True):
                self.held[d, semaphore, index] = count
            case Wait(semaphore, index, count):
                self.semaphores[d, semaphore, index] -= count
            case Read(buffer, slot, data):
                if (found := self.slots.get((d, buffer, slot))) != data:
                    raise Fault(f"read before it arrived: {action} on {d} finds {found}")
                self.unread.discard((d, buffer, slot))
        if all(p.done for p in self.processes if p.device == d):
            self._end(d)

    def _start(self, process, event, key, data):
        self._require_alive(event.action.peer, event.action)
        if key in self.unread or (key[1] in self.kept and key in self.slots):
            raise Fault(f"overwritten before it was read: {event.action}")
        if self.slots.get(key) == IN_FLIGHT:
            raise Fault(f"overwritten before it was read, or even arrived: {event.action}")
        self.slots[key] = IN_FLIGHT
        self.in_flight.append((process, event, key, data))
        process.copies.append(False)

    def _arrive(self, copy):
        process, event, key, data = copy
        self.in_flight.remove(copy)
        self.history.append(dataclasses.replace(event, arrives=True))
        if event.action.peer in self.ended:
            copied = "stored" if isinstance(event.action, Send) else "loaded"
            raise Fault(f"{copied} after the end of device {event.action.peer}: {data}")
        self.slots[key], process.copies[event.copy] = data, True
        if key[1] not in self.kept:
            self.unread.add(key)

    def _end(self, d):
        self.ended.add(d)
        mine = {key: value for key, value in self.semaphores.items() if key[0] == d}
        left = {key[1:]: value for key, value in mine.items() if value != self.held.get(key, 0)}
        if left:
            raise Fault(f"signals left over on {d}: {left}")

    def _require_alive(self, d, action):
        if d not in self.launched:
            raise Fault(f"before the launch of device {d}: {action}")
        if d in self.ended:
            raise Fault(f"after the end of device {d}: {action}")


def find_fault(programs: list[dict[str, list]], *, seeds=range(40), kept=("out",), **how) -> Simulator | None:
    """The shortest of several random runs that end in a fault; None if no run does."""
    faulty = []
    for seed in seeds:
        simulator = Simulator(programs, seed=seed, kept=kept, **how)
        try:
            simulator.run()
        except Fault:
            faulty.append(simulator)
    return min(faulty, key=lambda simulator: len(simulator.history), default=None)


@dataclasses.dataclass(frozen=True)
class PushedScatter:
    """`ReduceScatter` by push, for comparison: no kernel uses it. The owner adds up what all push to it.

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
        slot, peers = _device.rem(i, self.num_slots), everybody(d, self.n)
        credits = [Wait("freed", p, when=i >= self.num_slots) for p in peers]
        sends = [Send(p, "stage", (d, slot), (d, p, i)) for p in peers]
        return [*credits, *sends, Flush(self.n, when=i >= 1), *self._arrived(d, when=i >= 1)]

    def end_send(self, d, num_rounds) -> list:
        return [Flush(0), *self._arrived(d, when=num_rounds >= 1)]

    def add(self, d, i, num_rounds) -> list:
        """The role "add", round `i`."""
        slot = _device.rem(i, self.num_slots)
        waits = [Wait("arrived", q) for q in range(self.n)]
        reads = [Read("stage", (q, slot), (q, d, i)) for q in range(self.n)]
        freed = [Signal(q, "freed", d, when=i + self.num_slots < num_rounds) for q in range(self.n)]
        return [*waits, *reads, *freed]

    def _arrived(self, d, when) -> list:
        return [Signal(p, "arrived", d, when) for p in everybody(d, self.n)]


def programs_of(protocol, d: int, num_rounds: int) -> dict[str, list]:
    """All actions of each role on device `d`, without those that do not happen: for the simulator and for reading.

    `num_rounds` is the number of rounds of the collectives, and of tiles a shard of the products.
    """
    n = protocol.n
    match protocol:
        case AllGather():  # And AllToAll, which announces its sizes first.
            learn = lambda role: protocol.learn(role) if isinstance(protocol, AllToAll) else []
            pieces = lambda to: _rounds(num_rounds, lambda i: protocol.send(d, to, i))
            to_peers = [action for k in range(1, n) for action in pieces(peer(d, n, k))]
            announced = protocol.announce(d) if isinstance(protocol, AllToAll) else []
            send = [*announced, *learn(0), *to_peers, *protocol.end(d)]
            roles = {"send": send, "keep": [*learn(1), *pieces(d), *protocol.end_own()]}
        case ReduceScatter():
            pull = _rounds(num_rounds, lambda i: [*protocol.load(d, i), *protocol.add(d, i)])
            roles = {"pull": [*pull, *protocol.end(d)]}
        case PushedScatter():
            send = [*_rounds(num_rounds, lambda i: protocol.send(d, i)), *protocol.end_send(d, num_rounds)]
            roles = {"send": send, "add": _rounds(num_rounds, lambda i: protocol.add(d, i, num_rounds))}
        case GatherMatmul():
            send = lambda c: _rounds(protocol.num_rounds, lambda i: protocol.send(d, c, i)) + protocol.end_send(d)
            multiply = lambda step, tile: protocol.multiply(d, step, tile % protocol.num_blocks)
            roles = {f"send {c}": send(c) for c in range(protocol.num_senders)}
            roles |= _blocks(n, num_rounds, lambda step, tile, before: multiply(step, tile))
        case MatmulScatter():

            def one_tile(step, tile, before):
                announced = [] if before is None else protocol.sent(d, *before)
                return [*announced, *protocol.receive(d, step, tile), *protocol.send(d, step, tile)]

            roles = _blocks(n, num_rounds, one_tile, lambda before: protocol.sent(d, *before))
    return {role: [action for action in actions if action.when] for role, actions in roles.items()}


def _rounds(count: int, actions) -> list:
    return [action for i in range(count) for action in actions(i)]


def _blocks(n: int, num_tiles: int, one_tile, end=lambda before: []) -> dict[str, list]:
    """Roles of as many blocks as share out the tiles of all steps; each knows the tile that it computed before."""
    roles = {}
    for block in range(BLOCKS):
        mine = [divmod(number, num_tiles) for number in range(block, n * num_tiles, BLOCKS)]
        actions = [one_tile(*tile, before) for before, tile in zip([None, *mine], mine, strict=False)]
        roles[f"block {block}"] = sum([*actions, end(mine[-1]) if mine else []], [])
    return roles
