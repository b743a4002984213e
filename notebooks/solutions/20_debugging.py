"""Solutions of chapter 20's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  x_smem[...] * x_smem[...] => 2 * x_smem[...]  # it must be
  plgpu.commit_smem() => pass  # there is a race: read
  plgpu.wait_smem_to_gmem(0)\n            o_smem => o_smem  # there is a race: write
  x_smem[...] * x_smem[...] => x_gmem[rows] ** 2  # it reads an input in global memory
  plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, arrived) => x_smem[...] = x_gmem[rows]
    && plgpu.barrier_wait(arrived) =>  # must still be copied to shared memory
  plgpu.wait_smem_to_gmem(0)\n            o_smem => o_smem
    && o_gmem.at[rows])\n => o_gmem.at[rows]); plgpu.wait_smem_to_gmem(0)\n  # nothing runs beside
  plgpu.wait_smem_to_gmem(0)\n            o_smem => o_smem
    && plgpu.copy_gmem_to_smem( => plgpu.wait_smem_to_gmem(0); plgpu.copy_gmem_to_smem(
  plgpu.wait_smem_to_gmem(0)\n            o_smem => o_smem
    && plgpu.barrier_wait(arrived) => plgpu.wait_smem_to_gmem(0); plgpu.barrier_wait(arrived)  # Right.
exercise-2
  ((0, 0), 5, 3)  # shows another
  ((2, 1), 3, 5)  # other way round
  ((2, 1), 4, 3)  # coefficients
  ((2, 1), 5, 4)
  (2, 5, 3)  # shows another
  (None, None, None)  # three things
  5
exercise-3
  num_arrivals=2 => num_arrivals=3  # has 2 of 3 arrivals
  num_arrivals=2 => num_arrivals=1  # phase
  num_arrivals=2 => num_arrivals=3
    && plgpu.copy_gmem_to_smem( => plgpu.barrier_arrive(freed); plgpu.copy_gmem_to_smem(  # the loader has not read
exercise-4
  / 2\n => * 2\n  # it must be
  min(slots, tiles)\n => min(slots + 1, tiles)\n  # the
  min(slots, tiles)\n => slots - 1\n  # never end
  slots=2 => slots=1  # this is no ring
  min(slots, tiles)\n => min(2, tiles)\n  # never end
"""


# %% exercise-1 needs: parameters setup
def squared(x):
    def body(x_gmem, o_gmem, x_smem, o_smem, arrived):
        @pl.loop(0, x.shape[0] // 64)
        def _(i):
            rows = pl.ds(i * 64, 64)
            plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, arrived)
            plgpu.barrier_wait(arrived)
            #: o_smem[...] = x_smem[...] * x_smem[...]
            # BEGIN SOLUTION
            # The store of the tile before has read the buffer.
            plgpu.wait_smem_to_gmem(0)
            o_smem[...] = x_smem[...] * x_smem[...]
            # END SOLUTION
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows])

        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((64, 128), x.dtype)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(
        body, out_type=out, scratch_types=[tile, tile, plgpu.Barrier()]
    )(x)


ex20.check_squared(squared)


# %% exercise-2 needs: parameters setup
#: # (Row and column of the tile), the missing step, the one that is there twice.
#: answer = None, None, None
# BEGIN SOLUTION
answer = (2, 1), 5, 3
# END SOLUTION

ex20.check_evidence(answer)


# %% exercise-3 needs: parameters setup
def two_readers(x):
    def body(x_gmem, o_gmem, x_smem, o_smem, filled, freed):
        wg = lax.axis_index("wg")

        @pl.when(wg == 2)
        def load():
            @pl.loop(0, x.shape[0] // 128)
            def _(i):
                pl.when(i >= 1)(lambda: plgpu.barrier_wait(freed))
                plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * 128, 128)], x_smem, filled)

            plgpu.barrier_wait(freed)

        @pl.when(wg < 2)
        def compute():
            @pl.loop(0, x.shape[0] // 128)
            def _(i):
                plgpu.barrier_wait(filled)
                values = 2 * x_smem[pl.ds(wg * 64, 64)] + 1
                plgpu.wait_smem_to_gmem(0)
                o_smem[wg] = values
                plgpu.commit_smem()
                plgpu.barrier_arrive(freed)
                plgpu.copy_smem_to_gmem(
                    o_smem.at[wg], o_gmem.at[pl.ds(i * 128 + wg * 64, 64)]
                )

            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((128, 128), x.dtype),
            plgpu.SMEM((2, 64, 128), x.dtype),
            plgpu.Barrier(),
            #: plgpu.Barrier(num_arrivals=3),
            # BEGIN SOLUTION
            plgpu.Barrier(num_arrivals=2),  # Two warpgroups read.
            # END SOLUTION
        ],
    )(x)


ex20.check_two_readers(two_readers)


# %% exercise-4 needs: parameters setup
def halved(x, slots=2):
    tiles = x.shape[0] // 64

    def body(x_gmem, o_gmem, x_smem, o_smem, filled, freed):
        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def load():
            def fill(i):
                slot = lax.rem(i, slots)
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[pl.ds(i * 64, 64)], x_smem.at[slot], filled.at[slot]
                )

            #: first_to_wait = min(slots + 1, tiles)
            # BEGIN SOLUTION
            first_to_wait = min(slots, tiles)
            # END SOLUTION
            pl.loop(0, first_to_wait)(fill)

            @pl.loop(first_to_wait, tiles)
            def _(i):
                plgpu.barrier_wait(freed.at[lax.rem(i, slots)])
                fill(i)

            pl.loop(0, min(slots, tiles))(
                lambda slot: plgpu.barrier_wait(freed.at[slot])
            )

        @pl.when(wg == 0)
        def compute():
            @pl.loop(0, tiles)
            def _(i):
                slot = lax.rem(i, slots)
                plgpu.barrier_wait(filled.at[slot])
                values = x_smem[slot] / 2
                plgpu.wait_smem_to_gmem(0)
                o_smem[...] = values
                plgpu.commit_smem()
                plgpu.barrier_arrive(freed.at[slot])
                plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(i * 64, 64)])

            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((slots, 64, 128), x.dtype),
            plgpu.SMEM((64, 128), x.dtype),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
    )(x)


ex20.check_off_by_one(halved)
