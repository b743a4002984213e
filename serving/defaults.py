"""JAX's options that a program may set for itself, and that must not change what the engine computes."""

import functools

import jax


def under_defaults(fn):
    """`fn`, traced with JAX's own defaults of the options that change random numbers and the promotion of operands."""

    @functools.wraps(fn)
    def run(*args, **kwargs):
        with (
            jax.default_prng_impl("threefry2x32"), jax.threefry_partitionable(True),
            jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"),
        ):  # fmt: skip
            return fn(*args, **kwargs)

    return run
