"""Solutions of chapter 22's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  lax.rsqrt(jnp.sum(total * total) * (1 / total.size) + eps) => 1 / jnp.sqrt(jnp.sum(total * total / total.size) + eps)
    # Right.
  total = x + load(residual_gmem.at[row]) => total = x  # the norm of x alone
  jnp.sum(total * total) => jnp.sum(x * x)  # the squares must be those of the sum
  total * inverse * scale => total * inverse  # not multiplied by scale
  * (1 / total.size) =>  # divide it by the columns
  lax.rsqrt(jnp.sum(total * total) * (1 / total.size) + eps) => 1.0  # not divided by the root
  + eps) => )  # eps belongs under the root
  + eps) => + 1.0)  # the norm: element
  + eps) => + 1e-30)  # with values around 0.001
  jnp.sum(total * total) * (1 / total.size) + eps => (jnp.sum(total * total) + eps) * (1 / total.size)
    # with values around 0.001
  total_gmem[row] = total => pass  # the sum, which the next norm adds to
  total_gmem[row] = total => total_gmem[row] = x  # total_gmem has x alone
  total_gmem[row] = total => total_gmem[row] = total.astype(jnp.bfloat16).astype(jnp.float32)  # keep it in float32
  total_gmem[row] = total => total_gmem[row] = 2 * total  # the sum, which the next norm adds to
  (1 / total.size) => (1 / 1024)  # with 2048 columns, the norm
  total_gmem[row] = total => pass && total = x + load(residual_gmem.at[row]) => total_gmem[row] = x +
    load(residual_gmem.at[row])\n        total = load(total_gmem.at[row])  # reads it back
  (total * inverse * scale) => (total.astype(jnp.bfloat16).astype(jnp.float32) * inverse * scale)  # only y is rounded
  total_gmem[row] = total => total_gmem[row] = x + load(residual_gmem.at[row])  # 4 rows
  (1 / total.size) => (1 / (total.size - 8))  # the norm: element
  (1 / total.size) => {1024: 1 / 1024, 2048: 1 / 2048}[total.size]  # KeyError
  + eps) => + 1e-6)  # with eps = 1e-4
  load(residual_gmem.at[row]) => load(residual_gmem)  # cannot be compiled for a GPU
  load(residual_gmem.at[row]) => load(residual_gmem.at[row + 1])  # beyond the end
  lambda x, residual, scale: added_norm(x, residual, scale)[0]  # two arrays
  jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) => jax.ShapeDtypeStruct(x.shape, jnp.float32)  # the norm is bfloat16
  jax.ShapeDtypeStruct(x.shape, jnp.float32) => jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    && total_gmem[row] = total => total_gmem[row] = total.astype(jnp.bfloat16)  # the sum float32
exercise-2
  o_smem[0], o_smem[1] = a.astype(q.dtype), b.astype(q.dtype) => o_smem[1] = b.astype(q.dtype)
    \n        o_smem[0] = a.astype(q.dtype)  # Right.
  a, b = a * c - b * s, b * c + a * s => a = a * c - b * s; b = b * c + a * s  # turned already
  a, b = a * c - b * s, b * c + a * s => a, b = a * c + b * s, b * c - a * s  # the wrong way
  a, b = a * c - b * s, b * c + a * s => a, b = a * c + b * s, b * c + a * s  # that it must subtract
  a, b = a * c - b * s, b * c + a * s => a, b = a * c - b * s, b * c - a * s  # that it must add
  a, b = a * c - b * s, b * c + a * s => b, a = a * c - b * s, b * c + a * s  # each other's place
  a, b = a * c - b * s, b * c + a * s => a, b = a * c - a * s, b * c + b * s  # meets itself
  a, b = a * c - b * s, b * c + a * s => pass  # nothing is turned
  a, b = a * c - b * s, b * c + a * s => a = a * c - b * s; b = (b + s * a) / c  # where cos is 0
  a, b = a * c - b * s, b * c + a * s => a, b, c, s = (t.astype(q.dtype) for t in (a, b, c, s))
    \n        a, b = a * c - b * s, b * c + a * s  # element
  a, b = a * c - b * s, b * c + a * s => first = a * c - b * s
    \n        a, b = first, b * c + read(of_head.at[:, pl.ds(0, half)]) * s  # values per token
  for part in range(2): => for part in (0, 1, 0, 1):  # copies to GMEM, and 2 would do
  half = q.shape[2] // 2 => half = {64: 32, 128: 64}[q.shape[2]]  # KeyError
  a, b = a * c - b * s, b * c + a * s => a, b = a * c, b * c  # element
  read(sin_gmem.at[tokens]) => read(sin_gmem.at[pl.ds(0, 64)])  # heads of 64: element (64,
  plgpu.commit_smem() => pass  # commit what you have stored
  plgpu.wait_smem_to_gmem(0) => pass  # wait for all of them
  o_smem[0], o_smem[1] = a.astype(q.dtype), b.astype(q.dtype) => pass
    && plgpu.commit_smem() => pass && plgpu.wait_smem_to_gmem(0) => pass
    && plgpu.copy_smem_to_gmem(\n                o_smem.at[part], out.at[:, pl.ds(part * half, half)]\n            )
    => out.at[:, pl.ds(part * half, half)][...] = (a, b)[part].astype(q.dtype)  # by TMA
  for part in range(2): => for part in range(1):  # were never written
  read(of_head.at[:, pl.ds(half, half)]) => read(of_head.at[:, pl.ds(half, 8)])  # cannot be compiled
  lambda q, cos, sin: turned(q.reshape(*q.shape[:2], -1, 2).swapaxes(2, 3).reshape(q.shape), cos, sin)
    .reshape(*q.shape[:2], 2, -1).swapaxes(2, 3).reshape(q.shape)  # neighbouring values are paired
  lambda q, cos, sin: turned(q, cos, sin)[:, :1]  # shape
exercise-3
  lambda row, hidden, piece: np.arange(2 * hidden).reshape(2, -1, piece).swapaxes(0, 1).ravel()[row]  # Right.
  lambda row, hidden, piece: row  # of the gate alone
  lambda row, hidden, piece: row % 2 * hidden + row // 2  # take turns one by one
  which * hidden + tile * piece + within => which * hidden + within  # the rows of the first
  which * hidden + tile => tile  # those of up begin at `hidden`
  which * hidden => (1 - which) * hidden  # begins with the gate
  tile * piece => tile * 2 * piece  # only `piece` of each matrix
  lambda row, hidden, piece: row % hidden // piece * 2 * piece + row // hidden * piece + row % hidden % piece
    # the other direction
  lambda row, hidden, piece: 0  # at which place of the tile
  lambda *case: float(source_row(*case))  # a whole number
exercise-4
  return 1e3 * nbytes / rate => return np.float64(1e3) * nbytes / rate  # Right.
  (length + 1) => length  # also writes
  sequences * (length => (length  # of its own
  * (length + 1) =>  # of all tokens so far
  weight_bytes + token_bytes * sequences * (length + 1) => weight_bytes  # keys and values as well
  weight_bytes + => weight_bytes * sequences +  # a step reads them once
  layers * => 1 *  # Each layer has that many
  large + 1 => large  # gives the logits
  layers * small + once => layers * (small + once)  # not in each layer
  small + once => small  # cost as much
  large_us * (layers * large + 1) + =>  # it starts and drains
  + small_us * (layers * small + once) =>  # Small kernels cost time
  large_us * ( => small_us * (  # not as much as a small one
  large_us * ( => SWAP * ( && small_us * ( => large_us * ( && SWAP => small_us  # swapped
  return 1e3 * nbytes / rate + 1e-3 * kernels_us => return 1e3 * nbytes / rate  # That is the bound
  1e3 * nbytes / rate + 1e-3 * kernels_us => max(1e3 * nbytes / rate, 1e-3 * kernels_us)  # add them
  lambda *case: step_milliseconds(*case) / 1e3  # in seconds
  lambda *case: step_milliseconds(*case) * 1e3  # in microseconds
  lambda *case: 1.1 * step_milliseconds(*case)  # mind the units
"""


# %% exercise-1 needs: parameters setup
def added_norm(x, residual, scale, eps=1e-6):
    """The norm of residual + x in bfloat16, and the sum: x, residual (rows, cols)
    float32; scale (cols,)."""

    def kernel(x_gmem, residual_gmem, scale_gmem, y_gmem, total_gmem):
        row = lax.axis_index("block")
        x, scale = load(x_gmem.at[row]), load(scale_gmem)
        #: # Your code. So far this is the norm of x alone, and no sum is stored.
        #: inverse = lax.rsqrt(jnp.sum(x * x) * (1 / x.size) + eps)
        #: y_gmem[row] = (x * inverse * scale).astype(y_gmem.dtype)
        # BEGIN SOLUTION
        total = x + load(residual_gmem.at[row])
        inverse = lax.rsqrt(jnp.sum(total * total) * (1 / total.size) + eps)
        y_gmem[row] = (total * inverse * scale).astype(y_gmem.dtype)
        total_gmem[row] = total
        # END SOLUTION

    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
        ],
        grid=(len(x),),
        grid_names=("block",),
        compiler_params=lab.compiler_params(),
    )(x, residual, scale)


ex22.check_added_norm(added_norm)


# %% exercise-2 needs: parameters setup
def turned(q, cos, sin):
    """q (tokens, heads, D) with each head turned by its token's angles: cos, sin
    (tokens, D / 2) float32."""
    half = q.shape[2] // 2

    def kernel(q_gmem, cos_gmem, sin_gmem, o_gmem, o_smem):
        # A block has a head of 64 tokens. In this layout a thread has the same places
        # of both halves.
        tokens = pl.ds(64 * lax.axis_index("block"), 64)
        of_head = q_gmem.at[tokens, lax.axis_index("head")]
        read = lambda ref: plgpu.load(
            ref, layout=plgpu.Layout.WGMMA, optimized=False
        ).astype(jnp.float32)
        a = read(of_head.at[:, pl.ds(0, half)])
        b = read(of_head.at[:, pl.ds(half, half)])
        c, s = read(cos_gmem.at[tokens]), read(sin_gmem.at[tokens])
        #: a = a * c - b * s
        #: b = b * c + a * s
        # BEGIN SOLUTION
        a, b = a * c - b * s, b * c + a * s
        # END SOLUTION
        o_smem[0], o_smem[1] = a.astype(q.dtype), b.astype(q.dtype)
        # BEGIN SOLUTION
        plgpu.commit_smem()  # TMA must see what the threads have written.
        # END SOLUTION
        out = o_gmem.at[tokens, lax.axis_index("head")]
        for part in range(2):
            plgpu.copy_smem_to_gmem(
                o_smem.at[part], out.at[:, pl.ds(part * half, half)]
            )
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(len(q) // 64, q.shape[1]),
        grid_names=("block", "head"),
        scratch_types=[plgpu.SMEM((2, 64, half), q.dtype)],
        compiler_params=lab.compiler_params(),
    )(q, cos, sin)


ex22.check_turned(turned)


# %% exercise-3 needs: parameters setup
def source_row(row, hidden, piece):
    #: return None  # Your code.
    # BEGIN SOLUTION
    tile, place = divmod(row, 2 * piece)
    which, within = divmod(place, piece)
    return which * hidden + tile * piece + within
    # END SOLUTION


ex22.check_source_row(source_row)


# %% exercise-4 needs: parameters setup
def step_milliseconds(
    weight_bytes, token_bytes, sequences, length, rate, layers, large, small, once,
    large_us, small_us,
):  # fmt: skip
    #: return None  # Your code.
    # BEGIN SOLUTION
    nbytes = weight_bytes + token_bytes * sequences * (length + 1)
    kernels_us = large_us * (layers * large + 1) + small_us * (layers * small + once)
    return 1e3 * nbytes / rate + 1e-3 * kernels_us
    # END SOLUTION


ex22.check_step(step_milliseconds)
