"""Compile a kernel for a named GPU, on a machine that need not have one, and read what the compiler made of it."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import jax
from jax.experimental import topologies
from jaxlib.mlir import ir

from .. import _mgpu

# What XLA must know of a chip that it cannot ask, from NVIDIA's datasheets and compute-capability tables.
# num_sms and compute capability shape the kernels; bandwidth, cache and clock only steer XLA's own fusions around them.
GPUS = {
    "h200": dict(name="NVIDIA H200", major=9, num_sms=132, clock_ghz=1.98, l2=50 << 20, bandwidth=4.8e12, memory=141e9),
    "b200": dict(name="NVIDIA B200", major=10, num_sms=148, clock_ghz=1.97, l2=126 << 20, bandwidth=8e12, memory=180e9),
}
_TARGET_CONFIG = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: 0 feature_extension: ACCELERATED_FEATURES }}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: {smem}
  core_count: {num_sms} fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {l2} clock_rate_ghz: {clock_ghz} device_memory_size: {memory:.0f}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 19 patch: 0 }}
device_description_str: "{name}"
"""
_INSTALL = 'Install them with `pip install "pallas-cookbook[aot]"`; no GPU and no driver are needed.'

# Without a driver JAX's CUDA plugin refuses, with a traceback, to load for want of cuDNN; compiling needs neither.
_HAS_DRIVER = os.path.exists("/proc/driver/nvidia")
if not _HAS_DRIVER:
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

_lock = threading.Lock()  # A compile borrows the process's environment and its standard output.
_compiled_for = jax.make_user_context(None)  # Part of JAX's cache keys: what was traced for 132 SMs is not 148 SMs'.


class ToolchainMissing(RuntimeError):
    """Compiling needs packages that are not installed."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a function's kernels (`kernels` has one such record for each, and none itself)."""

    gpu: str
    name: str
    registers: int  # A thread; the most of any kernel. 255 is the limit.
    spill_bytes: int  # Stored to local memory by each thread because registers ran out; the sum over the kernels.
    smem_bytes: int  # Of one block, barriers included; the most of any kernel.
    compile_seconds: float  # From tracing to machine code, on this machine's CPU.
    remarks: tuple[str, ...]  # What ptxas says on performance, such as WGMMAs that it had to serialize.
    ptx: str = dataclasses.field(repr=False)
    cubin: bytes = dataclasses.field(repr=False)
    kernels: tuple["Compiled", ...] = dataclasses.field(default=(), repr=False)

    @functools.cached_property
    def sass(self) -> str:
        """The machine code, disassembled when first asked for."""
        if self.kernels:
            return "\n".join(kernel.sass for kernel in self.kernels)
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, "kernel.cubin")
            path.write_bytes(self.cubin)
            command = [tool("nvdisasm"), "-c", "-ndf", path]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_for(gpu: str, fn, *args, name: str | None = None) -> Compiled:
    """Compiles the Mosaic GPU kernels of `fn(*args)` for `gpu`, which this machine need not have.

    Args:
      gpu: "h200" (sm_90a, 132 SMs) or "b200" (sm_100a, 148 SMs).
      fn: launches at least one `plgpu.kernel`.
      args: arrays or `jax.ShapeDtypeStruct`s, pytrees of them included; only shapes and dtypes count.
      name: what to call the record; by default `fn`'s name.

    Raises:
      ValueError: `gpu` is not known, `fn` launches no Mosaic GPU kernel, or a kernel asks for too much shared memory.
      ToolchainMissing: the compile-only wheels are missing.
      RuntimeError: the compiler rejects a kernel (its message is included).
    """
    facts = gpu_facts(gpu)
    name = name or name_of(fn)
    start = time.perf_counter()
    with _lock, _compiled_for(gpu), tempfile.TemporaryDirectory() as directory:
        device = _device(gpu)
        avals = jax.eval_shape(lambda *args: args, *args)
        on_device = jax.sharding.SingleDeviceSharding(device)
        avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_device), avals)

        def lower():
            with (
                _mgpu.building_for(_mgpu.Target(facts["name"], facts["num_sms"])),
                jax.default_device(device),  # Mosaic takes the architecture from it.
            ):
                return jax.jit(lambda *args: fn(*args)).lower(*avals)

        with _environment(MOSAIC_GPU_DUMP_TO=directory):  # Writes, among others, what `_smem_bytes` reads.
            lowered = lower()
        if not (count := _keep_kernel(lowered.compiler_ir(), 0)):
            raise ValueError(f"{name} launches no Mosaic GPU kernel: there is nothing to compile for {gpu!r}.")
        smem_bytes = _smem_bytes(directory)
        kernels = []
        for index in range(count):
            if index:
                lowered = lower()
                _keep_kernel(lowered.compiler_ir(), index)
            kernels.append(_assemble(gpu, _ptx(lowered, name, directory), smem_bytes, start, directory))
    return Compiled(
        gpu,
        name,
        registers=max(kernel.registers for kernel in kernels),
        spill_bytes=sum(kernel.spill_bytes for kernel in kernels),
        smem_bytes=max(kernel.smem_bytes for kernel in kernels),
        compile_seconds=time.perf_counter() - start,
        remarks=tuple(dict.fromkeys(remark for kernel in kernels for remark in kernel.remarks)),
        ptx="\n".join(kernel.ptx for kernel in kernels),
        cubin=b"",
        kernels=tuple(kernels),
    )


def name_of(fn) -> str:
    """What to call a function in messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def gpu_facts(gpu: str) -> dict:
    """The public facts of a GPU that a kernel can be compiled for. Raises ValueError for a name not in `GPUS`."""
    if gpu not in GPUS:
        raise ValueError(f"gpu = {gpu!r} is not known; it must be one of {', '.join(map(repr, GPUS))}.")
    return GPUS[gpu]


def _device(gpu: str):
    """A compile-only device of JAX's CUDA plugin."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise ToolchainMissing(
            f"compile_for({gpu!r}, ...) needs JAX's CUDA 13 plugin and NVIDIA's compiler. {_INSTALL}"
        )
    tool("ptxas")
    config = _TARGET_CONFIG.format(**gpu_facts(gpu), smem=_mgpu.SMEM_BYTES_MAX)
    topology = functools.partial(topologies.get_topology_desc, platform="cuda", target_config=config, topology="1x1x1")
    try:
        return topology().devices[0]
    except NotImplementedError:
        if _HAS_DRIVER:
            raise
        importlib.import_module("jax_plugins.xla_cuda13").initialize()  # JAX had tried before this module was imported.
        return topology().devices[0]


@functools.cache
def tool(name: str) -> str:
    """Path of a CUDA program: the wheel's before any other, so that every machine with our lock reads the same code."""
    wheels = [path for root in _package("nvidia") for path in sorted(root.glob(f"*/bin/{name}"))]
    triton = [root / "backends/nvidia/bin" / name for root in _package("triton")]  # Comes with PyTorch.
    for path in [*wheels, shutil.which(name), f"/usr/local/cuda/bin/{name}", *triton]:
        if path and os.path.exists(path):
            return str(path)
    raise ToolchainMissing(f"NVIDIA's {name} is not installed. {_INSTALL}")


def _package(name: str) -> list[pathlib.Path]:
    spec = importlib.util.find_spec(name)
    return [pathlib.Path(root) for root in spec.submodule_search_locations] if spec else []


def _keep_kernel(module: ir.Module, index: int) -> int:
    """Leaves one Mosaic kernel in `module`, under a hash of its own, and makes the others plain allocations. Returns
    how many there were.

    One at a time, because a process can pass only one architecture to ptxas (the first that it compiled for): for any
    other, Mosaic stops after the PTX of its first kernel. The hash, because JAX 0.12 knows a compiled kernel again by
    it, and then has nothing to tell.
    """
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "mosaic_gpu" in str(op.attributes["call_target_name"]):
            found.append(op)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
        for i, op in enumerate(found):
            config = {item.name: item.attr for item in op.attributes["mhlo.backend_config"]} if i == index else {}
            if i == index:
                config["kernel_hash"] = ir.StringAttr.get(os.urandom(32))
                op.attributes["has_side_effect"] = ir.BoolAttr.get(True)  # Its reader may be gone: do not drop it.
            else:
                op.attributes["call_target_name"] = ir.StringAttr.get("AllocateBuffer")
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)
    return len(found)


def _ptx(lowered, name: str, directory: str) -> str:
    """The PTX of the one Mosaic kernel in `lowered`."""
    path, failure = pathlib.Path(directory, "output"), None
    # Mosaic asks the ptxas that it finds first which version of PTX to write.
    search = os.pathsep.join([os.path.dirname(tool("ptxas")), os.environ.get("PATH", "")])
    with _environment(MOSAIC_GPU_DUMP_PTX="1", PATH=search, TMPDIR=directory), _output_to(path):
        try:
            lowered.compile()
        except jax.errors.JaxRuntimeError as error:  # ptxas, on an architecture of its own choice; see _keep_kernel.
            failure = error
    output = path.read_text(errors="replace")
    start, end = output.find("//\n// Generated by LLVM NVPTX Back-End"), output.rfind("\n}")
    if start < 0:
        raise RuntimeError(f"{name} does not compile: {failure}\n{output}") from failure
    return output[start : output.index("\n", end + 1) + 1]


def _assemble(gpu: str, text: str, smem_bytes: dict[str, list[int]], start: float, directory: str) -> Compiled:
    """Runs ptxas on `text`, the PTX of one kernel."""
    name = re.search(r"\.entry (\w+?)_mosaic_gpu_kernel\(", text)[1]
    ptx, cubin = pathlib.Path(directory, "kernel.ptx"), pathlib.Path(directory, "kernel.cubin")
    ptx.write_text(text)
    arch = re.search(r"^\.target (\w+)", text, re.M)[1]
    ptxas = subprocess.run([tool("ptxas"), f"-arch={arch}", "-v", ptx, "-o", cubin], capture_output=True, text=True)
    said = ptxas.stdout + ptxas.stderr
    if ptxas.returncode:
        raise RuntimeError(f"ptxas rejects the kernel {name!r} for {gpu!r}: {said}")
    known = smem_bytes[name]
    return Compiled(
        gpu,
        name,
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spill_bytes=int(re.search(r"(\d+) bytes spill stores", said)[1]),
        smem_bytes=known.pop(0) if len(known) > 1 else known[0],
        compile_seconds=time.perf_counter() - start,
        remarks=tuple(re.findall(r"Potential Performance Loss: (.*?)(?: in the function.*)?$", said, re.M)),
        ptx=text,
        cubin=cubin.read_bytes(),
    )


@contextlib.contextmanager
def _environment(**variables: str):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _output_to(path: pathlib.Path):
    """Sends file descriptors 1 and 2 to a file: C++ writes to them whatever `sys.stdout` is (Jupyter's is no file)."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(path, "wb") as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            for descriptor, copy in enumerate(saved, start=1):
                os.dup2(copy, descriptor)
                os.close(copy)


def _smem_bytes(directory: str) -> dict[str, list[int]]:
    """The shared memory of each lowered kernel, by its name, in the order of lowering."""
    found: dict[str, list[int]] = {}
    files = pathlib.Path(directory).glob("*.after_layout_inference.txt")
    for path in sorted(files, key=lambda path: int(path.name.split(".")[0].rsplit("_", 1)[1])):
        name = path.name.split(".")[0].rsplit("_", 1)[0]
        found.setdefault(name, []).append(int(re.search(r"dynamic_shared_memory_size %c(\d+)", path.read_text())[1]))
    return found
