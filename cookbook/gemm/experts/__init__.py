"""A layer of experts, built on the grouped products."""

from .moe import moe as moe
