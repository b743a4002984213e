"""Chapter 18b's exercises: a tile's wait, what finer waits gain, how often to signal, tiles that go to their owners.

Two are kernels, run on one device of a host. The interpreter has neither peers nor semaphores, so the checker plays the
other devices: rows arrive at the last moment, when the kernel waits for them. Rows that it does not wait for are NaN.
"""

import contextlib
import functools
import itertools
import math
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from figures.overlap import NARROW, WIDE, Problem

TILE = 64  # Rows of a tile of the kernels.
# Exercise 2: (devices, µs of the product, µs of the gather, blocks of a shard).
TIMES = ((2, 100, 40, 1), (2, 100, 100, 1), (2, 100, 100, 50), (2, 40, 100, 4), (4, 90, 120, 1), (4, 90, 120, 3),
         (8, 70, 70, 8), (3, 10, 0, 2), (4, 100, 10, 1), (5, 100, 20, 3))  # fmt: skip
CHOICES = 1, 2, 4, 8, 16, 32
# Exercise 3: (problem, senders, µs of a signal, bytes per second of all senders together, choices).
SIGNALLED = (
    (NARROW, 16, 1.7, 346e9, CHOICES),
    (WIDE, 8, 1.7, 264e9, CHOICES),
    (Problem(4, 15872, 2048, 1024), 16, 1.7, 343e9, (3, 64, 12)),
    (Problem(2, 1408, 8192, 512), 8, 1.9, 264e9, CHOICES),
    (Problem(8, 2048, 1024, 2048), 8, 2.5, 200e9, CHOICES),
    (Problem(3, 7680, 2048, 1024), 12, 6.0, 300e9, (32, 8, 2)),
    (Problem(8, 2688, 6912, 1536), 4, 1.6, 195e9, CHOICES),
    (WIDE, 8, 1.7, 264e9, (4, 2, 1)),
    (Problem(2, 2944, 1024, 2048), 4, 1.8, 323e9, CHOICES),  # The waves of some groups are full.
    (Problem(4, 5376, 5376, 1792), 60, 1.3, 342e9, (1, 32, 16, 8)),
)
# Exercise 1: (devices, the kernel's device, senders of each, blocks of rows of a shard, columns of tiles, K).
SHARDS = ((2, 1, 1, 2, 2, 64), (3, 0, 2, 3, 1, 128), (4, 2, 4, 2, 3, 64))
# Exercise 4: (devices, the kernel's device, tiles of each owner). All of one host, to compare the order of owners.
SUMS = ((2, 0, 2), (5, 1, 3), (3, 0, 1), (3, 1, 1), (3, 2, 1))


@checker
def check_overlapped(answer) -> str:
    """Exercise 2: `answer(n, product_us, gather_us, blocks)` is when the product of all shards ends."""
    likely = (
        (lambda n, product_us, gather_us, blocks: product_us + gather_us, "That is one after the other: its own "
         "shard needs no gather."),
        (lambda n, product_us, gather_us, blocks: max(product_us, gather_us), "Nearly: the last block must be "
         "multiplied after it has arrived."),
        (lambda *case: _overlapped(*case[:3], 1), "The wait is for a whole shard: a block can start when it is there."),
        (dict(first=0), "A block can start when all of it is there: block i, from 1, arrives at i / ((n - 1) blocks)."),
        (dict(own_first=False), "Its own shard is there from the start: multiply it first."),
        (lambda n, product_us, gather_us, blocks: gather_us + product_us / n / blocks, "A block may also wait for the "
         "product of the block before it: take the later of the two."),
    )  # fmt: skip
    said = "A block starts when it is there and the product before it is over: the later of the two."
    draw = lambda rng: rng.integers((2, 1, 0, 1), (9, 200, 200, 20)).tolist()
    require_answers(answer, TIMES, _overlapped, likely, said, draw=draw)
    one, many = (_overlapped(2, 100, 100, blocks) for blocks in (1, 50))
    return f"Two GPUs, 100 µs of each: {one:g} µs with whole shards, {many:g} µs with fifty blocks, and 100 at best."


@checker
def check_product(answer) -> str:
    """Exercise 1: `answer(lhs, rhs, d, n, senders)` is (n, m, cols), all shards times rhs, computed on device d."""
    for n, d, senders, blocks, columns, k in SHARDS:
        shards, rhs = normal(n, (n, blocks * TILE, k), jnp.bfloat16), normal(d, (k, columns * TILE), jnp.bfloat16)
        peers = Senders(shards, d, senders)
        kernel = lambda lhs, rhs, d=d, n=n, senders=senders: answer(lhs, rhs, d, n, senders)
        tiles = n * blocks * columns
        out = run_kernel(kernel, shards[d], rhs, stand_ins=peers.play, copies=dict(load=2 * tiles, store=tiles))
        what = f"on device {d} of {n}, with {senders} sender{'s' * (senders > 1)} each"
        exact = wide(shards) @ wide(rhs)
        peers.judge(out, exact, what)
        require_close(out, exact, 0.01, what)
    return "It takes its own shard first, and no tile waits for more rows than it needs."


@checker
def check_every(answer) -> str:
    """Exercise 3: `answer(problem, senders, signal_us, rate, choices)`: how many blocks of rows to announce at once."""
    likely = (
        (dict(product=False), "The product of all tiles runs during the gather: the longer of the two counts."),
        (dict(last=False), "The tiles of the last group begin when it is there: that time comes after the gather."),
        (dict(signals=False), "A signal costs signal_us, and each sender signals for every group of every shard."),
        (dict(shards=1), "A sender signals for the groups of n - 1 shards, one after the other."),
        (dict(whole=False), "A wave that is not full takes as long as a full one: round up."),
        (dict(share=False), "An SM has 1 / 132 of PEAK, also where some of them send."),
        (dict(full=False), "A group has at most row_blocks blocks."),
        (lambda *case: _every(*case[:-1], CHOICES), "It must be one of choices."),
        (lambda *case: _every(*case[:-1], sorted(case[-1])), "Of equal ones take the first of choices."),
        (dict(sums=True), "The product of all tiles runs during the gather: the longer of the two counts."),
    )
    said = "Predict the time of each of choices. Of equal ones take the first."
    require_answers(answer, SIGNALLED, _every, likely, said, draw=_signalled)
    narrow, wide_one = (_every(*case) for case in SIGNALLED[:2])
    return (
        f"Two GPUs: announce {narrow} blocks at a time for narrow. For wide {wide_one} will do: the product hides it."
    )


@checker
def check_summed(answer) -> str:
    """Exercise 4: `answer(lhs, rhs, d, n)` is (m, 64), device d's rows of the sum. It sends the others their tiles."""
    steps = {}  # For each size of a host the order in which its devices serve the others.
    for n, d, tiles in SUMS:
        rng, m = np.random.default_rng(n), tiles * TILE
        lhs, rhs = (jnp.asarray(rng.integers(-9, 9, shape) / 8, jnp.bfloat16) for shape in ((n, m, 64), (64, 64)))
        large = 2.0**18 * rng.standard_normal((m, 64))
        parts = [large, -large, *rng.standard_normal((n, m, 64))][: n - 1]  # In another order the sum differs.
        peers = Owners(np.asarray(jnp.asarray(np.array(parts), jnp.bfloat16)), d)
        kernel = lambda lhs, rhs, n=n, d=d: answer(lhs, rhs, d, n)
        with peers.lowered():
            out = run_kernel(kernel, lhs, rhs, stand_ins=peers.play, copies=dict(store=n * tiles))
        products = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)  # Exact: few bits of each value are set.
        peers.judge(out, products, f"on device {d} of {n}")
        order = list(dict.fromkeys(owner for owner, _ in peers.signals))
        for other, owners in steps.setdefault(n, {}).items():
            _require_turns(n, (other, owners), (d, order))
        steps[n][d] = order
    return (
        "Every tile is sent to its owner before anybody waits. Parts are rounded when they are sent, and their sum, "
        "which has one order, once more."
    )


def _require_turns(n, one, two):
    """Raises NotYet if two devices of a host, each with the owners that it serves in order, meet at one of them."""
    (d, owners), (e, others) = one, two
    for step, (first, second) in enumerate(zip(owners, others, strict=True)):
        if first == second:
            raise NotYet(
                f"on {n} devices: the result is right, but in step {step} devices {d} and {e} both send to device "
                f"{first}, and share its link. Each must receive from one other in each step."
            )


# The other devices ----------------------------------------------------------------------------------------------------


class Semaphore:
    """Stands for a semaphore, or for one of an array of them."""

    def __init__(self, index=()):
        self.index = index

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        return Semaphore((*self.index, *(index if isinstance(index, tuple) else (index,))))


class Host:
    """Stands for the other devices of a host while a kernel is interpreted: what they send, and when."""

    counts: tuple  # Shape of the semaphores.
    most: int  # How many signals each of them gets.

    def __init__(self):
        self.fault, self.left = "", np.full(self.counts, self.most)
        self.arrived = np.zeros(self.counts, int)

    @contextlib.contextmanager
    def play(self):
        """A kernel that is traced inside meets this host in the place of peers."""
        of_pl, of_plgpu = self._stand_ins()
        with unittest.mock.patch.multiple(pl, **of_pl), unittest.mock.patch.multiple(plgpu, **of_plgpu):
            yield

    def _stand_ins(self):
        """Functions by name that replace those of `pl`, and those of `plgpu`."""
        return (
            dict(get_global=lambda what: Semaphore(), semaphore_wait=self._wait),
            dict(kernel=functools.partial(self._kernel, plgpu.kernel)),
        )

    def _kernel(self, real, body, **how):
        first = -len(how["scratch_types"]) - 2

        def in_a_host(*refs):
            self.out, self.buffer = refs[first : first + 2]
            body(*refs)

        return real(in_a_host, **how)

    def _wait(self, semaphore, value=1, *, decrement=True):
        index = [jnp.int32(i) for i in semaphore.index]
        come = functools.partial(self._come, decrement)
        aval = jax.ShapeDtypeStruct(self.rows_shape, jnp.bfloat16)
        rows = io_callback(come, aval, jnp.int32(value), self.out[...], *index, ordered=True)
        self._put(rows, *index)

    def _come(self, decrement, count, out, *index):
        """The rows that are there when a wait for `count` ends, and no others."""
        index, count = tuple(int(i) for i in index), int(count)
        if len(index) != len(self.counts) or not all(0 <= i < n for i, n in zip(index, self.counts, strict=False)):
            self.fault = self.fault or f"it waits for arrived{list(index)}, which nobody signals, for ever"
            return np.full(self.rows_shape, np.nan, jnp.bfloat16)
        if count > self.left[index]:
            again = ", which another wait has taken away: it needs decrement=False" * (count <= self.most)
            self.fault = self.fault or (
                f"it waits for ever until arrived{list(index)} is {count}: {self.most} signals come{again}"
            )
        self._look(np.asarray(out, np.float32), index)
        self.arrived[index] = max(self.arrived[index], self.most - self.left[index] + count)
        self.left[index] -= count * decrement
        return self._rows(index)


class Senders(Host):
    """The devices that push their shards to device `d`, block of rows by block of rows, each with some `senders`."""

    def __init__(self, shards, d, senders):
        self.shards, self.d, self.most = np.asarray(shards), d, senders
        self.n, self.blocks = len(shards), shards.shape[1] // TILE
        self.counts, self.rows_shape = (self.n - 1, self.blocks), (TILE, shards.shape[2])
        self.order = np.random.default_rng(senders).permutation(senders)  # In which they are done.
        self.waits = []  # (step, block) and what was computed by then, of each first wait.
        super().__init__()

    def _owner(self, step):
        return (self.d + step) % self.n

    def _look(self, out, index):
        if not self.arrived[index]:
            is_done = ~np.isnan(out.reshape(self.n, self.blocks, -1)).any(-1)
            self.waits.append((index[0] + 1, index[1], [list(is_done[self._owner(s)]) for s in range(self.n)]))

    def _rows(self, index):
        step, block = index
        rows = self.shards[self._owner(step + 1), block * TILE : (block + 1) * TILE].copy()
        columns = np.arange(rows.shape[1]) // (rows.shape[1] // self.most)  # Which sender's they are.
        rows[:, np.isin(columns, self.order[self.arrived[index] :])] = np.nan
        return rows

    def _put(self, rows, step, block):
        self.buffer[jax.lax.rem(self.d + step + 1, self.n), pl.ds(block * TILE, TILE)] = rows

    def judge(self, out, exact, what):
        if self.fault:
            raise NotYet(f"{what}: {self.fault}.")
        if out.shape != exact.shape:
            raise NotYet(f"{what}: the result has shape {out.shape}; it must be {exact.shape}")
        unset = np.isnan(wide(out)).reshape(self.n, self.blocks, -1).any(-1)
        for step, block in itertools.product(range(self.n), range(self.blocks)):
            rows = f"block {block} of the shard of device {self._owner(step)}"
            if unset[self._owner(step), block] and not step:
                raise NotYet(f"{what}: {rows}, its own, is missing. Nobody sends it its own rows: they are in lhs.")
            if unset[self._owner(step), block]:
                raise NotYet(
                    f"{what}: it reads {rows} before it has waited until arrived[{step - 1}, {block}] is {self.most} "
                    f"(it waited until {self.arrived[step - 1, block]}): the rows of some senders may not be there yet."
                )
        for i, (step, block, done) in enumerate(self.waits):
            before = itertools.product(range(step + 1), range(self.blocks))
            missing = [(s, b) for s, b in before if (s, b) < (step, block) and not done[s][b]]
            if missing:
                s, b = missing[0]
                waited = [wait[:2] for wait in self.waits[:i]]
                why = "A tile needs only its own rows." if (s, b) in waited else "Those rows arrive before."
                why = why if s else "Its own rows are there from the start: take them first."
                raise NotYet(
                    f"{what}: the result is right, but it waits for block {block} of device {self._owner(step)} before "
                    f"block {b} of device {self._owner(s)} is multiplied. {why}"
                )


class Owners(Host):
    """The devices that send their parts of the sums of device `d`, and that wait for its part of theirs."""

    def __init__(self, parts, d):
        self.parts, self.d, self.n = parts, d, len(parts) + 1
        self.most, self.counts, self.rows_shape = self.n - 1, (parts.shape[1] // TILE,), (self.n - 1, TILE, 64)
        self.order = np.random.default_rng(d).permutation(self.n - 1)  # In which parts arrive.
        self.sent, self.signals, self.early, self.late = {}, [], None, None
        super().__init__()

    @staticmethod
    def lowered():
        """A kernel that is traced inside for a GPU takes itself for its peers: a mesh of one device has no others."""
        real = pl.semaphore_signal
        stack = contextlib.ExitStack()
        stack.enter_context(unittest.mock.patch.object(plgpu, "remote_ref", lambda ref, device_id: ref))
        signal = lambda semaphore, inc=1, *, device_id=None: real(semaphore, inc)
        stack.enter_context(unittest.mock.patch.object(pl, "semaphore_signal", signal))
        return stack

    def _kernel(self, real, body, **how):
        out, parts = how["out_type"]
        outbox = jax.ShapeDtypeStruct((self.n, *parts.shape), parts.dtype)
        first = -len(how["scratch_types"]) - 3

        def in_a_host(*refs):
            self.out, self.buffer, self.outbox = refs[first : first + 3]
            body(*refs[: first + 2], *refs[first + 3 :])

        run = real(in_a_host, **how | dict(out_type=[out, parts, outbox]))
        return lambda *args: run(*args)[:2]

    def _stand_ins(self):
        of_pl, of_plgpu = super()._stand_ins()
        return of_pl | dict(semaphore_signal=self._signal), of_plgpu | dict(remote_ref=self._remote)

    def _look(self, out, index):
        told = sum(tile == index[0] for _, tile in self.signals)
        if told < self.n - 1 and self.early is None:
            self.early = index[0], told
        is_stored = ~np.isnan(out.reshape(*self.counts, -1)).any(-1)
        waited = [t for t in range(*self.counts) if t != index[0] and self.arrived[t] and not is_stored[t]]
        if waited and self.late is None:
            self.late = index[0], waited[0]

    def _rows(self, index):
        rows = self.parts[:, index[0] * TILE : (index[0] + 1) * TILE].copy()
        rows[self.order[self.arrived[index] :]] = np.nan
        return rows

    def _put(self, rows, tile):
        for slot in range(self.n - 1):
            self.buffer[slot, pl.ds(tile * TILE, TILE)] = rows[slot]

    def _signal(self, semaphore, inc=1, *, device_id=None, **_):
        owner = jnp.int32(device_id["x"] if device_id else self.d)
        io_callback(self._told, None, owner, self.outbox[owner], *map(jnp.int32, semaphore.index), ordered=True)

    def _told(self, owner, sent, tile):
        self.signals.append((int(owner), int(tile)))
        self.sent[int(owner)] = np.array(sent, np.float32)

    def _remote(self, ref, device_id, *_):
        return self.outbox.at[device_id["x"]]

    def judge(self, out, products, what):
        if self.fault:
            raise NotYet(f"{what}: {self.fault}.")
        wanted = sorted((owner, tile) for owner in range(self.n) if owner != self.d for tile in range(*self.counts))
        if sorted(self.signals) != wanted:
            raise NotYet(
                f"{what}: it signals (owner, tile) {sorted(self.signals)}; it must signal each of {wanted} once."
            )
        if self.early:
            raise NotYet(
                f"{what}: it waits for the others' parts of tile {self.early[0]} when it has sent its own part of that "
                f"tile to {self.early[1]} of {self.n - 1} owners. All devices do so: then all wait, and none sends."
            )
        for owner in range(self.n):
            if owner != self.d:
                part = np.asarray(jnp.asarray(products[owner], jnp.bfloat16), np.float64)
                slot = (self.d - owner - 1) % self.n
                require_close(self.sent[owner][slot], part, 0, f"{what}: the part for device {owner}")
        self._judge_sum(np.asarray(out, np.float32), products[self.d], what)
        if self.late:
            raise NotYet(
                f"{what}: the result is right, but it waits for the parts of tile {self.late[0]} before it has stored "
                f"tile {self.late[1]}, all of whose parts are there. A tile needs only its own parts."
            )

    def _judge_sum(self, out, own, what):
        rounded = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
        parts = list(self.parts.astype(np.float32))
        in_order = lambda addends, each=lambda x: x: rounded(functools.reduce(lambda a, b: each(a + b), addends))
        likely = (
            (rounded(own), "that is the device's own part alone: the others' parts are not added."),
            (in_order([rounded(own), *parts]), "its own part was rounded before the sum: keep it in float32."),
            (in_order([own, *parts[::-1]]), "the parts are added in another order: slot 0 comes first."),
            (in_order([*parts, own]), "its own part comes first: then the others are added to it, slot by slot."),
            (in_order([own, *parts], rounded), "the sum is rounded after every addition: keep it in float32 and round "
             "it at the end."),
            (in_order([rounded(own), *parts], rounded), "the sum is rounded before every addition: keep it in float32 "
             "and round it at the end."),
        )  # fmt: skip
        arrived = f"{what}, when it has waited for {self.arrived.min()} of {self.n - 1} signals"
        require_close(out, wide(in_order([own, *parts])), 0, arrived, likely)


# Right answers, and what is wrong with others -------------------------------------------------------------------------


def _overlapped(n, product_us, gather_us, blocks, *, first=1, own_first=True):
    now = product_us / n * own_first
    for i in range(first, (n - 1) * blocks + first):
        now = max(now, gather_us * i / ((n - 1) * blocks)) + product_us / n / blocks
    return now + product_us / n * (not own_first)


def _signalled(rng):
    n, blocks, k, cols, senders = rng.integers((2, 1, 2, 1, 1), (9, 120, 33, 12, 65)).tolist()
    problem = Problem(n, 128 * blocks, 256 * k, 256 * cols)
    choices = tuple(rng.permutation([1, 2, 3, 4, 8, 12, 16, 32, 64])[:4].tolist())
    return problem, senders, float(rng.integers(5, 60)) / 10, float(rng.integers(100, 450)) * 1e9, choices


def _every(
    problem, senders, signal_us, rate, choices, *,
    product=True, last=True, signals=True, shards=0, whole=True, full=True, share=True, sums=False,
):  # fmt: skip
    """The number of blocks of the least time; the switches leave a part of it out, or count it otherwise."""
    tile_us = 2 * 128 * 256 * problem.k / (lab.roofline.peak("bf16").value / (132 if share else 132 - senders)) * 1e6
    sent_us = (problem.n - 1) * problem.m * problem.k * 2 / rate * 1e6

    def tiles_us(blocks):
        waves = blocks * problem.columns / (132 - senders)
        return (math.ceil(waves) if whole else waves) * tile_us

    def us(every):
        groups = (shards or problem.n - 1) * math.ceil(problem.row_blocks / every)
        gather = (
            groups * signal_us * signals + sent_us + last * tiles_us(min(every, problem.row_blocks) if full else every)
        )
        multiply = product * tiles_us(problem.n * problem.row_blocks)
        return gather + multiply if sums else max(gather, multiply)

    return min(choices, key=us)
