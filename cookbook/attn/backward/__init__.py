# SPDX-License-Identifier: Apache-2.0
"""The gradient of attention."""
