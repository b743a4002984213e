"""Solutions of chapter 18b's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-2 needs: parameters setup
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


# %% exercise-1 needs: parameters setup
def overlapped_us(n, product_us, gather_us, pieces):
    #: return None  # Your code.
    # BEGIN SOLUTION
    now = product_us / n  # The own shard.
    for i in range(1, (n - 1) * pieces + 1):
        here = gather_us * i / ((n - 1) * pieces)
        now = max(now, here) + product_us / (n * pieces)
    return now
    # END SOLUTION


ex18b.check_overlapped(overlapped_us)


# %% exercise-3 needs: parameters setup matmul-bound
def senders_for(problem, rate, choices):
    #: return None  # Your code: one of the choices.
    # BEGIN SOLUTION
    tiles = problem.n * problem.row_blocks * problem.columns
    tile_s = 2 * 128 * 256 * problem.k / (PEAK / 132)

    def seconds(senders):
        gather = gathered_bytes(problem) / min(LINK, senders * rate)
        return max(gather, math.ceil(tiles / (132 - senders)) * tile_s)

    return min(choices, key=lambda senders: (seconds(senders), senders))
    # END SOLUTION


ex18b.check_senders(senders_for)


# %% exercise-4 needs: parameters setup
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
            owner = (d + 1 + step) % n  # The own tiles come last.
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
