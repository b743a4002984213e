"""The GPUs that a kernel can be compiled for, and NVIDIA's programs that it takes."""

import functools
import importlib
import importlib.util
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import _device

# Facts that XLA needs of a chip that it cannot ask, from NVIDIA's datasheets and compute-capability tables.
# num_sms and compute capability shape the kernels; bandwidth, cache and clock only steer XLA's own fusions around them.
GPUS = {
    "h200": dict(name="NVIDIA H200", major=9, num_sms=132, clock_ghz=1.98, l2=60 << 20, bandwidth=4.8e12, memory=141e9),
    "b200": dict(name="NVIDIA B200", major=10, num_sms=148, clock_ghz=1.97, l2=126 << 20, bandwidth=8e12, memory=180e9),
}
# SMs and boost clock of each GPU whose peaks `roofline` knows, by `results.gpu_of` of JAX's name for it. NVIDIA's white
# paper on the H100's architecture gives both for the SXM module and the PCIe card, the product briefs those of the NVL
# cards. An H200 and a GH200 have the GPU of the SXM module.
CHIPS = {
    "h200-nvl": dict(num_sms=132, clock_ghz=1.785),
    "h100": dict(num_sms=132, clock_ghz=1.98),
    "h100-pcie": dict(num_sms=114, clock_ghz=1.755),
    "h100-nvl": dict(num_sms=132, clock_ghz=1.785),
    "gh200": dict(num_sms=132, clock_ghz=1.98),
    "gh200-144g": dict(num_sms=132, clock_ghz=1.98),
} | {gpu: dict(num_sms=facts["num_sms"], clock_ghz=facts["clock_ghz"]) for gpu, facts in GPUS.items()}
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
_HAS_DRIVER = any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")))
if not _HAS_DRIVER:
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


class ToolchainMissing(RuntimeError):
    """Compiling needs packages that are not installed."""


def gpu_facts(gpu: str) -> dict:
    """The public facts of a GPU that a kernel can be compiled for. Raises ValueError for a name not in `GPUS`."""
    if gpu not in GPUS:
        raise ValueError(f"gpu = {gpu!r} is not known; it must be one of {', '.join(map(repr, GPUS))}.")
    return GPUS[gpu]


@functools.cache
def device(gpu: str) -> jax.Device:
    """A compile-only device of JAX's CUDA plugin. Raises ToolchainMissing."""
    return devices(gpu, 1)[0]


def devices(gpu: str, count: int) -> list[jax.Device]:
    """Compile-only devices of JAX's CUDA plugin: `count` GPUs of one host. Raises ToolchainMissing."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise ToolchainMissing(
            f"compile_for({gpu!r}, ...) needs JAX's CUDA 13 plugin and NVIDIA's compiler. {_INSTALL}"
        )
    tool("ptxas")
    config = _TARGET_CONFIG.format(**gpu_facts(gpu), smem=_device.SMEM_BYTES_MAX)
    topology = functools.partial(
        topologies.get_topology_desc, platform="cuda", target_config=config, topology=f"1x1x{count}"
    )
    try:
        return topology().devices
    except NotImplementedError:
        if _HAS_DRIVER:
            raise
        importlib.import_module("jax_plugins.xla_cuda13").initialize()  # JAX had tried before this module was imported.
        return topology().devices


@functools.cache
def claim_architecture() -> int:
    """Compiles a small kernel for this machine's GPU, or for an H200 where there is none.

    Mosaic passes one architecture alone to ptxas, the first of a process: after one of another GPU, this machine's own
    kernels would not compile. Returns its major compute capability. Raises ToolchainMissing.
    """
    on = jax.devices()[0] if jax.default_backend() == "gpu" else device("h200")
    out = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=jax.sharding.SingleDeviceSharding(on))
    with jax.default_device(on):
        jax.jit(plgpu.kernel(lambda out: None, out_type=out)).lower().compile()
    return int(float(on.compute_capability))


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
