"""The hash that ties a measurement to the code it measured."""

import ast
import dataclasses
import functools
import hashlib
import inspect
import linecache
import os
import sys
import sysconfig
import textwrap
import types

_ELSEWHERE = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))  # Other people's code.


def source_hash(fn) -> str:
    """Hash of all the code of ours that `fn` runs: comments, docstrings and layout do not count, nor do libraries.

    Followed from `fn`: functions and constants that its code names, closures, defaults, `functools.partial` arguments,
    and what `jax.jit` and the like wrap. A function of the `cookbook` package counts with its whole module and the
    `cookbook` modules which that uses, without `cookbook.lab`. Array values do not count.
    """
    return _digest(_Reach(fn).parts)


def module_hashes(fn) -> dict[str, str]:
    """The hash of each `cookbook` module that `fn` uses, by which a stored figure is known to be stale later."""
    return {name: _module_hash(sys.modules[name]) for name in sorted(_Reach(fn).modules)}


def module_is(name: str, known: str) -> bool:
    """Whether the `cookbook` module `name` still exists and hashes to `known`."""
    try:
        __import__(name)
    except ImportError:
        return False
    return _module_hash(sys.modules[name]) == known


class _Reach:
    """Walks what a function reaches: `parts` is the text of it, `modules` the names of the package's modules."""

    def __init__(self, fn):
        self.parts: set[str] = set()
        self.modules: set[str] = set()
        self._seen: dict[int, object] = {}  # Holds what it has seen: an id is good for as long as its object lives.
        self._visit(fn)
        for name in list(self.modules):
            self._module(sys.modules[name])

    def _visit(self, value, name: str = ""):
        if isinstance(value, str | int | float | bool | None):
            self.parts.add(f"{name} = {value!r}")
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, tuple | list):
            for i, item in enumerate(value):
                self._visit(item, f"{name}[{i}]")
        elif isinstance(value, dict):
            for key, item in value.items():
                self._visit(item, f"{name}[{key!r}]")
        elif isinstance(value, functools.partial):
            self._visit((value.func, value.args, value.keywords), f"{name}partial")
        elif isinstance(value, types.MethodType):
            self._visit((value.__func__, value.__self__), name)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            if _is_ours(value):
                self._own(value)
                for member in vars(value).values():
                    if isinstance(member, types.FunctionType):
                        self._visit(member)
        elif dataclasses.is_dataclass(value):
            self._visit(type(value))
            for field in dataclasses.fields(value):
                self._visit(getattr(value, field.name), f"{name}.{field.name}")
        if callable(inner := getattr(value, "__wrapped__", None)):
            self._visit(inner)

    def _function(self, fn: types.FunctionType):
        if not _is_ours(fn):
            return
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._visit(_cell(cell), name)
        self._visit((fn.__defaults__, fn.__kwdefaults__), f"{fn.__qualname__} defaults")
        if self._own(fn):
            return
        names = _names(fn.__code__)
        for name in names & fn.__globals__.keys():
            value = fn.__globals__[name]
            if not isinstance(value, types.ModuleType):
                self._visit(value, name)
            elif value.__name__.startswith("cookbook.") and _is_ours(value):
                self.modules.add(value.__name__)
            elif _is_ours(value):  # The package's index or a helper module: what is taken from it.
                for attribute in names & vars(value).keys():
                    self._visit(vars(value)[attribute], f"{name}.{attribute}")

    def _own(self, value) -> bool:
        """Notes the text of a function or class. True if it is the package's, whose modules count whole."""
        if value.__module__.startswith("cookbook."):
            self.modules.add(value.__module__)
            return True
        self.parts.add(_text(value))
        return False

    def _module(self, module: types.ModuleType):
        self.parts.add(_module_hash(module))
        for value in vars(module).values():
            name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
            if name.startswith("cookbook.") and not name.startswith("cookbook.lab") and name not in self.modules:
                self.modules.add(name)
                self._module(sys.modules[name])


def _is_ours(value) -> bool:
    """Whether a function, class or module is neither a library's nor `cookbook.lab`'s."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or ""
    file = value.__code__.co_filename if isinstance(value, types.FunctionType) else _file(sys.modules.get(name))
    return not name.startswith("cookbook.lab") and file is not None and not any(part in file for part in _ELSEWHERE)


def _file(module) -> str | None:
    if module is None or getattr(module, "__file__", None) is None:
        return "<notebook>" if module is sys.modules.get("__main__") else None
    return module.__file__


def _names(code: types.CodeType) -> set[str]:
    nested = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*nested)


def _cell(cell):
    try:
        return cell.cell_contents
    except ValueError:  # Not filled yet.
        return None


def _text(value) -> str:
    """The code of a function or class, found in its file or notebook cell; nothing for generated code."""
    if isinstance(value, type):
        try:
            return _normal(ast.parse(textwrap.dedent(inspect.getsource(value))))
        except (OSError, TypeError):  # A notebook's class: its methods and fields count, one by one.
            return value.__qualname__
    code = value.__code__
    tree = ast.parse("".join(linecache.getlines(code.co_filename, value.__globals__)))
    kind = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    found = [node for node in ast.walk(tree) if isinstance(node, kind) and _first_line(node) == code.co_firstlineno]
    if kind is ast.Lambda:  # Others may stand on the same line.
        arguments = list(code.co_varnames[: code.co_argcount])
        found = [node for node in found if [argument.arg for argument in node.args.args] == arguments]
    return "\n".join(map(_normal, found))


def _first_line(node) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _normal(tree: ast.AST) -> str:
    """The code of `tree` without comments, docstrings and layout."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and body
            and ast.get_docstring(node) is not None
        ):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@functools.cache
def _file_hash(path: str, modified: float) -> str:
    with open(path) as file:
        return _digest([_normal(ast.parse(file.read()))])


def _module_hash(module: types.ModuleType) -> str:
    return _file_hash(module.__file__, os.path.getmtime(module.__file__))


def _digest(parts) -> str:
    return hashlib.sha256("\0".join(sorted(parts)).encode()).hexdigest()[:16]
