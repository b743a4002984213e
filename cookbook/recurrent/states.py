# SPDX-License-Identifier: Apache-2.0
"""States of the recurrent kernels: what decays leave of them, in registers, from part to part of a sequence, and in
other libraries.

A state here is (B, H, P, N) in float32: a row of N numbers, the size of a key, for each of a head's P values. Packed
sequences have num_seqs in the place of B. Others have

    library        ops and models                    layout          where it is called
    fla            all recurrent ops                 (B, H, N, P)    initial_state, final_state
    fla.v_first    those with state_v_first=True,    (B, H, P, N)    the same
                   before transpose_state_layout
    mamba_ssm      Mamba-2: chunk scan and step      (B, H, P, N)    initial_states, final_states; state
    transformers   Qwen3-Next, Kimi Linear           (B, H, N, P)    cache.recurrent_states[layer]
    transformers   Mamba-2, as "transformers.mamba2" (B, H, P, N)    cache.ssm_states[layer]

Where N = P a state of the other layout has the right shape and is wrong: `states_from` and `states_to` know which is
which.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import PIECE, Ref

LEAST_DECAY = 2.0**-64  # A stronger decay counts as this one: 2**-64 of a state stays.


def cumulative(values):
    """Sums of `values` (H, chunks, rows) up to each row, in float32: by doublings, which XLA fuses. The order of the
    additions depends on the number of rows alone, so a sequence cut between two chunks has the same sums as a whole
    one. XLA's products and scans choose theirs by the whole shape."""
    width = 1
    while width < values.shape[-1]:
        before = jnp.pad(values[..., :-width], [(0, 0)] * (values.ndim - 1) + [(width, 0)])
        values, width = values + before, 2 * width
        if width == 8:  # XLA would fuse more doublings, and add numbers again for each result.
            values = lax.optimization_barrier(values)
    return values


def cumulative_decays(logs):
    """`cumulative` of the logarithms of decays, none below `LEAST_DECAY`, each sum rounded about once.

    Kernels take differences of these sums. So one strong decay must not cost the bits of the weak ones after it:
    hence the least decay, and whole numbers are summed apart, where nothing is rounded.
    """
    whole = jnp.round(logs)
    whole, rest = cumulative(jnp.stack([whole, logs - whole]))
    return whole + rest


def first_state(gmem: Ref | None, index, pieces: int):
    """The state (64, 64 * pieces) that a part starts from, in registers, as a list of its pieces. `index` is (the
    part's number, head). Zeros if `gmem` is None, or if the part is padding, for which `gmem` has no state."""
    if gmem is None:
        return [plgpu.layout_cast(jnp.zeros((PIECE, PIECE), jnp.float32), plgpu.Layout.WGMMA)] * pieces
    first, last = index[0], gmem.shape[0] - 1
    of = (jnp.minimum(first, last), *index[1:], slice(None))
    state = [_device.load(gmem.at[(*of, pl.ds(p * PIECE, PIECE))]) for p in range(pieces)]
    return [jnp.where(lax.broadcast(first <= last, piece.shape), piece, 0.0) for piece in state]


def store_state(gmem: Ref, index, state):
    """Stores the state after a part, unless the part is padding, for which `gmem` has no place."""

    @pl.when(index[0] < gmem.shape[0])
    def _():
        for p, piece in enumerate(state):
            _device.store(gmem.at[(*index, slice(None), pl.ds(p * PIECE, PIECE))], piece)


def combine(end_of, parts, seq, initial, reverse: bool = False):
    """(state at the start of each part, state at the end of each sequence's last part).

    `end_of(start, *part)` is the state at the end of a part: of the state at its start, and its numbers in `parts`,
    arrays of (parts, ...). `seq` is the sequence of each part; `initial` (num_seqs, ...) are the states at the starts
    of the sequences. In `reverse` each sequence starts at its last part.
    """
    num_seqs, before = len(initial), dict(constant_values=-1)
    neighbour = jnp.pad(seq[1:], (0, 1), **before) if reverse else jnp.pad(seq[:-1], (1, 0), **before)
    given = jnp.pad(initial, ((0, 1), *((0, 0),) * 3))

    def step(carry, part):
        previous, ends = carry
        *numbers, seq, is_first = part
        start = jnp.where(is_first, given[seq], previous)
        end = end_of(start, *numbers)
        return (end, ends.at[seq].set(end)), start

    parts = *parts, jnp.minimum(seq, num_seqs), seq != neighbour
    zero, ends = jnp.zeros(given.shape[1:], jnp.float32), jnp.zeros(given.shape, jnp.float32)
    (_, ends), starts = lax.scan(step, (zero, ends), parts, reverse=reverse, unroll=min(16, len(seq)))
    return starts, ends[:num_seqs]


# Whether the keys' axis comes before the values' in the states of a library.
KEYS_FIRST = {
    "fla": True, "fla.v_first": False, "mamba_ssm": False, "transformers": True, "transformers.mamba2": False,
}  # fmt: skip


def states_from(library: str, states):
    """States of `library`, one of `KEYS_FIRST`, of any float dtype, as this package's ops take them.

    Raises:
      ValueError: the library is not known, or the states have fewer than four axes.
    """
    return states_to(library, states).astype(jnp.float32)


def states_to(library: str, states):
    """States (B, H, P, N) of this package's ops in the layout of `library`, one of `KEYS_FIRST`. The dtype stays.

    Raises:
      ValueError: the library is not known, or the states have fewer than four axes.
    """
    where, states = f"{_host.PACKAGE}.recurrent.states", jnp.asarray(states)
    if library not in KEYS_FIRST:
        raise ValueError(f"{where}: {library=}; must be one of {', '.join(KEYS_FIRST)}")
    if states.ndim < 4:
        raise ValueError(f"{where}: {states.shape=}; must be (B, H, P, N), or (B, H, N, P) there: add the missing axes")
    return jnp.swapaxes(states, -1, -2) if KEYS_FIRST[library] else states


def as_states(states, heads: int):
    """States (num_seqs, H, P, N) with heads of 64 values: (num_seqs, H * P / 64, 64, N). Nothing is moved."""
    return states.reshape(len(states), heads, PIECE, states.shape[-1])
