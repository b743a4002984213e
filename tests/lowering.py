"""Lowering for an H200 without a GPU: Mosaic's layout inference says there which plans the compiler refuses."""

import jax

from cookbook import _host

H200 = _host.Target("h200", num_sms=132)


def lowered(fn, *avals, target=H200):
    """`fn` of arrays like `avals` (`jax.ShapeDtypeStruct`), lowered for `target`. Raises what Mosaic raises."""
    with _host.building_for(target):
        return jax.jit(lambda *args: fn(*args)).trace(*avals).lower(lowering_platforms=("cuda",))
