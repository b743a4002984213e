"""Solutions of chapter 23b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  * silu(load(gate_gmem.at[row])) =>  # without the gate
  t = load(x_gmem.at[row]) => t = load(x_gmem.at[row]) * silu(load(gate_gmem.at[row]))
    && * load(scale_gmem) * silu(load(gate_gmem.at[row])) => * load(scale_gmem)  # before the norm
  silu(load(gate_gmem.at[row])) => jax.nn.sigmoid(load(gate_gmem.at[row]))  # the sigmoid
  silu(load(gate_gmem.at[row])) => load(gate_gmem.at[row])  # without silu
  jnp.sum(t * t) => jnp.sum(load(x_gmem.at[row]) ** 2)  # load each once
  y = t * inverse => y = load(x_gmem.at[row]) * inverse
  / t.size => / 1  # element
  + eps => + 0.0  # eps is missing
  jnp.sum(t * t) / t.size => jnp.sum(load(x_gmem.at[row, pl.ds(0, 1024)]) ** 2) / t.size  # element
  t * inverse * load(scale_gmem) * silu(load(gate_gmem.at[row])) => silu(load(gate_gmem.at[row])) * inverse * t
    * load(scale_gmem)  # Right.
exercise-2
  (1 if fits else 2) => 1  # once more
  4 if bits == 8 else 0 => 0  # a factor
  2 * columns + => 0 +  # The sum is written too
  columns * bits // 8 => columns * 2  # one byte
  lambda columns, bits, fits: 7 * columns + 4  # is right
  2 * 2 * columns * (1 if fits else 2) => 2 * columns * (2 if fits else 3)  # not their rounded sum
exercise-3
  keep_if(row >= first_gmem[first], => keep_if(row >= 0,  # the rows before the part may be
  window = tuple(keep_if(continues, before) for before in window) => pass  # inside of a part
  keep_if(row >= first_gmem[first], => keep_if(row >= 0,
    && window = tuple(keep_if(continues, before) for before in window) => pass  # of the sequence before
  keep_if(row >= first_gmem[first], => keep_if(row >= first,  # the rows before it are missing
  tuple(keep_if(continues, before) for before in window) => tuple(before * jnp.where(continues, 1.0, 0.0)
    for before in window)  # 0 times NaN
  return keep_if(row >= first_gmem[first], x) => return x * jnp.where(row >= first_gmem[first], 1.0, 0.0)
  pl.ds(TILE * lax.axis_index("tile"), TILE) => pl.ds(0, TILE)  # a race
  window = (*window, x) => window = (*(keep_if(start + j - k >= first_gmem[start + j], load(x_gmem.at[jnp.maximum(start
    + j - k, 0), mine], 4)) for k in (3, 2, 1)), x)  # in registers
exercise-4
  return jnp.concatenate([state, x[-num:]])[-num:] => return x[-num:]  # shape
  return jnp.concatenate([state, x[-num:]])[-num:] => return jnp.concatenate([0 * state, x])[-num:]  # not zeros
  x[-num:] => x  # take the last rows of x first
  return jnp.concatenate([state, x[-num:]])[-num:] => return jnp.concatenate([state, x[-num:]])[:num]
    # the state that it began with
  return jnp.concatenate([state, x[-num:]])[-num:] => return jnp.concatenate([state, x[-num:]])[-num:][::-1]
    # must be the last one
  return jnp.concatenate([state, x[-num:]])[-num:] => return lax.scan(lambda s, row: (jnp.concatenate([s[1:],
    row[None]]), None), state, x)[0]  # in a loop
  return jnp.concatenate([state, x[-num:]])[-num:] => return jnp.concatenate([state,
    x[-num:]])[-num:].astype(jnp.float16)  # float16
"""


# %% exercise-1 needs: parameters setup helpers
def gated_norm(x, gate, scale, eps=1e-6):
    def kernel(x_gmem, gate_gmem, scale_gmem, y_gmem):
        row = lax.axis_index("row")
        t = load(x_gmem.at[row])
        inverse = lax.rsqrt(jnp.sum(t * t) / t.size + eps)
        #: y = t * inverse * load(scale_gmem)
        # BEGIN SOLUTION
        y = t * inverse * load(scale_gmem) * silu(load(gate_gmem.at[row]))
        # END SOLUTION
        y_gmem[row] = y.astype(y_gmem.dtype)

    return per_row(kernel, x, x.dtype)(x, gate, scale)


ex23b.check_gated_norm(gated_norm)


# %% exercise-2 needs: parameters setup helpers
def row_bytes(columns, bits, fits):
    #: return 0  # Your count.
    # BEGIN SOLUTION
    inputs = 2 * 2 * columns * (1 if fits else 2)
    return inputs + 2 * columns + columns * bits // 8 + (4 if bits == 8 else 0)
    # END SOLUTION


ex23b.check_row_bytes(row_bytes)


# %% exercise-3 needs: parameters setup helpers rung-5-code
def packed_conv(x, w, first_of, *, rows=16, at_once=4):
    length, columns = x.shape

    def kernel(x_gmem, w_gmem, first_gmem, y_gmem):
        first = rows * lax.axis_index("part")
        mine = pl.ds(TILE * lax.axis_index("tile"), TILE)
        weights = [load(w_gmem.at[j, mine], 4) for j in range(len(w))]

        def row_before(row):
            x = load(x_gmem.at[jnp.maximum(row, 0), mine], 4)
            #: return keep_if(row >= 0, x)
            # BEGIN SOLUTION
            return keep_if(row >= first_gmem[first], x)
            # END SOLUTION

        def step(i, window):
            start = first + i * at_once
            loaded = [load(x_gmem.at[start + j, mine], 4) for j in range(at_once)]
            for j, x in enumerate(loaded):
                # BEGIN SOLUTION
                continues = first_gmem[start + j] < start + j
                window = tuple(keep_if(continues, before) for before in window)
                # END SOLUTION
                window = (*window, x)
                y = silu(weighted(weights, window))
                y_gmem[start + j, mine] = y.astype(y_gmem.dtype)
                window = window[1:]
            return window

        halo = tuple(row_before(first - j) for j in range(len(w) - 1, 0, -1))
        lax.fori_loop(0, rows // at_once, step, halo)

    grid = dict(part=length // rows, tile=columns // TILE)
    return launch(kernel, grid, like(x))(x, w, first_of)


ex23b.check_packed_conv(packed_conv)


# %% exercise-4 needs: parameters setup helpers
def final_state(x, state):
    num = len(state)  # 3 for a convolution of width 4.
    #: return x[-num:]
    # BEGIN SOLUTION
    return jnp.concatenate([state, x[-num:]])[-num:]
    # END SOLUTION


ex23b.check_final_state(final_state)
