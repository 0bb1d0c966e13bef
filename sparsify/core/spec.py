"""Registries of functions: a signature is the schema of an entry, its docstring the help.

A `Registry` is a folder in which each file defines one function of its own name. To list and to configure
entries must not need what building them needs, so a signature is read from the file's syntax tree: of the
file only those statements are executed on which its defaults and annotations depend. A broken file is named,
and breaks no other entry.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sparsify import ranges

REQUIRED = "???"  # Hydra's word for a value that has no default


class BrokenFile(ValueError):
    """The error that a file can't be read as an entry; the message has its path and the line."""


@dataclass(frozen=True)
class Parameter:
    """A hyperparameter of an entry, read from the signature."""

    default: Any  # REQUIRED where there is none
    allowed: Any  # the type with its range, see `sparsify.ranges`
    is_keyword_only: bool = False


@dataclass(frozen=True)
class Registry:
    """The entries of one folder, a file each with a function of its own name, and of a table beside it.

    Args:
        table: entries without a file; a file stands in for a row of its name.
    """

    noun: str
    package: str
    folder: Path
    table: Mapping[str, Callable[..., Any]] = field(default_factory=dict, compare=False)

    def names(self) -> list[str]:
        """Return the names of files and rows, in alphabetical order."""
        files = (path.stem for path in self.folder.glob("*.py") if not path.stem.startswith("_"))
        return sorted({*files, *self.table})

    def _has_file(self, name: str) -> bool:
        return name not in self.table or (self.folder / f"{name}.py").exists()

    def _read_signature(self, name: str) -> Callable[..., Any]:
        """Return a function with the entry's signature and docstring, which need not work."""
        self.check_name(name)
        if not self._has_file(name):
            return self.table[name]
        path = self.folder / f"{name}.py"
        return _read_function(path, f"{self.package}.{name}", path.stat().st_mtime_ns)

    def import_function(self, name: str) -> Callable[..., Any]:
        """Return the function that builds the entry.

        Raises:
            BrokenFile: the entry's module can't be imported, or has no function of its own name.
        """
        if not self._has_file(name):
            return self.table[name]
        module = import_entry(f"{self.package}.{name}")
        function: Callable[..., Any] | None = getattr(module, name, None)
        if function is None:
            raise BrokenFile(_describe_missing_function(module.__file__, name))
        return function

    def check_name(self, name: str) -> None:
        """Refuse a name that no entry has."""
        if name not in self.names():
            raise ValueError(ranges.describe_unknown(self.noun, name, self.names()))

    def loadable_names(self) -> list[str]:
        """Return the names of the entries whose file can be read."""
        return [name for name in self.names() if not self.reason_unreadable(name)]

    def reason_unreadable(self, name: str) -> str:
        """Return why an entry's file can't be read; '' where it can."""
        try:
            self.parameters(name)
        except BrokenFile as broken:
            return str(broken)
        return ""

    def parameters(self, name: str) -> dict[str, Parameter]:
        """Return the hyperparameters of an entry, by name.

        Raises:
            BrokenFile: the file can't be read, or a default or an annotation in its signature is wrong.
        """
        return _read_parameters(self._read_signature(name))

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the default of each hyperparameter, '???' where a value must be given."""
        return {key: parameter.default for key, parameter in self.parameters(name).items()}

    def docstring(self, name: str) -> str:
        """Return an entry's docstring.

        Raises:
            BrokenFile: the file can't be read.
        """
        return inspect.getdoc(self._read_signature(name)) or ""

    def summary(self, name: str) -> str:
        """Return the first line of an entry's docstring."""
        return self.docstring(name).partition("\n")[0]

    def check_hyperparameters(self, name: str, values: Mapping[str, Any], prefix: str = "") -> None:
        """Refuse hyperparameters that the entry does not have, and values that it does not allow.

        Args:
            prefix: of the hyperparameters' names in the message.
        """
        known = self.parameters(name)
        for key, value in values.items():
            if key not in known:
                listing = ", ".join(f"{k}={p.default}" for k, p in known.items()) or "none"
                hint = ranges.suggest_similar(key, list(known))
                raise ValueError(
                    f"{self.noun} {name!r} has no {ranges.format_value(key)!r}{hint}; it has: {listing}"
                )
            if isinstance(value, str) and value == REQUIRED:
                raise ValueError(f"{self.noun} {name!r} needs {prefix}{key}, which has no default")
            ranges.check_value(f"{prefix}{key}", value, known[key].allowed)

    def build(self, name: str, values: Mapping[str, Any]) -> Any:
        """Call the entry's function."""
        self.check_hyperparameters(name, values)
        return self.import_function(name)(**values)


def _describe_missing_function(path: object, name: str) -> str:
    """Return the error message for a file without the function that it should have."""
    return f"{path} has no function {name}: each file there has one of its own name"


def import_entry(module: str) -> ModuleType:
    """Import the module that a file of a registry is.

    Raises:
        BrokenFile: it can't be imported.
        ImportError: of what it imports something is not installed, or can't be loaded.
    """
    ours = ("sparsify", module.partition(".")[0])
    try:
        return importlib.import_module(module)
    except Exception as error:  # what runs on import may raise anything
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] not in ours:
            raise
        raise _make_broken_file(error) from error


def _make_broken_file(error: Exception, path: Path | None = None) -> BrokenFile:
    """Return the error, with path and line, for what went wrong while a file was read or executed."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename or path}" + (f", line {error.lineno}" if error.lineno else "")
        return BrokenFile(f"{place}: {error.msg}")
    *_, last = (at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith("<"))
    return BrokenFile(f"{last.filename}, line {last.lineno}: {type(error).__name__}: {error}")


def _read_parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a function by name, as its signature has them.

    Raises:
        BrokenFile: an annotation means nothing.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:  # an annotation may raise anything
        code = inspect.unwrap(function).__code__
        raise BrokenFile(
            f"{code.co_filename}, line {code.co_firstlineno}: an annotation of {function.__name__} can't be "
            f"read: {type(error).__name__}: {error}"
        ) from error
    empty = inspect.Parameter.empty
    parameters = dict[str, Parameter]()
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:  # it takes what others have named
            continue
        parameters[name] = Parameter(
            REQUIRED if parameter.default is empty else parameter.default,
            Any if parameter.annotation is empty else parameter.annotation,
            parameter.kind is inspect.Parameter.KEYWORD_ONLY,
        )
    return parameters


def read_constant(path: Path, name: str) -> Any:
    """Return the value that a file assigns to a name at its top; None where it doesn't."""
    return _read_constant(path, name, path.stat().st_mtime_ns)


@cache
def _read_function(path: Path, module: str, modified_ns: int) -> Callable[..., Any]:
    """Return a file's function of its own name, with its signature and docstring and without its body."""
    tree = _parse(path)
    name = path.stem
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not definitions:
        raise BrokenFile(_describe_missing_function(path, name))
    definition = definitions[-1]
    docstring = definition.body[:1] if ast.get_docstring(definition) is not None else []
    definition.body = [*docstring, ast.copy_location(ast.Pass(), definition)]
    definition.decorator_list = []
    definition.returns = None
    before = tree.body[: tree.body.index(definition)]
    statements = [*_select_statements(before, _loaded_names(definition.args)), definition]
    function: Callable[..., Any] = _execute(path, module, statements)[name]
    return function


@cache
def _read_constant(path: Path, name: str, modified_ns: int) -> Any:
    statements = _select_statements(_parse(path).body, {name})
    return _execute(path, path.stem, statements).get(name)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise _make_broken_file(error, path) from error
    except ValueError as error:  # Python 3.10, of zero bytes
        raise BrokenFile(f"{path}: {error}") from error


def _select_statements(statements: Sequence[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """Return the statements on which the values of these names depend, in their order."""
    needed = set(names)
    selected = list[ast.stmt]()
    for statement in reversed(statements):
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if is_future or not needed.isdisjoint(_bound_names(statement)):
            selected.append(statement)
            needed |= _loaded_names(statement)
    return selected[::-1]


def _bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement at the top of a file gives values to."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    names = set[str]()
    for node in ast.walk(statement):
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def _loaded_names(tree: ast.AST) -> set[str]:
    """Return the names that a piece of code mentions."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _execute(path: Path, module: str, statements: Sequence[ast.stmt]) -> dict[str, Any]:
    """Execute some statements of a file, and return its names with their values."""
    made = ModuleType(f"{module} as a file")
    made.__file__ = str(path)
    made.__package__ = module.rpartition(".")[0]
    sys.modules[made.__name__] = made  # where dataclasses look for it
    try:
        code = compile(ast.Module([*statements], []), str(path), "exec", dont_inherit=True)
        exec(code, vars(made))
    except Exception as error:  # what runs may raise anything
        raise _make_broken_file(error, path) from error
    finally:
        del sys.modules[made.__name__]
    return vars(made)
