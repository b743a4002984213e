# SPDX-License-Identifier: Apache-2.0
"""The loss of a training step: cross-entropy, of logits or of what they are made of."""

from .cross_entropy import cross_entropy as cross_entropy
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
