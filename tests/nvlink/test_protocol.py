"""The protocols across GPUs, simulated in random orders, and mutants that the simulator must find."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from cookbook.nvlink import protocol
from cookbook.nvlink.protocol import AllGather, AllToAll, Flush, ReduceScatter, RingAllGather, Send, Signal, Wait
from tests.nvlink.simulator import Fault, Simulator

DEVICES = range(2, 9)
ROUNDS = 7
SEEDS = 40
KINDS = {
    "all_gather": AllGather,
    "reduce_scatter": lambda n: ReduceScatter(n, num_slots=2),
    "ring": lambda n: RingAllGather(n, num_slots=min(2, n - 1), num_blocks=3),
    "all_to_all": AllToAll,
}


def programs(kind, n, num_rounds=ROUNDS):
    return [protocol.programs(kind, d, num_rounds) for d in range(n)]


def simulate(programs, seeds=SEEDS, **kwargs):
    return [Simulator(programs, seed=seed, kept=("out",), **kwargs).run() for seed in range(seeds)]


# The protocols as they are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", DEVICES)
@pytest.mark.parametrize("name", KINDS)
def test_a_protocol_is_right_in_every_order(name, n):
    simulate(programs(KINDS[name](n), n))


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 3])
@pytest.mark.parametrize("num_slots", [2, 3, 5])
def test_reduce_scatter_with_more_slots_or_fewer_rounds(num_slots, num_rounds):
    simulate(programs(ReduceScatter(3, num_slots), 3, num_rounds))


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_a_ring_with_a_slot_for_every_step_or_fewer(num_slots):
    simulate(programs(RingAllGather(5, num_slots, num_blocks=1), 5))


@pytest.mark.parametrize("n", DEVICES)
def test_all_gather_gives_every_device_everything(n):
    for out in simulate(programs(AllGather(n), n), seeds=5):
        assert out == {(d, "out", (q, i)): (q, i) for d in range(n) for q in range(n) for i in range(ROUNDS)}


@pytest.mark.parametrize("n", DEVICES)
def test_reduce_scatter_adds_in_the_same_order_on_every_device(n):
    for d in range(n):
        reads = [a.data for a in protocol.programs(ReduceScatter(n, 2), d, ROUNDS)["add"] if hasattr(a, "data")]
        assert reads == [(q, d, i) for i in range(ROUNDS) for q in range(n)]


@pytest.mark.parametrize("n", DEVICES)
def test_a_ring_multiplies_every_shard_once_its_own_first(n):
    ring = RingAllGather(n, n - 1, num_blocks=1)
    for d in range(n):
        owners = [ring.owner(d, s) for s in range(n)]
        assert owners[0] == d and sorted(owners) == list(range(n))


def test_a_kernel_sees_the_protocol_that_is_simulated():
    """With a traced device and a traced round the actions are the same: a kernel has no others."""
    kinds = ReduceScatter(4, 3), RingAllGather(4, 2, num_blocks=2)
    roles = {
        "send": lambda d, i: kinds[0].send(d, i),
        "add": lambda d, i: kinds[0].add(d, i, 6),
        "end": lambda d, i: kinds[0].end_send(d, i),
        "gather": lambda d, i: [*AllGather(4).send(d, i), *AllGather(4).end(d)],
        "ring": lambda d, i: kinds[1].block(d, i, 1),
        "announce": lambda d, i: [*AllToAll(4).announce(d), *AllToAll(4).learn(i)],
        "exchange": lambda d, i: [*AllToAll(4).send(d, i, 3), *AllToAll(4).end(d)],
    }
    for role in roles.values():
        flat = lambda d, i, role=role: [list(vars(action).values()) for action in role(d, i)]
        traced = jax.jit(lambda d, i, flat=flat: [x for x in jax.tree.leaves(flat(d, i)) if not isinstance(x, str)])
        for d, i in ((0, 0), (3, 1), (2, 3)):
            wanted = [x for x in jax.tree.leaves(flat(d, i)) if not isinstance(x, str)]
            assert [int(x) for x in traced(jnp.int32(d), jnp.int32(i))] == [int(x) for x in wanted]


@pytest.mark.parametrize("make", [lambda: ReduceScatter(4, 1), lambda: RingAllGather(4, 1, 1)])
def test_too_few_slots_are_refused(make):
    with pytest.raises(ValueError, match="num_slots=1: must be"):
        make()


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
    "name, semaphore", [("reduce_scatter", "arrived"), ("ring", "arrived"), ("all_to_all", "known")]
)
@pytest.mark.parametrize("n", [2, 4])
def test_mutant_that_does_not_wait_for_arrival_is_found(name, semaphore, n):
    found(changed(name, n, late(semaphore)), "read before it arrived")


@pytest.mark.parametrize("name, n", [("reduce_scatter", 2), ("reduce_scatter", 4), ("ring", 4), ("ring", 8)])
def test_mutant_that_does_not_wait_for_a_free_slot_is_found(name, n):
    found(changed(name, n, late("freed")), "overwritten|read before it arrived|deadlock")


@pytest.mark.parametrize("name", KINDS)
def test_mutant_that_ends_without_waiting_is_found(name):
    found(changed(name, 3, without(Wait)), "after the end|read before|signals left over|overwritten")


@pytest.mark.parametrize("name", KINDS)
def test_mutant_that_signals_before_its_stores_have_arrived_is_found(name):
    found(changed(name, 3, without(Flush)), "stored after the end|read before it arrived")


@pytest.mark.parametrize("name", KINDS)
def test_mutant_that_never_signals_is_found(name):
    found(changed(name, 3, without(Signal, "arrived")), "deadlock", seeds=1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", [Send, Signal])
def test_mutant_with_a_wrong_neighbour_is_found(name, kind):
    """Sends or signals to the next device, or in the ring to the one before, go to the device after it."""
    right = programs(KINDS[name](4), 4)
    for d, roles in enumerate(right):
        neighbour = (d + (3 if name == "ring" else 1)) % 4
        is_wrong = lambda a, neighbour=neighbour: isinstance(a, kind) and a.peer == neighbour
        for role, actions in roles.items():
            swap = lambda a, to=(neighbour + 1) % 4: dataclasses.replace(a, peer=to)
            roles[role] = [swap(a) if is_wrong(a) else a for a in actions]
    found(right, "read before|overwritten|deadlock|left over|after the end")


@pytest.mark.parametrize("name, n", [("reduce_scatter", 2), ("reduce_scatter", 4), ("ring", 5), ("ring", 8)])
def test_mutant_that_reuses_a_slot_a_round_early_is_found(name, n):
    """The first wait for a free slot comes one use late, and all others with it."""

    def change(actions):
        waits = [k for k, a in enumerate(actions) if isinstance(a, Wait) and a.semaphore == "freed"]
        per_round = n if name == "reduce_scatter" else 3
        kept = waits[per_round:]
        early = {k: actions[previous] for k, previous in zip(kept, waits, strict=False)}
        return [early.get(k, a) for k, a in enumerate(actions) if k not in waits[:per_round]] + [
            actions[k] for k in waits[-per_round:]
        ]

    found(changed(name, n, change), "overwritten|read before it arrived|deadlock")


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

    found(changed("reduce_scatter", 3, change), "overwritten|read before it arrived")
