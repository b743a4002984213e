# SPDX-License-Identifier: Apache-2.0
"""Around the launches of every family: where a kernel runs, arguments, meshes, refusals.

`_device.py` has what stands inside kernels. A family works on its own: its folder and the shared files, in a package of
any name.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import math
import os
import reprlib
import threading
from collections.abc import Callable

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import ad, batching, mlir

PACKAGE = __package__  # Messages name an op as its caller imports it, wherever this was copied to.


# Axes of the kernels' grids, clusters and threads. JAX takes one for the axis of a mesh that has the same name.
GRID_NAMES = frozenset(
    "batch_index block block_m block_n cluster head_index part role rows seq_index tile unit warpgroup wg"
    .split()
)  # fmt: skip


# Types of the ops' arguments.
DType = jax.typing.DTypeLike
Activation = str | Callable[[jax.Array], jax.Array]  # A key of `_numerics.ACTIVATIONS`, or a function.
AxisName = str | tuple[str, ...]  # Axes of the mesh of `jax.shard_map`.
Window = int | tuple[int | None, int | None]  # Keys that a query sees on both sides, or to the left and right.

NUM_SMS_INTERPRETED = 4  # The pretended GPU of interpreted kernels has so many.


@dataclasses.dataclass(frozen=True)
class Target:
    """The GPU that the kernels traced now are built for."""

    name: str  # For messages.
    num_sms: int  # A persistent grid has as many blocks, or a multiple.
    interpreted: bool = False  # Whether JAX's GPU interpreter runs them. It cannot do all that a GPU can.
    several_devices: bool = False  # Whether it does so on the devices of a mesh. Alone it knows one.


_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)

_profile: contextvars.ContextVar[dict | None] = contextvars.ContextVar("profile", default=None)

_interpreting: set[int] = set()  # Threads inside `interpreting`.


@contextlib.contextmanager
def building_for(target: Target):
    """Kernels traced inside are built for `target`, not for the GPU of this machine."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def allow_waiting_threads():
    """Has JAX's CPU backend start with 64 threads, which it does only if it has not started yet.

    Two interpreted kernels of one program run at the same time where neither needs the other's results. Their waiting
    warpgroups may hold all of the backend's threads, by default one a core, and nothing that they wait for can run.
    """
    os.environ.setdefault("PJRT_NPROC", str(max(64, os.cpu_count() or 1)))


@contextlib.contextmanager
def interpreting(*, num_sms: int = NUM_SMS_INTERPRETED, detect_races: bool = False, several_devices: bool = False):
    """Kernels traced inside run in JAX's GPU interpreter, on the CPU, on a pretended GPU with `num_sms` SMs.

    A kernel takes seconds there even at small shapes. Races are printed under `detect_races`. It holds for this thread
    alone. `lab.interpret` also lets kernels run in `jax.checkpoint`, in `jax.vmap` of branches or with an axis
    name, and on `several_devices`.
    """
    allow_waiting_threads()
    on_cpu = jax.default_device(jax.devices("cpu")[0]) if jax.default_backend() != "cpu" else contextlib.nullcontext()
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    target, thread = Target("the GPU interpreter", num_sms, True, several_devices), threading.get_ident()
    is_first = thread not in _interpreting
    _interpreting.add(thread)
    try:
        with on_cpu, building_for(target), plgpu.force_gpu_interpret_mode(params):
            yield
    finally:
        if is_first:
            _interpreting.discard(thread)


@contextlib.contextmanager
def profiling(directory: str, events: int):
    """Kernels traced inside write the trace of their named scopes (at most `events` a warpgroup) to `directory`."""
    token = _profile.set(dict(profile_dir=directory, profile_space=events, profile_bounds_check=True))
    try:
        yield
    finally:
        _profile.reset(token)


def require_target(op: str) -> Target:
    """Returns what `op` is to be built for.

    Raises:
      RuntimeError: there is neither a Hopper or newer GPU nor an `interpreting` or `building_for` context in this
        thread; or JAX's interpreter, alone, would run a kernel on several devices.
      ValueError: the mesh of `jax.shard_map` has an axis of a name that kernels use.
    """
    if taken := GRID_NAMES.intersection(jax.sharding.get_abstract_mesh().axis_names):
        raise ValueError(
            f"{PACKAGE}.{op}: the mesh has an axis {min(taken)!r}, for which JAX would take one of the kernel's grid: "
            "name the mesh's axis differently"
        )
    target = _target.get()
    if (target.interpreted if target else jax.default_backend() != "gpu") and _only_others_interpret():
        raise RuntimeError(
            f"{PACKAGE}.{op}: another thread interprets kernels, and this one does not: what a thread enters does not "
            "reach those of a pool, and JAX's interpreter serves one thread. Call the op in the thread that interprets"
        )
    if target is not None:
        if target.interpreted and not target.several_devices and (devices := _devices_of_mesh()) > 1:
            raise RuntimeError(
                f"{PACKAGE}.{op}: JAX's interpreter knows one device, and the mesh has {devices}: interpret inside "
                "`with lab.interpret():`, which lets them take turns, or take a mesh of one"
            )
        if target.interpreted != _is_interpreted():
            raise RuntimeError(
                f"{PACKAGE}.{op} is built for {target}, but kernels traced here are "
                f"{'not ' if target.interpreted else ''}interpreted. {_how_to_interpret(op)}"
            )
        return target
    if jax.default_backend() != "gpu":
        if _is_interpreted():  # By JAX's own switch, or by another copy of this file.
            return Target("the GPU interpreter", NUM_SMS_INTERPRETED, True)
        raise RuntimeError(
            f"{PACKAGE}.{op} is a GPU kernel and JAX sees no GPU (its backend is {jax.default_backend()!r}). "
            + _how_to_interpret(op)
        )
    device = jax.devices()[0]
    if float(device.compute_capability) < 9.0:
        raise RuntimeError(
            f"{PACKAGE}.{op} needs a Hopper or newer GPU (compute capability 9.0); {device.device_kind} has "
            f"{device.compute_capability}. {_how_to_interpret(op)}"
        )
    return Target(device.device_kind, device.core_count)


# By the major number of compute capability: whose tensor cores these are, their instructions, a GPU to compile for.
ARCHITECTURES = {9: ("Hopper", "WGMMA", "h200"), 10: ("data-centre Blackwell", "tcgen05", "b200")}

OTHERS = {
    9: f"{PACKAGE}.blackwell.matmul or {PACKAGE}.blackwell.matmul_mxfp8",
    10: f"{PACKAGE}.matmul or {PACKAGE}.matmul_fp8",
}

# Hopper's ops, and Blackwell's.
SAME = {
    "matmul": "blackwell.matmul", "matmul_fp8": "blackwell.matmul_mxfp8", "ragged_dot": "blackwell.ragged_dot",
}  # fmt: skip


def require_tensor_cores(op: str, major: int = 9) -> Target:
    """`require_target(op)`, for an op on tensor cores that GPUs of compute capability `major` alone have.

    Raises:
      RuntimeError: as `require_target` does; or the GPU has other tensor cores.
    """
    gpu = jax.devices()[0] if jax.default_backend() == "gpu" else None
    capability = int(float(gpu.compute_capability)) if gpu else 0
    if _target.get() is not None or capability == major or (gpu is None and major == 9):
        return require_target(op)
    architecture, instructions, name = ARCHITECTURES[major]
    found = f"{gpu.device_kind} has {gpu.compute_capability}" if gpu else "JAX sees no GPU"
    other = (SAME if major == 9 else {b: a for a, b in SAME.items()}).get(op)
    other = f"{PACKAGE}.{other}" if other else OTHERS[major]
    raise RuntimeError(
        f"{PACKAGE}.{op} is built on {instructions}, which {architecture} alone has (compute capability {major}.x), "
        "and "
        f"{found}. "
        + (f"For it there is {other}. " if capability in ARCHITECTURES else "")
        + _how_to_interpret(op).replace("h200", name)
    )


def _how_to_interpret(op: str) -> str:
    if __package__ != "cookbook" or importlib.util.find_spec("lab") is None:  # It was copied, or installed alone.
        return (
            f"To run it on the CPU at small shapes, say `from {PACKAGE} import _host` and trace it inside "
            "`with _host.interpreting():`."
        )
    return (
        "Say `import lab`. To run it on the CPU at small shapes, trace it inside `with lab.interpret():`; to compile "
        f'it without a GPU, use `lab.compile_for("h200", cookbook.{op}, ...)`.'
    )


def _only_others_interpret() -> bool:
    return bool(_interpreting) and threading.get_ident() not in _interpreting


def _devices_of_mesh() -> int:
    """Devices over which `jax.shard_map` spreads what is traced now."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in mesh.manual_axes)


def _is_interpreted() -> bool:
    """Whether JAX's interpreter runs what is traced now. Its switch cannot be read, so this traces an empty kernel."""
    empty = plgpu.kernel(lambda out: None, out_type=jax.ShapeDtypeStruct((1,), jnp.int32))
    return "interpret=InterpretGPUParams" in str(jax.make_jaxpr(empty)())


def compiler_params(**kwargs) -> plgpu.CompilerParams:
    """`plgpu.CompilerParams(**kwargs)`, with the in-kernel profiler on inside `profiling`."""
    return plgpu.CompilerParams(**kwargs, **(_profile.get() or {}))


@contextlib.contextmanager
def own_options():
    """A kernel, and its tables of indices, are traced the same inside, whatever options of JAX a program has set.

    Under `jax_enable_x64` indices of loops would have 64 bits and those of blocks 32, and JAX divides none by the
    other; under `jax_disable_jit` a loop of Python's would slice a Ref at numbers, beyond its end at a tail; promotion
    may be set to raise.
    """
    with (
        jax.enable_x64(False),
        jax.disable_jit(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


MOST_BLOCKS = 65_535  # Along all axes of a grid but the last: CUDA's limit, which lowering does not check.


def _launchable(grid=(), grid_names=(), **others) -> dict:
    """The arguments of a launch, with the axes of its grid in an order that CUDA takes: if an axis other than the last
    has too many blocks, from the smallest to the largest. Kernels know axes by name."""
    grid, names = tuple(grid), tuple(grid_names)
    if grid[:-1] and "cluster" not in others and max(grid[-2], math.prod(grid[:-2])) > MOST_BLOCKS:
        grid, names = zip(*sorted(zip(grid, names, strict=True), key=lambda axis: axis[0]), strict=True)
    return dict(grid=grid, grid_names=names) | others


def kernel(body, varies: bool = True, **kwargs):
    """`plgpu.kernel(body, **kwargs)`, at home in JAX.

    Its results vary over the mesh axes of `jax.shard_map` over which an operand varies: `shard_map` checks that, and
    JAX's kernels say nothing about it. With `varies=False` these say nothing either, for a result that another kernel
    changes in place. `body` is traced under `own_options`. Profilers show a kernel by the name of its file or room, and
    of its function.
    """
    function = body
    while isinstance(function, functools.partial):
        function = function.func

    def traced(*refs, **scratch):
        with own_options():
            return body(*refs, **scratch)

    traced.__name__ = f"{_file_or_room(function.__module__)}_{function.__name__.strip('_')}"
    launch = plgpu.kernel(traced, **_launchable(**kwargs))

    def run(*operands):
        axes = varying(*jax.tree.leaves(operands)) if varies else frozenset()
        return jax.tree.map(lambda out: _vary(out, axes), launch(*operands))

    return run


def _file_or_room(module: str) -> str:
    """The name of a kernel's file, or of its room where the file is one of the room's `kernel*.py`."""
    *_, room, file = ["", *module.split(".")]
    return file.strip("_") if not file.startswith("kernel") else room + file.removeprefix("kernel")


def apart(arrays):
    """`arrays`, a pytree of operands or results of a kernel that changes one in place: XLA computes them outside its
    call.

    XLA calls a kernel on a slice as it lies in its array, and lets it write a result where `dynamic_update_slice` puts
    it. For such a call it forgets which operand is changed in place: the kernel then writes into the array that was
    sliced, and the result is memory that nobody wrote.
    """
    return lax.optimization_barrier(arrays)


def ref_of(op: str, array):
    """A Ref of `array`, for a kernel that changes it in place.

    Raises:
      ValueError: the array varies over an axis of a mesh, inside a `jax.shard_map` that checks that.
    """
    if axes := varying(array):
        raise ValueError(
            f"{PACKAGE}.{op} changes an array in place, and JAX's kernels take no Ref that varies over an axis of a "
            f"mesh, as this does over {', '.join(sorted(map(str, axes)))}: call jax.shard_map with check_vma=False"
        )
    return jax.new_ref(apart(array))


def alike(*arrays):
    """`arrays`, each made to vary over every mesh axis of `jax.shard_map` over which one of them varies.

    An op with a `custom_vjp` passes its operands through this first, by `reverse_only`. Then the gradients that its
    backward kernels return have their operands' types, and JAX sums the gradient of a replicated operand over the mesh.
    """
    axes = varying(*arrays)
    return tuple(_vary(x, axes) for x in arrays)


def varying(*arrays) -> frozenset:
    """The axes of a mesh over which one of `arrays` varies, as `jax.shard_map` checks it."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def _vary(x, axes: frozenset):
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(sorted(missing, key=str)), to="varying") if missing else x


def reverse_only(op: str, *arrays):
    """`alike(*arrays)`, for an op whose gradient JAX takes in reverse mode alone: forward mode is refused by name."""
    arrays = alike(*arrays)
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):  # Nothing is differentiated: for quick calls.
        return arrays
    return tuple(_in_reverse(op, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_reverse(op: str, x):
    return x


@_in_reverse.defjvp
def _(op, primals, tangents):
    return _in_reverse(op, *primals), _tangent.bind(*tangents, op=op)


def _refuse_forward_mode(*_, op: str):
    raise ValueError(
        f"{PACKAGE}.{op} has no derivative in forward mode (jax.jvp, jax.jacfwd, jax.hessian): take it in reverse mode "
        f"(jax.grad, jax.vjp, jax.jacrev), or differentiate {op}_reference, of the same module, instead"
    )


# The tangent of an operand. Reverse mode transposes it, which leaves a cotangent; forward mode computes it.
_tangent = jax.extend.core.Primitive("tangent")

_tangent.def_impl(_refuse_forward_mode)

_tangent.def_abstract_eval(lambda tangent, *, op: tangent)

ad.deflinear2(_tangent, lambda cotangent, tangent, *, op: (cotangent,))

batching.defvectorized(_tangent)

mlir.register_lowering(_tangent, lambda context, tangent, *, op: _refuse_forward_mode(op=op))


def without_derivative(op: str, gradient):
    """`gradient`, a function that launches a backward kernel, which refuses by name to be differentiated itself."""
    message = f"{PACKAGE}.{op} has no second derivative: differentiate {op}_reference, of the same module, instead"
    return _refusing_derivatives(gradient, message)


def without_gradient(op: str, instead: str, *arrays):
    """`arrays`, by which JAX refuses to differentiate what comes next: an op without a gradient passes its operands
    through this first, and is named."""
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):  # Nothing is differentiated: for quick calls.
        return arrays
    message = f"{PACKAGE}.{op} has no gradient: differentiate {instead} instead"
    return _refusing_derivatives(lambda *arrays: arrays, message)(*arrays)


def _refusing_derivatives(fn, message: str):
    once = jax.custom_jvp(fn)

    @once.defjvp
    def refuse(primals, tangents):
        raise ValueError(message)

    return once


def as_array(op: str, name: str, x):
    """`x` as a JAX array, converted as `jnp.asarray` does.

    Raises:
      ValueError: JAX can make no array of it; it is a Ref; it is sharded over an explicit axis of a mesh.
    """
    if isinstance(x, jax.Ref):
        raise ValueError(f"{PACKAGE}.{op}: {name} is a Ref; must be an array: pass {name}[...]")
    if isinstance(x, jax.Array):
        require_local(op, name, x)
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{PACKAGE}.{op}: {name}={reprlib.repr(x)}; must be an array ({error}): pass one, or numbers in lists of "
            "equal lengths"
        ) from error


def require_local(op: str, name: str, x):
    """Returns nothing. `as_array` does this; an op says it of a Ref.

    Raises:
      ValueError: `x` is sharded over an explicit axis of a mesh. JAX would let the kernel read a shard as if it were
        the whole array.
    """
    spec = jax.typeof(x).sharding.spec
    if any(spec):
        axes = [axis for entry in spec if entry for axis in (entry if isinstance(entry, tuple) else (entry,))]
        raise ValueError(
            f"{PACKAGE}.{op}: {name} is sharded over {' and '.join(map(repr, axes))}: call it inside jax.shard_map"
        )


def require_config(op: str, config, kind: type):
    """`config`, an instance of the op's `kind`, or None, which has the op choose.

    Raises:
      ValueError: it is neither.
    """
    if config is None or isinstance(config, kind):
        return config
    ours = f"{PACKAGE}.{op}.Config"
    raise ValueError(
        f"{PACKAGE}.{op}: config={reprlib.repr(config)}; must be a {ours}: pass {ours}(...), or None to have one chosen"
    )


def elsewhere(op: str, given: dict, known: dict) -> None:
    """Checks arguments that `op` does not have, but functions of other libraries do: None and False are what they do
    without. `known` are these, and what says the same here.

    Raises:
      ValueError: one has another value; it says what to do.
      TypeError: nobody has such an argument.
    """
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            text = "..." if hasattr(value, "shape") else reprlib.repr(value)
            raise ValueError(f"{PACKAGE}.{op}: {name}={text}; must be left out or None: {known[name]}")


_NUMBERS = {np.bool_: bool, np.integer: int, np.floating: float}  # JAX's kinds of dtypes, in Python.

_HOW_TO_PASS = {bool: "pass True or False", int: "pass a whole number", float: "pass a number"}


def option(op: str, name: str, value, kind: type):
    """`value`, a Python, NumPy or JAX scalar, as the Python `kind` (bool, int or float) that a kernel is compiled for.

    Raises:
      ValueError: it is traced, no such scalar, or not finite in float32.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{PACKAGE}.{op}: {name} is traced, but it is compiled into the kernel: pass a Python {kind.__name__}, or "
            f"name it in static_argnames of jax.jit"
        )
    number = _number(value)
    wanted = type(number) is kind or (type(number) is int and kind is float)
    if not wanted:
        is_whole = type(number) is float and kind is int and number.is_integer()
        fix = f"pass {int(number)}" if is_whole else _HOW_TO_PASS[kind]
        raise ValueError(f"{PACKAGE}.{op}: {name}={reprlib.repr(value)}; must be one {kind.__name__}: {fix}")
    if kind is float and not abs(number) <= float(jnp.finfo(jnp.float32).max):
        raise ValueError(f"{PACKAGE}.{op}: {name}={number}; must be finite in float32: leave it out for the default")
    return kind(number)


def _number(value):
    """`value`, a scalar of Python, NumPy or JAX, as Python's bool, int or float; another as it is."""
    if type(value) in _NUMBERS.values():
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # Lists of different lengths.
        return value
    kinds = [kind for dtype, kind in _NUMBERS.items() if jnp.issubdtype(array.dtype, dtype)]
    return kinds[0](array[()]) if kinds and array.ndim == 0 else value


def padded_shape(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with each size rounded up to a multiple of its tile."""
    return tuple(-(-size // t) * t for size, t in zip(shape, tile, strict=True))


def pad_to_tiles(x, tile: tuple[int, ...]):
    """`x` with zeros at the end of each axis up to a multiple of its tile: a copy, unless it is one already."""
    pads = [(0, full - size) for full, size in zip(padded_shape(x.shape, tile), x.shape, strict=True)]
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


def running(reduce, x):
    """`reduce` of the first number along the last axis, of the first two, and so on: all at once, which takes a
    fraction of the time of XLA's scan. The numbers are at least 0."""
    i = jnp.arange(x.shape[-1])
    return reduce(jnp.where(i <= i[:, None], x[..., None, :], 0), axis=-1).astype(x.dtype)


def require_indices(op: str, **sizes: int):
    """Raises a ValueError unless indices of 32 bits reach a tile beyond each of `sizes`. Their products may be larger:
    TMA and two-dimensional Refs count in 64 bits."""
    for name, size in sizes.items():
        if size >= 2**31 - 1024:
            raise ValueError(f"{PACKAGE}.{op}: {name}={size}; must be below 2**31 - 1024: pass parts of it")


def require_float(op: str, out_dtype, name: str = "out_dtype"):
    """`out_dtype`, whatever names a dtype, as the dtype of a result."""
    try:
        dtype = None if out_dtype is None else jnp.dtype(out_dtype)
    except TypeError:
        dtype = None
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"{PACKAGE}.{op}: {name}={out_dtype!r}; must be bfloat16, float16 or float32: cast the result of one"
        )
    return dtype
