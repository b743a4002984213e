"""Solutions of chapter 24's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  k - above => above  # the others of the k
  k - above => reached([key])[0] - above  # no room
  k - above => reached([key])[0]  # all keys that reach
  k - above => reached([key])[0] - k  # *not* among the k
  reached([key + 1]) => reached([find(reached, k, bits) + 1])  # 33 times
exercise-2
  2**bits - 1 => 2**bits  # one threshold decides
  columns * passes * (2**bits - 1) => columns * (2**bits - 1)  # a key has several
  columns if kept else columns * passes => columns * passes  # is loaded from global memory once
  columns * passes * (2**bits - 1) => 32 * columns  # more comparisons than it has bits
  columns * passes * (2**bits - 1) => 65536 * 3  # is right
exercise-3
  top + math.log(min_p) => -jnp.inf  # among all tokens
  top + math.log(min_p) => top * min_p  # of which min_p is a share
  top + math.log(min_p) => math.log(min_p)  # without the largest logit
  top + math.log(min_p) => top  # the most probable token
  (x >= floor) => (new >= floor)  # among all tokens
  (x >= floor) => (x > floor)  # exactly min_p times
  (x >= floor) => (jnp.exp(x) >= min_p * jnp.exp(top))  # among all tokens
  top = jnp.max(largest) => top = largest  # is what you compare with one number for the row
  largest = over(mine, lambda best, x, _: jnp.maximum(best, x), lowest) => largest = over(mine, lambda best, x, _:
    jnp.maximum(best, x), over(mine, lambda best, x, _: jnp.maximum(best, x), lowest))  # 3 times
  mine = x_gmem.at[row] => mine = x_gmem.at[row, pl.ds(0, 1024)]  # out of bounds
exercise-4
  x > c => x >= c  # only those above
  above_gmem[row, j] = above / total => above_gmem[row, j] = above  # a share of the row's total
  x > c => x < c  # what is below
  above_gmem[row, j] = above / total => above_gmem[row, j] = 1 - above / total  # what is not above
  jnp.exp(x - top) => jnp.exp(x)  # subtract the row's largest logit
  jnp.exp(x - top) => jnp.exp(x - wanted[0])  # subtract the row's largest logit
  jnp.exp(x - top) => jnp.exp(x - functools.reduce(jnp.maximum, wanted))  # subtract the row's largest logit
  total, *sums = (jnp.sum(total) for total in over(mine, visit, zeros)) => total, *sums = (jnp.sum(over(mine,
    lambda s, x, i, j=j: visit([s] * len(zeros), x, i)[j], zeros[0])) for j in range(len(zeros)))  # times
"""


# %% exercise-1 needs: parameters setup helpers rung-1-code
def kth_and_ties(x, k, *, bits=2):
    def kernel(x_gmem, key_gmem, ties_gmem):
        row = lax.axis_index("row")
        reached = functools.partial(count, x_gmem.at[row])
        key = find(reached, k, bits)
        key_gmem[row] = key
        #: ties_gmem[row] = jnp.int32(0)
        # BEGIN SOLUTION
        (above,) = reached([key + 1])
        ties_gmem[row] = k - above
        # END SOLUTION

    outs = like(len(x)), like(len(x))
    return launch(kernel, dict(row=len(x)), outs)(x)


ex24.check_kth_and_ties(kth_and_ties)


# %% exercise-2 needs: parameters setup helpers
def cost(columns, bits, kept):
    #: return 0, 0  # Values loaded, comparisons.
    # BEGIN SOLUTION
    passes = 32 // bits
    return columns if kept else columns * passes, columns * passes * (2**bits - 1)
    # END SOLUTION


ex24.check_cost(cost)


# %% exercise-3 needs: parameters setup helpers rung-1-code
def draw_min_p(logits, seeds, positions, min_p):
    def kernel(x_gmem, seed_gmem, position_gmem, token_gmem):
        row = lax.axis_index("row")
        key = noise.row_key(seed_gmem[row], position_gmem[row])
        mine = x_gmem.at[row]
        lowest = numbers(512).astype(jnp.float32) * 0 - jnp.inf
        # BEGIN SOLUTION
        largest = over(mine, lambda best, x, _: jnp.maximum(best, x), lowest)
        top = jnp.max(largest)
        floor = top + math.log(min_p)
        # END SOLUTION

        def visit(best, x, start):
            score, token = best
            column = start + numbers(512)
            new = x + noise.gumbel(key, column)
            is_better = new > score
            # BEGIN SOLUTION
            is_better = is_better & (x >= floor)
            # END SOLUTION
            return jnp.where(is_better, new, score), jnp.where(is_better, column, token)

        score, token = over(mine, visit, (lowest, numbers(512) * 0))
        token_gmem[row] = jnp.min(jnp.where(score == jnp.max(score), token, HIGHEST))

    grid, rows = dict(row=len(logits)), len(logits)
    return launch(kernel, grid, like(rows))(logits, seeds, positions)


ex24.check_draw_min_p(draw_min_p)


# %% exercise-4 needs: parameters setup helpers rung-1-code
def mass_above(logits, candidates):
    rows, num = candidates.shape

    def kernel(x_gmem, candidates_gmem, above_gmem):
        row = lax.axis_index("row")
        #: for j in range(num):
        #:     above_gmem[row, j] = jnp.float32(0)
        # BEGIN SOLUTION
        mine, lowest = x_gmem.at[row], numbers(512).astype(jnp.float32) * 0 - jnp.inf
        top = jnp.max(over(mine, lambda best, x, _: jnp.maximum(best, x), lowest))
        wanted = [candidates_gmem[row, j] for j in range(num)]

        def visit(sums, x, _):
            share = jnp.exp(x - top)
            shares = [share, *(jnp.where(x > c, share, 0.0) for c in wanted)]
            return [total + some for total, some in zip(sums, shares, strict=True)]

        zeros = [numbers(512).astype(jnp.float32) * 0 for _ in range(num + 1)]
        total, *sums = (jnp.sum(total) for total in over(mine, visit, zeros))
        for j, above in enumerate(sums):
            above_gmem[row, j] = above / total
        # END SOLUTION

    out = like(rows, num, dtype=jnp.float32)
    return launch(kernel, dict(row=rows), out)(logits, candidates)


ex24.check_mass_above(mass_above)
