"""Chapter 16b's exercises: rows that are combined, masked steps, zeros in shared memory, exchanged operands."""

import math

import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide

STEPS = ((0, 64), (0, 128), (64, 65), (70, 200), (8, 72), (7, 8), (70, 134), (3, 60), (45, 45), (71, 72), (129, 513))
GROUPS = ((70, 0, 58, 1, 100), (5, 3, 130))  # Sizes.
ROWS = 320  # The last of them belong to no group.
# An array, one of its rows, and a value there: the first or the last step of another group also holds this row.
POISONS = (("lhs", 70, np.nan), ("rhs", 66, np.nan), ("lhs", 128, np.inf), ("rhs", 230, np.inf))
WIDE, NARROW = 128, 8  # Columns of each matrix of exercise 4, and rows of each group.


@checker
def check_steps(answer) -> str:
    """`answer(start, end)` is (steps, masked) of the sum along these rows."""

    def twice(start, end):
        steps = _steps(start, end)[0]
        return steps, (steps > 0) * ((start % 8 > 0) + (start // 8 * 8 + 64 * steps > end))

    likely = (
        (dict(align=1), "The first step begins at a multiple of 8."),
        (dict(align=64), "Tiles are found at multiples of 8 rows, not of 64."),
        (twice, "A step that is both the first and the last counts once."),
        (lambda *case: (_steps(*case)[0], min(2, _steps(*case)[0])), "An end on a step's border needs no mask."),
        (lambda start, end: (-(-(end - start // 8 * 8) // 64), _steps(start, end)[1]), "An empty group has none."),
    )
    said = "Where does the first step begin, and where does the last one end?"
    draw = lambda rng: sorted(rng.integers(0, 600, 2).tolist())
    require_answers(answer, STEPS, _steps, likely, said, draw=draw)
    return "Only the ends of a group are masked, and a step that is both counts once."


@checker
def check_zeros(answer) -> str:
    """`answer(lhs, rhs, ends)` is a kernel: lhs.T @ rhs of each group's rows, whatever stands in the rows of others."""
    for sizes in GROUPS:
        ends = np.cumsum(sizes)
        lhs, rhs = (normal(seed, (ROWS, 64), jnp.bfloat16) for seed in (1, 2))
        found = _sums(answer, lhs, rhs, ends)
        for group, (mine, exact) in enumerate(zip(found, _exact_sums(lhs, rhs, ends), strict=True)):
            what = f"groups of {sizes} rows, all values finite: the sum of group {group}"
            require_close(mine, exact, 2e-3, what)
    sizes, ends = GROUPS[0], np.cumsum(GROUPS[0])
    for name, row, value in POISONS:
        arrays = {array: normal(seed, (ROWS, 64), jnp.bfloat16) for seed, array in enumerate(("lhs", "rhs"))}
        arrays[name] = arrays[name].at[row, 17].set(value)
        _judge_poisoned(_sums(answer, **arrays, ends=ends), _exact_sums(**arrays, ends=ends), name, row, value, ends)
    return "A neighbour's rows are zeros, in both operands, whatever stood there."


def _sums(answer, lhs, rhs, ends):
    out = np.asarray(run_kernel(answer, lhs, rhs, jnp.asarray(ends, jnp.int32)), np.float64)
    if out.shape != (len(ends), 64, 64):
        raise NotYet(f"the result has shape {out.shape}; it must be {(len(ends), 64, 64)}")
    return out


def _exact_sums(lhs, rhs, ends):
    lhs, rhs = wide(lhs, rhs)
    with np.errstate(invalid="ignore"):
        return [lhs[a:b].T @ rhs[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _judge_poisoned(found, exact, name, row, value, ends):
    owner = int(np.searchsorted(ends, row, side="right"))
    whose = f"group {owner}" if owner < len(ends) else "no group"
    what = f"{'infinity' if np.isinf(value) else 'NaN'} in row {row} of {name}, which belongs to {whose}"
    for group, (mine, wanted) in enumerate(zip(found, exact, strict=True)):
        is_finite = np.isfinite(wanted)
        if not np.isfinite(mine[is_finite]).all():
            hint = "0 times NaN is NaN: write zeros over a neighbour's rows, in both operands."
            raise NotYet(f"{what}, has reached the sum of group {group}. {hint}")
        if np.isfinite(mine[~is_finite]).any():
            raise NotYet(f"{what}, is gone from the sum of group {group}: only neighbours' rows become zeros.")
        require_close(
            np.where(is_finite, mine, 0), np.where(is_finite, wanted, 0), 2e-3, f"{what}: the sum of group {group}"
        )


@checker
def check_exchange(answer) -> str:
    """`answer(x, w)` is a kernel: x[g] @ w[g] for 8 rows a group, with an accumulator of no more than 128 x 8."""
    for num_groups, k in ((3, 128), (2, 192)):
        x, w = (
            normal(seed, (num_groups, *shape), jnp.bfloat16)
            for seed, shape in enumerate(((NARROW, k), (k, WIDE)), start=k)
        )
        try:
            out = run_kernel(answer, x, w)
        except NotYet as problem:
            if "mosaic_gpu.wgmma" in str(problem):
                raise NotYet(
                    "the compiler refuses the product. WGMMA takes 64 rows or more of its first operand, and the "
                    "accumulator has as many rows; x[g] has 8"
                ) from problem
            raise
        what = f"{num_groups} groups, K = {k}"
        exact = np.einsum("gmk,gkn->gmn", *wide(x, w))
        if out.shape == (num_groups, WIDE, NARROW):
            raise NotYet(f"{what}: the result has shape {out.shape}, which is transposed: exchange its last two axes")
        require_close(out, exact, 2e-3, what)
        found = list(judge.equations(judge.jaxpr_of(answer, x, w)))
        sums = [equation.invars[0].aval.size for equation in found if equation.primitive.name == "wgmma_ref"]
        if not sums:
            raise NotYet("the tensor cores have nothing to do: multiply with plgpu.wgmma")
        if any(equation.primitive.name == "transpose" and equation.invars[0].aval.shape in (x.shape, w.shape)
               for equation in found):  # fmt: skip
            raise NotYet("XLA turns an operand before the kernel, which copies it: turn the tile in shared memory")
        judge.require_staged(answer, x, w, loads=1)
        if max(sums) > WIDE * NARROW:
            raise NotYet(f"an accumulator has {max(sums)} values, and a group has {WIDE * NARROW} results: do not pad")
    return "The columns of the matrix are the rows of the tile, and none of them is computed in vain."


@checker
def check_combine(answer) -> str:
    """`answer(y, weights, rows)` is a kernel: each token's rows of y, weighted, added in float32 and rounded once."""
    for tokens, top_k, columns in ((5, 2, 512), (6, 8, 1024)):
        rng = np.random.default_rng(top_k)
        y = normal(top_k, (tokens * top_k, columns), jnp.bfloat16)
        weights = jnp.asarray(rng.dirichlet(np.ones(top_k), tokens), jnp.float32)
        rows = jnp.asarray(rng.permutation(tokens * top_k).reshape(tokens, top_k), jnp.int32)
        out = run_kernel(answer, y, weights, rows)
        what = f"{tokens} tokens, top-{top_k}, {columns} columns"
        if (blocks := _blocks_of(answer, y, weights, rows)) != tokens:
            raise NotYet(f"{what}: the kernel has {blocks} blocks; it must have one per token")
        if out.dtype != jnp.bfloat16:
            raise NotYet(f"{what}: the result is {out.dtype}; it must be bfloat16")
        in_order, ones = np.arange(rows.size).reshape(rows.shape), np.ones(rows.shape)
        same = np.broadcast_to(weights[:, :1], rows.shape)
        likely = (
            (_combined(y, weights, in_order), "these are rows of y as they lie: rows[t, j] says where they are."),
            (_combined(y, ones, in_order), "these are rows of y as they lie, without weights."),
            (_combined(y, ones, rows), "the rows are added without their weights."),
            (_combined(y, weights[:, :1], rows[:, :1]), "only each token's first row counts."),
            (_combined(y, ones[:, :1], rows[:, :1]), "only each token's first row counts, without its weight."),
            (_combined(y, same, rows), "each token's rows have one weight, its first."),
            (wide(y)[: len(rows)], "these are the first rows of y: write the body."),
        )
        # One rounding to bfloat16 moves a value by 2^-8 of it at most.
        require_close(out, _combined(y, weights, rows), 4e-3, f"{what} (sums in float32, one rounding)", likely)
    return "The rows are gathered, and added in the same order in every run."


def _blocks_of(answer, *args) -> int:
    found = judge.equations(judge.jaxpr_of(answer, *args))
    return math.prod(next(equation.params["meshes"][0].grid for equation in found if "meshes" in equation.params))


def _combined(y, weights, rows):
    return (wide(weights)[:, :, None] * wide(y)[np.asarray(rows)]).sum(1)


def _steps(start, end, *, align=8, step=64):
    if end <= start:
        return 0, 0
    first = start // align * align
    steps = -(-(end - first) // step)
    ends = {0} if first < start else set()
    if first + steps * step > end:
        ends |= {steps - 1}
    return steps, len(ends)
