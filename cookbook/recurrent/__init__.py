"""Linear attention and state-space models: kernels that keep a state, in chunks."""
