"""The hash that ties a notebook's recorded outputs to the code that made them."""

import ast
import functools
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cookbook"


def notebook_hash(path: Path) -> str:
    """Hash of the notebook's code and of the `cookbook` modules it uses, directly or through another, without `lab`.

    Comments, docstrings and layout do not count: they change no number.
    """
    cells = json.loads(Path(path).read_text())["cells"]
    code = "\n".join(_python("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code")
    tree = ast.parse(code)
    found, waiting = set(), _modules_used(tree)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting |= _modules_used(_parse(module))
    texts = [_normal(tree), *(_normal(_parse(module)) for module in sorted(found))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _python(cell: str) -> str:
    """`cell` without IPython's magics."""
    return "\n".join(line for line in cell.splitlines() if not line.startswith(("%", "!")))


def _parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text())


@functools.cache
def _exports() -> dict[str, str]:
    """Maps each public name of the package to the module that defines it."""
    imports = [node for node in _parse("__init__").body if isinstance(node, ast.ImportFrom) and node.module]
    return {
        alias.asname or alias.name: node.module.removeprefix("cookbook.").replace(".", "/")
        for node in imports
        for alias in node.names
    }


def _modules_used(tree: ast.Module) -> set[str]:
    """The modules of the package, without `lab`, that `tree` names: `softmax` for `cookbook.softmax` and the like."""
    names, aliases = set(), {"cookbook"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("cookbook.")}
            aliases |= {alias.asname for alias in node.names if alias.name == "cookbook" and alias.asname}
        elif isinstance(node, ast.ImportFrom):
            source = ".".join(filter(None, ["cookbook" if node.level else "", node.module]))
            if source == "cookbook":
                names |= {alias.name for alias in node.names}
            elif source.startswith("cookbook."):
                names.add(source.split(".")[1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            names.add(node.attr)
    folders = {name for name in names - {"lab"} if (PACKAGE / name).is_dir()}
    names = {name if (PACKAGE / f"{name}.py").exists() else _exports().get(name) for name in names - folders}
    names |= {f"{folder}/{path.stem}" for folder in folders for path in (PACKAGE / folder).glob("*.py")}
    return names - {None, "lab"}


def _normal(tree: ast.Module) -> str:
    """The text of `tree` without docstrings, comments and layout."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
