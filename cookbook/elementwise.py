# SPDX-License-Identifier: Apache-2.0
"""Any element-wise function as one kernel: `fuse(fn)`, and `add` with an activation, made of it.

    out[i] = fn(x[i], y[i], ...)         for arrays of one shape, of any rank and length

Shapes: every array leaf of the arguments, and so every leaf of the result, has the same shape. dtypes: float32,
bfloat16, float16, and the integers of 8, 16 and 32 bits, mixed as `fn` mixes them. Narrower ones are computed in 32
bits and rounded once, at the end.

Role table: one warpgroup per block loads a tile from global memory straight into registers, computes, and stores it.
There are no barriers: nothing is shared, so shared memory would be a detour (chapter 2 measures it).

Bound by: memory. Each input is read once and each output is written once, 16 bytes per thread at a time. The last block
also does the tail, in pieces of 128 elements, the last of them shifted back to end with the array. Elements that it
computes twice it stores twice; inputs and outputs are different arrays, so both stores write one value.

The gradient is another such kernel, made of `jax.vjp` of `fn`; so is a gradient of it. Integers have none.

Not supported: broadcasting between arguments, functions that mix elements, 64-bit types, forward-mode differentiation.
Chapter: notebooks/01_elementwise.ipynb.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _device, _host, _numerics


def add_reference(x, y, activation=None):
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return _numerics.activation_fn("add", activation)(x.astype(dtype) + y.astype(dtype))


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int = (
        1024  # Elements per block. 1024: one or two 16-byte loads per thread; larger tiles were slower on an H200.
    )

    def __post_init__(self):
        if self.tile < 128 or self.tile % 128:
            raise ValueError(f"{self.tile=}: must be a multiple of 128, the threads of a warpgroup")


def default_config(n: int, itemsize: int) -> Config:
    """The configuration for `n` elements, the widest of which has `itemsize` bytes."""
    vec = 16 // itemsize  # The tile shrinks for short arrays, so that they still spread over the SMs.
    return Config(tile=next((t for t in (1024, 512) if t % (128 * vec) == 0 and n >= 512 * t), 128 * vec))


def _check(op: str, leaves):
    if not leaves:
        raise ValueError(f"{_host.PACKAGE}.{op}: no array among the arguments; pass at least one")
    for leaf in leaves:
        if leaf.shape != leaves[0].shape:
            raise ValueError(
                f"{_host.PACKAGE}.{op}: shapes {leaves[0].shape} and {leaf.shape} differ; all arrays must have one "
                "shape: broadcast the smaller one first (jnp.broadcast_to)"
            )
        if leaf.dtype.itemsize > 4 or leaf.dtype == jnp.bool_ or jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(
                f"{_host.PACKAGE}.{op}: dtype {leaf.dtype} is not supported; cast to float32 or int32, or narrower"
            )


def _compute_dtype(dtype):
    """The GPU computes on 32 bits; JAX has no kernels for less."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(dtype).kind + "4"


def _apply(fn, in_refs, out_refs, start, size: int, vec: int):
    """Loads `size` elements from `start` on of every input, computes, and stores them."""
    where, layout = pl.ds(start, size), plgpu.Layout.WG_STRIDED((size,), vec)
    values = [plgpu.load(ref.at[where], layout=layout) for ref in in_refs]
    outs = fn(*(v.astype(_compute_dtype(v.dtype)) for v in values))
    for ref, out in zip(out_refs, outs, strict=True):
        _device.store(ref.at[where], plgpu.layout_cast(out.astype(ref.dtype), layout))


def _kernel(*refs, fn, num_inputs: int, n: int, tile: int, vec: int):
    apply = functools.partial(_apply, fn, refs[:num_inputs], refs[num_inputs:])
    at = functools.partial(_device.offsets, n)
    block, num_blocks, left = lax.axis_index("block"), max(n // tile, 1), n % tile
    if n >= tile:
        apply(at(lambda block: block * tile, block), tile, vec)
    if left:

        @pl.when(block == num_blocks - 1)
        def _leftovers():
            @pl.loop(0, pl.cdiv(left, 128))
            def _(i):
                apply(at(lambda i: jnp.minimum(n - left + i * 128, n - 128), i), 128, 1)


@functools.partial(jax.jit, static_argnames=("fn", "config", "params"))
def _call(leaves, fn, config: Config | None, params):
    """The pytree of arrays that `fn(*leaves)` is."""
    shape, n = leaves[0].shape, math.prod(leaves[0].shape)
    widest = max(leaf.dtype.itemsize for leaf in leaves)
    config = config or default_config(n, widest)
    pad = max(0, 128 - n)  # A warpgroup has 128 threads: an array below that is padded.
    flat = [jnp.pad(leaf.reshape(-1), (0, pad)) if pad else leaf.reshape(-1) for leaf in leaves]
    out_shape = jax.eval_shape(fn, *flat)
    avals = [jax.ShapeDtypeStruct((config.tile,), _compute_dtype(leaf.dtype)) for leaf in flat]
    kernel_fn = _numerics.lowerable(functools.wraps(fn)(lambda *values: jax.tree.leaves(fn(*values))), *avals)
    outs = _host.kernel(
        functools.partial(
            _kernel, fn=kernel_fn, num_inputs=len(flat), n=n + pad, tile=config.tile,
            vec=math.gcd(16 // widest, config.tile // 128),
        ),
        out_type=[jax.ShapeDtypeStruct((n + pad,), out.dtype) for out in jax.tree.leaves(out_shape)],
        grid=(max((n + pad) // config.tile, 1),),
        grid_names=("block",),
        compiler_params=params,
    )(*flat)  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(out_shape), [out[:n].reshape(shape) for out in outs])


@functools.lru_cache(maxsize=1024)  # One function for each, so that `jit` finds its kernel again.
def _of_leaves(fn, treedef):
    def of_leaves(*leaves):
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        return fn(*args, **kwargs)

    return functools.wraps(fn)(of_leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fused(op: str, fn, config: Config | None, leaves):
    _check(op, leaves)
    if leaves[0].size == 0:
        return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), jax.eval_shape(fn, *leaves))
    _host.require_target(op)
    return _call(leaves, fn, config, _host.compiler_params())


def _forward(op, fn, config, leaves):
    return _fused(op, fn, config, leaves), leaves


def _backward(op, fn, config, leaves, cotangents):
    is_float = tuple(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    real = tuple(ct for ct in jax.tree.leaves(cotangents) if ct.dtype != jax.dtypes.float0)
    gradients = iter(())
    if any(is_float) and real:
        gradients = iter(_fused(f"gradient of {op}", _vjp_of(fn, is_float), None, (*leaves, *real)))
    no_gradient = lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0)
    zero = lambda leaf, isf: next(gradients, jnp.zeros_like(leaf)) if isf else no_gradient(leaf)
    return (tuple(map(zero, leaves, is_float)),)


_fused.defvjp(_forward, _backward)


@functools.lru_cache(maxsize=1024)
def _vjp_of(fn, is_float: tuple[bool, ...]):
    """The gradients of the floating-point leaves, element-wise as `fn` is: a function of leaves and cotangents."""

    def gradients(*values):
        leaves, cotangents = values[: len(is_float)], iter(values[len(is_float) :])

        def of_floats(*floats):
            floats = iter(floats)
            mixed = [next(floats) if isf else leaf for leaf, isf in zip(leaves, is_float, strict=True)]
            outs = jax.tree.leaves(fn(*mixed))
            return [out for out in outs if jnp.issubdtype(out.dtype, jnp.floating)]

        outs, pull = jax.vjp(of_floats, *(leaf for leaf, isf in zip(leaves, is_float, strict=True) if isf))
        return pull([ct.astype(out.dtype) for out, ct in zip(outs, cotangents, strict=True)])

    gradients.__name__ = f"gradient of {getattr(fn, '__name__', 'fn')}"
    return gradients


def _run(op, fn, args, kwargs, config):
    leaves, treedef = jax.tree.flatten((args, kwargs))
    leaves = [_host.as_array(op, f"argument {i}", leaf) for i, leaf in enumerate(leaves)]
    return _fused(op, _of_leaves(fn, treedef), config, _host.reverse_only(op, *leaves))


def fuse(fn: Callable, *, config: Config | None = None) -> Callable:
    """Makes one kernel out of an element-wise function.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      fn: takes arrays, or pytrees of arrays (a dataclass of weights and biases, say), all of one shape, and returns a
        pytree of arrays of that shape. It may use any element-wise `jnp` function and Python number.
      config: tile size; None chooses by length.

    Returns:
      A function of the same arguments and results as `fn`, that runs as one kernel, under `jit` and `vmap` as well.
      Outputs have the dtypes that `fn` gives them; in between, 16-bit floats are float32.

    Raises:
      ValueError: shapes differ, a dtype is not supported, or `fn` is not element-wise; RuntimeError: no GPU.
    """

    _host.require_config("fuse", config, Config)
    if not callable(fn):
        raise ValueError(f"{_host.PACKAGE}.fuse: {fn=}; must be a function of arrays: fuse(lambda x, y: x + y)(x, y)")

    @functools.wraps(fn)
    def fused(*args, **kwargs):
        return _run(f"fuse({getattr(fn, '__name__', 'fn')})", fn, args, kwargs, config)

    return fused


fuse.Config = Config  # `cookbook.fuse` is this function, not its module.


def add(
    x: jax.Array, y: jax.Array, *, activation: _host.Activation | None = None, config: Config | None = None
) -> jax.Array:
    """`activation(x + y)`, computed in float32 and rounded once.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x, y: arrays of one shape, of any rank and length.
      activation: "relu", "gelu" (the tanh form), "sigmoid", "silu", an element-wise function, or None.
      config: tile size; None chooses by length.

    Returns:
      An array of the shape of `x` and of dtype `jnp.result_type(x, y)`.

    Raises:
      ValueError: shapes differ, or a dtype or the activation is not supported; RuntimeError: no GPU.
    """
    x, y = _host.as_array("add", "x", x), _host.as_array("add", "y", y)
    return _run("add", _add_fn(activation), (x, y), {}, _host.require_config("add", config, Config))


add.Config = Config  # `cookbook.add` is this function, not its module.


@functools.cache  # One function an activation, so that `jit` finds its kernel again.
def _add_fn(activation):
    act = _numerics.activation_fn("add", activation)

    def add(x, y):
        return act(x + y)

    return add


def flops(n: int) -> int:
    return n


def bytes_moved(n: int, itemsize: int, num_arrays: int = 3) -> int:
    """Each of `num_arrays` arrays of `n` elements is read or written once."""
    return n * itemsize * num_arrays
