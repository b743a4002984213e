"""Attention on Hopper's tensor cores: dense, packed and paged. `core` is what these kernels share."""
