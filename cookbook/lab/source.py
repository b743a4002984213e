"""The hashes that tie a figure, or a notebook's outputs, to the code that made them.

Nothing is imported or looked into to find that code, only read. A statement counts with those that bind the names it
uses: in its own file or notebook, and in the modules of the package that it imports from, and so on. A function that is
added to a module therefore leaves the figures of the others alone. Comments, docstrings and layout do not count, nor
do `cookbook.lab`, libraries, and `ON_THE_HOST`.
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
OUTSIDE = ("", "")  # The home of what does not count.
# They hand arguments on before anything is launched: no kernel, and so no figure of one, changes with them.
ON_THE_HOST = {("cookbook._mgpu", "as_array"), ("cookbook._mgpu", "without_gradient")}
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


def notebook_hash(path: pathlib.Path) -> str:
    """Hash of a notebook's code and of what it uses of the package."""
    cells = json.loads(pathlib.Path(path).read_text())["cells"]
    program = [s for cell in cells if cell["cell_type"] == "code" for s in _statements("".join(cell["source"]))]
    _, names = _reached(program, range(len(program)))
    return _digest([*map(_text, program), *_hashes(names).values()])


def code_of(fn) -> dict:
    """The code that a figure of `fn` keeps: `uses`, hashes of what it uses of the package by name, and `code`, the hash
    of all else.

    A function of the package is a name in `uses`; of any other the statement counts that defines it, with those that
    bind what it uses. In a notebook, where functions are made in passing, the running cell counts in place of that
    statement. A library's function has neither hash.
    """
    inner = _unwrapped(fn)
    if not hasattr(inner, "__code__") or _in_folder(inner, "lab"):
        return {}
    cells = getattr(sys.modules["__main__"], "In", None)  # IPython's: the cells run so far.
    if inner.__module__.startswith("cookbook.") and (fn is inner or not cells):
        name = inner.__qualname__.split(".")[0]  # A class counts with its methods, a module with its lambdas.
        return dict(uses=_hashes({f"{inner.__module__}.{name}" if name.isidentifier() else inner.__module__}))
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
    places, names = _reached(program, start)
    return dict(code=_digest(sorted({_text(program[i]) for i in places})), uses=_hashes(names))


def changed(provenance: dict, fn=None) -> bool:
    """Whether a figure's code is another now: what it uses of the package, or, where `fn` is given, `fn` itself.

    Under "also" a figure has the code of other calls that took it in the same process.
    """
    known = provenance.get("uses", {})
    if known and _hashes(known) != known:
        return True
    if fn is None or "source" in provenance or not provenance.keys() & {"code", "uses"}:
        return False  # Nobody knows: it is of other people's code, or older than this way to hash.
    what = lambda code: (code.get("code"), code.get("uses", {}).keys())
    return what(code_of(fn)) not in map(what, (provenance, *provenance.get("also", ())))


# Names of the package ------------------------------------------------------------------------------------------------


def _hashes(names) -> dict[str, str | None]:
    """The hash of what each name, such as "cookbook.softmax", leads to, by where it is; None for one that is gone."""
    paths = (os.path.join(folder, file) for folder, _, files in os.walk(PACKAGE) for file in files)
    stats = ((path, os.stat(path)) for path in sorted(paths) if path.endswith(".py"))
    now = tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats)
    return {home: digest for home, digest in (_hash_of(name, now) for name in sorted(names)) if home}


@functools.lru_cache(10_000)
def _hash_of(name: str, _now) -> tuple[str, str | None]:
    """Where `name` is ("" if it does not count) and its hash, with the package's files as they are `_now`."""
    if (home := _home(name)) is None:
        return name, None
    if home == OUTSIDE:
        return "", None
    return ".".join(filter(None, home)), _digest(_code(*home))


def _code(module: str, name: str) -> list[str]:
    """All statements that `name` of a module leads to, or all of the module, each after the name of its module."""
    found, seen, waiting = set(), set(), [(module, name)]
    while waiting:
        if (home := waiting.pop()) in seen:
            continue
        seen.add(home)
        module, name = home
        program = _program(module)
        start = _binding(program, name, len(program)) if name else range(len(program))
        places, names = _reached(program, start, module)
        found |= {f"{module}: {_text(program[i])}" for i in places}
        waiting += {_home(name) for name in names} - {OUTSIDE, None}
    return sorted(found)


def _home(name: str) -> tuple[str, str] | None:
    """(module, name in it) that "cookbook.softmax" or "cookbook.gemm.matmul.Config" comes from.

    The name is "" for a module as a whole. None: there is no such thing.
    """
    module, *parts = name.split(".")
    if module != "cookbook" or not parts or parts[0] == "lab" or parts[-1].startswith("__"):  # Such as `__file__`.
        return OUTSIDE
    while parts and _path(f"{module}.{parts[0]}"):
        module, parts = f"{module}.{parts[0]}", parts[1:]
    if not parts:
        return module, ""
    if (module, parts[0]) in ON_THE_HOST:
        return OUTSIDE
    program = _program(module)
    places = _binding(program, parts[0], len(program))
    if not places:
        return None
    sources = dict(_imported(program[places[0]], module))
    return _home(".".join([sources[parts[0]], *parts[1:]])) if parts[0] in sources else (module, parts[0])


def _program(module: str) -> tuple[ast.stmt, ...]:
    return _statements(_path(module).read_text())


def _path(module: str) -> pathlib.Path | None:
    stem = PACKAGE.joinpath(*module.split(".")[1:])
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)


def _imported(statement: ast.stmt, module: str | None):
    """(name, "cookbook.gemm.matmul") of each name that an import in `statement`, of a module, binds to one of ours."""
    if "import" not in _text(statement):
        return
    for node in ast.walk(statement):
        bound = []
        if isinstance(node, ast.Import):
            top = lambda alias: alias.name.split(".")[0]  # All that a plain import of a submodule binds.
            bound = [(x.asname or top(x), x.name if x.asname else top(x)) for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level and module:
                is_folder = _path(module).name == "__init__.py"
                folder = module.split(".")[: len(module.split(".")) + is_folder - node.level]
                source = ".".join(filter(None, [*folder, source]))
            bound = [(alias.asname or alias.name, f"{source}.{alias.name}") for alias in node.names]
        yield from ((name, source) for name, source in bound if source.split(".")[0] == "cookbook")


# Statements of a notebook, a file or a module ------------------------------------------------------------------------


def _reached(program, start, module: str | None = None) -> tuple[list[int], set[str]]:
    """The places in `program` of the statements `start` and of those that bind the names they use, and so on; and the
    names of the package that these statements use.

    An import of the package is no statement that counts: the names do.
    """
    found, ours, waiting = set(), set(), list(start)
    while waiting:
        if (place := waiting.pop()) in found:
            continue
        found.add(place)
        _, at_once, later = _names(_text(program[place]))
        sources = {}
        for name in at_once | later:  # A function looks its names up when it is called: the last binding counts.
            binding = _binding(program, name, place if name in at_once else len(program))
            waiting += binding
            for i in binding:
                sources |= {bound: source for bound, source in _imported(program[i], module) if bound == name}
        for root, *rest in _chains(_text(program[place])):
            if root in sources:
                ours.add(".".join([sources[root], *rest]))
    return [i for i in sorted(found) if not any(_imported(program[i], module))], ours


def _binding(program, name: str, before: int) -> list[int]:
    """The places of the statement that binds `name` last `before` a place, and of those that then add to it."""
    last = next((i for i in reversed(range(before)) if name in _names(_text(program[i]))[0]), None)
    return [] if last is None else [last, *(i for i in range(last + 1, len(program)) if name == _adds_to(program[i]))]


@functools.lru_cache(None)
def _adds_to(statement: ast.stmt) -> str | None:
    """The function that `f.defvjp(...)` or `f.Config = Config` adds something to."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement
    target = target.value.func if isinstance(target, ast.Expr) and isinstance(target.value, ast.Call) else target
    is_attribute = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
    return target.value.id if is_attribute else None


@functools.lru_cache(None)
def _text(statement: ast.stmt) -> str:
    return ast.unparse(statement)


@functools.lru_cache(10_000)
def _chains(code: str) -> list[list[str]]:
    """["core", "Plan"] for each `core.Plan` in `code`, ["Plan"] for each `Plan`."""
    nodes, found = list(ast.walk(ast.parse(code))), []
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if id(node) in inner:
            continue
        chain = []
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            found.append([node.id, *reversed(chain)])
    return found


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


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _digest(texts) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
