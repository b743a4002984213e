"""Solutions of chapter 18b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  pl.semaphore_wait(here, senders, decrement=False) => pl.when(col == 0)(lambda: pl.semaphore_wait(here, senders))
    # Right.
  arrived.at[step - 1, block] => arrived.at[step - 1].at[block]
  pl.semaphore_wait(here, senders, decrement=False)
    => pl.when(col == 0)(lambda: [pl.semaphore_wait(here) for _ in range(senders)].clear())
  rem(d + step, n) => lax.select(step < n - d, d + step, d + step - n)
  pl.semaphore_wait(here, senders, decrement=False) => pass  # until arrived[0, 0] is 1 (it waited until 0)
  arrived.at[step - 1, block] => arrived.at[step - 1, 0]  # until arrived[0, 1] is 1 (it waited until 0)
  arrived.at[step - 1, block] => arrived.at[step, block]  # nobody signals
  arrived.at[step - 1, block] => arrived.at[n - 1 - step, block]  # before it has waited until arrived[0, 0] is 2
  here, senders, decrement => here, decrement  # until arrived[0, 0] is 2 (it waited until 1)
  senders, decrement=False => senders  # it needs decrement=False
  here, senders, => here, senders + 1,  # waits for ever
  pl.semaphore_wait(here, senders, decrement=False)
    => [pl.semaphore_wait(arrived.at[step - 1, b], senders, decrement=False) for b in range(blocks)]
    # needs only its own rows
  step, block = div(number, blocks), => step, block = rem(div(number, blocks) - d + n, n),  # take them first
  step, block = div(number, blocks), => step, block = rem(div(number, blocks) + 1, n),
  step, block = div(number, blocks), => step, block = rem(n - div(number, blocks), n),  # arrive before
  lhs_gmem.at[rows] => gathered_gmem.at[owner, rows]  # its own, is missing
  gathered_gmem.at[owner, rows] => gathered_gmem.at[owner, rows, pl.ds(0, 64)]  # (64, 128)
  rem(d + step, n) => rem(max(d, 1) + step, n)  # its own, is missing
  pl.loop(0, n * blocks * columns) => pl.loop(0, 2 * n * blocks * columns) && number, col = div(tile, columns),
    => number, col = rem(div(tile, columns), n * blocks),  # 32 copies to shared memory, and 16 would do
  tile_product(a_smem, b_smem) => 0 * tile_product(a_smem, b_smem)  # it must be
  step, block = div(number, blocks), => step, block = div(number, 2),  # nobody signals
  pl.semaphore_wait(here, senders, decrement=False)\n => here = here\n && a_smem, loaded)\n\n            plgpu.copy_gmem
    => a_smem, loaded)\n                pl.semaphore_wait(here, senders, decrement=False)\n\n            plgpu.copy_gmem
    # there is a race
exercise-2
  lambda n, p, g, blocks: max(p, *(g * (i + 1) / ((n - 1) * blocks) + p / n / blocks * ((n - 1) * blocks - i)
    for i in range((n - 1) * blocks)))  # Right.
  lambda n, p, g, i: p + g  # one after the other
  lambda n, p, g, i: max(p, g)  # multiplied after it has arrived
  lambda n, p, g, i: overlapped_us(n, p, g, 1)  # for a whole shard
  lambda n, p, g, i: g + p / n / i  # take the later of the two
  range(1, (n - 1) * blocks + 1) => range((n - 1) * blocks)  # when all of it is there
  now = product_us / n => now = product_us / n if blocks > 1 else product_us / 2  # the later of the two
  now = product_us / n => now = 0 && return now => return now + product_us / n  # multiply it first
  max(now, here) => min(now, here)  # the later of the two
exercise-3
  min(choices, key=us) => sorted(choices, key=us)[0]  # Right.
  return max(arrived, tiles_us(problem.n * problem.row_blocks)) => return arrived  # the longer of the two
  math.ceil(blocks * problem.columns / (132 - senders)) => blocks * problem.columns / (132 - senders)  # round up
  math.ceil(blocks * problem.columns / (132 - senders)) => (blocks * problem.columns // (132 - senders) + 1)
    # Predict the time of each
  math.ceil(blocks * problem.columns / (132 - senders)) => (blocks * problem.columns // (132 - senders))
  tiles_us(problem.n * problem.row_blocks) => problem.n * tiles_us(problem.row_blocks)
  + tiles_us(min(every, problem.row_blocks))\n => \n  # begin when it is there
  groups * signal_us => 0  # costs signal_us
  (problem.n - 1) * math.ceil( => math.ceil(  # of n - 1 shards
  max(arrived, tiles_us(problem.n * problem.row_blocks)) => arrived + tiles_us(problem.n * problem.row_blocks)
    # the longer of the two
  lambda problem, senders, signal_us, rate, choices: 16  # Predict the time of each
  lambda problem, senders, signal_us, rate, choices: choices[-1]
  lambda problem, senders, signal_us, rate, choices: choices[0]
  choices, key=us => (1, 2, 4, 8, 16, 32), key=us  # must be one of choices
  min(choices, key=us) => min(sorted(choices), key=us)  # the first of choices
  (PEAK / 132) => (PEAK / (132 - senders))  # An SM has 1 / 132
  min(every, problem.row_blocks) => every  # at most row_blocks
exercise-4
  n - 1, decrement=False => n - 1  # Right.
  (d + 1 + step) % n => (d - 1 - step) % n
  pl.loop(0, m // 64)(functools.partial(one_tile, owner)) => [one_tile(owner, tile) for tile in range(m // 64)]
  pl.semaphore_wait(arrived.at[tile], n - 1, decrement=False)
    => [pl.semaphore_wait(arrived.at[tile]) for _ in range(n - 1)]
  (d + 1 + step) % n => (d + step) % n  # then all wait, and none sends
  (d + 1 + step) % n => step
  (d + 1 + step) % n => [*(p for p in range(n) if p != d), d][step]  # share its link
  (d + 1 + step) % n => [*(p for p in ((turn - d) % n for turn in range(n)) if p != d), d][step]
  range(n): => [*range(n), n - 1]:  # 6 copies to GMEM, and 4 would do
  pl.semaphore_wait(arrived.at[tile], n - 1, decrement=False)
    => [pl.semaphore_wait(arrived.at[t], n - 1, decrement=False) for t in range(m // 64)]  # only its own parts
  for slot in range(n - 1): => for slot in range(min(n - 1, 3)):  # it must be
  (d + 1 + step) % n => (d + 1) % n  # it must signal each of
  pl.semaphore_wait(arrived.at[tile], n - 1, decrement=False) => pass  # has waited for 0 of 1
  arrived.at[tile], n - 1, => arrived.at[tile], 1,  # waited for 1 of 4 signals
  wait(arrived.at[tile], n - 1, => wait(arrived.at[0], n - 1,  # never written
  arrived.at[tile], n - 1, => arrived.at[tile], n,  # waits for ever
  pl.semaphore_wait( => values = values.astype(jnp.bfloat16).astype(jnp.float32)\n                pl.semaphore_wait(
    # rounded before the sum
  pl.semaphore_signal(arrived.at[tile], device_id=to) => pass  # it must signal each of
  values = values + part(slot, rows) => pass  # own part alone
  part(slot, rows)\n => part(n - 2 - slot, rows)\n  # slot 0 comes first
  values + part(slot, rows)\n => (values + part(slot, rows)).astype(jnp.bfloat16).astype(jnp.float32)\n
    # after every addition
  values = values + part(slot, rows) => values = values.astype(jnp.bfloat16).astype(jnp.float32) + part(slot, rows)
    # before every addition
  part(slot, rows)\n => part(0, rows)\n  # it must be
  pl.loop(0, m // 64) => pl.loop(0, 2)  # it must signal each of
"""


# %% exercise-1 needs: parameters setup helpers
def product_of_shards(lhs, rhs, d, n, senders):
    """All shards times rhs, on device d: lhs (m, k) is its shard, rhs is (k, cols)."""
    (m, k), cols = lhs.shape, rhs.shape[1]
    blocks, columns = m // 64, cols // 64  # Tiles are 64 x 64.

    def body(lhs_gmem, rhs_gmem, o_gmem, gathered_gmem, a_smem, b_smem, o_smem, loaded):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((n - 1, blocks)))

        @pl.loop(0, n * blocks * columns)
        def _(tile):
            number, col = div(tile, columns), rem(tile, columns)
            rows, across = pl.ds(rem(number, blocks) * 64, 64), pl.ds(col * 64, 64)
            #: # Your code. So far shards are taken in the order of the result, all from
            #: # the buffer, and every tile waits for one signal, on the first rows.
            #: owner = div(number, blocks)
            #: pl.semaphore_wait(arrived.at[0, 0], decrement=False)
            #: plgpu.copy_gmem_to_smem(gathered_gmem.at[owner, rows], a_smem, loaded)
            # BEGIN SOLUTION
            step, block = div(number, blocks), rem(number, blocks)
            owner = rem(d + step, n)

            @pl.when(step == 0)
            def _():
                plgpu.copy_gmem_to_smem(lhs_gmem.at[rows], a_smem, loaded)

            @pl.when(step > 0)
            def _():
                here = arrived.at[step - 1, block]
                pl.semaphore_wait(here, senders, decrement=False)
                plgpu.copy_gmem_to_smem(gathered_gmem.at[owner, rows], a_smem, loaded)

            # END SOLUTION
            plgpu.copy_gmem_to_smem(rhs_gmem.at[:, across], b_smem, loaded)
            plgpu.barrier_wait(loaded)
            o_smem[...] = tile_product(a_smem, b_smem).astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[owner, rows, across])
            plgpu.wait_smem_to_gmem(0)

    out, _ = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((n, m, size), lhs.dtype) for size in (cols, k)],
        grid=(1,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((64, k), lhs.dtype),
            plgpu.SMEM((k, 64), lhs.dtype),
            plgpu.SMEM((64, 64), lhs.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=lab.compiler_params(),
    )(lhs, rhs)
    return out


ex18b.check_product(product_of_shards)


# %% exercise-2 needs: parameters setup
def overlapped_us(n, product_us, gather_us, blocks):
    #: return None  # Your code.
    # BEGIN SOLUTION
    now = product_us / n  # Its own shard.
    for i in range(1, (n - 1) * blocks + 1):
        here = gather_us * i / ((n - 1) * blocks)
        now = max(now, here) + product_us / (n * blocks)
    return now
    # END SOLUTION


ex18b.check_overlapped(overlapped_us)


# %% exercise-3 needs: parameters setup
def best_every(problem, senders, signal_us, rate, choices):
    #: return None  # Your code: one of the choices.
    # BEGIN SOLUTION
    tile_us = 2 * 128 * 256 * problem.k / (PEAK / 132) * 1e6
    sent_us = gathered_bytes(problem) / rate * 1e6

    def tiles_us(blocks):
        return math.ceil(blocks * problem.columns / (132 - senders)) * tile_us

    def us(every):
        groups = (problem.n - 1) * math.ceil(problem.row_blocks / every)
        arrived = (
            groups * signal_us + sent_us + tiles_us(min(every, problem.row_blocks))
        )
        return max(arrived, tiles_us(problem.n * problem.row_blocks))

    return min(choices, key=us)
    # END SOLUTION


ex18b.check_every(best_every)


# %% exercise-4 needs: parameters setup helpers
def summed_rows(lhs, rhs, d, n):
    """Device d's rows of the sum of all products: lhs (n, m, k), rhs (k, 64)."""
    (_, m, k), cols = lhs.shape, rhs.shape[1]

    def body(lhs_gmem, rhs_gmem, o_gmem, parts_gmem, a_smem, b_smem, o_smem, loaded):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((m // 64,)))

        def product(owner, rows):
            plgpu.copy_gmem_to_smem(lhs_gmem.at[owner, rows], a_smem, loaded)
            plgpu.copy_gmem_to_smem(rhs_gmem, b_smem, loaded)
            plgpu.barrier_wait(loaded)
            return tile_product(a_smem, b_smem)

        def store(values, gmem):
            o_smem[...] = values.astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, gmem)
            plgpu.wait_smem_to_gmem(0)

        def part(slot, rows):
            part = parts_gmem.at[slot, rows]
            part = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)
            return part.astype(jnp.float32)

        def one_tile(owner, tile):
            rows = pl.ds(tile * 64, 64)
            values = product(owner, rows)
            if owner != d:
                to, slot = {"x": owner}, (d - owner - 1) % n
                store(values, plgpu.remote_ref(parts_gmem, to).at[slot, rows])
                pl.semaphore_signal(arrived.at[tile], device_id=to)
            else:
                #: # Your code. So far this is the device's own part of the sum.
                # BEGIN SOLUTION
                pl.semaphore_wait(arrived.at[tile], n - 1, decrement=False)
                for slot in range(n - 1):
                    values = values + part(slot, rows)
                # END SOLUTION
                store(values, o_gmem.at[rows])

        for step in range(n):
            #: owner = (d + step) % n  # Is this the right order?
            # BEGIN SOLUTION
            owner = (d + 1 + step) % n  # Its own tiles come last.
            # END SOLUTION
            pl.loop(0, m // 64)(functools.partial(one_tile, owner))

    out, _ = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((m, cols), lhs.dtype),
            jax.ShapeDtypeStruct((n - 1, m, cols), lhs.dtype),
        ],
        grid=(1,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((64, k), lhs.dtype),
            plgpu.SMEM((k, cols), lhs.dtype),
            plgpu.SMEM((64, cols), lhs.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=lab.compiler_params(),
    )(lhs, rhs)
    return out


ex18b.check_summed(summed_rows)
