# SPDX-License-Identifier: Apache-2.0
"""draft"""

import functools
import jax
import jax.numpy as jnp
from .. import _host
from .._device import WARPGROUP
from . import kernel, noise


def _score(seed, position, temperature, x, column):
    x = x.astype(jnp.float32)
    x = jnp.where(x == x, x, -jnp.inf)
    is_greedy = temperature <= 0.0
    scale = 1.0 / jnp.where(is_greedy, 1.0, temperature)
    g = noise.gumbel(noise.row_key(seed, position), column)
    return kernel.to_key(x * scale + g * jnp.where(is_greedy, 0.0, 1.0))


@functools.partial(jax.jit, static_argnames=("target", "params"))
def _draw(logits, seeds, positions, temperature, target, params):
    score, index = kernel.stages(logits, 1, jnp.float32, target, params, _score, (seeds, positions, temperature))
    return index[:, 0]


def sample(logits, seeds, positions, temperature):
    target = _host.require_target("sample")
    params = _host.compiler_params(unsafe_no_auto_barriers=True, approx_math=True)
    return _draw(logits, seeds, positions, temperature, target, params)
