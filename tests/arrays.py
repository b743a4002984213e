"""Arrays of tests, made on the host."""

import jax
import numpy as np


def array(values, dtype) -> jax.Array:
    """`values`, on the device. `jnp.asarray` compiles a program for each shape, and most tests use one once."""
    return jax.device_put(np.asarray(values, dtype))
