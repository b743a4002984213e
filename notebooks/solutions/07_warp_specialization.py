"""Solutions of chapter 7's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-3 needs: parameters setup
def memory(ring, step):
    #: ring.load(step)  # Your lines before or after it.
    # BEGIN SOLUTION
    if step >= ring.stages:  # The first fillings find their slots empty.
        ring.barrier_wait("freed", step % ring.stages)
    ring.load(step)
    # END SOLUTION


def compute(ring, step):
    #: ring.multiply(step)  # Your lines before or after it.
    # BEGIN SOLUTION
    ring.barrier_wait("filled", step % ring.stages)
    ring.multiply(step)
    # The last readings free slots that nobody fills again.
    if step + ring.stages < ring.steps:
        ring.barrier_arrive("freed", step % ring.stages)
    # END SOLUTION


ex07.check_ring((memory, compute))


# %% exercise-mend needs: parameters setup launch
def mended(a, b, stages=2, tile=(128, 128, 64)):
    tile_m, tile_n, tile_k = tile
    steps, half = pl.cdiv(a.shape[1], tile_k), tile_m // 2

    def body(wg, mi, ni, a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, filled, freed):
        rows, cols = pl.ds(mi * tile_m, tile_m), pl.ds(ni * tile_n, tile_n)

        @pl.when(wg == 2)
        def memory():
            @pl.loop(0, steps)
            def _(step):
                slot, ks = lax.rem(step, stages), pl.ds(step * tile_k, tile_k)
                #: pl.when(step > stages)(lambda: plgpu.barrier_wait(freed.at[slot]))
                # BEGIN SOLUTION
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(freed.at[slot]))
                # END SOLUTION
                plgpu.copy_gmem_to_smem(
                    a_gmem.at[rows, ks], a_smem.at[slot], filled.at[slot]
                )
                plgpu.copy_gmem_to_smem(
                    b_gmem.at[ks, cols], b_smem.at[slot], filled.at[slot]
                )

        @pl.when(wg < 2)
        def compute():
            def multiply(acc):
                @pl.loop(0, steps)
                def _(step):
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(filled.at[slot])
                    plgpu.wgmma(
                        acc, a_smem.at[slot, pl.ds(wg * half, half)], b_smem.at[slot]
                    )
                    plgpu.wgmma_wait(0)
                    pl.when(step + stages < steps)(
                        lambda: plgpu.barrier_arrive(freed.at[slot])
                    )

                return acc[...]

            values = pl.run_scoped(multiply, plgpu.ACC((half, tile_n), jnp.float32))
            #: store(values, o_gmem, mi * tile_m + wg * half, ni * tile_n, o_smem.at[0])
            # BEGIN SOLUTION
            store(values, o_gmem, mi * tile_m + wg * half, ni * tile_n, o_smem.at[wg])
            # END SOLUTION

    scratch = [
        plgpu.SMEM((stages, tile_m, tile_k), a.dtype),
        plgpu.SMEM((stages, tile_k, tile_n), b.dtype),
        plgpu.SMEM((2, PIECE, PIECE), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # filled
        #: plgpu.Barrier(num_arrivals=1, num_barriers=stages),  # freed
        # BEGIN SOLUTION
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # freed
        # END SOLUTION
    ]
    return launch(body, (a.shape[0], b.shape[1]), tile, 3, scratch)(a, b)


ex07.check_mended(mended)


# %% exercise-1 needs: parameters setup
def may_run(memory, compute, num_compute_wgs):
    #: return None  # Your code.
    # BEGIN SOLUTION
    start = 65_536 // (128 * (num_compute_wgs + 1)) // 8 * 8
    in_eights = memory % 8 == compute % 8 == 0
    in_range = 24 <= memory <= start <= compute <= 255
    return (
        in_eights
        and in_range
        and memory + num_compute_wgs * compute <= (num_compute_wgs + 1) * start
    )
    # END SOLUTION


ex07.check_registers(may_run)


# %% exercise-2 needs: parameters setup
#: # "one slot", "two steps late" or "one copy at a time".
#: answer = {1: None, 2: None, 3: None}
# BEGIN SOLUTION
answer = {1: "one copy at a time", 2: "one slot", 3: "two steps late"}
# END SOLUTION


ex07.check_detective(answer)
