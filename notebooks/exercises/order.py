"""The order of a kernel's asynchronous work, read off its traced program: the interpreter looks for none of it.

`play` goes through a block of a kernel as a GPU may that ends everything as late as it can: a copy arrives when every
warpgroup waits, and a WGMMA reads its operands until a `wgmma_wait` says that it has ended. Each warpgroup knows what
it has done and waited for, and from a barrier what those knew that have arrived there. Work that must come after other
work is at fault where its warpgroup does not know that the other has ended.
"""

import collections
import dataclasses
import itertools

import numpy as np
from exercises.traced import UNKNOWN, Unsure, plain, walk

STEPS = 200_000  # Operations after which a play stops.
MOST_SLOTS = 16  # An array of which more parts are loaded is no ring.
UNSEEN = "The interpreter would not tell you"


class Disorder(Exception):
    """Raised with what a GPU may do too early, said to the kernel's author."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What a block starts: a "load" to or a "store" from shared memory by TMA, or a "product" by WGMMA."""

    kind: str
    wg: int
    shape: tuple[int, ...]  # Of the copied tile, or of the product.
    start: int = 0  # Of a product, a bit: who has it among what it knows comes after the start.
    known: int = 0


@dataclasses.dataclass
class Ring:
    """What came of an array in shared memory whose slots TMA loads."""

    shape: tuple[int, ...]
    slots: set = dataclasses.field(default_factory=set)
    loads: int = 0
    # Whenever the warpgroups wait for a load: which one, and how many slots are being loaded or worked on.
    in_use: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    work: set = dataclasses.field(default_factory=set)  # What the block had done by then.

    @property
    def most(self) -> int:
        """The most slots in use at once."""
        return min(len(self.slots), max((slots for _, slots in self.in_use), default=0))

    @property
    def is_idle(self) -> bool:
        """Whether too little happens for a ring: no slot is loaded again, or nothing is done between the loads."""
        return not 1 < len(self.slots) < min(self.loads, MOST_SLOTS) or len(self.work) == 1

    @property
    def later(self) -> int:
        """The most after the first round."""
        return max((slots for load, slots in self.in_use if load >= len(self.slots)), default=self.most)


@dataclasses.dataclass
class Block:
    """A block of a kernel that was played."""

    events: list[Event] = dataclasses.field(default_factory=list)
    rings: list[Ring] = dataclasses.field(default_factory=list)
    fault: str | None = None  # The first that comes too early.
    is_whole: bool = True  # Whether it was played to its end.

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)


def play(jaxpr, args) -> list[list[Block]]:
    """For each kernel that the closed `jaxpr` launches with `args`: its first block and its last one, played."""
    kernels = []

    def act(equation, operands):
        if equation.primitive.name != "mpmd_map":
            return None
        (body,), (mesh,) = equation.params["jaxprs"], equation.params["meshes"]
        sizes = tuple(zip((*mesh.grid_names, *mesh.cluster_names), (*mesh.grid, *mesh.cluster), strict=True))
        places = ({name: 0 for name, _ in sizes}, {name: size - 1 for name, size in sizes})
        places = places[: 1 + any(size > 1 for _, size in sizes)]
        kernels.append([_Play(mesh, place).run(body, operands) for place in places])
        return [UNKNOWN] * len(equation.outvars)

    collections.deque(walk(jaxpr, [plain(x) for x in args], act), maxlen=0)
    return kernels


# What a block knows ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Access:
    """A read or write of shared memory. Its `bit` is set in what a warpgroup knows once it knows that it has ended."""

    kind: str  # "load", "written", "store" or "product"
    wg: int
    box: tuple[tuple[int, int], ...]
    slot: tuple[int, ...]
    bit: int
    committed: int = 0  # The bit of its commit.
    has_ended: bool = False
    number: int = 0  # Of a load into the array.
    work: int = 0  # Work of the block when it began.


class _Memory:
    """A Ref: an array in one of a GPU's memories, or barriers."""

    def __init__(self, aval, values=UNKNOWN):
        self.shape = tuple(getattr(aval, "shape", ()))
        self.is_shared = str(getattr(aval, "memory_space", "")).lower().endswith("smem")
        self.values = values if values is UNKNOWN else np.asarray(values)  # Of few whole numbers.
        self.reads: list[_Access] = []
        self.writes: list[_Access] = []
        self.ring = Ring(self.shape)
        self.stall = -1
        self.needed = getattr(getattr(aval, "dtype", None), "num_arrivals", 1)
        self.barriers: dict = collections.defaultdict(lambda: _Barrier(self.needed))
        self.members: dict = {}  # Of a union: arrays that lie in the same memory.

    def is_busy(self, box) -> bool:
        """Whether a product or a copy that reads some of `box` still runs."""
        return any(not read.has_ended and _overlap(read.box, box) for read in self.reads)


class _Barrier:
    def __init__(self, needed: int):
        self.needed, self.arrived, self.known = needed, 0, 0
        self.phases: list[int] = []  # What is known after each completion.
        self.seen: collections.Counter = collections.Counter()  # Completions that each warpgroup has waited for.

    def arrive(self, known: int):
        self.arrived, self.known = self.arrived + 1, self.known | known
        if self.arrived == self.needed:
            self.phases.append(self.known)
            self.arrived = 0


class _Play:
    """The play of a block at `place`, an index for each axis of the grid."""

    def __init__(self, mesh, place):
        self.mesh, self.place = mesh, place
        self.block, self.bits, self.clock, self.work = Block(), itertools.count(), 0, 0
        self.shared: dict = {}  # What all warpgroups allocate together.
        self.flying: collections.deque = collections.deque()  # (memory or None, access, barrier, what arrives there)

    def run(self, body, operands) -> Block:
        avals = [x.aval for x in body.invars]
        refs = [_Memory(aval, values) for aval, values in itertools.zip_longest(avals, operands, fillvalue=UNKNOWN)]
        wgs = [_Warpgroup(self, wg) for wg in range(self.mesh.num_threads or 1)]
        left = [walk(body, refs, wg.act) for wg in wgs]
        try:
            while left:
                before = self.clock
                left = [going for going in left if next(going, self) is not self]
                if left and self.clock == before:
                    self._land()
        except Disorder as fault:
            self.block.fault = str(fault)
        except Unsure:
            self.block.is_whole = False
        return self.block

    def _land(self):
        """Every warpgroup waits: the copy that began first arrives."""
        if not self.flying:
            raise Unsure  # A deadlock, which the interpreter explains.
        memory, access, _, _ = self.flying[0]
        if memory and memory.stall != self.clock:
            memory.stall = self.clock
            flying = {copy.slot for other, copy, _, _ in self.flying if other is memory}
            busy = {copy.slot for copy in memory.writes if copy.slot not in flying and memory.is_busy(copy.box)}
            in_use = len(flying) + max(len(busy), self.work > access.work)
            memory.ring.in_use.append((access.number, in_use))
            memory.ring.work.add(self.work)
        _, _, barrier, known = self.flying.popleft()
        barrier.arrive(known)


# What a warpgroup does ------------------------------------------------------------------------------------------------


class _Warpgroup:
    """A warpgroup of a play, and all that it knows to have ended."""

    def __init__(self, play: _Play, index: int):
        self.play, self.index, self.warp, self.known = play, index, None, 0
        self.running: list[_Access] = []  # Reads of products, a list each.
        self.sent: list[list[_Access]] = [[]]  # Reads of copies to GMEM; the last group is still open.
        self.uncommitted: list[_Access] = []
        self.visits: collections.Counter = collections.Counter()

    def act(self, equation, operands):
        self.play.clock += 1
        if self.play.clock > STEPS:
            raise Unsure
        self.play.work += any(getattr(out.aval, "shape", ()) for out in equation.outvars)
        if action := _ACTIONS.get(equation.primitive.name):
            return action(self, equation, operands) or [UNKNOWN] * len(equation.outvars)
        return [UNKNOWN] * len(equation.outvars) if equation.effects else None

    # Memory

    def _begin(self, kind: str, view: "_View", **more) -> _Access:
        bit = 1 << next(self.play.bits)
        return _Access(kind, self.index, view.box, view.slot, bit, work=self.play.work, **more)

    def _overwrite(self, view: "_View", access: _Access):
        """Writes to `view`. Raises Disorder if somebody may still read there."""
        for read in view.memory.reads:
            if _overlap(read.box, view.box) and not read.bit & self.known:
                raise Disorder(_too_early(read, access))
        memory = view.memory
        memory.reads = [read for read in memory.reads if not _covers(view.box, read.box)]
        memory.writes = [write for write in memory.writes if not _covers(view.box, write.box)] + [access]

    def _read(self, view: "_View", kind: str) -> list[_Access]:
        """An asynchronous read of `view`. Raises Disorder if what it reads may not be there yet."""
        if view is None or not view.memory.is_shared:
            return []
        for write in view.memory.writes:
            if _overlap(write.box, view.box):
                self._require_there(write, kind)
        read = self._begin(kind, view)
        view.memory.reads.append(read)
        return [read]

    def _require_there(self, write: _Access, kind: str):
        reader = "a WGMMA" if kind == "product" else "a copy to GMEM"
        if not write.bit & self.known:
            if write.kind == "load":
                raise Disorder(
                    f"{reader} reads the slot before its tiles have arrived, or when the next ones may have "
                    "overwritten them: wait at the slot's barrier first, and give the slot back afterwards"
                )
            raise Disorder(
                f"{reader} reads what another warpgroup stores in shared memory, and no barrier is between the two"
            )
        if write.kind == "written" and not write.committed & self.known:
            raise Disorder(
                f"{reader} may read what was in shared memory before: commit what you have stored "
                "(plgpu.commit_smem) between the store and what reads it"
            )

    # Operations

    def _axis_index(self, equation, _):
        name, mesh = equation.params["axis_name"], self.play.mesh
        if name == mesh.thread_name:
            return [self.index]
        return [self.play.place.get(name, UNKNOWN if self.warp is None else self.warp)]

    def _run_scoped(self, equation, operands):
        body, collective = equation.params["jaxpr"], equation.params["collective_axes"]
        refs = [_Memory(x.aval) for x in body.invars]
        if collective:
            self.visits[id(equation)] += 1
            key = id(equation), self.visits[id(equation)]
            refs, entered = self.play.shared.setdefault(key, (refs, _Barrier(self.play.mesh.num_threads)))
            entered.arrive(self.known)
            yield from self._wait_at(entered)
        return (yield from walk(body, refs, self.act, operands))

    def _run_state(self, equation, operands):
        refs = [
            x if isinstance(x, _Memory) else _Memory(y.aval, x) for x, y in zip(operands, equation.invars, strict=True)
        ]
        yield from walk(equation.params["jaxpr"], refs, self.act)
        self._end_products(0)  # Its results are those of the products.
        return [x if isinstance(x, _Memory) else UNKNOWN for x in operands]

    def _each_warp(self, equation, operands):
        (body,) = equation.params["jaxprs"]
        for self.warp in range(4):
            yield from walk(body, operands, self.act)
        self.warp = None
        return [UNKNOWN] * len(equation.outvars)

    def _copy_in(self, equation, operands):
        params = equation.params
        if not params["has_barrier"]:
            raise Unsure
        trees = [params[f"{name}_transforms_treedef"] for name in ("src", "dst", "barrier")]
        (source, view, at), rest = _views(operands[:3], trees, operands[3:])
        if rest and rest[0] is UNKNOWN:
            raise Unsure
        if not all(rest):
            return
        if not (view and at):
            raise Unsure
        memory = view.memory
        access = self._begin("load", view, number=memory.ring.loads)
        self._overwrite(view, access)
        _copy_values(source, view)
        if not memory.ring.loads:
            self.play.block.rings.append(memory.ring)
        memory.ring.loads += 1
        memory.ring.slots.add(access.slot)
        self.play.block.events.append(Event("load", self.index, view.shape))
        self.play.flying.append((memory, access, at.barrier, access.bit | self.known))

    def _copy_out(self, equation, operands):
        trees = [equation.params[f"{name}_transforms_treedef"] for name in ("src", "dst")]
        (view, _), rest = _views(operands[:2], trees, operands[2:])
        if rest and rest[0] is UNKNOWN:
            raise Unsure
        if all(rest):
            self.sent[-1] += self._read(view, "store")
            self.play.block.events.append(Event("store", self.index, view.shape if view else ()))
        if equation.params["commit_group"]:
            self.sent.append([])

    def _close_group(self, equation, _):
        self.sent.append([])

    def _wait_out(self, equation, _):
        done = len(self.sent) - 1 - equation.params["n"]
        self._end(itertools.chain.from_iterable(self.sent[: max(done, 0)]))
        self.sent = self.sent[max(done, 0) :]

    def _end(self, reads):
        for read in reads:
            read.has_ended = True
            self.known |= read.bit

    def _get(self, equation, operands):
        (view,), _ = _views(operands[:1], [equation.params["tree"]], operands[1:])
        values = UNKNOWN if view is None else view.values
        return [values if values is UNKNOWN else plain(values.reshape(equation.outvars[0].aval.shape))]

    def _set(self, equation, operands):
        (view,), _ = _views(operands[:1], [equation.params["tree"]], operands[2:])
        if view is None and isinstance(operands[0], _Memory):
            operands[0].values = UNKNOWN
        if view and view.memory.is_shared:
            access = self._begin("written", view, committed=1 << next(self.play.bits))
            self._overwrite(view, access)
            self.known |= access.bit
            self.uncommitted.append(access)
            view.memory.values = UNKNOWN

    def _commit(self, equation, _):
        for write in self.uncommitted:
            self.known |= write.committed
        self.uncommitted = []

    def _arrive(self, equation, operands):
        (at,), rest = _views(operands[:1], [equation.params["transforms_treedef"]], operands[1:])
        if at is None or (rest and rest[0] is UNKNOWN):
            raise Unsure
        if all(rest):
            at.barrier.arrive(self.known)

    def _wait(self, equation, operands):
        (at,), _ = _views(operands[:1], [equation.params["transforms_treedef"]], operands[1:])
        if at is None:
            raise Unsure
        yield from self._wait_at(at.barrier)
        return [UNKNOWN] * len(equation.outvars)

    def _arrive_and_wait(self, equation, operands):
        self._arrive(equation, operands)
        return (yield from self._wait(equation, operands))

    def _wait_at(self, barrier: _Barrier):
        who = self.index, self.warp
        while len(barrier.phases) <= barrier.seen[who]:
            yield
        self.known |= barrier.phases[barrier.seen[who]]
        barrier.seen[who] += 1

    def _multiply(self, equation, operands):
        trees = [equation.params[f"{name}_transforms_tree"] for name in ("acc", "a", "b")]
        (_, *tiles), _ = _views(operands[:3], trees, operands[3:])
        self.play.work += 1
        self.running.append([read for view in tiles for read in self._read(view, "product")])
        start = 1 << next(self.play.bits)
        self.known |= start
        shape = equation.invars[0].aval.shape
        self.play.block.events.append(Event("product", self.index, shape, start, self.known))

    def _wait_products(self, equation, _):
        self._end_products(equation.params["n"])

    def _dereference(self, equation, _):
        if equation.params["wait_n"] is not None:
            self._end_products(equation.params["wait_n"])

    def _end_products(self, left: int):
        done = max(len(self.running) - left, 0)
        self._end(itertools.chain.from_iterable(self.running[:done]))
        self.running = self.running[done:]


_ACTIONS = {
    "axis_index": _Warpgroup._axis_index, "run_scoped": _Warpgroup._run_scoped, "run_state": _Warpgroup._run_state,
    "mpmd_map": _Warpgroup._each_warp, "get": _Warpgroup._get, "load": _Warpgroup._get, "swap": _Warpgroup._set,
    "store": _Warpgroup._set, "addupdate": _Warpgroup._set, "commit_smem": _Warpgroup._commit,
    "copy_gmem_to_smem": _Warpgroup._copy_in, "copy_smem_to_gmem": _Warpgroup._copy_out,
    "commit_group": _Warpgroup._close_group, "wait_smem_to_gmem": _Warpgroup._wait_out,
    "barrier_arrive": _Warpgroup._arrive, "barrier_wait": _Warpgroup._wait,
    "barrier_arrive_and_wait": _Warpgroup._arrive_and_wait, "wgmma_ref": _Warpgroup._multiply,
    "wgmma_wait": _Warpgroup._wait_products, "wgmma_accumulator_deref": _Warpgroup._dereference,
    "wgmma_accumulator_deref_p": _Warpgroup._dereference,
}  # fmt: skip


def _too_early(read: _Access, write: _Access) -> str:
    """What is wrong with a write to what somebody may still read."""
    what = "a copy starts" if write.kind == "load" else "a tile is stored in shared memory"
    if read.kind == "store":
        remedy = (
            "call plgpu.wait_smem_to_gmem first" if read.wg == write.wg else "give each warpgroup a tile of its own"
        )
        return f"{what} while TMA may still send what lies there: {remedy}"
    if read.wg == write.wg:
        return (
            f"{what} while the last WGMMA may still read the slot: wait for it first. wgmma_wait(n) leaves the last n "
            "products running, so slots may come back n steps later, not before (delay_release=n in emit_pipeline). "
            f"{UNSEEN}"
        )
    return (
        f"{what} while a WGMMA of another warpgroup may still read the slot: give a slot back (barrier_arrive) after "
        f"the wgmma_wait with which its product has ended, and wait for that before you load into it. {UNSEEN}"
    )


# Where a Ref is looked at ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _View:
    """A part of an array: the first index and the size along each axis, which is all of it where nothing is known."""

    memory: _Memory
    box: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]  # Without the axes at which one index is taken.

    @property
    def slot(self) -> tuple[int, ...]:
        return tuple(start for (start, size), n in zip(self.box, self.memory.shape, strict=True) if size < n)

    @property
    def barrier(self) -> _Barrier:
        return self.memory.barriers[tuple(start for start, _ in self.box)]

    @property
    def values(self):
        """Its numbers, UNKNOWN where they are not followed or lie beyond the end."""
        ends = (start + size <= n for (start, size), n in zip(self.box, self.memory.shape, strict=True))
        return self.memory.values[self.index] if all(ends) and self.memory.values is not UNKNOWN else UNKNOWN

    @property
    def index(self):
        return tuple(slice(start, start + size) for start, size in self.box)


def _views(refs, trees, leaves):
    """(for each Ref the _View of its transforms, None where an index is not known or it is none; the leaves left)."""
    found, leaves = [], list(leaves)
    for ref, tree in zip(refs, trees, strict=True):
        count = tree.num_leaves if tree is not None else 0
        transforms = tree.unflatten(leaves[:count]) if tree is not None else ()
        leaves = leaves[count:]
        found.append(_view(ref, transforms) if isinstance(ref, _Memory) else None)
    return found, leaves


def _view(memory: _Memory, transforms) -> _View | None:
    box, axes = [(0, size) for size in memory.shape], list(range(len(memory.shape)))
    for transform in transforms:
        if hasattr(transform, "indices"):
            axes = _indexed(box, axes, transform.indices)
        elif hasattr(transform, "permutation"):
            axes = [axes[i] for i in transform.permutation]
        elif hasattr(transform, "tiling"):  # Its last axes are tiled: of them, all is looked at.
            count = len(transform.tiling)
            axes = axes[: -2 * count] + [None] * count
        elif hasattr(transform, "offset"):  # A member of a union.
            # Members of one shape have the same values in the same places: they differ in how they are swizzled.
            key = transform.offset, tuple(transform.shape), str(transform.dtype)
            member = memory.members.setdefault(key, _Memory(transform))
            member.is_shared = memory.is_shared
            return _view(member, transforms[1:])
        elif not hasattr(transform, "swizzle"):
            axes = [None] * 8  # Another shape.
        if axes is None:
            return None
    return _View(memory, tuple(box), tuple(box[axis][1] for axis in axes if axis is not None))


def _indexed(box: list, axes: list, indices) -> list | None:
    """The axes that are left after `indices`, which narrow `box`. None if one is not known."""
    left = []
    for axis, index in zip(axes, indices, strict=False):
        is_slice = hasattr(index, "start")
        first = index.start if is_slice else index
        if first is UNKNOWN:
            return None
        if is_slice or not isinstance(first, int):
            left.append(axis)
        if axis is not None and isinstance(first, int):
            box[axis] = (box[axis][0] + first, (index.size - 1) * index.stride + 1 if is_slice else 1)
    return left


def _copy_values(source: _View | None, target: _View):
    memory, values = target.memory, UNKNOWN if source is None else source.values
    if values is UNKNOWN:
        memory.values = UNKNOWN
        return
    if memory.values is UNKNOWN:
        memory.values = np.zeros(memory.shape, values.dtype)
    memory.values[target.index] = values.reshape(memory.values[target.index].shape)


def _overlap(a, b) -> bool:
    return all(i < j + m and j < i + n for (i, n), (j, m) in zip(a, b, strict=True))


def _covers(a, b) -> bool:
    return all(i <= j and j + m <= i + n for (i, n), (j, m) in zip(a, b, strict=True))
