# SPDX-License-Identifier: Apache-2.0
"""Products of matrices.

`kernel.py` is the kernel that all but the rungs are built on, `plan.py` says how it cuts a product up, `launch.py`
launches it, and `cost.py` chooses its configuration. Formats of 8 bits have `dense/kernel_int8_weights.py`, which
converts weights in registers, and `grouped/kernel_fp8.py`, which scales sums: a new format goes beside them.
"""

from .dense import matmul as matmul
from .dense import matmul_fp8 as matmul_fp8
from .dense import matmul_int8_weights as matmul_int8_weights
from .experts import moe as moe
from .gated import glu as glu
from .grouped import ragged_dot as ragged_dot
from .grouped import ragged_dot_fp8 as ragged_dot_fp8
from .grouped import ragged_dot_int8_weights as ragged_dot_int8_weights
from .grouped import ragged_dot_transposed as ragged_dot_transposed
from .rungs import matmul_blocked as matmul_blocked
from .rungs import matmul_pipelined as matmul_pipelined
from .rungs import matmul_wgmma as matmul_wgmma
