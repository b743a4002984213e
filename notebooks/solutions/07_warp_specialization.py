"""Solutions of chapter 7's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-3
  (lambda ring, step: (memory(ring, step), step + 1 < ring.steps or [ring.barrier_wait("freed", last % ring.stages)
    for last in range(max(0, ring.steps - ring.stages), ring.steps)]), lambda ring, step:
    (ring.barrier_wait("filled", step % ring.stages), ring.multiply(step),
    ring.barrier_arrive("freed", step % ring.stages)))  # Right.
  if step + ring.stages < ring.steps: => if True:  # must wait for each completion
  if step + ring.stages < ring.steps:\n        ring.barrier_arrive("freed", step % ring.stages)
    => if 1 <= step <= ring.steps - ring.stages:\n        ring.barrier_arrive("freed", (step - 1) % ring.stages)
    # a ring of 2 stages is used as if it had 1
  step >= ring.stages: => True:  # would never end
  ring.load(step) => ring.load(step)\n    ring.barrier_wait("filled", step % ring.stages)
    # a ring of 2 stages is used as if it had 1
  ring.load(step) => && if step >= => ring.load(step)\n    if step >=  # may have overwritten
  "freed", step % ring.stages)\n    ring.load => "freed", step)\n    ring.load  # has no slot 2
  (memory, lambda ring, step: (ring.barrier_wait("filled", step % ring.stages), step + ring.stages < ring.steps and
    ring.barrier_arrive("freed", step % ring.stages), ring.multiply(step)))  # give a stage back (barrier_arrive) after
  (memory, lambda ring, step: (ring.barrier_wait("filled", step % ring.stages), ring.multiply(step)))  # never end
  ring.barrier_wait("filled", step % ring.stages) =>  # before its tiles have arrived
  ring.multiply(step) => ring.multiply(step)\n    ring.barrier_arrive("filled", 0)  # nobody has to arrive at filled
  ring.multiply(step) => ring.multiply(step)\n    ring.load(step)  # ring.load is not for compute
  (lambda ring, step: ring.load(step), compute)  # may have overwritten
  (lambda ring, step: ring.load(step), lambda ring, step: ring.multiply(step))  # before its tiles have arrived
  (lambda ring, step: None, compute)  # memory must call ring.load(step) once
  (compute, memory)  # ring.multiply is not for memory
  (memory, lambda ring, step: ring.barrier_wait("full", 0))  # there is no barrier 'full'
exercise-mend
  # filled\n        plgpu.Barrier(num_arrivals=2 => # filled\n        plgpu.Barrier(num_arrivals=1  # the
  pl.when(step >= stages) => pl.when(step > stages)
  pl.when(step >= stages) => pl.when(step >= 0)  # never end
  o_smem.at[wg] => o_smem.at[0]  # a tile of its own
  plgpu.wgmma_wait(0) => plgpu.wgmma_wait(1)  # give a stage back (barrier_arrive) after the wgmma_wait
  stages=2 => stages=1  # this is no ring
  pl.ds(wg * half, half) => pl.ds(0, half)  # 128 x 384 x 128
exercise-1
  (num_compute_wgs + 1) * start => 512  # what the block was started with
  in_eights\n        and =>  # Counts go by eights
  24 <= memory <= start <= compute <= 255 => memory <= start <= compute  # at least 24
  <= start <= compute <= 255 => and compute <= 255  # decreases its count
  lambda memory, compute, n: memory + compute <= 2 * ex07.launch_registers(n)  # Each of the compute warpgroups
  lambda *plan: True  # then four rules
  lambda *plan: 1  # True or False
exercise-2
  {1: "one slot", 2: "one copy at a time", 3: "two steps late"}  # trace 1 is not
  {1: "one copy at a time", 2: "two steps late", 3: "one slot"}  # trace 2 is not
  {1: "two steps late", 2: "one slot", 3: "one copy at a time"}  # trace 1 is not
  dict.fromkeys((1, 2, 3), "one slot")  # a fault of its own
  answer | {1: "no barrier"}  # no fault of the list
  answer | {1: ["one slot"]}
  answer | {1: None}  # name the fault
  {1: "one slot"}
  list(answer.values())
"""


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
