# SPDX-License-Identifier: Apache-2.0
"""WIP"""
import dataclasses
import functools
import jax
import jax.numpy as jnp
from ... import _host, _numerics
from .grid import num_counters
from .kernel import launch
from .plan import AddParts, Cut, Normalize, Plan, Product, cut_of


@dataclasses.dataclass(frozen=True)
class Config:
    """How the products are cut up."""

    up: Cut | None = None
    down: Cut | None = None
    before: Cut | None = None
    after: Cut | None = None
    num_stages: int | None = None
    x_stages: int | None = None


def stages_of(rows, hidden, inner, config, num_sms, arrays, k_before=None, n_after=None, has_after=False, total=True):
    def product(name, x, n, k, is_gated=False):
        cut = getattr(config, name) or cut_of(rows, n, k, is_gated, num_sms)
        return Product(x, f"w_{name}", f"of_{name}", n, k, cut, num_sms, is_gated)

    stages, before = [], None
    if k_before:
        before = product("before", "x", hidden, k_before)
        stages.append(before)
        arrays = arrays[1:]
    stages.append(Normalize(arrays, "scale", "y", "total" if total else None, hidden, before))
    stages.append(product("up", "y", inner, hidden, True))
    down = product("down", "of_up", hidden, inner)
    stages.append(down)
    if not has_after:
        return (*stages, AddParts(down, "out"))
    y = "y_after" if n_after else "out"
    stages.append(Normalize(("total",), "scale_after", y, "total_after", hidden, down))
    if n_after:
        after = product("after", y, n_after, hidden)
        stages += [after, AddParts(after, "out")]
    return tuple(stages)
