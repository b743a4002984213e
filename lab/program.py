"""The program that a function lowers to, as a hash: it says which program a recorded figure timed.

A figure is fresh while its function lowers to the same program for the GPU that it was recorded on. A program does not
know in which file its kernel stands, what its functions are called or how its lines are laid out, so code can move
without anything being measured again. `python tools/stale.py` compares all figures with the code as it is.
"""

import ast
import hashlib
import json
import os
import pathlib
import re

import jax
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.interpreters import mlir
from jaxlib.mlir import ir

from cookbook import _host

from .toolchain import CHIPS


def digest(fn, *args, gpu: str = "h200") -> str:
    """The hash of the program that `fn(*args)` lowers to for `gpu`; it needs no GPU and runs nothing.

    Args:
      fn: a function of arrays.
      args: arrays, or a `jax.ShapeDtypeStruct` in the place of each.
      gpu: of `toolchain.CHIPS`, or another that this machine has.

    Raises:
      ValueError: it is neither.
    """
    num_sms = CHIPS[gpu]["num_sms"] if gpu in CHIPS else getattr(jax.devices()[0], "core_count", None)
    if num_sms is None:
        raise ValueError(f"gpu = {gpu!r} is not known; it must be one of {', '.join(map(repr, CHIPS))}.")
    with _host.building_for(_host.Target(gpu, num_sms)):
        lowered = jax.jit(lambda *args: fn(*args)).trace(*args).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    return _digest(_Walk(module).lines)


def note(problem: str, impl: str, fn, args, gpu: str) -> None:
    """Under COOKBOOK_PROGRAMS=FILE: adds the program of a figure that a chapter or the benchmark shows to that file."""
    if not (file := os.environ.get("COOKBOOK_PROGRAMS")) or fn is None:
        return
    try:
        found = dict(program=digest(fn, *args, gpu=gpu))
    except Exception as error:  # Such as a peer that is not installed here.
        found = dict(error=f"{type(error).__name__}: {str(error)[:200]}")
    with open(file, "a") as lines:
        lines.write(json.dumps(dict(problem=problem, impl=impl, gpu=gpu) | found) + "\n")


class _Walk:
    """The operations of a program, a line for each, in the order in which they run.

    A function stands where it is called, so how a program is divided into functions does not count.
    """

    def __init__(self, module):
        self.functions = {ir.StringAttr(op.attributes["sym_name"]).value: op for op in module.body.operations}
        self.lines, self.numbers, self.counted = [], {}, 0
        main = self.functions["main"]
        self.function(main, [self.number(argument) for argument in main.regions[0].blocks[0].arguments])

    def number(self, value) -> int:
        if value not in self.numbers:
            self.numbers[value], self.counted = self.counted, self.counted + 1
        return self.numbers[value]

    def function(self, function, operands) -> list[int]:
        """Adds the lines of a call and returns the numbers of its results."""
        (block,) = function.regions[0].blocks
        self.numbers |= dict(zip(block.arguments, operands, strict=True))
        *inner, end = block.operations
        for op in inner:
            self.operation(op)
        return [self.number(value) for value in end.operands]

    def operation(self, op) -> None:
        operands = [self.number(value) for value in op.operands]
        if op.operation.name == "func.call":
            callee = self.functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
            self.numbers |= dict(zip(op.results, self.function(callee, operands), strict=True))
            return
        results = [f"{self.number(value)}: {value.type}" for value in op.results]
        self.lines.append(f"{op.operation.name} {operands} {results}")
        for name in sorted(op.attributes):
            value = op.attributes[name]
            self.lines.append(f"  {name} = {_backend_text(value) if name == 'mhlo.backend_config' else value}")
        for region in op.operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    self.operation(inner)


def _backend_text(config) -> str:
    """The configuration of a custom call: a Mosaic kernel in it as text, without locations and names."""
    if not isinstance(config, ir.DictAttr) or "module" not in config:
        return str(config)
    others = [f"{entry.name} = {entry.attr}" for entry in config if entry.name not in ("module", "kernel_hash")]
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        mosaic_gpu.dialect.register_dialect(context)
        kernel = ir.Module.parse(ir.StringAttr(config["module"]).value_bytes).operation
    return "\n".join([*others, _without_names(kernel.get_asm(enable_debug_info=False))])


def _without_names(text: str) -> str:
    """`text` of a kernel, in which each symbol is called by the order in which it appears."""
    names: dict[str, str] = {}
    number = lambda found: names.setdefault(found[0].strip('@"'), f"@{len(names)}")
    text = re.sub(r'mosaic_gpu\.dump_basename = "[^"]*"', "", text)
    return re.sub(r'(?<=sym_name = )"[^"]*"|@[\w.$-]+', number, text)


def notebook_hash(path) -> str:
    """The hash of a notebook's own code, without comments and layout: its outputs are of that code.

    Cells that only show a drawing do not count: a drawing is the same on every machine (`tools/draw.py`).
    """
    cells = json.loads(pathlib.Path(path).read_text())["cells"]
    sources = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return _digest(_code(source) for source in sources if not is_drawing(source))


def is_drawing(source: str) -> bool:
    """Whether a cell only imports from `figures` and shows a drawing: `name.draw()`."""
    try:
        *imports, last = ast.parse(source).body
    except (SyntaxError, ValueError):  # Magics; or an empty cell.
        return False
    return re.fullmatch(r"[\w.]+\.draw\(\)", ast.unparse(last)) is not None and all(
        isinstance(one, ast.ImportFrom) and one.module.split(".")[0] == "figures" for one in imports
    )


class _Unsaid(ast.NodeTransformer):
    """Takes away what `lab.say` is given."""

    def visit_Call(self, node):
        if ast.unparse(node.func) == "lab.say":
            node.args = []
        return self.generic_visit(node)


def _code(source: str) -> str:
    """A cell without comments, layout and sentences; with IPython's magics left out."""
    lines = ["" if line.startswith(("%", "!")) else line for line in source.splitlines()]
    try:
        return ast.unparse(_Unsaid().visit(ast.parse("\n".join(lines))))
    except SyntaxError:  # A cell that shows one.
        return source


def _digest(lines) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
