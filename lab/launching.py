"""The launches of a compiled program on a GPU, counted without one."""

import re
from typing import NamedTuple

import jax

from cookbook import _host

from . import interpreter
from .toolchain import claim_architecture, device, gpu_facts

# Instructions that launch nothing: they name arguments, results and parts of them.
_NAMES = {"parameter", "get-tuple-element", "bitcast", "constant", "tuple", "after-all", "opt-barrier"}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = .*? ([a-z][\w-]*)\((.*)$", re.M)


class Launch(NamedTuple):
    """A launch of a program: a Mosaic kernel by its name, or what XLA generated, by the name of the last operation."""

    name: str
    is_kernel: bool  # A Mosaic kernel.


def launches(gpu: str, fn, *args, donate_argnums=()) -> list[Launch]:
    """The launches of one run of `fn(*args)`, compiled whole for `gpu`, in their order; a loop counts as one.

    Args:
      gpu: "h200" or "b200": this machine's GPU, and "h200" where there is none. A process can compile whole programs
        for one GPU alone.
      fn: a function. On this machine's GPU one that `jax.jit` returned keeps its options, and is compiled for its
        next call too.
      args: arrays or `jax.ShapeDtypeStruct`s, pytrees of them included; only shapes and dtypes count.
      donate_argnums: as of `jax.jit`.

    Raises:
      ValueError: `gpu` is not known, or another than this process compiles for. ToolchainMissing: the compile-only
        wheels are missing.
    """
    facts, target = gpu_facts(gpu), device(gpu)
    if (here := claim_architecture()) != facts["major"]:
        raise ValueError(
            f"gpu = {gpu!r} has compute capability {facts['major']}; this process compiles whole programs for {here}, "
            "as this machine's GPU or, without one, an H200 has: lab.compile_for compiles kernels alone, for any GPU."
        )
    if isinstance(fn, jax.stages.Wrapped):
        if interpreter.on_gpu(gpu):
            return _of(fn.lower(*args).compile().as_text())
        fn = fn.__wrapped__  # JAX would keep the trace, which is for another machine.
    where = jax.sharding.SingleDeviceSharding(target)
    avals = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), jax.eval_shape(lambda *args: args, *args)
    )
    with (
        _host.building_for(_host.Target(facts["name"], facts["num_sms"])),
        jax.default_device(target),
    ):
        jitted = jax.jit(lambda *args: fn(*args), donate_argnums=donate_argnums)
        return _of(jitted.lower(*avals).compile().as_text())


def _of(text: str) -> list[Launch]:
    """The launches of a program that XLA has scheduled, by its text."""
    computations = {
        name: body for name, body in re.findall(r"^(?:ENTRY )?%?(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)
    }
    entry = computations[re.search(r"^ENTRY %?(\S+) ", text, re.M)[1]]
    found = []
    for name, opcode, rest in _INSTRUCTION.findall(entry):
        if opcode in _NAMES:
            continue
        called = re.search(r"calls=%?([\w.-]+)", rest)
        whole = rest + (computations.get(called[1], "") if called else "")
        kernel = re.search(r'custom_call_target="mosaic_gpu', whole)
        of_kernel = re.search(r'op_name="[^"]*?([^"/]+)/mpmd_map"', whole)
        found.append(Launch(of_kernel[1] if kernel and of_kernel else re.sub(r"\.\d+$", "", name), bool(kernel)))
    return found
