"""Chapter 18's exercises: a barrier among devices, a chain of them, bytes of an all-reduce, and places of ragged parts.

The first two are protocols. The simulator of `cookbook.nvlink` runs them in random orders.
"""

from exercises.judge import NotYet, checker, require_answers

from cookbook.nvlink.protocol import Flush, Read, Send, Signal, Wait
from lab.nvlink_simulator import find_fault

BYTES = ((2, 1024), (4, 4096), (8, 4096), (3, 999), (1, 64))
SIZES = (
    ((3, 1, 2), (0, 4, 2), (2, 2, 2)),
    ((0, 5), (7, 1)),
    ((1, 2, 3, 4), (4, 3, 2, 1), (0, 0, 9, 1), (5, 0, 0, 5)),
)
ORDERS = 150  # Random orders in which a protocol is run.
ACTIONS = (Send, Flush, Signal, Wait, Read)


@checker
def check_bytes(answer) -> str:
    """Exercise 3: `answer(n, nbytes)` is how many bytes leave each device in an all-reduce."""
    nbytes_of = lambda n, nbytes: 2 * (n - 1) * nbytes / n
    likely = (
        (lambda n, b: (n - 1) * b / n, "That is one of the two collectives."),
        (lambda n, b: 2 * (n - 1) * b, "A shard is an n-th of the array. (Or is it the sum over all devices?)"),
        (lambda n, b: (n - 1) * b, "A shard is an n-th of the array, and there are two collectives."),
        (lambda n, b: 2 * b, "Nearly: a device sends nothing to itself."),
    )
    said = "Count what a device sends in the reduce-scatter, and then in the all-gather of the sums."
    draw = lambda rng: rng.integers(1, 9999, 2).tolist()
    require_answers(answer, BYTES, nbytes_of, likely, said, draw=draw)
    return "Twice nearly the array, however many devices there are."


@checker
def check_places(answer) -> str:
    """Exercise 4: `answer(sizes, d)` has (first row in the sender's array, first row in the result) for each device."""

    def places(sizes, d, *, result=lambda sizes, d, p: sum(line[p] for line in sizes[:d])):
        return [(sum(sizes[d][:p]), result(sizes, d, p)) for p in range(len(sizes))]

    likely = (
        (lambda *case: [pair[::-1] for pair in places(*case)], "In the sender's array a part begins after those for "
         "lower devices."),
        (dict(result=lambda sizes, d, p: sum(sizes[d][:p])), "In the result a part begins after those of lower "
         "senders, not of lower receivers."),
        (dict(result=lambda sizes, d, p: sum(line[p] for line in sizes[: d + 1])), "The sender's own part is not "
         "before itself."),
    )  # fmt: skip
    said = "In the result a part begins after those that lower devices send to the same device."
    cases = [(sizes, d) for sizes in SIZES for d in range(len(sizes))]
    draw = lambda rng: (rng.integers(0, 20, (5, 5)).tolist(), int(rng.integers(5)))
    require_answers(answer, cases, places, likely, said, draw=draw)
    return "Along a line in the sender's array, down a column in the results."


@checker
def check_meet(answer) -> str:
    """Exercise 1: `answer(d, n)` lists the actions of a barrier, which is used again and again."""
    for n in (2, 3, 5):
        meets = [_actions("meet", answer(d, n), f"({d}, {n})") for d in range(n)]
        for d, actions in enumerate(meets):
            if not all(isinstance(action, Signal | Wait) for action in actions):
                raise NotYet(f"meet({d}, {n}) must consist of signals and waits alone.")
        if not any(meets):
            raise NotYet("meet returns no actions: write its body.")
        programs = [{"all": _between(d, n, meets[d])} for d in range(n)]
        _require_right(programs, f"with {n} devices", kept=(), hint=_MEET_HINTS)
    return "It holds in every order, again and again."


@checker
def check_chain(answer) -> str:
    """Exercise 2: `answer(d, n, i, rounds)` lists the actions of one device of a chain in one round."""
    for n, rounds in ((2, 1), (2, 3), (3, 5), (4, 6)):
        programs = []
        for d in range(n):
            lists = [_actions("pass_on", answer(d, n, i, rounds), f"({d}, {n}, {i}, {rounds})") for i in range(rounds)]
            if d == 0 and not any(lists):
                raise NotYet("pass_on returns no actions: write its body.")
            for i, actions in enumerate(lists):
                _require_piece(d, n, i, actions)
            programs.append({"all": [action for actions in lists for action in actions]})
        _require_right(programs, f"with {n} devices and {rounds} pieces", kept=(), hint=_CHAIN_HINTS)
    return "Every piece goes all the way, and no slot is overwritten before it is read."


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


def _require_right(programs, what: str, kept, hint: dict) -> None:
    run = find_fault(programs, seeds=range(ORDERS), kept=kept)
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
