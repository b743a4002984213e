"""Every op that is fuzzed, by its name in `cookbook`."""

from . import attn, chain, elementwise, gemm, grouped, loss, nvlink, recurrent, rows, select

OPS = {
    **elementwise.OPS, **rows.OPS, **gemm.OPS, **chain.OPS, **grouped.OPS, **attn.OPS, **recurrent.OPS, **loss.OPS,
    **select.OPS, **nvlink.OPS,
}  # fmt: skip
