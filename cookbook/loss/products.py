# SPDX-License-Identifier: Apache-2.0
"""The three products of linear_cross_entropy, by the kernel of gemm, of operands as they lie.

    logits = hidden @ weight^T          (rows, H), (V, H)  ->  (rows, pitch)
    d_hidden = g @ weight               (rows, pitch), (V, H)  ->  (rows, H)
    d_weight = g^T @ hidden             (rows, pitch), (rows, H)  ->  (V, H)

The logits have `pitch` columns, at least V, so that TMA can read rows of any vocabulary; what is beyond V holds nothing
that counts before the gradient writes zeros there. With `transposed` the weight, and its gradient, is (H, V).
"""

import functools

from .. import _host
from ..gemm import cost
from ..gemm.kernel import kernel
from ..gemm.launch import fused_product
from ..gemm.plan import identity, plan_of

PITCH_MIN = 128  # The kernels along rows have a column for each thread.


def pitch_of(vocabulary: int, transposed: bool) -> int:
    """Columns of the logits. Tiles of g^T need no copy if these are a multiple of 64."""
    unit = 8 if transposed else 64
    return max(PITCH_MIN, -(-vocabulary // unit) * unit)


@functools.lru_cache(4096)
def _config(problem: cost.Problem) -> cost.Config:
    """The configuration of the least predicted time, of those that keep no float32 sums of parts of K in memory."""
    return min(
        (config for config in cost.candidates(problem) if not config.second_kernel),
        key=lambda config: cost.predict(config, problem),
    )


def seconds(sizes: tuple[int, int, int], transposed: tuple[bool, bool], num_sms: int) -> float:
    """The predicted time of a product of 16-bit operands, of sizes (M, N, K)."""
    problem = cost.Problem(*sizes, transposed, (2, 2, 2), num_sms)
    return cost.predict(_config(problem), problem) / 1e6


def _product(target: _host.Target, a, b, sizes, transposed, out_dtype, scale=None, varies=True):
    problem = cost.Problem(*sizes, transposed, (2, 2, out_dtype.itemsize), target.num_sms)
    plan = plan_of(
        *sizes, (a.dtype, b.dtype), transposed, identity, out_dtype, _config(problem), target.num_sms,
        target.interpreted,
    )  # fmt: skip
    vectors = {} if scale is None else dict(scale=scale.reshape(1))
    params = _host.compiler_params(approx_math=True)
    return fused_product(kernel, a, b, vectors, plan=plan, params=params, varies=varies)


def logits(target: _host.Target, hidden, weight, pitch: int, transposed: bool):
    """The logits of these rows; to JAX they never vary over an axis of a mesh, so that the gradient may take their
    place."""
    sizes = hidden.shape[0], pitch, hidden.shape[1]
    return _product(target, hidden, weight, sizes, (False, transposed), hidden.dtype, varies=False)


def d_hidden(target: _host.Target, g, weight, transposed: bool, scale):
    """(rows, H), times `scale`."""
    h, v = weight.shape if transposed else weight.shape[::-1]
    return _product(target, g, weight, (g.shape[0], h, v), (False, not transposed), g.dtype, scale)


def d_weight(target: _host.Target, g, hidden, shape: tuple[int, int], transposed: bool, scale):
    """(V, H), or (H, V), as `shape` says, times `scale`."""
    (rows, h), pitch = hidden.shape, g.shape[1]
    if transposed:
        return _product(target, hidden, g, (h, pitch, rows), (True, True), g.dtype, scale)[:, : shape[1]]
    return _product(target, g, hidden, (pitch, h, rows), (True, True), g.dtype, scale)[: shape[0]]
