# SPDX-License-Identifier: Apache-2.0
"""Chains of products of few rows in one kernel."""

from .mlp import mlp as mlp
