# SPDX-License-Identifier: Apache-2.0
"""Writing keys and values into the pages of a cache."""

from .rope_write_kv import rope_write_kv as rope_write_kv
from .write_kv import write_kv as write_kv
