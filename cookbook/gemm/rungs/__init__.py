# SPDX-License-Identifier: Apache-2.0
"""Three earlier products of the course, each on one page."""

from .matmul_blocked import matmul_blocked as matmul_blocked
from .matmul_pipelined import matmul_pipelined as matmul_pipelined
from .matmul_wgmma import matmul_wgmma as matmul_wgmma
