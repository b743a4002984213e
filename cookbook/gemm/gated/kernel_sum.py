# SPDX-License-Identifier: Apache-2.0
"""The sum of two products in one kernel, that of `gemm/kernel.py`: the gradient of x of a gated linear unit.

    o = a[0] @ b[0].T + a[1] @ b[1].T

The steps of the second product follow those of the first, in the same accumulators. So the sum is float32 and rounded
once, and no product is written to memory. Only the copies of a step differ: from the first pair, or from the second.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ... import _host
from .. import cost
from ..kernel import copy_step
from ..kernel import kernel as kernel_of_one
from ..launch import fused_product
from ..operand import Ring
from ..plan import Plan, identity, plan_of


def copy_of_two(plan: Plan, ring: Ring, slot, a_gmem, b_gmem, row, col, k):
    """As `copy_step` of `gemm/kernel.py`, of the pair of operands in which `k` lies when one pair follows the other."""
    half = plan.tiles.k // 2
    copy = functools.partial(copy_step, plan, ring, slot)
    pl.when(k < half)(lambda: copy(a_gmem[0], b_gmem[0], row, col, k))
    pl.when(k >= half)(lambda: copy(a_gmem[1], b_gmem[1], row, col, k - half))


kernel = functools.partial(kernel_of_one, copy=copy_of_two)


def sum_plan(m, n, k, dtype, lies: bool, out_dtype, config, num_sms=132, interpreted=False) -> Plan:
    """The plan of two (M, K) by (N, K) products, or (K, N) if b `lies` so. Each begins with a step of its own."""
    plan = plan_of(m, n, k, (dtype, dtype), (False, lies), identity, out_dtype, config, num_sms, interpreted)
    tile_k = plan.tiles.tile_k
    return dataclasses.replace(plan, tiles=dataclasses.replace(plan.tiles, k=2 * -(-k // tile_k) * tile_k))


def sum_of_products(a, b, lies: bool, out_dtype):
    """The sum of the products of the two arrays `a`, (M, K), with the two `b`, (N, K), or (K, N) if they `lies` so."""
    (m, k), n = a[0].shape, b[0].shape[1 if lies else 0]
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    dtype, target = a[0].dtype, _host.require_tensor_cores("glu")
    config = cost.best(cost.Problem(m, n, 2 * k, (False, lies), (2, 2, out_dtype.itemsize), target.num_sms))
    plan = sum_plan(m, n, k, dtype, lies, out_dtype, config, target.num_sms, target.interpreted)
    return fused_product(kernel, a, b, {}, plan=plan, params=_host.compiler_params(approx_math=out_dtype.itemsize == 2))
