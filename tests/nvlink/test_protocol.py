"""The protocols across GPUs, simulated in random orders, and mutants that the simulator must find."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

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
)
from lab.nvlink_simulator import Fault, PushedScatter, Simulator, find_fault, programs_of

DEVICES = range(2, 9)
ROUNDS = 8  # Rounds of the collectives; tiles a shard of the products.
SEEDS = 40
KINDS = {
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "pushed_scatter": lambda n: PushedScatter(n, num_slots=2),
    "all_to_all": AllToAll,
    "gather_matmul": lambda n: GatherMatmul(n, num_senders=2, num_blocks=4, rounds=2, lag=3),
    "matmul_scatter": MatmulScatter,
}


def programs(kind, n, num_rounds=ROUNDS):
    return [programs_of(kind, d, num_rounds) for d in range(n)]


def simulate(programs, seeds=SEEDS, **kwargs):
    return [Simulator(programs, seed=seed, kept=("out",), **kwargs).run() for seed in range(seeds)]


# The protocols as they are --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("n", DEVICES)
@pytest.mark.parametrize("name", KINDS)
def test_a_protocol_is_right_in_every_order(name, n):
    simulate(programs(KINDS[name](n), n), seeds=SEEDS * 3 // n)  # With n devices an order has n times as many events.


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_collective_with_fewer_rounds(name, num_rounds):
    simulate(programs(KINDS[name](3), 3, num_rounds))


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 3])
@pytest.mark.parametrize("num_slots", [2, 3, 5])
def test_pushed_scatter_with_more_slots_or_fewer_rounds(num_slots, num_rounds):
    simulate(programs(PushedScatter(3, num_slots), 3, num_rounds))


@pytest.mark.parametrize(
    "num_senders, num_blocks, rounds, lag", [(1, 1, 1, 8), (3, 2, 1, 1), (1, 4, 3, 0), (4, 2, 2, 2)]
)
@pytest.mark.parametrize("n", [2, 5])
def test_gather_matmul_with_any_senders_blocks_and_lag(n, num_senders, num_blocks, rounds, lag):
    simulate(programs(GatherMatmul(n, num_senders, num_blocks, rounds, lag), n), seeds=10)


@pytest.mark.parametrize("n", DEVICES)
def test_gather_matmul_may_keep_the_own_shard(n):
    out = Simulator(programs(GatherMatmul(n, 2, 4, 1, 3, keeps_own=True), n), seed=n, kept=("gathered",)).run()
    pieces = [(q, block, piece) for q in range(n) for block in range(4) for piece in range(2)]
    assert out == {(d, "gathered", piece): piece for d in range(n) for piece in pieces}


@pytest.mark.parametrize("num_tiles", [1, 2, 7])
def test_matmul_scatter_with_more_tiles_than_blocks_or_fewer(num_tiles):
    simulate(programs(MatmulScatter(4), 4, num_tiles))


@pytest.mark.parametrize("n", DEVICES)
def test_all_gather_gives_every_device_everything(n):
    for out in simulate(programs(AllGather(n), n), seeds=5):
        assert out == {(d, "out", (q, i)): (q, i) for d in range(n) for q in range(n) for i in range(ROUNDS)}


@pytest.mark.parametrize("n", DEVICES)
def test_reduce_scatter_adds_in_the_same_order_on_every_device(n):
    for d in range(n):
        reads = [a.data for a in programs_of(ReduceScatter(n), d, ROUNDS)["pull"] if hasattr(a, "data")]
        assert reads == [(q, d, i) for i in range(ROUNDS) for q in range(n)]


@pytest.mark.parametrize("n", DEVICES)
def test_a_product_has_every_shard_once(n):
    """Its own first where shards arrive, and last where tiles leave; no two devices send to one in the same step."""
    gather, scatter = GatherMatmul(n, 1, 1, 1, 1), MatmulScatter(n)
    for d in range(n):
        assert [gather.owner(d, step) for step in range(n)] == [(d + step) % n for step in range(n)]
        assert sorted(scatter.owner(d, step) for step in range(n)) == list(range(n)) and scatter.owner(d, n - 1) == d
    for step in range(n):
        assert sorted(scatter.owner(d, step) for d in range(n)) == list(range(n))
        senders = [gather.send(d, 0, max(step - 1, 0))[0].peer for d in range(n)]
        assert sorted(senders) == list(range(n))


@pytest.mark.parametrize("n", DEVICES)
def test_matmul_scatter_adds_the_parts_of_the_devices_after_it_in_order(n):
    for d in range(n):
        reads = [a.data for a in MatmulScatter(n).receive(d, n - 1, 5) if hasattr(a, "data")]
        assert reads == [((d + k) % n, d, 5) for k in range(1, n)]


def test_a_kernel_sees_the_protocol_that_is_simulated():
    """With a traced device and a traced round the actions are the same: a kernel has no others."""
    kinds = ReduceScatter(4), GatherMatmul(4, 2, num_blocks=2, rounds=2, lag=1), MatmulScatter(4)
    roles = {
        "pull": lambda d, i: [*kinds[0].load(d, i), *kinds[0].add(d, i), *kinds[0].end(d)],
        "push": lambda d, i: [*PushedScatter(4, 3).send(d, i), *PushedScatter(4, 3).end_send(d, i)],
        "add": lambda d, i: PushedScatter(4, 3).add(d, i, 6),
        "gather": lambda d, i: [*AllGather(4).send(d, i, 3), *AllGather(4).end(d)],
        "announce": lambda d, i: [*AllToAll(4).announce(d), *AllToAll(4).learn(i)],
        "exchange": lambda d, i: [*AllToAll(4).send(d, i, 3), *AllToAll(4).end(d)],
        "send shards": lambda d, i: [*kinds[1].send(d, 1, i), *kinds[1].end_send(d)],
        "multiply": lambda d, i: kinds[1].multiply(d, i, 1),
        "scatter": lambda d, i: [*kinds[2].sent(d, i, 1), *kinds[2].receive(d, i, 1), *kinds[2].send(d, i, 1)],
    }
    numbers = lambda action: [x for x in jax.tree.leaves(list(vars(action).values())) if not isinstance(x, str)]
    for role in roles.values():
        traced = jax.jit(lambda d, i, role=role: [(numbers(action), action.when) for action in role(d, i)])
        for d, i in ((0, 0), (3, 1), (2, 3)):
            for action, (found, when) in zip(role(d, i), traced(jnp.int32(d), jnp.int32(i)), strict=True):
                assert bool(when) == action.when
                assert not when or [int(x) for x in found] == [int(x) for x in numbers(action)]


def test_too_few_slots_are_refused():
    with pytest.raises(ValueError, match="num_slots=1: must be"):
        PushedScatter(4, 1)


@pytest.mark.parametrize("n", DEVICES)
def test_all_to_all_brings_every_piece_to_the_device_that_it_is_for(n):
    for out in simulate(programs(AllToAll(n), n), seeds=5):
        assert out == {(p, "out", (d, i)): (d, p, i) for d in range(n) for p in range(n) for i in range(ROUNDS)}


@pytest.mark.parametrize("n", [2, 3, 8])
def test_all_to_all_of_equal_parts_needs_no_sizes(n):
    """And any number of pieces for each device is right, with no signal but those of the end."""
    kind, all_programs = AllToAll(n), []
    for d in range(n):
        pieces = lambda p, d=d: [a for i in range((d * p + 2 * p) % 4) for a in kind.send(d, p, i)]
        to_peers = [a for k in range(1, n) for a in pieces((d + k) % n)]
        all_programs.append({"send": [*to_peers, *kind.end(d)], "keep": [*pieces(d), *kind.end_own()]})
    simulate(all_programs)


# Mutants --------------------------------------------------------------------------------------------------------------


def changed(name, n, change):
    """Programs of `n` devices, each role of which `change(actions)` has edited."""
    return [{role: change(list(actions)) for role, actions in p.items()} for p in programs(KINDS[name](n), n)]


def found(programs, kind, **kwargs):
    with pytest.raises(Fault, match=kind):
        simulate(programs, **kwargs)


def without(kind, semaphore=None):
    is_one = lambda a: isinstance(a, kind) and (semaphore is None or a.semaphore == semaphore)
    return lambda actions: [a for a in actions if not is_one(a)]


def late(semaphore):
    """Waits for the same, but at the end: the counts are right, the order is not."""

    def change(actions):
        waits = [a for a in actions if isinstance(a, Wait) and a.semaphore == semaphore]
        return [a for a in actions if a not in waits] + waits

    return change


@pytest.mark.parametrize(
    "name, semaphore",
    [
        ("pushed_scatter", "arrived"),
        ("all_to_all", "known"),
        ("gather_matmul", "arrived"),
        ("matmul_scatter", "arrived"),
    ],
)
@pytest.mark.parametrize("n", [2, 4])
def test_mutant_that_does_not_wait_for_arrival_is_found(name, semaphore, n):
    found(changed(name, n, late(semaphore)), "read before it arrived")


@pytest.mark.parametrize("n", [2, 4])
def test_mutant_that_does_not_wait_for_a_free_slot_is_found(n):
    found(changed("pushed_scatter", n, late("freed")), "overwritten|read before it arrived|deadlock")


@pytest.mark.parametrize("name", KINDS)
def test_mutant_that_ends_without_waiting_is_found(name):
    found(changed(name, 3, without(Wait)), "after the end|read before|signals left over|overwritten")


@pytest.mark.parametrize("name", KINDS)
def test_mutant_that_signals_before_its_stores_have_arrived_is_found(name):
    found(changed(name, 3, without(Flush)), "(stored|loaded) after the end|read before it arrived")


@pytest.mark.parametrize("name", KINDS)
def test_mutant_that_never_signals_is_found(name):
    last = "read" if name == "reduce_scatter" else "arrived"
    found(changed(name, 3, without(Signal, last)), "deadlock", seeds=1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", [(Send, Load), Signal])
def test_mutant_with_a_wrong_neighbour_is_found(name, kind):
    """Copies or signals to the next device go to the device after it."""
    right = programs(KINDS[name](4), 4)
    for d, roles in enumerate(right):
        neighbour = (d + 1) % 4
        is_wrong = lambda a, neighbour=neighbour: isinstance(a, kind) and a.peer == neighbour
        for role, actions in roles.items():
            swap = lambda a, to=(neighbour + 1) % 4: dataclasses.replace(a, peer=to)
            roles[role] = [swap(a) if is_wrong(a) else a for a in actions]
    found(right, "read before|overwritten|deadlock|left over|after the end")


@pytest.mark.parametrize("n", [2, 4])
def test_mutant_that_reuses_a_slot_a_round_early_is_found(n):
    """The first wait for a free slot comes one use late, and all others with it."""

    def change(actions):
        waits = [k for k, a in enumerate(actions) if isinstance(a, Wait) and a.semaphore == "freed"]
        kept = waits[n:]
        early = {k: actions[previous] for k, previous in zip(kept, waits, strict=False)}
        return [early.get(k, a) for k, a in enumerate(actions) if k not in waits[:n]] + [actions[k] for k in waits[-n:]]

    found(changed("pushed_scatter", n, change), "overwritten|read before it arrived|deadlock")


@pytest.mark.parametrize("n", [2, 4])
def test_mutant_that_says_it_has_read_before_its_loads_have_arrived_is_found(n):
    """Each device signals at the beginning that its peers may end."""
    early = lambda actions: sorted(actions, key=lambda a: not isinstance(a, Signal))
    found(changed("reduce_scatter", n, early), "after the end")


@pytest.mark.parametrize("name", KINDS)
def test_mutant_that_does_not_launch_together_is_found(name):
    found(programs(KINDS[name](3), 3), "before the launch", launch_together=False)


def test_mutant_that_announces_its_sizes_to_one_role_alone_is_found():
    change = lambda actions: [a for a in actions if not (isinstance(a, Signal) and a.index == 1)]
    found(changed("all_to_all", 3, change), "deadlock", seeds=1)


def test_mutant_that_copies_once_the_peers_of_the_pieces_are_known_is_found():
    """Where a device's rows begin depends on all devices' sizes, not on those of the two alone."""

    def change(actions):
        fewer = lambda a: dataclasses.replace(a, count=2) if isinstance(a, Wait) and a.semaphore == "known" else a
        return [fewer(a) for a in actions]

    found(changed("all_to_all", 4, change), "read before it arrived|signals left over")


def test_mutant_that_frees_a_slot_before_it_is_read_is_found():
    def change(actions):
        """Each round's signals go before its reads."""
        out = []
        for action in actions:
            is_free = isinstance(action, Signal) and action.semaphore == "freed"
            at = len(out)
            while is_free and at and not isinstance(out[at - 1], Wait):
                at -= 1
            out.insert(at, action)
        return out

    found(changed("pushed_scatter", 3, change), "overwritten|read before it arrived")


def test_mutant_whose_senders_announce_a_block_too_early_is_found():
    """Each signal comes a round before the stores of its block have ended."""
    early = lambda actions: [
        dataclasses.replace(a, pending=a.pending + 1) if isinstance(a, Flush) else a for a in actions
    ]
    found(changed("gather_matmul", 3, early), "read before it arrived|(stored|loaded) after the end")


def test_mutant_that_waits_for_one_of_several_senders_is_found():
    one = lambda actions: [dataclasses.replace(a, count=1) if isinstance(a, Wait) else a for a in actions]
    found(changed("gather_matmul", 3, one), "read before it arrived|left over|after the end")


def test_mutant_that_sends_to_the_slot_of_another_device_is_found():
    swap = lambda a: dataclasses.replace(a, slot=(1 - a.slot[0], a.slot[1])) if isinstance(a, Send) else a
    mutant = programs(MatmulScatter(3), 3)
    mutant[0] = {role: [swap(a) for a in actions] for role, actions in mutant[0].items()}
    found(mutant, "overwritten|read before it arrived|never read")


# The simulator --------------------------------------------------------------------------------------------------------


def test_the_shortest_faulty_run_is_found_with_its_history():
    letter = [Send(1, "o", (0,), ("x",)), Signal(1, "arrived")], [Wait("arrived"), Read("o", (0,), ("x",))]
    run = find_fault([{"sender": letter[0]}, {"receiver": letter[1]}])
    assert str(run.fault).startswith("read before it arrived")
    assert [type(event.action) for event in run.history] == [Send, Signal, Wait, Read]
    flushed = [letter[0][0], Flush(0), letter[0][1]]
    assert find_fault([{"sender": flushed}, {"receiver": letter[1]}]) is None


def test_a_history_has_every_action_and_every_arrival_after_its_send():
    all_programs = programs(PushedScatter(2, 2), 2)
    run = Simulator(all_programs, seed=0)
    run.run()
    actions = [action for roles in all_programs for actions in roles.values() for action in actions]
    starts = [event for event in run.history if not event.arrives]
    assert sorted(map(str, actions)) == sorted(str(event.action) for event in starts) and run.fault is None
    for at, event in enumerate(run.history):
        if event.arrives:
            assert dataclasses.replace(event, arrives=False) in run.history[:at]
