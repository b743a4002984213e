# SPDX-License-Identifier: Apache-2.0
"""Choosing among the values of a row."""

from .sample import sample as sample
from .top_k import top_k as top_k
