"""The memories of a kernel that is played: who reads and writes which part of them, and what barriers let through."""

import collections
import dataclasses

import numpy as np
from exercises.traced import UNKNOWN

MOST_STAGES = 16  # An array of which more parts are loaded is no ring.


@dataclasses.dataclass
class Ring:
    """How an array in shared memory is used whose stages TMA loads."""

    shape: tuple[int, ...]
    stages: set = dataclasses.field(default_factory=set)
    loads: int = 0
    # Whenever the warpgroups wait for a load: which one, and how many stages are being loaded or worked on.
    in_use: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    work: set = dataclasses.field(default_factory=set)  # How much the block had done by then.

    @property
    def most(self) -> int:
        """The most stages in use at once."""
        return min(len(self.stages), max((stages for _, stages in self.in_use), default=0))

    @property
    def is_idle(self) -> bool:
        """Whether too little happens for a ring: no stage is loaded again, or nothing is done between the loads."""
        return not 1 < len(self.stages) < min(self.loads, MOST_STAGES) or len(self.work) == 1

    @property
    def later(self) -> int:
        """The most after the first round."""
        return max((stages for load, stages in self.in_use if load >= len(self.stages)), default=self.most)


@dataclasses.dataclass(eq=False)
class Access:
    """A read or write of shared memory. Its `bit` is set in what a warpgroup knows once it knows that it has ended."""

    kind: str  # "load", "written", "store" or "product"
    wg: int
    box: tuple[tuple[int, int], ...]
    stage: tuple[int, ...]
    bit: int
    committed: int = 0  # The bit of its commit.
    has_ended: bool = False
    number: int = 0  # How many loads into the array came before this one.
    work: int = 0  # Work of the block when it began.


class Memory:
    """A Ref: an array in one of a GPU's memories, or barriers."""

    def __init__(self, aval, values=UNKNOWN):
        self.shape = tuple(getattr(aval, "shape", ()))
        space = str(getattr(aval, "memory_space", "")).lower()
        self.is_shared, self.is_global = space.endswith("smem"), space.endswith("gmem")
        self.values = values if values is UNKNOWN else np.asarray(values)  # Whole numbers, if they are few.
        self.reads: list[Access] = []
        self.writes: list[Access] = []
        self.stored: list[tuple] = []  # The boxes of direct stores to global memory.
        self.ring = Ring(self.shape)
        self.stall = -1
        self.needed = getattr(getattr(aval, "dtype", None), "num_arrivals", 1)
        self.barriers: dict = collections.defaultdict(lambda: Barrier(self.needed))
        self.members: dict = {}  # Arrays of a union, which lie in the same memory.

    def is_busy(self, box) -> bool:
        """Whether a product or a copy that reads some of `box` still runs."""
        return any(not read.has_ended and overlap(read.box, box) for read in self.reads)


class Barrier:
    def __init__(self, needed: int):
        self.needed, self.arrived, self.known = needed, 0, 0
        self.phases: list[int] = []  # All that is known after each completion.
        self.seen: collections.Counter = collections.Counter()  # Completions that each warpgroup has waited for.

    def arrive(self, known: int):
        self.arrived, self.known = self.arrived + 1, self.known | known
        if self.arrived == self.needed:
            self.phases.append(self.known)
            self.arrived = 0


@dataclasses.dataclass
class View:
    """A part of an array: the first index and the size along each axis, which is all of it where nothing is known."""

    memory: Memory
    box: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]  # Without the axes at which one index is taken.

    @property
    def stage(self) -> tuple[int, ...]:
        return tuple(start for (start, size), n in zip(self.box, self.memory.shape, strict=True) if size < n)

    @property
    def barrier(self) -> Barrier:
        return self.memory.barriers[tuple(start for start, _ in self.box)]

    @property
    def values(self):
        """Its numbers, UNKNOWN where they are not followed or lie beyond the end."""
        ends = (start + size <= n for (start, size), n in zip(self.box, self.memory.shape, strict=True))
        return self.memory.values[self.index] if all(ends) and self.memory.values is not UNKNOWN else UNKNOWN

    @property
    def index(self):
        return tuple(slice(start, start + size) for start, size in self.box)


def views(refs, trees, leaves):
    """(for each Ref the View of its transforms, None where an index is not known or it is none; the leaves left)."""
    found, leaves = [], list(leaves)
    for ref, tree in zip(refs, trees, strict=True):
        count = tree.num_leaves if tree is not None else 0
        transforms = tree.unflatten(leaves[:count]) if tree is not None else ()
        leaves = leaves[count:]
        found.append(view(ref, transforms) if isinstance(ref, Memory) else None)
    return found, leaves


def view(memory: Memory, transforms) -> View | None:
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
            member = memory.members.setdefault(key, Memory(transform))
            member.is_shared = memory.is_shared
            return view(member, transforms[1:])
        elif not hasattr(transform, "swizzle"):
            axes = [None] * 8  # Another shape.
        if axes is None:
            return None
    return View(memory, tuple(box), tuple(box[axis][1] for axis in axes if axis is not None))


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


def copy_values(source: View | None, target: View):
    memory, values = target.memory, UNKNOWN if source is None else source.values
    if values is UNKNOWN:
        memory.values = UNKNOWN
        return
    if memory.values is UNKNOWN:
        memory.values = np.zeros(memory.shape, values.dtype)
    memory.values[target.index] = values.reshape(memory.values[target.index].shape)


def overlap(a, b) -> bool:
    return all(i < j + m and j < i + n for (i, n), (j, m) in zip(a, b, strict=True))


def covers(a, b) -> bool:
    return all(i <= j and j + m <= i + n for (i, n), (j, m) in zip(a, b, strict=True))
