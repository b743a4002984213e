"""Solutions of chapter 7's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-ring
  if i >= ring.num_stages: => if True:  # would never end
  if i >= ring.num_stages: => if i >= min(ring.num_stages, 3):
  if i >= ring.num_stages: => if i > ring.num_stages:  # may have overwritten
  if i >= ring.num_stages: => if False:
  (lambda ring, i: i % ring.num_stages, wait, release, drain)
  ring.freed.at[i % ring.num_stages])\n    return => ring.filled.at[(i - 1) % ring.num_stages])\n    return
    # may still read the stage
  plgpu.barrier_wait(ring.filled.at[i % ring.num_stages])\n =>  # before its tiles have arrived
  (acquire, lambda ring, i: (plgpu.barrier_wait(ring.filled.at[i % ring.num_stages]),
    plgpu.barrier_arrive(ring.freed.at[i % ring.num_stages]), i % ring.num_stages)[2], lambda ring, i: None, drain)
    # give a stage back (barrier_arrive) after
  (acquire, wait, lambda ring, i: None, drain)  # never end
  (acquire, wait, release, lambda ring, num_steps: None)  # somebody must wait for it
  max(0, num_steps - ring.num_stages) => num_steps - 1  # somebody must wait for it
  range(max(0, num_steps - ring.num_stages), num_steps) => range(ring.num_stages)  # never end
  (acquire, wait, lambda ring, i: i + ring.num_stages < 6 and release(ring, i), lambda ring, num_steps: None)
    # never end
  (lambda ring, i: (acquire(ring, i), i and plgpu.barrier_wait(ring.filled.at[(i - 1) % ring.num_stages]),
    i % ring.num_stages)[2], wait, release, drain)  # is used as if it had 1
  return i % ring.num_stages => return i % max(1, ring.num_stages - 1)  # must return the stage of step 1
  return i % ring.num_stages => return None  # must return the stage of step 0
  (acquire, wait, lambda ring, i: plgpu.barrier_arrive(ring.filled.at[i % ring.num_stages]), drain)  # phase
  (lambda ring, i: ring.stage, wait, release, drain)  # must return the stage of step 0
exercise-mend
  freed=plgpu.Barrier(num_arrivals=2 => freed=plgpu.Barrier(num_arrivals=1
    # the
  o_smem.at[wg] => o_smem.at[0]  # a tile of its own
  plgpu.wgmma_wait(0)\n => # no wait\n  # give a stage back (barrier_arrive) after the wgmma_wait
  plgpu.wgmma_wait(0) => plgpu.wgmma_wait(1)
  num_stages=2 => num_stages=1  # this is no ring
  pl.ds(wg * half, half)] => pl.ds(0, half)]  # 128 x 384 x 128
  row, col = place_of_tile(o_gmem, tile) => row, col = 0, place_of_tile(o_gmem, tile)[1]  # unordered
  ring.drain(num_steps) => pass  # wait for the last releases too
  ring.drain(num_steps) => [plgpu.barrier_wait(freed.at[stage]) for stage in range(num_stages)]  # would never end
  wg * half, half)] => 0, tile_m)] && ACC((half, => ACC((tile_m, && store(values, o_gmem, row + wg * half, col,
    o_smem.at[wg]) => [pl.when(wg == w)(lambda w=w: store(values[w * half : (w + 1) * half], o_gmem, row + w * half,
    col, o_smem.at[w])) for w in (0, 1)]  # multiply the whole tile each
  plgpu.wgmma_wait(0)\n                    ring.release(i) => plgpu.wgmma_wait(1)
    \n                    pl.when(i > 0)(lambda: ring.release(i - 1)) && return acc[...] => values = acc[...]
    \n                ring.release(num_steps - 1)\n                return values  # Right.
  @pl.when(wg < 2) => @pl.when(wg == 0) && wg * half, half)] => 0, tile_m)] && ACC((half, => ACC((tile_m,
    && row + wg * half => row && freed=plgpu.Barrier(num_arrivals=2 => freed=plgpu.Barrier(num_arrivals=1
    # do not share the tile
  wg * half, half)] => 0, tile_m)] && ACC((half, => ACC((tile_m, && row + wg * half => row  # there is a race
  ring.release(i) => pl.when(wg == 0)(lambda: ring.release(i))
    && freed=plgpu.Barrier(num_arrivals=2 => freed=plgpu.Barrier(num_arrivals=1  # may still read the stage
  b_smem.at[stage], filled.at[stage])\n\n => b_smem.at[stage], filled.at[stage])\n                ring.wait(i)\n\n
    # is used as if it had 1
  stage, depth = ring.acquire(i) => stage, depth = lax.rem(i, num_stages)  # may have overwritten
  stage = ring.wait(i) => stage = lax.rem(i, num_stages)  # before its tiles have arrived
exercise-registers
  (num_compute_wgs + 1) * start => 512  # what the block was started with
  in_eights\n        and =>  # Counts are multiples of 8.
  24 <= memory <= start <= compute => memory <= start <= compute  # at least 24
  <= start <= compute => and start  # decreases its count
  lambda memory, compute, n: memory + compute <= 2 * ex07.launch_registers(n)  # Each of the compute warpgroups
  lambda *plan: True  # then four rules
  lambda *plan: 1  # True or False
exercise-detective
  {1: "one stage", 2: "one copy at a time", 3: "two steps late"}  # trace 1 is not
  {1: "one copy at a time", 2: "two steps late", 3: "one stage"}  # trace 2 is not
  {1: "two steps late", 2: "one stage", 3: "one copy at a time"}  # trace 1 is not
  dict.fromkeys((1, 2, 3), "one stage")  # a fault of its own
  answer | {1: "no barrier"}  # no fault of the list
  answer | {1: ["one stage"]}
  answer | {1: None}  # name the fault
  {1: "one stage"}
  list(answer.values())
"""


# %% exercise-ring needs: parameters setup
def acquire(ring, i):
    #: # Your lines.
    # BEGIN SOLUTION
    if i >= ring.num_stages:  # The first fillings find their stages empty.
        plgpu.barrier_wait(ring.freed.at[i % ring.num_stages])
    # END SOLUTION
    return i % ring.num_stages


def wait(ring, i):
    #: # Your lines.
    # BEGIN SOLUTION
    plgpu.barrier_wait(ring.filled.at[i % ring.num_stages])
    # END SOLUTION
    return i % ring.num_stages


def release(ring, i):
    #: pass  # Your lines.
    # BEGIN SOLUTION
    plgpu.barrier_arrive(ring.freed.at[i % ring.num_stages])
    # END SOLUTION


def drain(ring, num_steps):
    #: pass  # Your lines.
    # BEGIN SOLUTION
    for i in range(max(0, num_steps - ring.num_stages), num_steps):
        plgpu.barrier_wait(ring.freed.at[i % ring.num_stages])
    # END SOLUTION


ex07.check_ring((acquire, wait, release, drain))


# %% exercise-detective needs: parameters setup
#: # "one stage", "two steps late" or "one copy at a time".
#: answer = {1: None, 2: None, 3: None}
# BEGIN SOLUTION
answer = {1: "one copy at a time", 2: "one stage", 3: "two steps late"}
# END SOLUTION


ex07.check_detective(answer)


# %% exercise-mend needs: parameters setup launch ring
def mended(a, b, tile=(128, 128, 64), num_stages=2):
    tile_m, tile_n, tile_k = tile
    num_steps, half = a.shape[1] // tile_k, tile_m // 2

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, filled, freed):
        wg, ring = lax.axis_index("wg"), Ring(filled, freed, num_stages)
        row, col = place_of_tile(o_gmem, tile)
        rows, columns = pl.ds(row, tile_m), pl.ds(col, tile_n)

        @pl.when(wg == 2)
        def load():
            @pl.loop(0, num_steps)
            def _(i):
                stage, depth = ring.acquire(i), pl.ds(i * tile_k, tile_k)
                copy(a_gmem.at[rows, depth], a_smem.at[stage], filled.at[stage])
                copy(b_gmem.at[depth, columns], b_smem.at[stage], filled.at[stage])

            ring.drain(num_steps)

        @pl.when(wg < 2)
        def compute():
            def add_up(acc):
                @pl.loop(0, num_steps)
                def _(i):
                    stage = ring.wait(i)
                    my_rows = a_smem.at[stage, pl.ds(wg * half, half)]
                    plgpu.wgmma(acc, my_rows, b_smem.at[stage])
                    #: ring.release(i)
                    #: plgpu.wgmma_wait(0)
                    # BEGIN SOLUTION
                    plgpu.wgmma_wait(0)
                    ring.release(i)
                    # END SOLUTION

                return acc[...]

            values = pl.run_scoped(add_up, plgpu.ACC((half, tile_n)))
            #: store(values, o_gmem, row + wg * half, col, o_smem.at[0])
            # BEGIN SOLUTION
            store(values, o_gmem, row + wg * half, col, o_smem.at[wg])
            # END SOLUTION

    scratch = dict(
        a_smem=plgpu.SMEM((num_stages, tile_m, tile_k), a.dtype),
        b_smem=plgpu.SMEM((num_stages, tile_k, tile_n), b.dtype),
        o_smem=plgpu.SMEM((2, PIECE, PIECE), a.dtype),
        filled=plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        #: freed=plgpu.Barrier(num_arrivals=1, num_barriers=num_stages),
        # BEGIN SOLUTION
        freed=plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        # END SOLUTION
    )
    return launch(kernel, a, b, tile, scratch, num_wgs=3)


ex07.check_mended(mended)


# %% exercise-registers needs: parameters setup
def may_run(memory, compute, num_compute_wgs):
    #: return None  # Your code.
    # BEGIN SOLUTION
    start = 65_536 // (128 * (num_compute_wgs + 1)) // 8 * 8
    in_eights = memory % 8 == compute % 8 == 0
    in_range = 24 <= memory <= start <= compute
    return (
        in_eights
        and in_range
        and memory + num_compute_wgs * compute <= (num_compute_wgs + 1) * start
    )
    # END SOLUTION


ex07.check_registers(may_run)
