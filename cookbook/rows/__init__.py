"""Sums and norms of rows, one block or warp a row: `core` is the plan that they share."""
