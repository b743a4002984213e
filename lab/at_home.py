"""Lets an interpreted kernel run where one on a GPU runs: in JAX's transformations, under its options, on many devices.

On a GPU a kernel is an operation without effects, on the device of its operands. Interpreted, it calls Python back at
each step, in an order that JAX keeps, and its memory is the process's. JAX refuses that in some places, and gets it
wrong in others; these are put right here.
"""

import contextlib
import functools
import threading

import jax
from jax import lax
from jax._src import callback as callbacks
from jax._src import core, dispatch, effects
from jax._src.interpreters import batching
from jax._src.lax.control_flow import conditionals
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, jaxpr_interpret

_memory_is_free = threading.Condition()


@contextlib.contextmanager
def at_home():
    """Kernels interpreted inside are at home in JAX: in `jax.checkpoint`, `jax.vmap` with an axis name or of branches,
    `jax.transfer_guard`, 64 bits, and `jax.shard_map` over several devices."""
    batchers, ours = batching.fancy_primitive_batchers, callbacks.OrderedIOEffect
    with contextlib.ExitStack() as stack:
        stack.callback(effects.remat_allowed_effects._effect_types.discard, ours)
        effects.remat_allowed_effects.add_type(ours)
        stack.callback(batchers.__setitem__, conditionals.cond_p, batchers[conditionals.cond_p])
        batchers[conditionals.cond_p] = functools.partial(_batched_branches, batchers[conditionals.cond_p])
        for owner, name, wrapper in (
            (interpret_pallas_call, "interpret_pallas_call", _with_32_bits),
            (dispatch.RuntimeTokenSet, "get_token_input", _unguarded),
            (thread_map, "_run_jaxpr", _unguarded),
            (gpu_callbacks, "_initialize_shared_memory", _one_at_a_time),
            (gpu_callbacks, "_clear_shared_memory", _notifying),
            (jaxpr_interpret, "DeviceInfo", lambda original: _OneDevice),
        ):
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, wrapper(original))
        yield


def forget_failure():
    """JAX hands the error of a program with ordered effects to all that come after it."""
    dispatch.runtime_tokens.clear()


def _batched_branches(original, axis_data, args, dims, *, branches, **params):
    """JAX runs all branches then and selects, which it refuses where Python is called back. A kernel's calls change
    nothing but its results."""
    if not any(_calls_back(branch) for branch in branches):
        branches = tuple(_without_calls(branch) for branch in branches)
    return original(axis_data, args, dims, branches=branches, **params)


def _calls_back(jaxpr) -> bool:
    """Whether the program itself has a callback: a kernel's appear where it is lowered."""
    return any(
        eqn.primitive is callbacks.io_callback_p or any(map(_calls_back, core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _without_calls(branch):
    return branch.replace(effects={e for e in branch.effects if not isinstance(e, callbacks.OrderedIOEffect)})


def _with_32_bits(original):
    """A kernel is traced with 32-bit indices under `jax_enable_x64` too, and so are the interpreter's own loops."""

    def call(*args, **kwargs):
        with jax.enable_x64(False):
            return original(*args, **kwargs)

    return call


def _unguarded(original):
    """The interpreter hands arrays to and fro, which `jax.transfer_guard` may forbid the program."""

    def call(*args, **kwargs):
        with jax.transfer_guard("allow"):
            return original(*args, **kwargs)

    return call


def _one_at_a_time(original):
    """Devices of a mesh take turns: JAX's memory for several looks at all of them where one has ended."""

    def call(**kwargs):
        with _memory_is_free:
            while gpu_callbacks._shared_memory is not None:
                _memory_is_free.wait(1)  # Nobody notifies where the interpreter is reset.
            return original(**kwargs)

    return call


def _notifying(original):
    def call():
        original()
        with _memory_is_free:
            _memory_is_free.notify_all()

    return call


class _OneDevice(jaxpr_interpret.DeviceInfo):
    """A kernel's device as the only one. It has its place on a mesh, and none along an axis of `jax.vmap`."""

    device_id, num_devices = 0, 1

    def __init__(self):
        mesh = jax.sharding.get_abstract_mesh()
        object.__setattr__(self, "axis_sizes", {name: mesh.shape[name] for name in mesh.manual_axes})
        object.__setattr__(self, "axis_indices", {name: lax.axis_index(name) for name in mesh.manual_axes})
