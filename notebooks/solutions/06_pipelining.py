"""Solutions of chapter 6's exercises; how to read the marks: tools/skeletons.py."""

# %% exercise-2 needs: parameters setup
#: answer = (None, None)  # The name, and the step.
# BEGIN SOLUTION
# Two products may still run, and the slot of the last one but one is refilled.
answer = ("C", 9)
# END SOLUTION


ex06.check_wrong_release(answer)


# %% exercise-1 needs: parameters setup
def stages_for(tile_m, tile_n, tile_k, blocks):
    #: return None  # Your code.
    # BEGIN SOLUTION
    budget = 233_472 // blocks - 1_024
    stages = max(budget, 0) // (2 * (tile_m + tile_n) * tile_k + 8)
    return stages if 2 * tile_m * tile_n + 8 * stages <= budget else 0
    # END SOLUTION


ex06.check_stages(stages_for)


# %% exercise-gated needs: parameters setup launch
def gated(a, gate, up, tile=(128, 64, 64)):
    tile_m, tile_n, tile_k = tile

    def body(grid_tiles, a_gmem, gate_gmem, up_gmem, o_gmem):
        mi, ni = plgpu.planar_snake(lax.axis_index("tile"), grid_tiles, 0, 8)

        #: def multiply(acc_gate):
        #:     def step(_, a_smem, gate_smem):
        #:         plgpu.wgmma(acc_gate, a_smem, gate_smem)
        #:         plgpu.wgmma_wait(0)
        #:
        # BEGIN SOLUTION
        def multiply(acc_gate, acc_up):
            def step(_, a_smem, gate_smem, up_smem):
                plgpu.wgmma(acc_gate, a_smem, gate_smem)
                plgpu.wgmma(acc_up, a_smem, up_smem)
                plgpu.wgmma_wait(0)

            # END SOLUTION
            a_spec = plgpu.BlockSpec((tile_m, tile_k), lambda ki: (mi, ki))
            b_spec = plgpu.BlockSpec((tile_k, tile_n), lambda ki: (ki, ni))
            #: in_specs, operands = [a_spec, b_spec], (a_gmem, gate_gmem)
            # BEGIN SOLUTION
            in_specs, operands = [a_spec, b_spec, b_spec], (a_gmem, gate_gmem, up_gmem)
            # END SOLUTION
            steps = pl.cdiv(a.shape[1], tile_k)
            plgpu.emit_pipeline(
                step, grid=(steps,), in_specs=in_specs, max_concurrent_steps=3
            )(*operands)
            #: return acc_gate[...]
            # BEGIN SOLUTION
            return jax.nn.silu(acc_gate[...]) * acc_up[...]
            # END SOLUTION

        #: accumulators = [plgpu.ACC((tile_m, tile_n), jnp.float32)]
        # BEGIN SOLUTION
        accumulators = [plgpu.ACC((tile_m, tile_n), jnp.float32)] * 2
        # END SOLUTION
        store_tile(pl.run_scoped(multiply, *accumulators), o_gmem, mi, ni)

    return launch(body, (a.shape[0], gate.shape[1]), tile)(a, gate, up)


ex06.check_gated(gated)


# %% exercise-3 needs: parameters setup launch
def matmul_transposed_a(a, b, tile=(128, 128, 64)):
    tile_m, tile_n, tile_k = tile
    steps = pl.cdiv(a.shape[0], tile_k)

    def body(grid_tiles, a_gmem, b_gmem, o_gmem):
        mi, ni = plgpu.planar_snake(lax.axis_index("tile"), grid_tiles, 0, 8)

        def multiply(acc):
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
            specs = dict(
                grid=(steps,), in_specs=[a_spec, b_spec], max_concurrent_steps=3
            )
            plgpu.emit_pipeline(step, **specs)(a_gmem, b_gmem)
            return acc[...]

        store_tile(
            pl.run_scoped(multiply, plgpu.ACC((tile_m, tile_n), jnp.float32)),
            o_gmem,
            mi,
            ni,
        )

    return launch(body, (a.shape[1], b.shape[1]), tile)(a, b)


ex06.check_transposed_a(matmul_transposed_a)
