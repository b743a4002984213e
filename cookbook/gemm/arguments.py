# SPDX-License-Identifier: Apache-2.0
"""The arguments of products: what is refused, and by which message."""

import jax.numpy as jnp
from jax import lax

from .. import _host


def product_sizes(op: str, operands: dict, transpose_a=False, transpose_b=False, grouped=False, along_k=False):
    """M, N and K of the product of two `operands`, by name: (M, K) and (K, N), or (G, K, N) if `grouped`.

    Args:
      op: whose operands they are, for messages.
      operands: the two.
      transpose_a, transpose_b: the first, or the second, lies the other way round.
      along_k: the kernel reads both with K along their rows, also one that lies differently: it is copied before.

    Raises:
      ValueError: a rank or shape is not supported, or TMA cannot read the rows.
    """
    (name_a, a), (name_b, b) = operands.items()
    said = f"{_host.PACKAGE}.{op}: {name_a}.shape={a.shape}, {name_b}.shape={b.shape}"
    if a.ndim != 2 or b.ndim != (3 if grouped else 2):
        rule = "be (M, K) and a matrix for each group" if grouped else "both be matrices: use jax.vmap for batches"
        raise ValueError(f"{said}; must {rule}")
    (m, k), (k_b, n) = a.shape[:: -1 if transpose_a else 1], b.shape[-2:][:: -1 if transpose_b else 1]
    if k != k_b:
        raise ValueError(f"{said} share no K: {k} is not {k_b}; is one stored the other way round?")
    for name, x in operands.items():
        require_rows(op, name, x, k if along_k else None)
    _host.require_indices(op, M=m, N=n, K=k)
    return m, n, k


def require_rows(op: str, name: str, x, k: int | None = None):
    """Raises a ValueError unless TMA can read the rows of `x`, or `k` values of it along K."""
    size = x.shape[-1] if k is None else k
    unit = 16 // x.dtype.itemsize
    if size % unit:
        found = f"a row of {name} has {size} values" if k is None else f"{name} has {size} values along K"
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {found}, {size * x.dtype.itemsize} bytes; TMA needs a multiple of 16 bytes: pad it "
            f"to {-(-size // unit) * unit} (jnp.pad, one copy of {name})"
        )


def require_halves(op: str, **operands):
    """Raises a ValueError unless both operands are bfloat16, or both float16."""
    (name_a, a), (name_b, b) = operands.items()
    if a.dtype not in (jnp.bfloat16, jnp.float16) or a.dtype != b.dtype:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name_a}.dtype={a.dtype}, {name_b}.dtype={b.dtype}; must both be bfloat16 or both "
            "float16: cast one"
        )


def bias_of(op: str, bias, n: int):
    """`bias` as an array (N,), or None."""
    if bias is None:
        return None
    bias = _host.as_array(op, "bias", bias)
    if bias.shape != (n,) or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"{_host.PACKAGE}.{op}: {bias.shape=}, {bias.dtype=}; must be ({n},), N, of a floating dtype")
    return bias


def require_precision(op: str, precision):
    """Raises a ValueError unless `precision` is what every `jax.lax.Precision` means for values of 16 bits."""
    for x in precision if isinstance(precision, tuple) else (precision,):
        try:
            lax.Precision(x)
        except ValueError:
            raise ValueError(
                f"{_host.PACKAGE}.{op}: precision={precision!r}; must be None or a jax.lax.Precision, which all mean "
                "exact products of 16-bit values and float32 sums: leave it out"
            ) from None
