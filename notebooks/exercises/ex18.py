"""Chapter 18's exercises: bytes of an all-reduce, a barrier among devices, a chain of them, and a gather by pull.

The second and the third are protocols: the simulator runs them in random orders. The last is a kernel. The
interpreter has neither peers nor semaphores, so one device at a time runs it, beside the arrays of all.
"""

import contextlib
import dataclasses
import functools
import itertools
import unittest.mock

import jax.numpy as jnp
from exercises.judge import (
    NotYet,
    checker,
    drawn,
    normal,
    play_kernel,
    require_answers,
    require_close,
    require_copies,
    require_rings,
    run_kernel,
    wide,
)
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook.nvlink.protocol import Flush, Read, Send, Signal, Wait
from lab.nvlink_simulator import find_fault

BYTES = ((2, 1024), (4, 4096), (8, 4096), (3, 999), (1, 64))
ORDERS = 150  # Random orders in which a protocol is run.
ACTIONS = (Send, Flush, Signal, Wait, Read)


@checker
def check_bytes(answer) -> str:
    """Exercise 1: `answer(n, nbytes)` is how many bytes leave each device in an all-reduce."""
    nbytes_of = lambda n, nbytes: 2 * (n - 1) * nbytes / n
    likely = (
        (lambda n, b: (n - 1) * b / n, "That is one of the two collectives."),
        (lambda n, b: 2 * (n - 1) * b, "A shard is an n-th of the array. (Or is it the sum over all devices?)"),
        (lambda n, b: (n - 1) * b, "A shard is an n-th of the array, and there are two collectives."),
        (lambda n, b: 2 * b, "Nearly: a device sends nothing to itself."),
    )
    said = "Count what a device sends in the reduce-scatter, and then in the all-gather of the sums."

    def draw(rng):
        n, nbytes_of_shard = rng.integers(1, 999, 2).tolist()
        return n, n * nbytes_of_shard  # So that `//` is right, too.

    require_answers(answer, BYTES, nbytes_of, likely, said, draw=draw)
    return "Twice nearly the array, however many devices there are."


@checker
def check_meet(answer) -> str:
    """Exercise 2: `answer(d, n)` lists the actions of a barrier, which is used again and again."""
    for n in (2, 3, 4, 9, 5, 6, 7, 8):
        meets = [_actions("meet", answer(d, n), f"({d}, {n})") for d in range(n)]
        for d, actions in enumerate(meets):
            if not all(isinstance(action, Signal | Wait) for action in actions):
                raise NotYet(f"meet({d}, {n}) must consist of signals and waits alone.")
        if not any(meets):
            raise NotYet("meet returns no actions: write its body.")
        programs = [{"all": _between(d, n, meets[d])} for d in range(n)]
        orders = ORDERS if n in (2, 3, 4, 9) else 8
        _require_right(programs, f"with {n} devices", kept=(), hint=_MEET_HINTS, orders=orders)
    counters = lambda actions: {(action.semaphore, action.index) for action in actions if isinstance(action, Wait)}
    if max(len(counters(actions)) for actions in meets) > 1:
        return "It holds in every order, again and again. Now try it with one counter for all."
    return (
        "One counter is enough. A device that is ahead has heard that all are here, so its early signal says as much "
        "as the late one that it is taken for."
    )


@checker
def check_chain(answer) -> str:
    """Exercise 3: `answer(d, n, i, rounds)` lists the actions of one device of a chain in one round."""
    draw = lambda rng: (int(rng.integers(2, 7)), int(rng.integers(4, 17)))
    cases = [(n, rounds, ORDERS) for n, rounds in ((2, 1), (2, 3), (3, 5), (6, 9))]
    for n, rounds, orders in (*cases, *((*case, 20) for case in drawn(draw, 3))):
        programs = []
        for d in range(n):
            lists = [_actions("pass_on", answer(d, n, i, rounds), f"({d}, {n}, {i}, {rounds})") for i in range(rounds)]
            if d == 0 and not any(lists):
                raise NotYet("pass_on returns no actions: write its body.")
            for i, actions in enumerate(lists):
                _require_piece(d, n, i, actions)
            programs.append({"all": [action for actions in lists for action in actions]})
        pieces = f"{rounds} pieces" if rounds > 1 else "1 piece"
        _require_right(programs, f"with {n} devices and {pieces}", kept=(), hint=_CHAIN_HINTS, orders=orders)
    _require_room_for_two(answer)
    return "Every piece goes all the way, and no slot is overwritten before it is read."


@checker
def check_gather(answer) -> str:
    """Exercise 4: `answer(x, axis_name)` is (n, rows, 256): the shards of all devices, each pulled from its owner."""
    for n, d, rows, how in _GATHERS:
        shards = normal(n, (n, rows, 256), jnp.bfloat16)
        peers = Peers(shards, d)
        kernel = lambda x, how=how: answer(x, axis_name=AXIS, **how)
        with peers.lowered():
            out = run_kernel(kernel, shards[d], stand_ins=peers.play, undrained="load no more pieces than there are")
            played = play_kernel(kernel, shards[d])
        what = f"on device {d} of {n}, with {rows} rows"
        require_close(out, wide(shards), 0, what, _wrong_gathers(shards, d))
        peers.judge(what)
        if any(block.fetched or not block.count("load") for blocks in played for block in blocks):
            raise NotYet(f"{what}: the data is right, but no ring brings all of it: load it by TMA, into x_smem.")
        _require_inside(played, dict(load=shards.shape[1:], store=shards.shape), what)
        pieces = n * rows // how.get("piece_rows", 16) // how.get("num_blocks", 2)
        for kind in ("load", "store"):
            require_copies(played, kind, pieces)
        require_rings(played, how.get("num_stages", 4))
    return "No piece needs a signal: the shards are there before the kernel begins. One at the end keeps them there."


def _require_inside(played, shapes: dict, what: str) -> None:
    """The interpreter moves a copy that leaves its array back inside; a GPU does not."""
    copies = [event for blocks in played for block in blocks for event in block.events if event.box]
    for copy in copies:
        ends = [
            (start + size, length) for (start, size), length in zip(copy.box, shapes.get(copy.kind, ()), strict=False)
        ]
        if any(end > length for end, length in ends):
            raise NotYet(f"{what}: a {copy.kind} goes beyond the end of a shard: how many pieces has this block?")


_GATHERS = (  # Devices, the one that runs, rows of its shard, and how.
    (3, 1, 256, {}),
    (2, 0, 128, dict(num_blocks=4, piece_rows=8, num_stages=3)),
    (3, 2, 160, dict(num_blocks=1, num_stages=5)),
)


def _wrong_gathers(shards, d):
    own = jnp.broadcast_to(shards[d], shards.shape)
    turned = jnp.roll(shards, -d, axis=0)
    return (
        (own, "all parts are its own shard: load from plgpu.remote_ref(x_gmem, {axis_name: owner})."),
        (turned, "the shards stand in the order in which they were loaded; shard q belongs in o_gmem.at[q]."),
        (jnp.roll(turned, -1, axis=0), "the shards stand in the order in which they were loaded."),
    )


_MEET_HINTS = {
    "deadlock": "Somebody waits for a signal that nobody sends, or that another wait has taken.",
    "signals left over": "As many signals must be waited for as are sent.",
    "overwritten": "A device goes on before all have come: for whom does it not wait?",
    "read before": "A device goes on before all have come: for whom does it not wait?",
    "after the end": "Somebody is signalled who does not wait for it.",
}
_CHAIN_HINTS = {
    "deadlock": "Who waits for `freed`, and is it signalled for every piece that needs it?",
    "signals left over": "The last two pieces need no `freed`: nobody waits for it any more.",
    "overwritten": "A slot is used again two rounds later. Has its reader freed it by then?",
    "read before": "A signal must follow a flush: else it overtakes the data.",
    "after the end": "The last two pieces need no `freed`: the device before may have ended.",
    "stored after": "A device waits for each piece that is sent to it.",
    "never read": "Every device but the first reads each piece.",
}


def _require_right(programs, what: str, kept, hint: dict, orders: int = ORDERS) -> None:
    run = find_fault(programs, seeds=range(orders), kept=kept)
    if run is not None:
        kind = str(run.fault).partition(": ")[0]
        text = next((text for start, text in hint.items() if kind.startswith(start)), "")
        raise NotYet(
            f"{what} there is an order that fails, after {len(run.history)} events: {run.fault}. {text}".strip()
        )


def _actions(name, given, case) -> list:
    if given is None:
        raise NotYet(f"{name} returns None: it must return a list of actions.")
    actions = list(given)
    for action in actions:
        if not isinstance(action, ACTIONS):
            raise NotYet(f"{name}{case} has {action!r}, which is no action.")
    return [action for action in actions if action.when]


def _between(d, n, meet) -> list:
    """Everybody sends to everybody, meets, reads, and meets again before the same slots are filled anew."""
    actions, others = [], [(d + k) % n for k in range(1, n)]
    for step in range(2):
        actions += [*meet] if step else []
        actions += [Send(p, "box", (d,), (d, step)) for p in others]
        actions += [Flush(0), *meet, *(Read("box", (q,), (q, step)) for q in others)]
    return actions


def _require_piece(d, n, i, actions) -> None:
    """The sends and reads of a round are those of its piece, the read first."""
    reads = [(a.buffer, tuple(a.slot), tuple(a.data)) for a in actions if isinstance(a, Read)]
    sends = [(a.peer, a.buffer, tuple(a.slot), tuple(a.data)) for a in actions if isinstance(a, Send)]
    place = "inbox", (i % 2,), (i,)
    if reads != ([place] if d else []):
        raise NotYet(f"device {d} of {n} reads {reads} in round {i}; it must read {[place] if d else 'nothing'}.")
    wanted = [(d + 1, *place)] if d < n - 1 else []
    if sends != wanted:
        raise NotYet(f"device {d} of {n} sends {sends} in round {i}; it must send {wanted or 'nothing'}.")
    if reads and sends and [type(a) for a in actions].index(Send) < [type(a) for a in actions].index(Read):
        raise NotYet(f"device {d} of {n} sends piece {i} before it has read it.")


def _require_room_for_two(answer) -> None:
    """Each device reads each piece when the next one has been sent to it: that must not hold the sender up."""
    n, rounds = 3, 5
    for d, i in itertools.product(range(n - 1), range(rounds - 1)):
        programs = [[action for i in range(rounds) for action in answer(d, n, i, rounds)] for d in range(n)]
        programs = [[action for action in actions if action.when] for actions in programs]
        sender, reader = programs[d], programs[d + 1]
        sent = [at for at, action in enumerate(sender) if isinstance(action, Send)][i + 1] + 1
        read = [at for at, action in enumerate(reader) if isinstance(action, Read)][i]
        sender.insert(sent, Signal(d + 1, "next one sent"))
        reader.insert(read, Wait("next one sent"))
        if find_fault([{"all": actions} for actions in programs], seeds=range(3), kept=()) is not None:
            raise NotYet(
                f"no order fails, but device {d} sends piece {i + 1} only when piece {i} has been read: there is room "
                "for both."
            )


# One device for all ---------------------------------------------------------------------------------------------------

AXIS = "x"


class Semaphore:
    """Stands for a semaphore of a kernel's scratch."""


def _place(device_id):
    if not isinstance(device_id, dict) or AXIS not in device_id:
        raise NotYet("a device_id is a dictionary here, from the mesh's axis to a place on it: {axis_name: 1}")
    return device_id[AXIS]


class Peers:
    """Stands for the other devices while device `d` runs a kernel of one operand. `arrays` has the operand of each.

    A kernel loads from the peers, and may signal them. It stores to itself alone.
    """

    def __init__(self, arrays, d: int):
        self.arrays, self.d, self.n = arrays, d, len(arrays)
        self.events = []  # (kind, block, number) of loads, waits at barriers, signals and waits, as they happen.
        self.indices = []  # That of each `remote_ref`, the first transform of what is taken from it.
        self.has_descriptor = False  # Whether a load from a peer has one.

    @contextlib.contextmanager
    def _on_axis(self, **of_plgpu):
        index = lax.axis_index
        here = dict(axis_index=lambda name: jnp.int32(self.d) if name == AXIS else index(name))
        here |= dict(axis_size=lambda name: self.n)
        with unittest.mock.patch.multiple(lax, **here), unittest.mock.patch.multiple(plgpu, **of_plgpu):
            yield

    @contextlib.contextmanager
    def lowered(self):
        """A kernel that is traced inside for a GPU takes itself for its peers: a mesh of one device has no others."""
        real = pl.semaphore_signal

        def signal(semaphore, inc=1, *, device_id=None, device_id_type=None):
            if device_id is not None:
                _place(device_id)
            real(semaphore, inc)

        def remote_ref(ref, device_id, device_id_type=None):
            _place(device_id)
            return ref

        with self._on_axis(remote_ref=remote_ref), unittest.mock.patch.object(pl, "semaphore_signal", signal):
            yield

    @contextlib.contextmanager
    def play(self):
        """A kernel that is traced inside finds the operands of all devices."""
        of_plgpu = dict(remote_ref=self._remote_ref)
        of_plgpu["kernel"] = functools.partial(self._kernel, plgpu.kernel)
        of_plgpu["barrier_wait"] = self._noting("barrier", plgpu.barrier_wait)
        of_plgpu["copy_gmem_to_smem"] = self._noting("load", self._load(plgpu.copy_gmem_to_smem))
        of_pl = dict(
            semaphore_signal=self._signal,
            semaphore_wait=lambda semaphore, value=1, *, decrement=True: self._note("wait", value),
        )
        with self._on_axis(**of_plgpu), unittest.mock.patch.multiple(pl, **of_pl):
            yield

    def _kernel(self, real, body, *, scratch_types, **how):
        count = dict(scratch_types)
        semaphores = {name: Semaphore() for name, kind in count.items() if "sem" in type(kind).__name__.lower()}

        def alone(x_gmem, *refs, **scratch):
            self.operands = x_gmem
            body(x_gmem.at[self.d], *refs, **scratch, **semaphores)

        scratch = {name: kind for name, kind in count.items() if name not in semaphores}
        run = real(alone, scratch_types=scratch, **how)
        return lambda x: run(self.arrays)

    def _remote_ref(self, ref, device_id, device_id_type=None):
        if getattr(ref, "ref", None) is not self.operands:
            raise NotYet("a pull stores to itself alone: remote_ref is for x_gmem")
        found = self.operands.at[_place(device_id)]
        self.indices += found.transforms
        # `ref` is a part of what device `d` has: its first transform is the index d.
        return dataclasses.replace(found, transforms=(*found.transforms, *ref.transforms[1:]))

    def _load(self, real):
        def load(source, *args, oob_mode=None, **how):
            is_peers = any(index is found for index in self.indices for found in getattr(source, "transforms", ()))
            self.has_descriptor |= is_peers and oob_mode is not plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            return real(source, *args, oob_mode=oob_mode, **how)

        return load

    def _signal(self, semaphore, inc=1, *, device_id=None, device_id_type=None):
        for _ in range(inc):
            self._note("signal", self.d if device_id is None else _place(device_id))

    def _noting(self, kind, real):
        def noted(*args, **how):
            self._note(kind)
            return real(*args, **how)

        return noted

    def _note(self, kind, number=0):
        note = lambda block, number: self.events.append((kind, int(block), int(number)))
        io_callback(note, None, lax.axis_index("block"), jnp.int32(number), ordered=True)

    def judge(self, what: str) -> None:
        """Raises NotYet unless each block signals each peer once, when it has loaded all, and then waits for all; or if
        a load from a peer has a descriptor."""
        if self.has_descriptor:
            raise NotYet(
                f"{what}: the data is right, but a copy from a peer needs a descriptor, which must not hold a peer's "
                "address: use load_bytes."
            )
        others = sorted({*range(self.n)} - {self.d})
        for block in sorted({block for _, block, _ in self.events}):
            events = [(kind, number) for kind, of, number in self.events if of == block]
            kinds = [kind for kind, _ in events]
            if sorted(number for kind, number in events if kind == "signal") != others:
                raise NotYet(
                    f"{what}: the data is right, but block {block} signals devices "
                    f"{[number for kind, number in events if kind == 'signal']}; it must signal each of {others} once: "
                    "until then they must keep their arrays."
                )
            waited = sum(number for kind, number in events if kind == "wait")
            if waited != len(others):
                raise NotYet(
                    f"{what}: the data is right, but block {block} waits for {waited} signals; {len(others)} come. A "
                    "kernel that ends before all have read its array gives it back too early."
                )
            first = kinds.index("signal")
            if {"barrier", "load"} & {*kinds[first:]}:
                raise NotYet(
                    f"{what}: the data is right, but block {block} signals before its loads have arrived: a peer may "
                    "then end, and its array is overwritten under the load."
                )
            if kinds.index("wait") < len(kinds) - kinds[::-1].index("signal"):
                raise NotYet(f"{what}: all wait before they have signalled all others: then none goes on.")
