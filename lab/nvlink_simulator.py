"""Several GPUs that carry out a protocol, in a random order that the seed gives: processes, semaphores, buffers.

A store to a peer starts and arrives later; in between its slot holds neither the old data nor the new. A load from a
peer reads its operand when it arrives. Stores and loads arrive in any order. A semaphore is zeroed when its device is
launched and may not be touched after the device has ended. At the end it holds zero, or the count that waits waited for
which keep it. There are no proxies here (`protocol.py`): a wait orders all that comes after it.
"""

import dataclasses
import random

from cookbook.nvlink.protocol import Flush, Load, Read, Send, Signal, Wait


class Fault(Exception):
    """The protocol is wrong: the message begins with the kind of fault."""


IN_FLIGHT = "in flight"


@dataclasses.dataclass(frozen=True)
class Event:
    """An action of a role, or the arrival of a copy that it has started."""

    device: int  # The role's.
    role: str
    action: object
    copy: int | None = None  # The number of the send or load, among those of its role.
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
      kept: buffers whose slots are results; all others must be read once before they are overwritten.
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
