"""Random problems for every public op, each compared with NumPy: `make fuzz SECONDS=300 SEED=1`.

A case is an op's name and a dictionary that JSON can hold: shapes, dtypes, flags, kinds of values, and the seed of the
values. One file per family says how to draw a case, make its arrays, call the op, and compute the result in float64.
"""
