"""Matrix products on Hopper's tensor cores, and the rungs that lead to them."""
