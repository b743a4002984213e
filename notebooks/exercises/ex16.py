"""Chapter 16's exercises: the table's room, copies, a boundary tile's store, and tiles with unequal steps."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ENTRIES = ((1000, 4, 128), (1024, 8, 128), (280, 5, 64), (5, 9, 64), (129, 2, 128), (64, 1, 64), (0, 3, 16))
COPIES = (  # Sizes of groups, and the rows of a piece.
    ((64, 128, 192), 64), ((63,), 64), ((70, 0, 130, 1, 63), 64), ((70, 0, 130, 1, 63), 32), ((5, 7, 1000, 31), 16),
    ((0, 0), 64),
)  # fmt: skip
LEFT = (63, *range(63), 64, 200, -1, -27)  # Rows of the group that are left, of a piece of 64.
PLAYED = ((63, 64, 37), (5, 200, 3))  # The copies of these are counted: three blocks of a kernel are played.
# Steps of each tile, and blocks. The second of two blocks has fewer steps than its ring has stages.
UNEQUAL = (((3, 0, 1, 1), 2, 192, 64), ((1, 0, 2, 1), 1, 192, 64), ((0, 4, 1, 2, 0, 1, 3), 3, 256, 128))  # (.., K, N)
NUMBERS = "The ring wants the numbers 0, 1, 2, ... of steps from both warpgroups: which do they give it?"
UNDRAINED = "drain the ring with the number of all steps of the block"


@checker
def check_entries(answer) -> str:
    """`answer(m, num_groups, tile)` is the most entries that sizes of that many groups can need."""
    likely = (
        (lambda m, g, tile: -(-m // tile), "Groups share no tile: each may have one that is not full."),
        (lambda m, g, tile: m // tile + g, "Nearly. With m // tile whole tiles, can every group have one more?"),
        (lambda m, g, tile: -(-m // tile) + g, "That is room enough, and more than any sizes need."),
        (lambda m, g, tile: -(-m // tile) + g - 1, "Nearly. How many rows do the groups have that need an entry more?"),
        (lambda m, g, tile: (m + g * (tile - 1)) // tile, "An entry has at least one row."),
    )
    draw = lambda rng: rng.integers((0, 1, 1), (2000, 40, 200)).tolist()
    said = "Give each group one row: what do the other rows add?"
    require_answers(answer, ENTRIES, most_entries, likely, said, draw=draw)
    return "No sizes need more, and some need as many."


@checker
def check_copies(answer) -> str:
    """`answer(sizes, piece)` is how many copies all groups need for one column of pieces."""
    copies = lambda sizes, piece: sum(size // piece + (size % piece).bit_count() for size in sizes)
    likely = (
        (lambda sizes, piece: sum(-(-size // piece) for size in sizes), "The last piece of a group is several copies."),
        (lambda sizes, piece: sum(sizes), "A copy moves more than one row."),
        (lambda sizes, piece: copies([sum(sizes)], piece), "Pieces begin anew in every group."),
        (lambda sizes, piece: sum(size.bit_count() for size in sizes), "No box is larger than a piece."),
        (lambda sizes, piece: sum(size // piece for size in sizes), "And the last pieces, which are not whole?"),
    )
    draw = lambda rng: (tuple(rng.integers(0, 300, 4).tolist()), int(2 ** rng.integers(0, 8)))
    require_answers(answer, COPIES, copies, likely, "Whole pieces, and then the rest in binary.", draw=draw)
    return "A whole piece is one copy; of the last one, as many as its rows have ones in binary."


@checker
def check_store(answer) -> str:
    """`answer(piece_smem, o_gmem, left)` starts the copies of the first `left` rows of a piece."""
    values = normal(16, (64, 64), jnp.bfloat16)
    kernel = lambda values, left: _store_pieces(answer, values, left)
    for numbers in PLAYED:
        _require_boxes(judge.require_order_of(kernel, values, jnp.asarray(numbers, jnp.int32)), numbers)
    out = np.asarray(run_kernel(kernel, values, jnp.asarray(LEFT, jnp.int32)), np.float32)
    for left, mine, found in zip(LEFT, ~np.isnan(out), out, strict=True):
        rows = min(max(left, 0), 64)
        if mine[rows:].any():
            row = rows + int(np.argmax(mine[rows:].any(1)))
            raise NotYet(f"left = {left}: row {row} was written, and it belongs to the next group.")
        if not mine[:rows].all():
            row = int(np.argmin(mine[:rows].all(1)))
            raise NotYet(f"left = {left}: row {row} was never written. Are there boxes for each bit of left?")
        said = f"left = {left}, where a box begins in both memories at one row"
        require_close(found[:rows], wide(values)[:rows], 0, said)
    return "Every row of the group is stored, and no other."


def _require_boxes(played, numbers) -> None:
    """Raises NotYet if a block starts more copies than `left` has ones in binary, or waits between two of them."""
    for left, block in zip(numbers, itertools.chain.from_iterable(played), strict=True):
        stores, most = [event for event in block.events if event.kind == "store"], min(left, 64).bit_count()
        if len(stores) > most:
            raise NotYet(f"left = {left}: it starts {len(stores)} copies to GMEM, and {most} would do")
        if any(one.end & other.known for one, other in itertools.pairwise(stores)):
            raise NotYet(f"left = {left}: it waits for a copy before it starts the next one. The caller waits for all")


@checker
def check_steps(answer) -> str:
    """`answer(a, b, steps, num_blocks)` is a product by tiles of 64 rows, of which tile t has `steps[t]` steps."""
    for steps, num_blocks, k, n in UNEQUAL:
        a, b = normal(1, (64 * len(steps), k), jnp.bfloat16), normal(2, (k, n), jnp.bfloat16)
        fn = functools.partial(answer, num_blocks=num_blocks)
        said = f"steps = {steps}, {num_blocks} blocks"
        played = judge.require_order_of(fn, a, b, jnp.asarray(steps, jnp.int32))
        try:
            out = run_kernel(fn, a, b, jnp.asarray(steps, jnp.int32), undrained=UNDRAINED)
        except NotYet as problem:
            if "never end" not in str(problem):
                raise
            raise NotYet(f"{said}: the kernel would never end. {NUMBERS}") from None
        exact = [wide(a)[64 * t : 64 * t + 64, : 64 * x] @ wide(b)[: 64 * x] for t, x in enumerate(steps)]
        require_close(out, np.concatenate(exact), 0.02, said)
        _require_steps(played, steps, num_blocks)
    return "Both warpgroups number the steps alike, however many a tile has."


def _require_steps(played, steps, num_blocks: int) -> None:
    """Raises NotYet if a block has other steps than its tiles, or if its memory warpgroup does not run ahead."""
    indices = dict.fromkeys((0, num_blocks // 2, num_blocks - 1))  # Those that are played.
    for index, block in zip(indices, itertools.chain.from_iterable(played), strict=True):
        products, loads = ([event for event in block.events if event.kind == kind] for kind in ("product", "load"))
        mine = steps[index::num_blocks]
        for kind, found in (("products", len(products)), ("loads of a", len(loads) // 2)):
            if block.is_whole and found != sum(mine):
                raise NotYet(
                    f"steps = {steps}, {num_blocks} blocks: block {index} starts {found} {kind}; its tiles have "
                    f"{' + '.join(map(str, mine))} steps"
                )
        ends = {sum(mine[:turn]) for turn in range(1, len(mine))} - {0, sum(mine)}
        if any(products[end - 1].end & loads[2 * end].known for end in ends if 2 * end < len(loads)):
            raise NotYet(
                "the memory warpgroup waits for the end of a tile before it loads the next one: let it run ahead, as "
                "far as the ring has stages"
            )


def _store_pieces(answer, values, left):
    """One piece for each number in `left`, from a block each; what is not stored stays NaN in the interpreter."""

    def body(values_gmem, left_gmem, o_gmem, piece_smem, loaded):
        case = lax.axis_index("case")
        plgpu.copy_gmem_to_smem(values_gmem, piece_smem, loaded)
        plgpu.barrier_wait(loaded)
        answer(piece_smem, o_gmem.at[case], left_gmem[case])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((left.size, *values.shape), values.dtype),
        grid=(left.size,),
        grid_names=("case",),
        scratch_types=[plgpu.SMEM(values.shape, values.dtype), plgpu.Barrier()],
    )(values, left)


def most_entries(m, num_groups, tile):
    # A row in each group, then whole tiles of what is left.
    return min(m, (m + num_groups * (tile - 1)) // tile)
