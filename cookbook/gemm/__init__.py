# SPDX-License-Identifier: Apache-2.0
"""Products of matrices.

`kernel.py` is the kernel that all but the rungs are built on, `plan.py` says how it cuts a product up, `launch.py`
launches it, and `cost.py` chooses its configuration. Narrow formats have `dense/kernel_int8_weights.py`, which converts
weights of 8 or 4 bits (`dense/four_bits.py`) in registers, `dense/halves.py`, which multiplies e2m1 weights in FP8, and
`grouped/kernel_fp8.py`, which scales sums: a new format goes beside them.
"""

from .dense import matmul as matmul
from .dense import matmul_fp8 as matmul_fp8
from .dense import matmul_int4_weights as matmul_int4_weights
from .dense import matmul_int8_weights as matmul_int8_weights
from .dense import matmul_mxfp4_weights as matmul_mxfp4_weights
from .dense import pack_int4 as pack_int4
from .dense import pack_int4_awq as pack_int4_awq
from .dense import pack_int4_gptq as pack_int4_gptq
from .dense import pack_mxfp4 as pack_mxfp4
from .dense import unpack_int4 as unpack_int4
from .experts import moe as moe
from .gated import glu as glu
from .grouped import ragged_dot as ragged_dot
from .grouped import ragged_dot_fp8 as ragged_dot_fp8
from .grouped import ragged_dot_int4_weights as ragged_dot_int4_weights
from .grouped import ragged_dot_int8_weights as ragged_dot_int8_weights
from .grouped import ragged_dot_mxfp4_weights as ragged_dot_mxfp4_weights
from .grouped import ragged_dot_transposed as ragged_dot_transposed
from .rungs import matmul_blocked as matmul_blocked
from .rungs import matmul_pipelined as matmul_pipelined
from .rungs import matmul_wgmma as matmul_wgmma
