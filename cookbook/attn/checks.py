"""Checks of the arguments of every op of this family."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from .. import _mgpu
from .core import window


def arrays(op: str, **given) -> list:
    """`given` as JAX arrays. Under `jax_enable_x64` too, lists and NumPy's arrays become those of 32 bits.

    Raises:
      ValueError: JAX can make no array of one.
    """

    def array(name, x):
        on_host = isinstance(x, np.ndarray | list | tuple)
        with jax.enable_x64(False) if on_host else contextlib.nullcontext():
            return _mgpu.as_array(op, name, x)

    return [array(*item) for item in given.items()]


def options(op: str, head_dim: int, is_causal, scale, logits_soft_cap, local_window_size) -> dict:
    """Scale, soft cap and window, in the words of `core.Problem`. Each number may be Python's, NumPy's or JAX's.

    Raises:
      ValueError: one is traced, of another kind, or out of range.
    """
    numbers = dict(scale=head_dim**-0.5 if scale is None else scale, logits_soft_cap=logits_soft_cap)
    for name, number in numbers.items():
        if number is not None:
            numbers[name] = _mgpu.option(op, name, number, float)
            if not numbers[name] > 0:
                raise ValueError(f"cookbook.{op}: {name} = {number} must be above 0")
    sizes = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    wrong = isinstance(local_window_size, list) or len(sizes) != 2
    if not wrong:
        sizes = tuple(None if size is None else _mgpu.option(op, "local_window_size", size, int) for size in sizes)
    if wrong or any(size is not None and size < 0 for size in sizes):
        raise ValueError(
            f"cookbook.{op}: {local_window_size=} must be a number of keys, at least 0, or a tuple (before, after), "
            "None for all"
        )
    left, right = window(_mgpu.option(op, "is_causal", is_causal, bool), sizes)
    return dict(scale=numbers["scale"], soft_cap=numbers["logits_soft_cap"], left=left, right=right)


def sinks(op: str, sinks, num_heads: int):
    """`sinks` as a JAX array in float32, or None.

    Raises:
      ValueError: they are not a number a head.
    """
    if sinks is None:
        return None
    (sinks,) = arrays(op, sinks=sinks)
    if sinks.shape != (num_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"cookbook.{op}: sinks = {sinks.shape}, {sinks.dtype}; must be ({num_heads},), a logit a head, in floats"
        )
    return sinks.astype(jnp.float32)


def segment_ids(op: str, ids, kv_ids, shape: tuple[int, int], kv_shape: tuple[int, int]):
    """Segments of queries and of keys, as int32 that are equal, and in order, where these are.

    Raises:
      ValueError: they are no integers of these shapes, or have no integer dtype in common.
    """
    with jax.enable_x64():  # Without it 0 and 2**32 would be the same segment.
        ids = _integers(op, "segment_ids", ids, shape)
        kv_ids = _integers(op, "kv_segment_ids", kv_ids, kv_shape)
        dtype = jnp.promote_types(ids.dtype, kv_ids.dtype)
        if jnp.can_cast(dtype, jnp.int32):
            return ids.astype(jnp.int32), kv_ids.astype(jnp.int32)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(
                f"cookbook.{op}: segment ids of {ids.dtype} and {kv_ids.dtype} share no integers: cast one"
            )
        # Wider ids become their ranks.
        both = jnp.concatenate([ids.astype(dtype), kv_ids.astype(dtype)], axis=1)
        ranks = jax.vmap(lambda x: jnp.searchsorted(jnp.sort(x), x))(both).astype(jnp.int32)
        return ranks[:, : shape[1]], ranks[:, shape[1] :]


def _integers(op: str, name: str, ids, shape):
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and ids.size:
        if -(2**31) <= int(ids.min()) and int(ids.max()) < 2**31:
            ids = ids.astype(np.int32)  # No ranks are needed for them.
    ids = _mgpu.as_array(op, name, ids)
    if ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"cookbook.{op}: {name} = {ids.shape}, {ids.dtype}; must be {shape}, an integer each")
    return ids


def check_smem(op: str, config, need: int, head_dim: int) -> None:
    """Check that a block has the `need` bytes of shared memory that a configuration asks for.

    Raises:
      ValueError: it has fewer.
    """
    if need > _mgpu.SMEM_BYTES_MAX:
        raise ValueError(
            f"cookbook.{op}: {config} needs {need} bytes of shared memory for {head_dim=}, and a block has "
            f"{_mgpu.SMEM_BYTES_MAX}: fewer stages or smaller blocks"
        )
