"""The order of a kernel's asynchronous work, read off its traced program: the interpreter looks for none of it.

`play` goes through a block of a kernel as a GPU may that ends everything as late as it can: a copy arrives when every
warpgroup waits, and a WGMMA reads its operands until a `wgmma_wait` says that it has ended. Each warpgroup knows what
it has done and waited for, and from a barrier what those knew that have arrived there. Work that must come after other
work is at fault where its warpgroup does not know that the other has ended.
"""

import collections
import contextlib
import dataclasses
import itertools

from exercises.memory import UNKNOWN, Access, Barrier, Memory, Ring, View, copy_values, covers, overlap, views
from exercises.traced import Unsure, plain, walk

STEPS = 200_000  # Operations after which a play stops.
UNSEEN = "The interpreter would not tell you"


class Disorder(Exception):
    """Raised with what a GPU may do too early, said to the kernel's author."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A "load" to or "store" from shared memory by TMA, a "product", a "wait" or "arrive" at a barrier, in a block."""

    kind: str
    wg: int
    shape: tuple[int, ...]  # The shape of the copied tile, or of the product; () at a barrier.
    start: int = 0  # A bit of a product: whoever has it among what it knows comes after the start.
    known: int = 0  # All that its warpgroup knew when it started the product, load or store.
    end: int = 0  # Bits of what ends with the event: whoever knows one of them comes after the end.
    box: tuple | None = None  # (start, size) along each axis of a load or store in global memory, where known.


@dataclasses.dataclass
class Block:
    """A block of a kernel that was played."""

    events: list[Event] = dataclasses.field(default_factory=list)
    rings: list[Ring] = dataclasses.field(default_factory=list)
    stored: list[tuple] = dataclasses.field(default_factory=list)  # The box of each direct store to global memory.
    fetched: list[tuple] = dataclasses.field(default_factory=list)  # (memory, box) of each direct load from there.
    fault: str | None = None  # The first that comes too early.
    is_whole: bool = True  # Whether it was played to its end.
    reads_back: bool = False  # Whether it reads in global memory what it has stored there.
    is_left_over: bool = False  # Whether a barrier has completed for nobody at its end.
    is_sending: bool = False  # Whether TMA may still send from its shared memory at its end.

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)


def play(jaxpr, args) -> list[list[Block]]:
    """For each kernel that the closed `jaxpr` launches with `args`: its first, a middle and its last block, played."""
    kernels = []

    def act(equation, operands):
        if equation.primitive.name != "mpmd_map":
            return None
        (body,), (mesh,) = equation.params["jaxprs"], equation.params["meshes"]
        sizes = tuple(zip((*mesh.grid_names, *mesh.cluster_names), (*mesh.grid, *mesh.cluster), strict=True))
        places = [{name: at(size) for name, size in sizes} for at in (lambda _: 0, lambda n: n // 2, lambda n: n - 1)]
        places = [place for i, place in enumerate(places) if place not in places[:i]]
        kernels.append([_Play(mesh, place).run(body, operands) for place in places])
        return [UNKNOWN] * len(equation.outvars)

    with contextlib.suppress(Unsure):  # A launch that depends on a value.
        collections.deque(walk(jaxpr, [plain(x) for x in args], act), maxlen=0)
    return kernels


class _Play:
    """The play of a block at `place`, an index for each axis of the grid."""

    def __init__(self, mesh, place):
        self.mesh, self.place = mesh, place
        self.block, self.bits, self.clock, self.work = Block(), itertools.count(), 0, 0
        self.shared: dict = {}  # Refs that all warpgroups allocate together.
        self.refs: list[Memory] = []  # All that were allocated.
        self.flying: collections.deque = collections.deque()  # (memory or None, access, barrier, what arrives there)

    def run(self, body, operands) -> Block:
        avals = [x.aval for x in body.invars]
        refs = [Memory(aval, values) for aval, values in itertools.zip_longest(avals, operands, fillvalue=UNKNOWN)]
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
        ends = [barrier for ref in self.refs for barrier in ref.barriers.values()]
        self.block.is_left_over = any(len(x.phases) > max(x.seen.values(), default=0) for x in ends)
        self.block.is_sending = any(any(wg.sent) for wg in wgs)
        return self.block

    def _land(self):
        """Every warpgroup waits: the copy that began first arrives."""
        if not self.flying:
            raise Unsure  # A deadlock, which the interpreter explains.
        memory, access, _, _ = self.flying[0]
        if memory and memory.stall != self.clock:
            memory.stall = self.clock
            flying = {copy.stage for other, copy, _, _ in self.flying if other is memory}
            busy = {copy.stage for copy in memory.writes if copy.stage not in flying and memory.is_busy(copy.box)}
            in_use = len(flying) + max(len(busy), self.work > access.work)
            memory.ring.in_use.append((access.number, in_use))
            memory.ring.work.add(self.work)
        _, _, barrier, known = self.flying.popleft()
        barrier.arrive(known)


# The warpgroups -----------------------------------------------------------------------------------------------------


class _Warpgroup:
    """A warpgroup of a play, and all that it knows to have ended."""

    def __init__(self, play: _Play, index: int):
        self.play, self.index, self.warp, self.known = play, index, None, 0
        self.running: list[Access] = []  # Reads of products, a list each.
        self.sent: list[list[Access]] = [[]]  # Reads of copies to GMEM; the last group is still open.
        self.tensor = 0  # The bits of what tcgen05's products read.
        self.uncommitted: list[Access] = []
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

    def _begin(self, kind: str, view: "View", **more) -> Access:
        bit = 1 << next(self.play.bits)
        return Access(kind, self.index, view.box, view.stage, bit, work=self.play.work, **more)

    def _overwrite(self, view: "View", access: Access):
        """Writes to `view`. Raises Disorder if somebody may still read there."""
        for read in view.memory.reads:
            if overlap(read.box, view.box) and not read.bit & self.known:
                raise Disorder(_too_early(read, access))
        memory = view.memory
        memory.reads = [read for read in memory.reads if not covers(view.box, read.box)]
        memory.writes = [write for write in memory.writes if not covers(view.box, write.box)] + [access]

    def _read(self, view: "View", kind: str) -> list[Access]:
        """An asynchronous read of `view`. Raises Disorder if what it reads may not be there yet."""
        if view is None or not view.memory.is_shared:
            return []
        for write in view.memory.writes:
            if overlap(write.box, view.box):
                self._require_there(write, kind)
        read = self._begin(kind, view)
        view.memory.reads.append(read)
        return [read]

    def _require_there(self, write: Access, kind: str):
        reader = {"product": "a WGMMA", "tcgen05": "a product", "store": "a copy to GMEM"}[kind]
        if not write.bit & self.known:
            if write.kind == "load":
                raise Disorder(
                    f"{reader} reads the stage before its tiles have arrived, or when the next ones may have "
                    "overwritten them: wait at the stage's barrier first, and give the stage back afterwards"
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
        refs = [Memory(x.aval) for x in body.invars]
        self.play.refs += refs
        if collective:
            self.visits[id(equation)] += 1
            key = id(equation), self.visits[id(equation)]
            refs, entered = self.play.shared.setdefault(key, (refs, Barrier(self.play.mesh.num_threads)))
            entered.arrive(self.known)
            yield from self._wait_at(entered)
        return (yield from walk(body, refs, self.act, operands))

    def _run_state(self, equation, operands):
        refs = [
            x if isinstance(x, Memory) else Memory(y.aval, x) for x, y in zip(operands, equation.invars, strict=True)
        ]
        yield from walk(equation.params["jaxpr"], refs, self.act)
        self._end_products(0)  # Its results are those of the products.
        return [x if isinstance(x, Memory) else UNKNOWN for x in operands]

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
        (source, view, at), rest = views(operands[:3], trees, operands[3:])
        if rest and rest[0] is UNKNOWN:
            raise Unsure
        if not all(rest):
            return
        if not (view and at):
            raise Unsure
        memory = view.memory
        access = self._begin("load", view, number=memory.ring.loads)
        self._overwrite(view, access)
        copy_values(source, view)
        if not memory.ring.loads:
            self.play.block.rings.append(memory.ring)
        memory.ring.loads += 1
        memory.ring.stages.add(access.stage)
        box = source.box if source else None
        event = Event("load", self.index, view.shape, known=self.known, end=access.bit, box=box)
        self.play.block.events.append(event)
        self.play.flying.append((memory, access, at.barrier, access.bit | self.known))

    def _copy_out(self, equation, operands):
        trees = [equation.params[f"{name}_transforms_treedef"] for name in ("src", "dst")]
        (view, target), rest = views(operands[:2], trees, operands[2:])
        if rest and rest[0] is UNKNOWN:
            raise Unsure
        if all(rest):
            box = target.box if target else None
            reads, known = self._read(view, "store"), self.known
            self.sent[-1] += reads
            shape, end = view.shape if view else (), sum(read.bit for read in reads)
            self.play.block.events.append(Event("store", self.index, shape, known=known, end=end, box=box))
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
        (view,), _ = views(operands[:1], [equation.params["tree"]], operands[1:])
        if view and any(overlap(view.box, box) for box in view.memory.stored):
            self.play.block.reads_back = True
        if view and view.memory.is_global:
            self.play.block.fetched.append((view.memory, view.box))
        values = UNKNOWN if view is None else view.values
        return [values if values is UNKNOWN else plain(values.reshape(equation.outvars[0].aval.shape))]

    def _set(self, equation, operands):
        (view,), _ = views(operands[:1], [equation.params["tree"]], operands[2:])
        if view is None and isinstance(operands[0], Memory):
            operands[0].values = UNKNOWN
        if view and view.memory.is_global:
            self.play.block.stored.append(view.box)
            view.memory.stored.append(view.box)
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
        (at,), rest = views(operands[:1], [equation.params["transforms_treedef"]], operands[1:])
        if at is None or (rest and rest[0] is UNKNOWN):
            raise Unsure
        if all(rest):
            self.play.block.events.append(Event("arrive", self.index, ()))
            at.barrier.arrive(self.known)

    def _wait(self, equation, operands):
        (at,), _ = views(operands[:1], [equation.params["transforms_treedef"]], operands[1:])
        if at is None:
            raise Unsure
        self.play.block.events.append(Event("wait", self.index, ()))
        yield from self._wait_at(at.barrier)
        return [UNKNOWN] * len(equation.outvars)

    def _arrive_and_wait(self, equation, operands):
        self._arrive(equation, operands)
        return (yield from self._wait(equation, operands))

    def _wait_at(self, barrier: Barrier):
        who = self.index, self.warp
        while len(barrier.phases) <= barrier.seen[who]:
            yield
        self.known |= barrier.phases[barrier.seen[who]]
        barrier.seen[who] += 1

    def _multiply(self, equation, operands):
        trees = [equation.params[f"{name}_transforms_tree"] for name in ("acc", "a", "b")]
        (_, *tiles), _ = views(operands[:3], trees, operands[3:])
        self.play.work += 1
        reads = [read for view in tiles for read in self._read(view, "product")]
        self.running.append(reads)
        start = 1 << next(self.play.bits)
        self.known |= start
        shape = equation.invars[0].aval.shape
        end = sum(read.bit for read in reads)
        self.play.block.events.append(Event("product", self.index, shape, start, self.known, end))

    def _multiply_tcgen05(self, equation, operands):
        params = equation.params
        names = ("acc", "a", "b", "barrier")[: 3 + params["arrive"]]
        refs = operands[:3] + operands[4 : 4 + params["arrive"]]
        leaves = operands[4 + params["arrive"] + 2 * params["scaled"] + params["sparse"] :]
        (_, *tiles), _ = views(refs, [params[f"{name}_transforms_tree"] for name in names], leaves)
        self.play.work += 1
        self.play.block.events.append(Event("product", self.index, equation.invars[0].aval.shape))
        for view in tiles[:2]:
            for read in self._read(view, "tcgen05"):
                self.tensor |= read.bit
        if params["arrive"]:
            self._arrive_tcgen05(tiles[2])

    def _commit_tcgen05(self, equation, operands):
        (at,), _ = views(operands[:1], [equation.params["barrier_transforms_tree"]], operands[1:])
        self._arrive_tcgen05(at)

    def _arrive_tcgen05(self, at: View | None):
        """All products that were started before arrive there when they have ended."""
        if at is None:
            raise Unsure
        self.play.flying.append((None, None, at.barrier, self.tensor | self.known))

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
    "tcgen05_mma": _Warpgroup._multiply_tcgen05,
    "tcgen05_commit_arrive": _Warpgroup._commit_tcgen05,
}  # fmt: skip


def _too_early(read: Access, write: Access) -> str:
    """A sentence on a write to what somebody may still read."""
    what = "a copy starts" if write.kind == "load" else "a tile is stored in shared memory"
    if read.kind == "store":
        remedy = (
            "call plgpu.wait_smem_to_gmem first" if read.wg == write.wg else "give each warpgroup a tile of its own"
        )
        return f"{what} while TMA may still send what lies there: {remedy}"
    if read.kind == "tcgen05":
        return (
            f"{what} while a product of tcgen05 may still read the stage: wait first at a barrier that "
            f"plgpu.tcgen05_commit_arrive completes after it. {UNSEEN}"
        )
    if read.wg == write.wg:
        return (
            f"{what} while the last WGMMA may still read the stage: wait for it first. wgmma_wait(n) leaves the last n "
            "products running, so stages may come back n steps later, not before (delay_release=n in emit_pipeline). "
            f"{UNSEEN}"
        )
    return (
        f"{what} while a WGMMA of another warpgroup may still read the stage: give a stage back (barrier_arrive) after "
        f"the wgmma_wait with which its product has ended, and wait for that before you load into it. {UNSEEN}"
    )
