"""Matrix product: warp-specialized and persistent, its operands shared in clusters, its results stored meanwhile.

    o = activation(a @ b + bias)

Shapes: a (M, K), b (K, N), bias (N,), o (M, N); with `transpose_a` a is (K, M), with `transpose_b` b is (N, K), read as
they lie. a and b are both bfloat16 or both float16; sums are float32; o is bfloat16, float16 or float32. Rows of a and
b must be multiples of 16 bytes, which TMA asks for.

Role table: one block a SM, which computes tile after tile of o; three warpgroups.

    memory     one, with few registers: starts the TMA copies of each step of K into the next slot of the ring. It runs
               ahead, into the next tile, while the others compute or store
    compute    two, with the others' registers: each multiplies its half of the tile, then rounds it into shared memory,
               some pieces of 64 rows by 128 bytes at a time, from where TMA copies them to o

Barrier table:

    barrier       arrivals                              who waits
    filled[slot]  each copy of a's and b's tile         both compute warpgroups, before they read the slot
                  (one each, or one for each `_pieces`)
    freed[slot]   the compute warpgroups of all blocks  the memory warpgroup, before it refills the slot
                  of the cluster                        (multicast writes the slots of the whole cluster)

WGMMA is asynchronous: a slot is given back one step later, when `wgmma_wait(1)` has told that its product has ended.

What bounds its speed: the tensor cores, and the power that they may draw. Tiles are visited in a snake, for the L2
cache. Two blocks of a cluster share the operand that they have in common: each loads half of it for both. A small o
with a long K is split over K: each part sums its own, and the parts are added in a fixed order.

Not supported: batches (use `jax.vmap`), other dtypes. A plain b whose N is no multiple of 64, or whose K is none of 8,
is read as it lies with `swapped`, the default for large products; a transposed a of such a size, or both, cost a padded
copy of one. Chapters: 7 (roles), 8 (persistence, order, clusters, split K). Sources: CUTLASS's documents on
warp-specialized persistent kernels, for the ideas; Osama et al., "Stream-K" (2023), on sharing out K.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu, _numerics, _tuned

COMPUTE, MEMORY = 2, 2  # Compute warpgroups, and the index of the memory warpgroup, which follows them.
STEP_BYTES = 128  # Of each row along K, a step: the widest swizzle.
STORE_ROWS, STORE_BYTES = 64, 128  # Of a piece of o on its way out: rows of one WGMMA, the widest swizzle.
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # A thread; 128 threads each, 65,536 registers in all.


def matmul_reference(a, b, bias=None, activation=None):
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    product = jnp.matmul(a.astype(dtype), b.astype(dtype), precision="highest")
    product = product if bias is None else product + bias.astype(dtype)
    return _numerics.activation_fn("matmul_reference", activation)(product)


@dataclasses.dataclass(frozen=True)
class Config:
    tile_m: int = 128  # Rows of o a block.
    tile_n: int = 256  # Columns of o a block.
    num_stages: int = 4  # Slots of the ring.
    split_dim: int = 0  # The dimension of the tile that the two compute warpgroups share out: 0 for M, 1 for N.
    cluster_dim: int | None = None  # Two neighbouring tiles along it are a cluster's; they share what they both need.
    grid_minor_dim: int = 0  # The dimension of the tile grid along which the snake runs: 0 for M, 1 for N.
    grid_tile_width: int = 8  # Tiles, or clusters, across the snake.
    split_k: int = 1  # Parts of K that are summed apart, each by a block of its own.
    store_slots: int = 2  # Pieces of o that each compute warpgroup may have on their way out.
    # Whether to compute the transposed product, with b and a in each other's place, and transpose it on its way out:
    # all other fields are then of that product. A plain b whose N is no multiple of 64 needs no copy then.
    swapped: bool = False

    def __post_init__(self):
        if self.split_dim not in (0, 1):
            raise ValueError(f"{self.split_dim=}: a dimension is 0 or 1")
        rows, cols = self.compute_tile
        if rows % 64 or cols % 64 or min(rows, cols) < 64:
            raise ValueError(
                f"{self.tile_m=}, {self.tile_n=} must be multiples of 64, also when {self.split_dim=} has halved one "
                "of them (WGMMA's rows; columns of the 128-byte swizzle)"
            )
        if self.tile_m > 256 or self.tile_n > 256 or rows * cols > 64 * 256:
            raise ValueError(
                f"{self.tile_m=} x {self.tile_n=}: at most 256 each (TMA), and 64 x 256 values for each of two "
                "warpgroups: a larger accumulator spills their registers"
            )
        self.check()

    def check(self):
        if self.cluster_dim not in (None, 0, 1) or self.grid_minor_dim not in (0, 1):
            raise ValueError(f"{self.cluster_dim=}, {self.grid_minor_dim=}: a dimension is 0 or 1")
        if self.num_stages < 2 or min(self.split_k, self.grid_tile_width, self.store_slots) < 1:
            raise ValueError(
                f"{self.num_stages=} must be at least 2 (a slot is given back one step late), "
                f"{self.split_k=}, {self.grid_tile_width=} and {self.store_slots=} at least 1"
            )
        if self.smem_bytes > _mgpu.SMEM_BYTES_MAX:
            raise ValueError(
                f"{self.num_stages=} of {self.tile_m=}, {self.tile_n=} need {self.smem_bytes} bytes of shared memory, "
                f"and a block has {_mgpu.SMEM_BYTES_MAX}: fewer stages or smaller tiles"
            )

    @property
    def compute_tile(self) -> tuple[int, int]:
        """Rows and columns of o of one compute warpgroup."""
        return tuple(
            size // 2 if self.split_dim == dim else size for dim, size in enumerate((self.tile_m, self.tile_n))
        )

    @property
    def cluster_shape(self) -> tuple[int, int]:
        """Blocks of a cluster along M and N."""
        return tuple(2 if self.cluster_dim == dim else 1 for dim in (0, 1))

    @property
    def smem_bytes(self) -> int:
        """The ring, the pieces of o on their way out, and the barriers."""
        ring = self.num_stages * (self.tile_m + self.tile_n) * STEP_BYTES
        return ring + self.pieces_bytes + 16 * self.num_stages

    @property
    def pieces_bytes(self) -> int:
        if self.swapped and self.split_k > 1:  # Parts of sums go out of registers.
            return 0
        return COMPUTE * self.store_slots * STORE_ROWS * STORE_BYTES


def default_config(m: int, n: int, k: int, num_sms: int = 132) -> Config:
    """The configuration for an (m, k) by (k, n) product on `num_sms` SMs."""
    tiles = lambda tile_m, tile_n: pl.cdiv(m, tile_m) * pl.cdiv(n, tile_n)
    if tiles(128, 256) >= num_sms:
        return Config(cluster_dim=0 if m > 128 else None)
    if m <= 64:  # Half of the SMs load as fast as memory is.
        split_k = num_sms // (2 * tiles(64, 128))
        config = Config(tile_m=64, tile_n=128, num_stages=8, split_dim=1)
    elif m <= 128:
        split_k = num_sms // tiles(128, 64)
        config = Config(tile_n=64, num_stages=8)
    else:
        split_k = num_sms // tiles(128, 128)
        config = Config(tile_n=128, num_stages=6, grid_minor_dim=1)
    return dataclasses.replace(config, split_k=max(1, min(split_k, k // 1024)))


def _default(m: int, n: int, k: int, num_sms: int, b_is_cut: bool) -> Config:
    if b_is_cut and (config := default_config(n, m, k, num_sms)).tile_n == 256:
        return dataclasses.replace(config, swapped=True)
    return default_config(m, n, k, num_sms)


def configs(a, b, *, transpose_a=False, transpose_b=False, **_) -> list[Config]:
    """The configurations worth timing on these operands, for `cookbook.lab.autotune`."""
    (m, k), n = a.shape[:: -1 if transpose_a else 1], b.shape[0 if transpose_b else 1]
    found = candidates(Config, m, n, k)
    if not transpose_b and _is_cut(k, n):
        swapped = [dataclasses.replace(config, swapped=True) for config in candidates(Config, n, m, k)]
        found += [config for config in swapped if config.compute_tile[0] == 64 and config.split_k == 1]
    return found


def candidates(config_type, m: int, n: int, k: int, num_sms: int = 132) -> list:
    """Tiles of which o fills more than half, with the deepest ring, and orders of them; K split where tiles alone leave
    SMs idle."""
    found = []

    def add(*args):
        for num_stages in range(8, 1, -1):
            try:
                return found.append(config_type(*args[:2], num_stages, *args[2:]))
            except ValueError:  # It does not fit in shared memory.
                continue

    if pl.cdiv(m, 128) * pl.cdiv(n, 256) >= num_sms:
        for cluster_dim, minor_dim in itertools.product((None, 0), (0, 1)):
            add(256, 128, 0, cluster_dim, minor_dim, 8)
            for width in (4, 8, 16):
                add(128, 256, 0, cluster_dim, minor_dim, width)
        return found
    halved = (128, 256, 0), (128, 256, 1), (256, 128, 0), (128, 128, 0), (128, 64, 0), (64, 256, 1), (64, 128, 1)
    for tile_m, tile_n, split_dim in halved:
        idle = max(1, num_sms // (pl.cdiv(m, tile_m) * pl.cdiv(n, tile_n)))
        if tile_m > 64 and 2 * m <= tile_m:
            continue
        splits = {1, idle // 2, idle, 2 * idle} if idle > 1 else {1}
        for split_k in sorted({max(1, min(split, k // 256)) for split in splits}):
            for minor_dim in (0, 1) if split_k == 1 else (0,):
                add(tile_m, tile_n, split_dim, None, minor_dim, 8, split_k)
    return found


def _is_cut(k: int, n: int) -> bool:
    """Whether TMA has to cut off tiles of an operand whose rows run along N, or M."""
    return _mgpu.padded_shape((k, n), _mgpu.SWIZZLE_TILE) != (k, n)


def problem(a, b, *, transpose_a=False, transpose_b=False, **_) -> str:
    """What `cookbook.lab.autotune` calls the problem: the best configuration depends on nothing else."""
    return _tuned.problem_name(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel: sizes, what is fused, and which operand lies transposed.

    Where the config says `swapped`, a and b are each other, and so are M and N.
    """

    m: int
    n: int
    k: int
    dtypes: tuple[jnp.dtype, jnp.dtype]  # Of a and b.
    transpose_a: bool
    transpose_b: bool
    activation: object
    out_dtype: jnp.dtype
    config: Config
    interpreted: bool

    @property
    def tile_k(self) -> int:
        """Values of K a step."""
        return STEP_BYTES // self.dtypes[0].itemsize

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of o, in clusters, along M and N."""
        c = self.config
        return pl.cdiv(self.m, c.tile_m * c.cluster_shape[0]), pl.cdiv(self.n, c.tile_n * c.cluster_shape[1])

    @property
    def num_tiles(self) -> int:
        return self.grid[0] * self.grid[1] * self.config.split_k

    @property
    def num_steps(self) -> int:
        """Of each tile. All parts of K have as many: beyond K lie zeros."""
        return pl.cdiv(pl.cdiv(self.k, self.tile_k), self.config.split_k)

    def blocks(self, num_sms: int) -> int:
        """Clusters that run at the same time, one block on each SM."""
        return min(num_sms // (1 if self.config.cluster_dim is None else 2), self.num_tiles)

    def tiles_of_block(self):
        """How many tiles this block computes."""
        clusters = lax.axis_size("cluster_id")
        return lax.div(self.num_tiles - lax.axis_index("cluster_id") + clusters - 1, clusters)

    def slot(self, tile, step):
        """(slot, whether it has been filled before) of a step of this block's `tile`."""
        count = tile * self.num_steps + step
        return lax.rem(count, self.config.num_stages), count >= self.config.num_stages

    def tile_index(self, tile):
        """(part of K, row, column) of this block's `tile`, among all tiles."""
        c = self.config
        index = lax.axis_index("cluster_id") + tile * lax.axis_size("cluster_id")
        tiles_of_part = self.grid[0] * self.grid[1]
        mi, ni = plgpu.planar_snake(lax.rem(index, tiles_of_part), self.grid, c.grid_minor_dim, c.grid_tile_width)
        if c.cluster_dim == 0:
            mi = 2 * mi + lax.axis_index("block")
        elif c.cluster_dim == 1:
            ni = 2 * ni + lax.axis_index("block")
        return lax.div(index, tiles_of_part), mi, ni

    def place(self, tile):
        """(part of K, row, column) of what this compute warpgroup computes of this block's `tile`."""
        (part, mi, ni), c, role = self.tile_index(tile), self.config, lax.axis_index("role")
        m, n = (role * size if c.split_dim == dim else 0 for dim, size in enumerate(c.compute_tile))
        return part, mi * c.tile_m + m, ni * c.tile_n + n

    @property
    def a_tile(self) -> tuple[int, int]:
        """Rows and columns of a's tile of a step, as it lies."""
        return (self.tile_k, self.config.tile_m) if self.transpose_a else (self.config.tile_m, self.tile_k)

    @property
    def b_tile(self) -> tuple[int, int]:
        return (self.config.tile_n, self.tile_k) if self.transpose_b else (self.tile_k, self.config.tile_n)

    @property
    def a_piece(self) -> tuple[int, int] | None:
        """Rows and columns of what TMA copies at once of a's tile; None for all of it.

        Tensor cores read tiles of 8 rows by 128 bytes. TMA writes them so, but whole ones alone. What it has to cut
        off at the edge of an array it takes for rows of 128 bytes, which lie the same if the piece is no wider.
        """
        cols = STEP_BYTES // self.dtypes[0].itemsize
        if not self.transpose_a:
            return self.a_tile[0], cols
        return (self.tile_k, cols) if _is_cut(self.k, self.m) and self.config.compute_tile[0] == cols else None

    @property
    def b_piece(self) -> tuple[int, int] | None:
        return (self.b_tile[0], STEP_BYTES // self.dtypes[1].itemsize) if self.transpose_b else None

    def padded(self, a, b):
        """The operands as TMA takes them: with whole tiles of the swizzle, if it copies no pieces."""
        pad = lambda x, piece: x if piece else _mgpu.pad_to_tiles(x, _mgpu.SWIZZLE_TILE)
        return pad(a, self.a_piece), pad(b, self.b_piece)

    @property
    def in_parts(self) -> bool:
        """Whether the kernel returns float32 sums, to be added and finished after it."""
        return self.config.split_k > 1 or (self.config.swapped and self.out_dtype.itemsize == 4)

    @property
    def store_piece(self) -> tuple[int, int]:
        """Rows and columns of a piece of what this kernel computes, on its way out."""
        if self.config.swapped:
            return STORE_ROWS, min(self.config.tile_n, 64)
        return STORE_ROWS, STORE_BYTES // self.out_dtype.itemsize

    def tiles(self, shape, dtype, piece, swizzle: int = STEP_BYTES):
        """Shared memory for tiles as tensor cores read them, in pieces; and, if there are any, as TMA writes them.

        The interpreter takes two descriptions for two memories, and cuts off everything: it gets the first alone.
        """
        if piece is not None:
            shape = (*shape[:-2], shape[-2] // piece[0], shape[-1] // piece[1], *piece)
        tile, swizzle = (8, swizzle // jnp.dtype(dtype).itemsize), plgpu.SwizzleTransform(swizzle)
        tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), swizzle))
        if piece is None or self.interpreted:
            return tiled
        return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))

    def views(self, smem, piece):
        """(as tensor cores, as TMA sees it) of what `tiles` described."""
        return (smem, smem) if piece is None or self.interpreted else tuple(smem)

    @property
    def scratch(self) -> dict:
        c = self.config
        freed = plgpu.Barrier
        if c.cluster_dim is not None:
            freed = functools.partial(plgpu.ClusterBarrier, collective_axes=("block",))
        scratch = dict(
            a_smem=self.tiles((c.num_stages, *self.a_tile), self.dtypes[0], self.a_piece),
            b_smem=self.tiles((c.num_stages, *self.b_tile), self.dtypes[1], self.b_piece),
            filled=plgpu.Barrier(
                num_arrivals=len(_pieces(self.a_tile, self.a_piece)) + len(_pieces(self.b_tile, self.b_piece)),
                num_barriers=c.num_stages,
            ),
            freed=freed(num_arrivals=COMPUTE, num_barriers=c.num_stages),
        )
        if not self.writes_directly:
            piece = self.store_piece[:: -1 if c.swapped else 1]
            scratch["o_smem"] = self.tiles((COMPUTE, c.store_slots, *piece), self.out_dtype, piece)
        return scratch

    @property
    def writes_directly(self) -> bool:
        """Whether sums go to o from registers: transposed ones of 32 bits cannot be transposed on their way."""
        return self.config.swapped and self.in_parts

    def halves(self, a, b):
        """What this compute warpgroup multiplies of a slot's tiles, as WGMMA takes it."""
        (rows, cols), role, dim = self.config.compute_tile, lax.axis_index("role"), self.config.split_dim
        m = pl.ds(role * rows, rows) if dim == 0 else slice(None)
        n = pl.ds(role * cols, cols) if dim == 1 else slice(None)
        if not self.transpose_a:
            a = a.at[0, 0, m]
        elif self.a_piece is None:
            a = a.at[:, m].T
        else:  # A piece for each warpgroup, or one for both.
            a = a.at[0, role if dim == 0 else 0].T
        return a, b.at[0, 0, n].T if self.transpose_b else b.at[:, n]


def _kernel(a_gmem, b_gmem, fused, o_gmem, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem=None):
    (a_smem, a_tma), (b_smem, b_tma) = plan.views(a_smem, plan.a_piece), plan.views(b_smem, plan.b_piece)

    def operands(tile, step):
        slot, _ = plan.slot(tile, step)
        plgpu.barrier_wait(filled.at[slot])
        return plan.halves(a_smem.at[slot], b_smem.at[slot])

    def release(tile, step):
        plgpu.barrier_arrive(freed.at[plan.slot(tile, step)[0]])

    @pl.when(lax.axis_index("role") == MEMORY)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        load_tiles(plan, a_gmem, b_gmem, a_tma, b_tma, filled, freed)

    @pl.when(lax.axis_index("role") < COMPUTE)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        compute_tiles(plan, operands, release, fused, o_gmem, o_smem)


def load_tiles(plan: Plan, a_gmem, b_gmem, a_smem, b_smem, filled, freed):
    """The memory warpgroup: all steps of all tiles of this block, as fast as slots are given back."""
    tiles = plan.tiles_of_block()

    @pl.loop(0, tiles)
    def _(tile):
        index = plan.tile_index(tile)

        @pl.loop(0, plan.num_steps)
        def _(step):
            slot, used = plan.slot(tile, step)
            pl.when(used)(lambda: plgpu.barrier_wait(freed.at[slot]))
            load_step(plan, index, step, a_gmem, b_gmem, *(x.at[slot] for x in (a_smem, b_smem, filled)))

    # No block leaves while another of its cluster may still arrive at its barriers.
    steps, slots = tiles * plan.num_steps, plan.config.num_stages
    pl.loop(lax.max(steps - slots, 0), steps)(lambda count: plgpu.barrier_wait(freed.at[lax.rem(count, slots)]))


def load_step(plan: Plan, index, step, a_gmem, b_gmem, a_smem, b_smem, filled):
    """Starts the copies of a step of the tile at `index` into a slot."""
    (part, mi, ni), c = index, plan.config
    m, n, k = mi * c.tile_m, ni * c.tile_n, (part * plan.num_steps + step) * plan.tile_k
    a_at, b_at = (k, m) if plan.transpose_a else (m, k), (n, k) if plan.transpose_b else (k, n)
    with jax.named_scope("load"):
        _copy(a_gmem, a_at, a_smem, filled, plan.a_tile, plan.a_piece, shared=c.cluster_dim == 1)
        _copy(b_gmem, b_at, b_smem, filled, plan.b_tile, plan.b_piece, shared=c.cluster_dim == 0)


def _pieces(tile, piece) -> list[tuple[int, int]]:
    """Row and column of each of the pieces of a tile, counted in pieces."""
    rows, cols = piece or tile
    return list(itertools.product(range(tile[0] // rows), range(tile[1] // cols)))


def _copy(gmem, at, smem, filled, tile, piece, shared: bool):
    """Starts the copies of the tile of `gmem` that begins at `at`; its cluster does it together if it is `shared`."""
    rows, cols = piece or tile
    for i, j in _pieces(tile, piece):
        source = gmem.at[pl.ds(at[0] + i * rows, rows), pl.ds(at[1] + j * cols, cols)]
        target = smem if piece is None else smem.at[i, j]
        plgpu.copy_gmem_to_smem(source, target, filled, collective_axes="block" if shared else None)


def compute_tiles(plan: Plan, operands, release, fused, o_gmem, o_smem):
    """A compute warpgroup: its half of all tiles of this block.

    `operands(tile, step)` waits for the operands of a step and returns them; `release(tile, step)` tells that their
    product has ended.
    """

    def multiply(tile, acc):
        @pl.loop(0, plan.num_steps)
        def _(step):
            a, b = operands(tile, step)
            with jax.named_scope("wgmma"):
                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(1)  # The product before has ended.
            pl.when(step > 0)(lambda: release(tile, step - 1))

        values = acc[...]  # Waits for the last product.
        release(tile, plan.num_steps - 1)
        return values

    @pl.loop(0, plan.tiles_of_block())
    def _(tile):
        place = plan.place(tile)
        values = pl.run_scoped(functools.partial(multiply, tile), plgpu.ACC(plan.config.compute_tile, jnp.float32))
        with jax.named_scope("store"):
            store(plan, place, values, fused, o_gmem, o_smem)

    plgpu.wait_smem_to_gmem(0)


def store(plan: Plan, place, values, fused, o_gmem, o_smem):
    """Sends `values`, this warpgroup's part of a tile, to its `place` in o, some pieces at a time."""
    part, m, n = place
    if plan.config.split_k > 1:
        o_gmem = o_gmem.at[part]
    role, (height, width), slots = lax.axis_index("role"), plan.store_piece, plan.config.store_slots
    if plan.writes_directly:
        o_part = o_gmem.at[pl.ds(n, values.shape[1]), pl.ds(m, values.shape[0])].T
        _mgpu.store(o_part, plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED))
        return
    o_tiled, o_smem = plan.views(o_smem, plan.store_piece)
    pieces = [(i, j) for i in range(0, values.shape[0], height) for j in range(0, values.shape[1], width)]
    vectors = {(i, j): _load_vectors(plan, fused, m + i, n + j) for i, j in pieces}  # All are under way at once.
    for first in range(0, len(pieces), slots):
        at_once = list(enumerate(pieces[first : first + slots]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # TMA has read the pieces before.
        for slot, (i, j) in at_once:
            piece = _scale_and_shift(values[i : i + height, j : j + width], vectors[i, j])
            piece, target = plan.activation(piece).astype(plan.out_dtype), o_tiled.at[role, slot, 0, 0]
            if plan.config.swapped:
                piece, target = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED), target.T
            target[...] = piece
        plgpu.commit_smem()
        for slot, (i, j) in at_once:
            rows, cols = pl.ds(m + i, height), pl.ds(n + j, width)
            o_piece = o_gmem.at[cols, rows] if plan.config.swapped else o_gmem.at[rows, cols]
            plgpu.copy_smem_to_gmem(o_smem.at[role, slot, 0, 0], o_piece)


def _load_vectors(plan: Plan, fused, m, n) -> dict:
    """What is fused with the piece at row `m` and column `n` of what this kernel computes."""

    def load(name: str):
        if name == "scale":
            return fused[name][0]
        axis = (0 if name == "row_scale" else 1) ^ plan.config.swapped
        start, layout = (m, n)[axis], plgpu.Layout.WGMMA.reduce(1 - axis)
        values = plgpu.load(fused[name].at[pl.ds(start, plan.store_piece[axis])], layout=layout, optimized=False)
        return lax.broadcast_in_dim(values, plan.store_piece, [axis])

    return {name: load(name) for name in fused}


def _scale_and_shift(product, fused: dict):
    for name in ("scale", "row_scale", "col_scale"):
        product = product * fused[name] if name in fused else product
    return product + fused["bias"] if "bias" in fused else product


@functools.partial(jax.jit, static_argnames=("plan", "num_sms", "params", "kernel"))
def fused_product(a, b, vectors: dict, *, plan: Plan, num_sms: int, params, kernel=_kernel):
    """`activation(a @ b * scale * row_scale * col_scale + bias)`, where `vectors` holds float32 "scale" (1,),
    "row_scale" (M,), "col_scale" (N,) and "bias" (N,), or some of them."""
    c = plan.config
    a, b = plan.padded(a, b)
    tile_m, tile_n = c.tile_m * c.cluster_shape[0], c.tile_n * c.cluster_shape[1]
    if plan.in_parts:  # What is fused comes after the sum.
        kernel_plan = dataclasses.replace(plan, activation=identity, out_dtype=jnp.dtype(jnp.float32))
        fused = {}
    else:
        piece = jax.ShapeDtypeStruct((STORE_ROWS * plan.store_piece[1],), jnp.float32)
        kernel_plan = dataclasses.replace(plan, activation=_numerics.lowerable(plan.activation, piece))
        tiles = dict(scale=1, row_scale=tile_m, col_scale=tile_n, bias=tile_n)
        if c.swapped:
            tiles |= dict(row_scale=tile_n, col_scale=tile_m, bias=tile_m)
        fused = {name: _mgpu.pad_to_tiles(vector, (tiles[name],)) for name, vector in vectors.items()}
    shape = (plan.n, plan.m) if c.swapped else (plan.m, plan.n)
    # What is written directly is not cut off; a row of o is a multiple of 16 bytes too.
    shape = _mgpu.padded_shape(shape, (tile_n, tile_m) if plan.writes_directly else (1, 8))
    cluster = {} if c.cluster_dim is None else dict(cluster=(2,), cluster_names=("block",))
    out = plgpu.kernel(
        functools.partial(kernel, plan=kernel_plan),
        out_type=jax.ShapeDtypeStruct(shape if c.split_k == 1 else (c.split_k, *shape), kernel_plan.out_dtype),
        grid=(plan.blocks(num_sms),),
        grid_names=("cluster_id",),
        num_threads=COMPUTE + 1,
        thread_name="role",
        scratch_types=kernel_plan.scratch,
        compiler_params=params,
        **cluster,
    )(a, b, fused)
    m, n = (plan.n, plan.m) if c.swapped else (plan.m, plan.n)
    if not plan.in_parts:
        return out[:m, :n]
    total = out if c.split_k == 1 else functools.reduce(jnp.add, out)  # One part after the other, in every run.
    total = total[:m, :n]
    columns = {name: v[:, None] if name == "row_scale" else v for name, v in vectors.items()}
    total = _scale_and_shift(total, columns)
    return plan.activation(total).astype(plan.out_dtype)


def identity(x):
    return x


@dataclasses.dataclass(frozen=True)
class Options:
    """What `matmul` was asked for, beside its arrays."""

    transpose_a: bool
    transpose_b: bool
    activation: object
    out_dtype: jnp.dtype
    config: Config | None


def _forward(a, b, bias, options: Options):
    m, n, k = _mgpu.matmul_sizes("matmul", a, b, options.transpose_a, options.transpose_b)
    activation = options.activation
    if 0 in (m, n):
        return jnp.zeros((m, n), options.out_dtype)
    if k == 0:
        product = jnp.zeros((m, n), jnp.float32) + (0.0 if bias is None else bias.astype(jnp.float32))
        return activation(product).astype(options.out_dtype)
    target = _mgpu.require_target("matmul")
    how = dict(transpose_a=options.transpose_a, transpose_b=options.transpose_b)
    config = options.config or _tuned.tuned("matmul", target.name, problem(a, b, **how), Config)
    config = config or _default(m, n, k, target.num_sms, not options.transpose_b and _is_cut(k, n))
    transpose_a, transpose_b = options.transpose_a, options.transpose_b
    if config.swapped:
        a, b, m, n, transpose_a, transpose_b = b, a, n, m, not transpose_b, not transpose_a
    plan = Plan(
        m, n, k, (a.dtype, b.dtype), transpose_a, transpose_b, activation, options.out_dtype, config,
        interpreted=target.interpreted,
    )  # fmt: skip
    params = _mgpu.compiler_params(approx_math=options.out_dtype.itemsize == 2)
    vectors = {} if bias is None else dict(bias=bias.astype(jnp.float32))
    return fused_product(a, b, vectors, plan=plan, num_sms=target.num_sms, params=params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _matmul(a, b, bias, options: Options):
    return _forward(a, b, bias, options)


def _matmul_fwd(a, b, bias, options: Options):
    if options.activation is identity:
        return _forward(a, b, bias, options), (a, b, bias, None)
    # The backward pass needs what the activation was applied to, so that it is not fused here.
    before = _forward(a, b, bias, dataclasses.replace(options, activation=identity, out_dtype=jnp.dtype(jnp.float32)))
    return options.activation(before).astype(options.out_dtype), (a, b, bias, before)


def _matmul_bwd(options: Options, residuals, d_out):
    a, b, bias, before = residuals
    d_out = d_out.astype(jnp.float32)
    if before is not None:
        (d_out,) = jax.vjp(options.activation, before)[1](d_out)
    d_bias = None if bias is None else jnp.sum(d_out, axis=0).astype(bias.dtype)
    d = d_out.astype(a.dtype)
    n = d.shape[1]
    if n % 8:  # b is (N, K): rows of d are no multiple of 16 bytes, and it has to be padded along N.
        d, b_n = jnp.pad(d, ((0, 0), (0, -n % 8))), jnp.pad(b, ((0, -n % 8), (0, 0)))
    else:
        b_n = b
    ta, tb = options.transpose_a, options.transpose_b
    product = functools.partial(matmul, out_dtype=a.dtype)
    if ta:
        d_a = product(b_n, d, transpose_a=tb, transpose_b=True)
    else:
        d_a = product(d, b_n, transpose_b=not tb)
    if tb:
        d_b = product(d, a, transpose_a=True, transpose_b=ta)[:n]
    else:
        d_b = product(a, d, transpose_a=not ta)
    return d_a, d_b, d_bias


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def matmul(
    a, b, *, bias=None, activation=None, out_dtype=None, transpose_a=False, transpose_b=False,
    config: Config | None = None,
):  # fmt: skip
    """`activation(a @ b + bias)`, with float32 sums, rounded once; the same to the bit in every run.

    Differentiable in a, b and bias: gradients are products by the same kernel, of the gradient of o rounded to the
    dtype of a. Under differentiation an activation is applied after the kernel, to float32 sums that are kept.

    Args:
      a: (M, K), or (K, M) with `transpose_a`; bfloat16 or float16.
      b: (K, N), or (N, K) with `transpose_b`; of the dtype of `a`.
      bias: (N,), of a floating dtype; or None.
      activation: "relu", "gelu" (the tanh form), "silu", an element-wise function, or None.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `a`.
      transpose_a, transpose_b: the operand is given transposed, and is read as it lies: no transposed copy is made.
      config: tiles, stages, cluster and order; None chooses by shape.

    Returns:
      (M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype, row length or activation is not supported; RuntimeError: no GPU.
    """
    out_dtype = jnp.dtype(out_dtype or a.dtype)
    _mgpu.require_float("matmul", out_dtype)
    _, n, _ = _mgpu.matmul_sizes("matmul", a, b, transpose_a, transpose_b)
    if bias is not None and (bias.shape != (n,) or not jnp.issubdtype(bias.dtype, jnp.floating)):
        raise ValueError(f"cookbook.matmul: {bias.shape=}, {bias.dtype=}; must be ({n},), N, of a floating dtype")
    activation = identity if activation is None else _numerics.activation_fn("matmul", activation)
    return _matmul(a, b, bias, Options(transpose_a, transpose_b, activation, out_dtype, config))


matmul.Config = Config  # `cookbook.matmul` is this function, not its module.


def flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """Each operand read once and the result written once, all of `itemsize` bytes."""
    return itemsize * (m * k + k * n + m * n)
