"""`top_k`."""

import numpy as np

import cookbook

from .cases import Draw, Op
from .elementwise import FLOATS


def draw_top_k(draw: Draw) -> dict:
    columns, rows = draw.choice((16, 300), (300, 20), (3000, 4), (30000, 1))
    cols = max(1, draw.size(columns, draw.choice(1, 1, 8)))
    dtype = draw.choice(*FLOATS, "int32")
    kinds = ("normal", "huge", "zeros") if dtype == "int32" else ("normal", "zeros", "nan", "infs", "-inf rows")
    values = draw.choice(*kinds)
    return dict(shape=[draw.size(rows), cols], dtype=dtype, values=values, k=draw.number(0, min(cols, 2049)),
                grad=values == "normal" and dtype != "int32" and draw.sometimes(0.2))  # fmt: skip


def top_k_reference(case, x):
    """A stable sort. NaN without a sign comes first, and 0.0 before -0.0."""
    finite = np.where(np.isnan(x), np.inf, x).astype(np.float64)
    order = np.lexsort((np.signbit(finite), -finite, ~np.isnan(x)), axis=-1)[:, : case["k"]]
    return [(np.take_along_axis(x, order, -1), 0), (order, 0)]


def too_many(case) -> str | None:
    return "must be from 0 to" if case["k"] > 2048 else None


OPS = {
    "top_k": Op(
        draw_top_k,
        lambda case, values: dict(x=values(case["shape"], case["dtype"], case["values"])),
        lambda case, x: cookbook.top_k(x, case["k"]), top_k_reference, too_many, ("x",),
    ),
}  # fmt: skip
