"""Arrays of tests, made on the host."""

import jax
import numpy as np


def array(values, dtype=None) -> jax.Array:
    """`values`, on the device. `jnp.asarray` does the same by a program that is compiled for each shape and dtype: in
    tests, whose shapes are many and small, that took longer than all that they compute."""
    return jax.device_put(np.asarray(values, dtype))
