"""Times torch's grouped product on the named problems of `ragged_dot` and records it as the peer "torch".

`python -m bench ragged_dot` starts this in a process of its own, because torch and JAX bring CUDA libraries of their
own. Times are those between two CUDA events, which is a few microseconds more than the kernel takes.
"""

import statistics
import sys

import numpy as np

from bench.problems import CASES, Case, relative_error
from cookbook import lab


def cases() -> list[Case]:
    """Problems of rows by matrices that lie as (G, K, N)."""
    return [case for case in CASES if case.op == "ragged_dot" and case.derive is None]


def main(iterations: int = 30) -> int:
    try:
        import torch
    except ImportError:
        sys.exit("bench.torch_peers: torch is missing: install it, or leave this peer out")
    if not torch.cuda.is_available():
        sys.exit("bench.torch_peers: torch sees no GPU: this needs one")
    for case in cases():
        lhs, rhs = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in case.shapes)
        (sizes,) = case.integers
        offsets = torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)
        product = lambda lhs=lhs, rhs=rhs, offsets=offsets: torch.nn.functional.grouped_mm(lhs, rhs, offs=offsets)
        out, largest = product(), int(np.argmax(sizes))
        rows = slice(int(offsets[largest]) - int(sizes[largest]), int(offsets[largest]))
        exact = (lhs[rows].float() @ rhs[largest].float()).cpu().numpy()
        if not (error := relative_error(out[rows].float().cpu().numpy(), exact)) < 1e-2:
            sys.exit(f"{case.problem}, torch: wrong by {error:.2g}, and so not timed")
        times = _milliseconds(torch, product, iterations)
        lower, _, upper = statistics.quantiles(times)
        row = dict(ms=statistics.median(times), min_ms=min(times), flops=case.flops, nbytes=case.nbytes)
        row["spread"] = (upper - lower) / row["ms"]
        lab.results.write(case.problem, "torch", **row, torch=torch.__version__, timed_by="CUDA events")
        print(f"{case.problem}, torch: {row['ms']:.4f} ms, {case.flops / row['ms'] / 1e9:.0f} TFLOP/s")
        del lhs, rhs, out, product
    return 0


def _milliseconds(torch, fn, iterations: int) -> list[float]:
    for _ in range(5):
        fn()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
    for start, end in events:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


if __name__ == "__main__":
    sys.exit(main())
