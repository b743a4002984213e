# SPDX-License-Identifier: Apache-2.0
"""Collectives over NVLink, and products that overlap with them."""

from .all_gather import all_gather as all_gather
from .all_gather_matmul import all_gather_matmul as all_gather_matmul
from .all_to_all import all_to_all as all_to_all
from .matmul_reduce_scatter import matmul_reduce_scatter as matmul_reduce_scatter
from .reduce_scatter import reduce_scatter as reduce_scatter
