"""Chapter 16's exercises: the table's room, copies, a boundary tile's store, and its groups."""

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ENTRIES = ((1000, 4, 128), (1024, 8, 128), (280, 5, 64), (5, 9, 64), (129, 2, 128), (64, 1, 64), (0, 3, 16))
COPIES = (  # Sizes of groups, and the rows of a piece.
    ((64, 128, 192), 64), ((63,), 64), ((70, 0, 130, 1, 63), 64), ((70, 0, 130, 1, 63), 32), ((5, 7, 1000, 31), 16),
    ((0, 0), 64),
)  # fmt: skip
# Rows of the group that are left, of a piece of 64. The first and the last one need several copies.
LEFT = (63, 64, 200, 32, 8, 1, 0, -27, 37)


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
    out = np.asarray(run_kernel(kernel, values, jnp.asarray(LEFT, jnp.int32), copies={"store": 6}), np.float32)
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


@checker
def check_bias(answer) -> str:
    """`answer(x, bias, ends)` is a kernel: each row of x plus the bias of its group."""
    for sizes in ((64, 128), (70, 0, 58), (0, 1, 190, 1), (10, 20, 30, 4)):
        ends = np.cumsum(sizes)
        x, bias = normal(1, (ends[-1], 128)), normal(2, (len(sizes), 128))
        out = np.asarray(run_kernel(answer, x, bias, jnp.asarray(ends, jnp.int32)))
        exact = np.asarray(x, np.float64) + np.repeat(np.asarray(bias, np.float64), sizes, axis=0)
        wrong = np.flatnonzero((np.abs(out - exact) > 1e-3).any(axis=1) | np.isnan(out).any(axis=1))
        if len(wrong):
            group = int(np.searchsorted(ends, wrong[0], side="right"))
            raise NotYet(
                f"groups of {sizes} rows: row {wrong[0]}, of group {group}, is wrong, and {len(wrong) - 1} more"
            )
    return "Each row has the bias of its own group, wherever the tile begins."


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
