"""Every op that is fuzzed, by its name in `cookbook`."""

from . import attn, elementwise, gemm, grouped, nvlink, recurrent, rows

OPS = {
    **elementwise.OPS, **rows.OPS, **gemm.OPS, **grouped.OPS, **attn.OPS, **recurrent.OPS, **nvlink.OPS,
}  # fmt: skip
