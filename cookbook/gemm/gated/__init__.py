# SPDX-License-Identifier: Apache-2.0
"""Gated linear units."""

from .glu import glu as glu
