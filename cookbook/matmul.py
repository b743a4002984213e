"""Matrix product: warp-specialized and persistent, its operands shared in clusters, its results stored meanwhile.

    o = activation(a @ b + bias)

Shapes: a (M, K), b (K, N), bias (N,), o (M, N); with `transpose_a` a is (K, M), with `transpose_b` b is (N, K), read as
they lie. a and b are both bfloat16 or both float16; sums are float32; o is bfloat16, float16 or float32. Rows of a and
b must be multiples of 16 bytes, which TMA asks for.

Role table: one block a SM, which computes tile after tile of o; three warpgroups.

    memory     one, with few registers: starts the TMA copies of each step of K into the next slot of the ring. It runs
               ahead, into the next tile, while the others compute or store
    compute    two, with the others' registers: each multiplies its half of the tile, then rounds it into shared memory,
               64 rows by 128 bytes at a time, from where TMA copies it to o while the next tile is multiplied

Barrier table:

    barrier       arrivals                              who waits
    filled[slot]  2: the copies of a's and b's tile     both compute warpgroups, before they read the slot
    freed[slot]   the compute warpgroups of all blocks  the memory warpgroup, before it refills the slot
                  of the cluster                        (multicast writes the slots of the whole cluster)

WGMMA is asynchronous: a slot is given back one step later, when `wgmma_wait(1)` has told that its product has ended.

What bounds its speed: the tensor cores, and the power that they may draw. Tiles are visited in a snake, for the L2
cache. Two blocks of a cluster share the operand that they have in common: each loads half of it for both. A small o
with a long K is split over K: each part sums its own, and the parts are added in a fixed order.

Not supported: batches (use `jax.vmap`), other dtypes. An operand whose rows run along M or N (a transposed a, a plain
b) is padded, at the cost of one copy, unless they are multiples of 64 values and its K is one of 8. Not timed on a
GPU yet, and so not in the package's index. Sources: CUTLASS's documents on warp-specialized persistent kernels, for the
ideas; Osama et al., "Stream-K" (2023), on sharing out K.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import _jnp, _mgpu, _tuned

COMPUTE, MEMORY = 2, 2  # Compute warpgroups, and the index of the memory warpgroup, which follows them.
STEP_BYTES = 128  # Of each row along K, a step: the widest swizzle.
STORE_ROWS, STORE_BYTES = 64, 128  # Of a piece of o on its way out: rows of one WGMMA, the widest swizzle.
STORE_SLOTS = 2  # Pieces that each compute warpgroup may have under way.
PIECES_BYTES = COMPUTE * STORE_SLOTS * STORE_ROWS * STORE_BYTES
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # A thread; 128 threads each, 65,536 registers in all.


def matmul_reference(a, b, bias=None, activation=None):
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    product = jnp.matmul(a.astype(dtype), b.astype(dtype), precision="highest")
    product = product if bias is None else product + bias.astype(dtype)
    return _jnp.activation_fn("matmul_reference", activation)(product)


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

    def __post_init__(self):
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
        if self.split_dim not in (0, 1) or self.cluster_dim not in (None, 0, 1) or self.grid_minor_dim not in (0, 1):
            raise ValueError(f"{self.split_dim=}, {self.cluster_dim=}, {self.grid_minor_dim=}: a dimension is 0 or 1")
        if self.num_stages < 2 or self.split_k < 1 or self.grid_tile_width < 1:
            raise ValueError(
                f"{self.num_stages=} must be at least 2 (a slot is given back one step late), "
                f"{self.split_k=} and {self.grid_tile_width=} at least 1"
            )
        if self.smem_bytes > _mgpu.SMEM_BYTES_MAX:
            raise ValueError(
                f"{self.num_stages=} of {self.tile_m=}, {self.tile_n=} need {self.smem_bytes} bytes of shared memory, "
                f"and a block has {_mgpu.SMEM_BYTES_MAX}: fewer stages or smaller tiles"
            )

    @property
    def compute_tile(self) -> tuple[int, int]:
        """Rows and columns of o of one compute warpgroup."""
        return (self.tile_m // 2, self.tile_n) if self.split_dim == 0 else (self.tile_m, self.tile_n // 2)

    @property
    def cluster_shape(self) -> tuple[int, int]:
        """Blocks of a cluster along M and N."""
        return tuple(2 if self.cluster_dim == dim else 1 for dim in (0, 1))

    @property
    def smem_bytes(self) -> int:
        """The ring, the pieces of o on their way out, and the barriers."""
        ring = self.num_stages * (self.tile_m + self.tile_n) * STEP_BYTES
        return ring + PIECES_BYTES + 16 * self.num_stages


def default_config(m: int, n: int, k: int, num_sms: int = 132) -> Config:
    """The configuration for an (m, k) by (k, n) product on `num_sms` SMs."""
    tiles = lambda tile_m, tile_n: pl.cdiv(m, tile_m) * pl.cdiv(n, tile_n)
    if tiles(128, 256) >= num_sms:
        return Config(cluster_dim=0 if m > 128 else None)
    if tiles(128, 128) >= num_sms or m > 64:
        config = Config(tile_n=128, num_stages=6)
    else:
        config = Config(tile_m=64, tile_n=128, num_stages=8, split_dim=1)
    idle = num_sms // tiles(config.tile_m, config.tile_n)
    return dataclasses.replace(config, split_k=max(1, min(idle, k // 1024)))


def configs(a, b, *, transpose_a=False, transpose_b=False, **_) -> list[Config]:
    """The configurations worth timing on these operands, for `cookbook.lab.autotune`."""
    (m, k), n = a.shape[:: -1 if transpose_a else 1], b.shape[0 if transpose_b else 1]
    return candidates(Config, m, n, k)


def candidates(config_type, m: int, n: int, k: int, num_sms: int = 132) -> list:
    """Every tile of which o fills more than half, with the deepest ring; every order and cluster; K split where tiles
    alone leave SMs idle."""
    found = []
    for tile_m, tile_n in ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128)):
        tiles = pl.cdiv(m, tile_m) * pl.cdiv(n, tile_n)
        idle = max(1, num_sms // tiles)
        splits = [split for split in sorted({1, idle, max(1, idle // 2), 2 * idle}) if split <= max(1, k // 256)]
        widths = (4, 8, 16) if tiles > 2 * num_sms else (8,)
        if tile_m > 64 and 2 * m <= tile_m:
            continue
        for split_dim, cluster_dim, minor_dim, width, split_k in itertools.product(
            (0, 1), (None, 0, 1), (0, 1), widths, splits if tiles < num_sms else (1,)
        ):
            for num_stages in range(8, 1, -1):
                try:
                    found.append(
                        config_type(tile_m, tile_n, num_stages, split_dim, cluster_dim, minor_dim, width, split_k)
                    )
                    break
                except ValueError:  # It does not fit in shared memory, or its halves are too small.
                    continue
    return found


def problem(a, b, *, transpose_a=False, transpose_b=False, **_) -> str:
    """What `cookbook.lab.autotune` calls the problem: the best configuration depends on nothing else."""
    return _tuned.problem_name(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel: sizes, what is fused, and which operand lies transposed."""

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
    def a_is_narrow(self) -> bool:
        """Whether a row of a's tile is the 128 bytes of a step of K."""
        return not self.transpose_a

    @property
    def b_is_narrow(self) -> bool:
        return self.transpose_b

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
        return min(num_sms // (2 if self.config.cluster_dim is not None else 1), self.num_tiles)

    def tiles_of_block(self):
        """How many tiles this block computes."""
        clusters = lax.axis_size("cluster_id")
        return lax.div(self.num_tiles - lax.axis_index("cluster_id") + clusters - 1, clusters)

    def tile(self, step):
        """(part of K, row, column) of the tile that this block computes in its `step`."""
        c = self.config
        index = lax.axis_index("cluster_id") + step * lax.axis_size("cluster_id")
        tiles_of_part = self.grid[0] * self.grid[1]
        mi, ni = plgpu.planar_snake(lax.rem(index, tiles_of_part), self.grid, c.grid_minor_dim, c.grid_tile_width)
        if c.cluster_dim == 0:
            mi = 2 * mi + lax.axis_index("block")
        elif c.cluster_dim == 1:
            ni = 2 * ni + lax.axis_index("block")
        return lax.div(index, tiles_of_part), mi, ni

    @property
    def store_cols(self) -> int:
        return STORE_BYTES // self.out_dtype.itemsize

    def narrow(self, shape, dtype):
        """Shared memory for tiles whose rows are 128 bytes: as the tensor core reads it, and as TMA writes it.

        Such a tile lies the same way swizzled, and tiled by 8 rows and swizzled. TMA cuts the first off at the edges of
        an array of any size, of the second it moves whole tiles only. The interpreter takes the two for different
        memory, and cuts off everything: it gets the same one twice.
        """
        tile, swizzle = (8, STORE_BYTES // jnp.dtype(dtype).itemsize), plgpu.SwizzleTransform(STORE_BYTES)
        tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), swizzle))
        return tiled if self.interpreted else plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))

    def views(self, smem, narrow: bool = True):
        """(as warpgroups and tensor cores see it, as TMA does) of shared memory that is `narrow`, or plain."""
        return tuple(smem) if narrow and not self.interpreted else (smem, smem)

    def padded(self, a, b):
        """The operands as TMA takes them: tiles that are not narrow are moved in whole tiles of the swizzle."""
        pad = lambda x, narrow: x if narrow else _mgpu.pad_to_tiles(x, _mgpu.SWIZZLE_TILE)
        return pad(a, self.a_is_narrow), pad(b, self.b_is_narrow)

    @property
    def scratch(self) -> dict:
        c = self.config
        a_tile = (self.tile_k, c.tile_m) if self.transpose_a else (c.tile_m, self.tile_k)
        b_tile = (c.tile_n, self.tile_k) if self.transpose_b else (self.tile_k, c.tile_n)
        ring = lambda narrow, tile, dtype: (self.narrow if narrow else plgpu.SMEM)((c.num_stages, *tile), dtype)
        in_cluster = {} if c.cluster_dim is None else dict(collective_axes=("block",))
        return dict(
            a_smem=ring(self.a_is_narrow, a_tile, self.dtypes[0]),
            b_smem=ring(self.b_is_narrow, b_tile, self.dtypes[1]),
            o_smem=self.narrow((COMPUTE, STORE_SLOTS, STORE_ROWS, self.store_cols), self.out_dtype),
            filled=plgpu.Barrier(num_arrivals=2, num_barriers=c.num_stages),
            freed=(plgpu.ClusterBarrier if in_cluster else plgpu.Barrier)(
                num_arrivals=COMPUTE, num_barriers=c.num_stages, **in_cluster
            ),
        )

    def halves(self, a, b):
        """What this compute warpgroup multiplies of a slot's tiles, as WGMMA takes it."""
        rows, cols = self.config.compute_tile
        m = pl.ds(lax.axis_index("role") * rows, rows) if self.config.split_dim == 0 else slice(None)
        n = pl.ds(lax.axis_index("role") * cols, cols) if self.config.split_dim == 1 else slice(None)
        return a.at[:, m].T if self.transpose_a else a.at[m], b.at[n].T if self.transpose_b else b.at[:, n]


def _kernel(a_gmem, b_gmem, fused, o_gmem, *, plan: Plan, a_smem, b_smem, o_smem, filled, freed):
    c = plan.config
    (a_smem, a_tma), (b_smem, b_tma) = plan.views(a_smem, plan.a_is_narrow), plan.views(b_smem, plan.b_is_narrow)
    slot = lambda count: lax.rem(count, c.num_stages)

    def operands(count):
        plgpu.barrier_wait(filled.at[slot(count)])
        return plan.halves(a_smem.at[slot(count)], b_smem.at[slot(count)])

    @pl.when(lax.axis_index("role") == MEMORY)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        load_tiles(plan, a_gmem, b_gmem, a_tma, b_tma, filled, freed)

    @pl.when(lax.axis_index("role") < COMPUTE)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        release = lambda count: plgpu.barrier_arrive(freed.at[slot(count)])
        compute_tiles(plan, operands, release, fused, o_gmem, o_smem)


def load_tiles(plan: Plan, a_gmem, b_gmem, a_smem, b_smem, filled, freed):
    """The memory warpgroup: all steps of all tiles of this block, as fast as slots are given back."""
    slot = lambda count: lax.rem(count, plan.config.num_stages)

    @pl.loop(0, plan.tiles_of_block())
    def _(tile):
        place = plan.tile(tile)

        @pl.loop(0, plan.num_steps)
        def _(step):
            count = tile * plan.num_steps + step
            pl.when(count >= plan.config.num_stages)(lambda: plgpu.barrier_wait(freed.at[slot(count)]))
            load_step(plan, place, step, a_gmem, b_gmem, *(x.at[slot(count)] for x in (a_smem, b_smem, filled)))

    # No block leaves while another of its cluster may still arrive at its barriers.
    last = plan.tiles_of_block() * plan.num_steps
    pl.loop(lax.max(last - plan.config.num_stages, 0), last)(lambda count: plgpu.barrier_wait(freed.at[slot(count)]))


def load_step(plan: Plan, place, step, a_gmem, b_gmem, a_smem, b_smem, filled):
    """Starts the copies of a step of the tile at `place` into a slot."""
    (part, mi, ni), c = place, plan.config
    rows, cols = pl.ds(mi * c.tile_m, c.tile_m), pl.ds(ni * c.tile_n, c.tile_n)
    ks = pl.ds((part * plan.num_steps + step) * plan.tile_k, plan.tile_k)
    a_tile = a_gmem.at[ks, rows] if plan.transpose_a else a_gmem.at[rows, ks]
    b_tile = b_gmem.at[cols, ks] if plan.transpose_b else b_gmem.at[ks, cols]
    with jax.named_scope("load"):
        plgpu.copy_gmem_to_smem(a_tile, a_smem, filled, collective_axes="block" if c.cluster_dim == 1 else None)
        plgpu.copy_gmem_to_smem(b_tile, b_smem, filled, collective_axes="block" if c.cluster_dim == 0 else None)


def compute_tiles(plan: Plan, operands, release, fused, o_gmem, o_smem):
    """A compute warpgroup: its half of all tiles of this block.

    `operands(count)` waits for the operands of a step, counted through all tiles, and returns them; `release(count)`
    tells that their product has ended.
    """
    c, role = plan.config, lax.axis_index("role")
    rows, cols = c.compute_tile

    def multiply(tile, acc):
        first = tile * plan.num_steps

        @pl.loop(0, plan.num_steps)
        def _(step):
            a, b = operands(first + step)
            with jax.named_scope("wgmma"):
                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(1)  # The product before has ended.
            pl.when(step > 0)(lambda: release(first + step - 1))

        values = acc[...]  # Waits for the last product.
        release(first + plan.num_steps - 1)
        return values

    @pl.loop(0, plan.tiles_of_block())
    def _(tile):
        part, mi, ni = plan.tile(tile)
        values = pl.run_scoped(functools.partial(multiply, tile), plgpu.ACC((rows, cols), jnp.float32))
        m = mi * c.tile_m + (role * rows if c.split_dim == 0 else 0)
        n = ni * c.tile_n + (role * cols if c.split_dim == 1 else 0)
        with jax.named_scope("store"):
            _store(plan, tile, values, fused, o_gmem if c.split_k == 1 else o_gmem.at[part], m, n, o_smem, role)

    plgpu.wait_smem_to_gmem(0)


def _store(plan: Plan, tile, values, fused, o_gmem, m, n, o_smem, role):
    """Sends `values`, the warpgroup's half of a tile, to o at row `m` and column `n`, piece by piece."""
    o_tiled, o_smem = plan.views(o_smem)
    pieces = [(i, j) for i in range(0, values.shape[0], STORE_ROWS) for j in range(0, values.shape[1], plan.store_cols)]
    for index, (i, j) in enumerate(pieces):
        # Slots are taken in turn, from tile to tile.
        slot = index if len(pieces) % STORE_SLOTS == 0 else tile * len(pieces) + index
        slot = lax.rem(jnp.int32(slot), jnp.int32(STORE_SLOTS))
        piece = values[i : i + STORE_ROWS, j : j + plan.store_cols]
        piece = plan.activation(_scale_and_shift(piece, fused, m + i, n + j)).astype(plan.out_dtype)
        plgpu.wait_smem_to_gmem(STORE_SLOTS - 1, wait_read_only=True)  # The slot's last piece has been read.
        o_tiled[role, slot] = piece
        plgpu.commit_smem()
        o_piece = o_gmem.at[pl.ds(m + i, STORE_ROWS), pl.ds(n + j, plan.store_cols)]
        plgpu.copy_smem_to_gmem(o_smem.at[role, slot], o_piece)


def _scale_and_shift(piece, fused, m, n):
    """`piece` of the product, at row `m` and column `n`, times its scales and plus its bias."""
    layout, (rows, cols) = plgpu.Layout.WGMMA, piece.shape

    def along(axis: int, name: str):
        """The values of a vector that belong to the columns (axis 1) or rows (0) of the piece."""
        start, size = (m, rows) if axis == 0 else (n, cols)
        vector = plgpu.load(fused[name].at[pl.ds(start, size)], layout=layout.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(vector, piece.shape, [axis])

    if "row_scale" in fused:
        piece *= along(0, "row_scale")
    if "col_scale" in fused:
        piece *= along(1, "col_scale")
    if "bias" in fused:
        piece += along(1, "bias")
    return piece


@functools.partial(jax.jit, static_argnames=("plan", "num_sms", "params", "kernel"))
def fused_product(a, b, vectors: dict, *, plan: Plan, num_sms: int, params, kernel=_kernel):
    """`activation(a @ b * row_scale * col_scale + bias)`, where `vectors` holds float32 "row_scale" (M,), "col_scale"
    (N,) and "bias" (N,), or some of them."""
    c = plan.config
    a, b = plan.padded(a, b)
    n = pl.cdiv(plan.n, 8) * 8  # A row of o is a multiple of 16 bytes too.
    if c.split_k == 1:
        piece = jax.ShapeDtypeStruct((STORE_ROWS * plan.store_cols,), jnp.float32)
        kernel_plan = dataclasses.replace(plan, activation=_jnp.lowerable(plan.activation, piece))
        whole_tiles = lambda name: (
            c.tile_m * c.cluster_shape[0] if name == "row_scale" else c.tile_n * c.cluster_shape[1]
        )
        fused = {name: _mgpu.pad_to_tiles(vector, (whole_tiles(name),)) for name, vector in vectors.items()}
    else:  # What is fused comes after the sum.
        kernel_plan = dataclasses.replace(plan, activation=identity, out_dtype=jnp.dtype(jnp.float32))
        fused = {}
    cluster = {} if c.cluster_dim is None else dict(cluster=(2,), cluster_names=("block",))
    out = plgpu.kernel(
        functools.partial(kernel, plan=kernel_plan),
        out_type=jax.ShapeDtypeStruct((plan.m, n) if c.split_k == 1 else (c.split_k, plan.m, n), kernel_plan.out_dtype),
        grid=(plan.blocks(num_sms),),
        grid_names=("cluster_id",),
        num_threads=COMPUTE + 1,
        thread_name="role",
        scratch_types=kernel_plan.scratch,
        compiler_params=params,
        **cluster,
    )(a, b, fused)
    if c.split_k == 1:
        return out[:, : plan.n]
    total = functools.reduce(jnp.add, out)[:, : plan.n]  # One part after the other, in every run.
    if "row_scale" in vectors:
        total *= vectors["row_scale"][:, None]
    if "col_scale" in vectors:
        total *= vectors["col_scale"]
    if "bias" in vectors:
        total += vectors["bias"]
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
    plan = Plan(
        m, n, k, (a.dtype, b.dtype), options.transpose_a, options.transpose_b, activation, options.out_dtype,
        config or default_config(m, n, k, target.num_sms), interpreted=target.name == "the GPU interpreter",
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
    activation = identity if activation is None else _jnp.activation_fn("matmul", activation)
    return _matmul(a, b, bias, Options(transpose_a, transpose_b, activation, out_dtype, config))


def flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """Each operand read once and the result written once, all of `itemsize` bytes."""
    return itemsize * (m * k + k * n + m * n)
