# SPDX-License-Identifier: Apache-2.0
"""Products of two matrices."""

from .matmul import matmul as matmul
from .matmul_fp8 import matmul_fp8 as matmul_fp8
from .matmul_int4_weights import matmul_int4_weights as matmul_int4_weights
from .matmul_int8_weights import matmul_int8_weights as matmul_int8_weights
from .matmul_mxfp4_weights import matmul_mxfp4_weights as matmul_mxfp4_weights
from .pack import pack_int4 as pack_int4
from .pack import pack_int4_awq as pack_int4_awq
from .pack import pack_int4_gptq as pack_int4_gptq
from .pack import pack_mxfp4 as pack_mxfp4
from .pack import unpack_int4 as unpack_int4
