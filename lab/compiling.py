"""Compile a kernel for a named GPU, on a machine that need not have one, and read what the compiler made of it."""

import collections
import contextlib
import dataclasses
import functools
import io
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import jax
import numpy as np
from jaxlib.mlir import ir

from cookbook import _host

from .toolchain import claim_architecture, device, gpu_facts, tool
from .toolchain import devices as target_devices

_FOREIGN = {"h200": r"mosaic_gpu\.(tcgen05|tmem)", "b200": r"mosaic_gpu\.(wgmma)"}  # Operations of the other GPU.
SMEM_BYTES, REGISTERS, THREADS = 233_472, 65_536, 2_048  # An SM of Hopper and of data-centre Blackwell.
_lock = threading.Lock()  # A compile borrows the process's environment and its standard output.


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Record of a function's compiled kernels; `kernels` has one such record for each, whose own `kernels` are ()."""

    gpu: str
    name: str
    registers: int  # Registers of a thread; the most of any kernel. 255 is the limit.
    spill_bytes: int  # Stored to local memory by each thread because registers ran out; the sum over the kernels.
    smem_bytes: int  # Bytes of a block, barriers included; the most of any kernel.
    compile_seconds: float  # From tracing to machine code, on this machine's CPU.
    remarks: tuple[str, ...]  # Remarks of ptxas on performance, such as WGMMAs that it had to serialize.
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

    @property
    def instructions(self) -> list[str]:
        """The instructions of the machine code, predicates included, in their order; without what pads its end."""
        lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?) *;", self.sass, re.M)
        return [line for line in lines if not line.startswith("NOP")]

    @property
    def opcodes(self) -> collections.Counter[str]:
        """How often each instruction occurs, by its name up to the first dot, such as HGMMA."""
        return collections.Counter(re.sub(r"^@\S+\s+", "", line).split()[0].split(".")[0] for line in self.instructions)

    @property
    def early_arrivals(self) -> list[str]:
        """Arrivals at a barrier that do not wait for loads from shared memory before them: each, and its last load.

        If such a load reads the slot that the arrival gives back, TMA may overwrite it first. A use of what was loaded
        waits for it, and so does `plgpu.commit_smem()`. Whether the load is from that slot, only the kernel's source
        tells. The machine code is read in its order, past branches.
        """
        if self.kernels:
            return [arrival for kernel in self.kernels for arrival in kernel.early_arrivals]
        found, loading = [], []  # Loads that nothing has waited for, the earliest first, and their registers.
        for line in self.instructions:
            opcode, _, operands = re.sub(r"^@\S+\s+", "", line).partition(" ")
            registers, is_load = [int(number) for number in re.findall(r"\bR(\d+)", operands)], opcode.startswith("LDS")
            arrived = [i for i, (_, into) in enumerate(loading, 1) if into & set(registers[is_load:])]
            if opcode.startswith(("FENCE", "MEMBAR", "DEPBAR")):
                loading = []
            elif arrived:  # Loads arrive in their order.
                loading = loading[arrived[-1] :]
            if is_load and registers:
                size = 4 if opcode.endswith(("128", ".4")) else 2 if opcode.endswith(("64", ".2")) else 1
                loading.append((line, set(range(registers[0], registers[0] + size))))
            elif opcode.startswith("SYNCS.ARRIVE") and "A1T0" in opcode and loading:
                found.append(f"{line}, after {loading[-1][0]}")
        return found

    @property
    def overwritten_operands(self) -> list[str]:
        """Writes to registers that a WGMMA before them may still read as its first operand: each, and that WGMMA.

        A WGMMA reads them until `WARPGROUP.DEPBAR` has waited for its group. ptxas 13.0 wrote constants there too
        early in one of our kernels. The machine code is read in its order, past branches.
        """
        if self.kernels:
            return [write for kernel in self.kernels for write in kernel.overwritten_operands]
        found, groups = [], [[]]  # WGMMAs of each group that nothing has waited for, the last one open.
        for line in self.instructions:
            opcode, _, operands = re.sub(r"^@\S+\s+", "", line).partition(" ")
            if opcode.startswith("HGMMA"):
                if first := re.match(r"R\d+, R(\d+)", operands):
                    groups[-1].append((line, set(range(int(first[1]), int(first[1]) + 4))))
                groups += [[]] if "gsb0" in operands else []
            elif opcode.startswith("WARPGROUP.DEPBAR"):
                left = int(operands.rpartition(",")[2], 16)
                groups = groups[max(len(groups) - 1 - left, 0) :]
            else:
                into = _written(opcode, operands)
                found += [f"{line}, after {reader}" for group in groups for reader, of in group if of & into]
        return found

    @property
    def threads(self) -> int:
        """Threads of a block; the most of any kernel."""
        return max(int(x) * int(y) * int(z) for x, y, z in re.findall(r"\.maxntid (\d+), (\d+), (\d+)", self.ptx))

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit on an SM at the same time, by its registers and its shared memory.

        CUDA keeps 1,024 bytes of shared memory for each block, and gives registers to warps by 8 a thread.
        """
        by_smem = SMEM_BYTES // (self.smem_bytes + 1_024)
        return min(by_smem, REGISTERS // (self.threads * 8 * -(-self.registers // 8)), THREADS // self.threads)


# Opcodes whose first register is read, not written.
_READERS = ("ISETP", "FSETP", "DSETP", "HSETP", "PLOP", "R2P", "R2UR", "BAR", "ST", "RED", "BRX", "RET", "CALL",
            "NANOSLEEP", "WARPSYNC", "JMP", "SYNCS", "UTMA")  # fmt: skip


def _written(opcode: str, operands: str) -> set[int]:
    """The registers that an instruction writes. Predicates may come first."""
    result = re.match(r"(?:!?U?P(?:\d+|T), )*R(\d+)", operands)
    if result is None or opcode.startswith(_READERS):
        return set()
    if opcode.startswith(("LD", "ATOM")):
        size = 4 if "128" in opcode or ".4" in opcode else 2 if "64" in opcode or ".2" in opcode else 1
    else:
        is_pair = "WIDE" in opcode or opcode == "CS2R" or opcode.startswith(("DADD", "DMUL", "DFMA"))
        size = 2 if is_pair else 1
    return set(range(int(result[1]), int(result[1]) + size))


def compile_for(gpu: str, fn, *args, name: str | None = None, devices: int | dict[str, int] | None = None) -> Compiled:
    """Compiles the Mosaic GPU kernels of `fn(*args)` for `gpu`, which this machine need not have.

    Args:
      gpu: "h200" (sm_90a, 132 SMs) or "b200" (sm_100a, 148 SMs).
      fn: launches at least one `plgpu.kernel`.
      args: arrays or `jax.ShapeDtypeStruct`s, pytrees of them included; only shapes and dtypes count.
      name: what to call the record; by default `fn`'s name.
      devices: GPUs of one host that run `fn` together: their number, on a mesh of one axis "x", or the size of each
        axis by its name, such as dict(x=2, y=2). `fn` calls `jax.shard_map` without a mesh and gets this one, and
        `args` are whole arrays, not shards. By default `fn` runs on one GPU, without a mesh.

    Raises:
      ValueError: `gpu` is not known, `devices` names no mesh, `fn` launches no Mosaic GPU kernel, or a kernel asks for
        too much shared memory, for the other GPU's tensor core, or for Lane semantics.
      ToolchainMissing: the compile-only wheels are missing.
      RuntimeError: the compiler rejects a kernel (its message is included).
    """
    facts = gpu_facts(gpu)
    name = name or name_of(fn)
    axes = _mesh_axes(devices)
    with _lock:
        claim_architecture()
    start = time.perf_counter()
    with _lock, tempfile.TemporaryDirectory() as directory:
        target = device(gpu)
        avals = jax.eval_shape(lambda *args: args, *args)
        on_device, mesh = jax.sharding.SingleDeviceSharding(target), contextlib.nullcontext()
        if axes:
            on_device, mesh = _replicated(gpu, axes)
        avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_device), avals)

        def lower():
            with (
                _host.building_for(_host.Target(facts["name"], facts["num_sms"])),
                # Gives Mosaic the architecture, and keeps what is traced for one GPU apart in JAX's caches.
                jax.default_device(target),
                mesh,
            ):
                return jax.jit(lambda *args: fn(*args)).lower(*avals)

        lowered, modules = _lower_aloud(lower)
        calls = _kernel_calls(lowered.compiler_ir())
        if not calls:
            raise ValueError(f"{name} launches no Mosaic GPU kernel: there is nothing to compile for {gpu!r}.")
        smem_bytes = _smem_bytes(modules, name, gpu)
        if not smem_bytes:
            raise ValueError(
                f"{name} has Lane semantics (plgpu.CompilerParams(lowering_semantics=...)), of which JAX does not tell "
                "how much shared memory a kernel takes: use Warpgroup semantics, JAX's default, or jax.jit(...).lower."
            )
        kernels = []
        _drop_results(lowered.compiler_ir())
        for index in range(len(calls)):
            _keep_kernel(calls, index)
            kernels.append(_assemble(gpu, _ptx(lowered, index, name, directory), smem_bytes, start, directory))
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


def _mesh_axes(devices: int | dict[str, int] | None) -> dict[str, int]:
    """Sizes of the mesh's axes by name; none for one GPU without a mesh."""
    if devices is None:
        return {}
    axes = devices if isinstance(devices, dict) else {"x": devices}
    if not axes or not all(type(size) is int and size >= 1 for size in axes.values()):
        raise ValueError(
            f"devices = {devices!r}; it must be a number of GPUs, 1 or more, or a dict of the mesh's axes with such "
            "numbers: devices=4 or devices=dict(x=2, y=2)."
        )
    return axes


def _replicated(gpu: str, axes: dict[str, int]):
    """(The sharding of arrays that every device of a mesh with these axes has whole, that mesh as a context)."""
    grid = np.array(target_devices(gpu, math.prod(axes.values()))).reshape(*axes.values())
    mesh = jax.sharding.Mesh(grid, tuple(axes))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), jax.set_mesh(mesh)


def name_of(fn) -> str:
    """Name of a function for messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _kernel_calls(module: ir.Module) -> list[tuple[ir.Operation, ir.Attribute, dict[str, ir.Attribute]]]:
    """Each call of a Mosaic kernel in `module`, with its target and its configuration as they were lowered."""
    found = []

    def visit(op):
        target = op.attributes["call_target_name"] if op.name == "stablehlo.custom_call" else ""
        if "mosaic_gpu" in str(target):
            found.append((op, target, {item.name: item.attr for item in op.attributes["mhlo.backend_config"]}))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return found


def _drop_results(module: ir.Module) -> None:
    """Makes the results of the program plain allocations, so that what computes them is dead code."""
    with module.context:
        (main,) = (op for op in module.body if ir.StringAttr(op.attributes["sym_name"]).value == "main")
        _allocate_operands(main.regions[0].blocks[0].operations[-1])


def _keep_kernel(calls: list[tuple[ir.Operation, ir.Attribute, dict[str, ir.Attribute]]], index: int) -> None:
    """Leaves the Mosaic kernel `calls[index]`, under a hash of its own, and nothing else that XLA would compile.

    One at a time, because for any architecture but the one that `claim_architecture` chose, Mosaic stops after the PTX
    of its first kernel. The other kernels become plain allocations, and so do its operands: what computed them is dead
    code. The hash, because JAX 0.12 knows a compiled kernel again by it, and then has nothing to tell.
    """
    for i, (op, target, config) in enumerate(calls):
        with op.context:
            if i == index:
                config = config | {"kernel_hash": ir.StringAttr.get(os.urandom(32))}
                op.attributes["has_side_effect"] = ir.BoolAttr.get(True)
                _allocate_operands(op)
            else:
                target, config = ir.StringAttr.get("AllocateBuffer"), {}
                op.attributes["has_side_effect"] = ir.BoolAttr.get(False)
            op.attributes["call_target_name"] = target
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)


def _allocate_operands(op: ir.Operation) -> None:
    """Replaces each operand by an allocation of its type."""
    api_version = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2)
    attributes = dict(call_target_name=ir.StringAttr.get("AllocateBuffer"), api_version=api_version)
    for i, operand in enumerate(list(op.operands)):
        with ir.InsertionPoint(op), op.location:
            new = ir.Operation.create("stablehlo.custom_call", [operand.type], attributes=attributes)
        op.operands[i] = new.result


def _ptx(lowered, index: int, name: str, directory: str) -> str:
    """The PTX of the one Mosaic kernel in `lowered`, the `index`-th that was kept."""
    printed, complaints, failure = pathlib.Path(directory, "stdout"), pathlib.Path(directory, "stderr"), None
    # Mosaic asks the ptxas that it finds first which version of PTX to write.
    search = os.pathsep.join([os.path.dirname(tool("ptxas")), os.environ.get("PATH", "")])
    with (
        _environment(MOSAIC_GPU_DUMP_PTX="1", PATH=search),
        _descriptor_to(1, printed),
        _descriptor_to(2, complaints),
    ):
        try:
            # JAX knows a module that it compiled again, though it has changed since, unless an option differs.
            lowered.compile({"xla_dump_max_hlo_modules": index + 1})
        except jax.errors.JaxRuntimeError as error:  # ptxas, on an architecture of its own choice; see _keep_kernel.
            failure = error
    _, _, ptx = printed.read_text(errors="replace").partition("// Generated by LLVM NVPTX Back-End")
    if not ptx:
        said = complaints.read_text(errors="replace").strip()
        raise RuntimeError(f"{name} does not compile: {failure}\n{said}") from failure
    return "// Generated by LLVM NVPTX Back-End" + ptx


def _assemble(gpu: str, text: str, smem_bytes: list[tuple[str, int]], start: float, directory: str) -> Compiled:
    """Runs ptxas on `text`, the PTX of one kernel."""
    name = re.search(r"\.entry (\S+?)_mosaic_gpu_kernel\(", text)[1]
    ptx, cubin = pathlib.Path(directory, "kernel.ptx"), pathlib.Path(directory, "kernel.cubin")
    ptx.write_text(text)
    arch = re.search(r"^\.target (\w+)", text, re.M)[1]
    ptxas = subprocess.run([tool("ptxas"), f"-arch={arch}", "-v", ptx, "-o", cubin], capture_output=True, text=True)
    said = ptxas.stdout + ptxas.stderr
    if ptxas.returncode:
        raise RuntimeError(f"ptxas rejects the kernel {name!r} for {gpu!r}: {said}")
    smem = next((item for item in smem_bytes if item[0] == name), smem_bytes[0])
    if len(smem_bytes) > 1:  # A kernel launched in two places may have been lowered once.
        smem_bytes.remove(smem)
    return Compiled(
        gpu,
        name,
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spill_bytes=int(re.search(r"(\d+) bytes spill stores", said)[1]),
        smem_bytes=smem[1],
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
def _descriptor_to(descriptor: int, path: pathlib.Path):
    """Sends what is written to a file descriptor, by C++ too, to a file: `sys.stdout` knows nothing of that."""
    (sys.stdout if descriptor == 1 else sys.stderr).flush()
    saved = os.dup(descriptor)
    with open(path, "wb") as file:
        try:
            os.dup2(file.fileno(), descriptor)
            yield
        finally:
            os.dup2(saved, descriptor)
            os.close(saved)


def _lower_aloud(lower):
    """(what `lower()` returns, each kernel's module as it was before Mosaic's layout inference, and as it was after).

    Mosaic prints them. (It would write files as well, but others with them, which take about as long as lowering.)
    """
    said = io.StringIO()
    try:
        with _environment(MOSAIC_GPU_DUMP_MLIR_PASSES="1"), contextlib.redirect_stdout(said):
            lowered = lower()
    finally:
        from_the_function, *modules = re.split(r"^(?=module @)", said.getvalue(), flags=re.M)
        print(from_the_function, end="")
    return lowered, modules


def _smem_bytes(modules: list[str], name: str, gpu: str) -> list[tuple[str, int]]:
    """(name, shared memory) of each lowered kernel, in the order of lowering.

    Raises ValueError for an instruction that `gpu` has not: of tcgen05 on Hopper, JAX 0.12's compiler dies.
    """
    found = []
    for text in modules[1::2]:
        if foreign := re.search(_FOREIGN[gpu], text):
            raise ValueError(
                f"{name} uses {foreign[1]}, which {gpu!r} has not: Hopper has wgmma, data-centre Blackwell tcgen05 "
                "(cookbook.blackwell has kernels for it)."
            )
        kernel = re.search(r"func\.func @(\S+)_mosaic_gpu\b", text)[1]
        found.append((kernel, int(re.search(r"dynamic_shared_memory_size %c(\d+)", text)[1])))
    return found
