"""Solutions of chapter 6's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  delay_release=1 => delay_release=0  # may still read the stage: wait for it first. wgmma_wait(n) leaves the last n
  (ki, mi), delay_release=1 => (ki, mi), delay_release=0
  (ki, ni), delay_release=1 => (ki, ni), delay_release=0
  plgpu.wgmma_wait(1) => plgpu.wgmma_wait(2)
  plgpu.wgmma_wait(1) => pass
  plgpu.wgmma_wait(1) => pl.when(mi == 0)(lambda: (plgpu.wgmma_wait(1), None)[1])
  plgpu.wgmma_wait(1) => plgpu.wgmma_wait(0)  # Right.
  max_concurrent_steps=3 => max_concurrent_steps=2  # Right.
  max_concurrent_steps=3 => max_concurrent_steps=1 && delay_release=1 => delay_release=0 && wait(1) => wait(0)
    # this is no ring: nothing is loaded while a step is computed
  (tile_k, tile_m), lambda ki: (ki, mi) => (tile_k, tile_m), lambda ki: (mi, ki)  # a of 128 x 128
  lambda ki: (ki, mi) => lambda ki: (ki * tile_k, mi * tile_m)
  grid=(num_steps,) => grid=(min(num_steps, 2),)  # are not all of K
  grid=(num_steps,) => grid=(min(num_steps, 16),)
  (ki, mi) => (ki, lax.rem(mi, 2))  # element
  (ki, mi) => (ki, 0)  # a of 448 x 256
  (ki, mi) => (lax.rem(ki, 4), mi)
  (ki, mi) => (lax.rem(ki, 8), mi)  # other windows
  (ki, mi) => (ki, lax.rem(mi, 4))
  lambda ki: (ki, ni) => lambda ki: (ki, lax.rem(ni, 4))
  wgmma(acc, a_smem.T, b_smem) => wgmma(acc, a_smem, b_smem)  # cannot be compiled
  lambda a, b: matmul_transposed_a(matmul_transposed_a(a, b), b[:128])  # launches 2 kernels, and 1 is asked for
exercise-2
  ("A", 10)  # A is right
  ("B", 9)  # B is right
  ("D", 8)  # D is right
  ("C", 10)  # C it is
  ("C", 8)
  ("C", "9")
  ("E", 9)  # no configuration
  "C"  # a pair
  ("C", None)
exercise-3
  max_concurrent_steps=3 => max_concurrent_steps=4  # Right.
  plgpu.wgmma_wait(2) => plgpu.wgmma_wait(3)  # may still read the stage
  plgpu.wgmma_wait(2) => pass
  plgpu.wgmma_wait(2) => pl.when(mi == 0)(lambda: (plgpu.wgmma_wait(2), None)[1])
  delay_release=1 => delay_release=0
  (mi, ki), delay_release=1 => (mi, ki), delay_release=0
  delay_release=1 => delay_release=0 && wait(2) => wait(1)
  plgpu.wgmma_wait(2) => plgpu.wgmma_wait(1)  # leaves n products running, not n steps
  plgpu.wgmma_wait(2) => plgpu.wgmma_wait(0)
  delay_release=1 => delay_release=0 && wait(2) => wait(0)
  delay_release=1 => delay_release=0 && wait(2) => wait(0) && max_concurrent_steps=3 => max_concurrent_steps=1
    # this is no ring: nothing is loaded while a step is computed
  wgmma(acc_up, a_smem, up_smem) => wgmma(acc_up, a_smem, gate_smem)  # `gate` stands in both
  (a_gmem, gate_gmem, up_gmem)\n => (a_gmem, up_gmem, gate_gmem)\n  # silu belongs to the product with `gate`
  jax.nn.silu(acc_gate[...]) => acc_gate[...]  # without silu
  jax.nn.silu(acc_gate[...]) * acc_up[...] => acc_gate[...] + acc_up[...]  # one accumulator
  [a_spec, b_spec, b_spec] => [a_spec, b_spec]  # cannot be compiled
  lambda ki: (mi, ki) => lambda ki: (lax.rem(mi, 2), ki)  # element
  grid=(num_steps,) => grid=(min(num_steps, 16),)  # are not all of K
  lambda ki: (ki, ni) => lambda ki: (lax.rem(ki, 4), ni)  # element
  lambda ki: (mi, ki) => lambda ki: (0, ki) && lambda ki: (ki, ni) => lambda ki: (ki, 0)
  lambda ki: (mi, ki) => lambda ki: (lax.rem(mi, 4), ki)  # other windows
  lambda ki: (ki, ni) => lambda ki: (ki, lax.rem(ni, 8))
  lambda ki: (mi, ki) => lambda ki: (mi, lax.rem(ki, 8)) && lambda ki: (ki, ni) => lambda ki: (lax.rem(ki, 8), ni)
  lambda a, gate, up: gated(gated(a, gate, up), gate[:128], up[:128])  # launches 2 kernels, and 1 is asked for
  in_specs, operands = [a_spec, b_spec, b_spec], (a_gmem, gate_gmem, up_gmem)\n
    => specs = dict(grid=(num_steps,), in_specs=[a_spec, b_spec])
    \n            half = lambda acc: lambda _, a_smem, b_smem: plgpu.wgmma(acc, a_smem, b_smem) or plgpu.wgmma_wait(1)
    \n            plgpu.emit_pipeline(half(acc_up), **specs, max_concurrent_steps=3)(a_gmem, up_gmem)\n
    && step, grid=(num_steps,), in_specs=in_specs => half(acc_gate), **specs && (*operands) => (a_gmem, gate_gmem)
    # A is loaded once for each of the two
exercise-4
  (tile_m + tile_n) * tile_k => tile_m * tile_k && return stages if 2 * tile_m * tile_n + 8 * stages <= budget else 0
    => return stages  # a tile of A and a tile of B
  233_472 // blocks => 233_472  # shared by all its blocks
  - 1_024 =>  # reserves 1 KB
  tile_k + 8 => tile_k && + 8 * stages =>  # barrier of 8 bytes
  tile_n + 8 * stages <= budget => tile_n <= budget  # barriers stay beside
  return stages if 2 * tile_m * tile_n + 8 * stages <= budget else 0 => return stages  # tile of the output
  // (2 => / (2  # a whole number
  lambda *case: 3  # Count the bytes
"""


# %% exercise-1 needs: parameters setup
def matmul_transposed_a(a, b, tile_m=128, tile_n=128, tile_k=64):
    num_steps, grid_n = pl.cdiv(a.shape[0], tile_k), pl.cdiv(b.shape[1], tile_n)

    def kernel(a_gmem, b_gmem, o_gmem):
        mi, ni = row_by_row(lax.axis_index("tile"), grid_n)

        def add_up(acc):
            def step(_, a_smem, b_smem):
                #: plgpu.wgmma(acc, a_smem, b_smem)  # Change this line,
                # BEGIN SOLUTION
                plgpu.wgmma(acc, a_smem.T, b_smem)
                # END SOLUTION
                plgpu.wgmma_wait(1)

            #: # and this one.
            #: a_spec = plgpu.BlockSpec(
            #:     (tile_m, tile_k), lambda ki: (mi, ki), delay_release=1
            #: )
            # BEGIN SOLUTION
            a_spec = plgpu.BlockSpec(
                (tile_k, tile_m), lambda ki: (ki, mi), delay_release=1
            )
            # END SOLUTION
            b_spec = plgpu.BlockSpec(
                (tile_k, tile_n), lambda ki: (ki, ni), delay_release=1
            )
            specs = dict(in_specs=[a_spec, b_spec], max_concurrent_steps=3)
            plgpu.emit_pipeline(step, grid=(num_steps,), **specs)(a_gmem, b_gmem)
            return acc[...]

        store_tile(pl.run_scoped(add_up, plgpu.ACC((tile_m, tile_n))), o_gmem, mi, ni)

    return launch(kernel, a.shape[1], b.shape[1], tile_m, tile_n)(a, b)


ex06.check_transposed_a(matmul_transposed_a)


# %% exercise-2 needs: parameters setup
#: answer = (None, None)  # The name, and the step.
# BEGIN SOLUTION
# Two products may still run, and the stage of the last one but one is refilled.
answer = ("C", 9)
# END SOLUTION


ex06.check_wrong_release(answer)


# %% exercise-3 needs: parameters setup
def gated(a, gate, up, tile_m=128, tile_n=64, tile_k=64):
    num_steps, grid_n = pl.cdiv(a.shape[1], tile_k), pl.cdiv(up.shape[1], tile_n)

    def kernel(a_gmem, gate_gmem, up_gmem, o_gmem):
        mi, ni = row_by_row(lax.axis_index("tile"), grid_n)

        #: def add_up(acc_gate):
        #:     def step(_, a_smem, gate_smem):
        #:         plgpu.wgmma(acc_gate, a_smem, gate_smem)
        #:         plgpu.wgmma_wait(0)
        #:
        #:     a_spec = plgpu.BlockSpec((tile_m, tile_k), lambda ki: (mi, ki))
        #:     b_spec = plgpu.BlockSpec((tile_k, tile_n), lambda ki: (ki, ni))
        #:     in_specs, operands = [a_spec, b_spec], (a_gmem, gate_gmem)
        # BEGIN SOLUTION
        def add_up(acc_gate, acc_up):
            def step(_, a_smem, gate_smem, up_smem):
                plgpu.wgmma(acc_gate, a_smem, gate_smem)
                plgpu.wgmma(acc_up, a_smem, up_smem)
                plgpu.wgmma_wait(2)  # The two products of this step.

            a_spec = plgpu.BlockSpec(
                (tile_m, tile_k), lambda ki: (mi, ki), delay_release=1
            )
            b_spec = plgpu.BlockSpec(
                (tile_k, tile_n), lambda ki: (ki, ni), delay_release=1
            )
            in_specs, operands = [a_spec, b_spec, b_spec], (a_gmem, gate_gmem, up_gmem)
            # END SOLUTION
            plgpu.emit_pipeline(
                step, grid=(num_steps,), in_specs=in_specs, max_concurrent_steps=3
            )(*operands)
            #: return acc_gate[...]
            # BEGIN SOLUTION
            return jax.nn.silu(acc_gate[...]) * acc_up[...]
            # END SOLUTION

        #: accumulators = [plgpu.ACC((tile_m, tile_n))]
        # BEGIN SOLUTION
        accumulators = [plgpu.ACC((tile_m, tile_n))] * 2
        # END SOLUTION
        store_tile(pl.run_scoped(add_up, *accumulators), o_gmem, mi, ni)

    return launch(kernel, a.shape[0], up.shape[1], tile_m, tile_n)(a, gate, up)


ex06.check_gated(gated)


# %% exercise-4 needs: parameters setup
def stages_for(tile_m, tile_n, tile_k, blocks):
    #: return None  # Your code.
    # BEGIN SOLUTION
    budget = 233_472 // blocks - 1_024
    stages = max(budget, 0) // (2 * (tile_m + tile_n) * tile_k + 8)
    return stages if 2 * tile_m * tile_n + 8 * stages <= budget else 0
    # END SOLUTION


ex06.check_stages(stages_for)
