"""Sums and norms of rows, one block or warp a row: `core` and `leading` are what they share."""
