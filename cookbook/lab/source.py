"""The hashes that tie a figure, or a notebook's outputs, to the code that made them.

Nothing is imported or looked into to find that code, only read. A module counts with all modules of the package that it
imports, directly or through another; a notebook's cell with the statements that bind the names it uses, in cells before
it. Comments, docstrings and layout do not count, nor does `cookbook.lab`, nor do libraries.
"""

import ast
import functools
import hashlib
import inspect
import json
import os
import pathlib
import symtable
import sys
import sysconfig

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


def notebook_hash(path: pathlib.Path) -> str:
    """Hash of a notebook's code and of the modules of the package that it uses."""
    cells = json.loads(pathlib.Path(path).read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = ast.Module([statement for source in sources for statement in _statements(source)], [])
    return _digest([ast.unparse(code), *_hashes(_closure(_names_of_ours(code))).values()])


def code_of(fn) -> dict:
    """The code that a figure of `fn` keeps: `modules`, their hashes by name, and `code`, the hash of all else.

    A function of the package counts with its module and what that imports, any other with the statement that defines it
    and those that bind what it uses. In a notebook, where functions are made in passing, the running cell counts in
    place of that statement. A library's function has neither hash.
    """
    inner = _unwrapped(fn)
    if not hasattr(inner, "__code__") or _in_folder(inner, "lab"):
        return {}
    cells = getattr(sys.modules["__main__"], "In", None)  # IPython's: the cells run so far.
    if inner.__module__.startswith("cookbook.") and (fn is inner or not cells):
        return dict(modules=_hashes(_closure({inner.__module__})))
    if not inner.__module__.startswith("cookbook.") and any(part in inner.__code__.co_filename for part in _LIBRARIES):
        return {}
    if cells:
        *before, running = [_statements(cell) for cell in cells]
        program = [statement for cell in before for statement in cell] + list(running)
        start = range(len(program) - len(running), len(program))
    elif os.path.exists(inner.__code__.co_filename):
        program = _statements(pathlib.Path(inner.__code__.co_filename).read_text())
        line = inner.__code__.co_firstlineno
        start = [i for i, statement in enumerate(program) if _first_line(statement) <= line <= statement.end_lineno]
    else:
        return {}
    reached = ast.Module(_reached(program, start), [])
    code = sorted({ast.unparse(statement) for statement in reached.body})
    return dict(code=_digest(code), modules=_hashes(_closure(_names_of_ours(reached))))


def changed(provenance: dict, fn=None) -> bool:
    """Whether a figure's code is another now: one of its modules, or, where `fn` is given, `fn` itself."""
    known = provenance.get("modules", {})
    if _hashes(known) != known:
        return True
    if fn is None or "source" in provenance or not provenance.keys() & {"code", "modules"}:
        return False  # Nobody knows: it is of other people's code, or older than this way to hash.
    now = code_of(fn)
    return now.get("code") != provenance.get("code") or now.get("modules", {}).keys() != known.keys()


# Modules of the package ----------------------------------------------------------------------------------------------


def _closure(names: set[str]) -> set[str]:
    """The modules with code that these names come from, and those that they import, directly or through another."""
    found, waiting = set(), set(names)
    while waiting:
        module = _module_of(waiting.pop())
        if module and module not in found:
            found.add(module)
            waiting |= _names_of_ours(_parsed(_path(module)), _path(module))
    return {module for module in found if ast.unparse(_parsed(_path(module))) not in ("", "pass")}


def _hashes(modules) -> dict[str, str | None]:
    """The hash of each module, None for one that is not there."""
    return {name: _digest([ast.unparse(_parsed(path))]) if (path := _path(name)) else None for name in sorted(modules)}


def _path(module: str) -> pathlib.Path | None:
    stem = PACKAGE.joinpath(*module.split(".")[1:])
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)


def _module_of(name: str) -> str | None:
    """The module that `cookbook.softmax` or `cookbook.gemm.matmul.Config` comes from; None outside of the package."""
    top, *parts = name.split(".")
    if top != "cookbook" or not parts or parts[0] == "lab":
        return None
    for count in range(len(parts), 0, -1):
        if _path(module := ".".join([top, *parts[:count]])):
            return module
    index = PACKAGE / "__init__.py"
    return next((_module_of(source) for name, source in _bound(_parsed(index), index) if name == parts[0]), None)


def _bound(tree: ast.Module, path: pathlib.Path | None):
    """(name, "cookbook.gemm.matmul") of each name that an import in `tree`, the code of `path`, binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
                yield "", alias.name
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level and path:
                folder = ["cookbook", *path.parent.relative_to(PACKAGE).parts]
                source = ".".join(filter(None, [*folder[: len(folder) + 1 - node.level], source]))
            yield from ((alias.asname or alias.name, f"{source}.{alias.name}") for alias in node.names)


def _names_of_ours(tree: ast.Module, path: pathlib.Path | None = None) -> set[str]:
    """The names that `tree` imports, or takes from its imports: "cookbook.softmax", "cookbook.gemm.matmul.Config"."""
    bound = list(_bound(tree, path))
    sources, names = dict(bound), {source for _, source in bound}
    for node in ast.walk(tree):
        chain = []
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        if chain and isinstance(node, ast.Name) and node.id in sources:
            names.add(".".join([sources[node.id], *reversed(chain)]))
    return names


# Statements of a notebook or a file ----------------------------------------------------------------------------------


def _reached(program: list[ast.stmt], start) -> list[ast.stmt]:
    """The statements of `program` at the places `start`, and those that bind the names they use, and so on."""
    names = [_names(ast.unparse(statement)) for statement in program]
    found, waiting = set(), list(start)
    while waiting:
        if (place := waiting.pop()) in found:
            continue
        found.add(place)
        _, at_once, later = names[place]
        for name in at_once | later:  # A function looks its names up when it is called: the last binding counts.
            before = place if name in at_once else len(program)
            waiting += [i for i in range(before) if name in names[i][0]][-1:]
    return [program[i] for i in sorted(found)]


@functools.lru_cache(10_000)
def _names(code: str) -> tuple[frozenset, frozenset, frozenset]:
    """The names that a statement binds, those that it uses itself, and those that functions in it use."""
    top = symtable.symtable(code, "", "exec")
    inner, waiting = [], top.get_children()
    while waiting:
        inner.append(waiting.pop())
        waiting += inner[-1].get_children()
    pick = lambda tables, rule: frozenset(x.get_name() for table in tables for x in table.get_symbols() if rule(x))
    return (
        pick([top], lambda x: x.is_assigned() or x.is_imported()),
        pick([top], lambda x: x.is_referenced()),
        pick(inner, lambda x: x.is_global() and x.is_referenced()),
    )


@functools.lru_cache(10_000)
def _statements(source: str) -> tuple[ast.stmt, ...]:
    """The statements of a cell or file, one import each, without IPython's magics; none if it is no Python."""
    lines = ["" if line.startswith(("%", "!")) else line for line in source.splitlines()]
    try:
        tree = _without_docstrings(ast.parse("\n".join(lines)))
    except SyntaxError:
        return ()
    return tuple(single for statement in tree.body for single in _single_imports(statement))


def _single_imports(statement: ast.stmt) -> list[ast.stmt]:
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return [statement]
    others = {field: value for field, value in ast.iter_fields(statement) if field != "names"}
    return [ast.copy_location(type(statement)(names=[alias], **others), statement) for alias in statement.names]


def _unwrapped(fn):
    """The function that a partial, a method or a decorator's result calls."""
    while (inner := getattr(fn, "func", None) or getattr(fn, "__func__", None) or inspect.unwrap(fn)) is not fn:
        fn = inner
    return fn


def _in_folder(fn, folder: str) -> bool:
    return f"{fn.__module__}.".startswith(f"cookbook.{folder}.")


def _first_line(statement: ast.stmt) -> int:
    return min([statement.lineno, *(decorator.lineno for decorator in getattr(statement, "decorator_list", ()))])


def _parsed(path: pathlib.Path) -> ast.Module:
    return _parsed_at(path, path.stat().st_mtime_ns)


@functools.lru_cache(1000)
def _parsed_at(path: pathlib.Path, _modified: int) -> ast.Module:
    return _without_docstrings(ast.parse(path.read_text()))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _digest(texts) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
