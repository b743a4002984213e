"""Every op that is fuzzed, by its name in `cookbook`."""

from . import attn, elementwise, gemm, grouped, loss, nvlink, recurrent, rows, select

OPS = {
    **elementwise.OPS, **rows.OPS, **gemm.OPS, **grouped.OPS, **attn.OPS, **recurrent.OPS, **loss.OPS, **select.OPS,
    **nvlink.OPS,
}  # fmt: skip
