"""A folder in which each file defines one function of its own name: the file is the entry, the signature its
schema.

Signatures are read from the source, so that listing and configuring entries needs none of what building them
needs. A broken file is named, and breaks no other entry.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sparsify import ranges

REQUIRED = "???"  # Hydra's word for a value that has no default


class BrokenFile(ValueError):
    """A file that can't be read as an entry; the message has its path and the line."""


@dataclass(frozen=True)
class Parameter:
    """A hyperparameter, from the signature."""

    default: Any  # REQUIRED where there is none
    allowed: Any  # the type with its range, see `sparsify.ranges`
    is_keyword_only: bool = False


@dataclass(frozen=True)
class Registry:
    """The entries of one folder. `noun` is what an entry is called in a sentence."""

    noun: str
    package: str
    folder: Path

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.py") if not path.stem.startswith("_"))

    def check_name(self, name: str) -> None:
        if name not in self.names():
            raise ValueError(ranges.unknown(self.noun, name, self.names()))

    def sound(self) -> list[str]:
        """The entries whose file can be read."""
        return [name for name in self.names() if not self.why_broken(name)]

    def why_broken(self, name: str) -> str:
        """Why an entry's file can't be read; empty where it can."""
        try:
            self.parameters(name)
        except BrokenFile as broken:
            return str(broken)
        return ""

    def parameters(self, name: str) -> dict[str, Parameter]:
        """Hyperparameters of an entry.

        Raises:
            BrokenFile: the file, or a default or an annotation in its signature, can't be read.
        """
        self.check_name(name)
        path = self.folder / f"{name}.py"
        return _parameters(path, name, path.stat().st_mtime_ns)

    def defaults(self, name: str) -> dict[str, Any]:
        """Hyperparameters of an entry and their defaults, '???' where one must be given."""
        return {key: parameter.default for key, parameter in self.parameters(name).items()}

    def docstring(self, name: str) -> str:
        """An entry's docstring.

        Raises:
            BrokenFile: the file can't be read.
        """
        self.check_name(name)
        path = self.folder / f"{name}.py"
        return ast.get_docstring(_function(parsed(path), path, name)) or ""

    def summary(self, name: str) -> str:
        """The first line of an entry's docstring."""
        return self.docstring(name).partition("\n")[0]

    def check(self, name: str, values: Mapping[str, Any], prefix: str = "") -> None:
        """Refuse a hyperparameter that the entry does not have, and a value that it does not allow.

        Args:
            prefix: of the hyperparameters' names in the message.
        """
        known = self.parameters(name)
        for key, value in values.items():
            if key not in known:
                listing = ", ".join(f"{k}={p.default}" for k, p in known.items()) or "none"
                hint = ranges.did_you_mean(key, list(known))
                raise ValueError(
                    f"{self.noun} {name!r} has no {ranges.shown(key)!r}{hint}; it has: {listing}"
                )
            if isinstance(value, str) and value == REQUIRED:
                raise ValueError(f"{self.noun} {name!r} needs {prefix}{key}, which has no default")
            ranges.check(f"{prefix}{key}", value, known[key].allowed)

    def build(self, name: str, values: Mapping[str, Any]) -> Any:
        """Call the entry's function."""
        self.check(name, values)
        return function_of(self.package, name)(**values)


def function_of(package: str, name: str) -> Callable[..., Any]:
    """The function of its own name in a module of a package.

    Raises:
        BrokenFile: the module can't be imported, or has no such function.
    """
    module = imported(f"{package}.{name}")
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise BrokenFile(f"{module.__file__} has no function {name}: each file there has one of its own name")
    return function


def imported(module: str) -> ModuleType:
    """The module, which one file of a folder is.

    Raises:
        BrokenFile: it can't be imported.
        ImportError: of what it imports something is not installed, or can't be loaded.
    """
    ours = ("sparsify", module.partition(".")[0])
    try:
        return importlib.import_module(module)
    except SyntaxError as error:
        raise BrokenFile(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except Exception as error:  # what runs on import may raise anything
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] not in ours:
            raise
        *_, last = (at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith("<"))
        raise BrokenFile(f"{last.filename}, line {last.lineno}: {type(error).__name__}: {error}") from error


def parsed(path: Path) -> ast.Module:
    """A file as its syntax tree.

    Raises:
        BrokenFile: it has a syntax error.
    """
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise BrokenFile(f"{path}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # a zero byte
        raise BrokenFile(f"{path}: {error}") from error


def constant(path: Path, name: str) -> Any:
    """What a file assigns to a name at its top, where that is a literal; else None.

    Raises:
        BrokenFile: the file has a syntax error.
    """
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
            with contextlib.suppress(ValueError):
                return ast.literal_eval(node.value)
    return None


def _function(tree: ast.Module, path: Path, name: str) -> ast.FunctionDef:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise BrokenFile(f"{path} has no function {name}: each file there has one of its own name")


@cache
def _parameters(path: Path, name: str, modified_ns: int) -> dict[str, Parameter]:
    tree = parsed(path)
    arguments = _function(tree, path, name).args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = [
        *zip(positional, [*missing, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    found = {}
    for argument, default in pairs:
        value = REQUIRED if default is None else _value(default, tree, path)
        allowed = Any if argument.annotation is None else _value(argument.annotation, tree, path)
        found[argument.arg] = Parameter(value, allowed, argument in arguments.kwonlyargs)
    return found


def _value(node: ast.expr, tree: ast.Module, path: Path) -> Any:
    """The value of an expression of a signature: names come from the file's own imports and constants."""
    try:
        known = {
            part.id: _named(part.id, tree, path) for part in ast.walk(node) if isinstance(part, ast.Name)
        }
        return eval(compile(ast.Expression(node), str(path), "eval"), known)  # the repository's own code
    except (BrokenFile, ImportError):
        raise
    except Exception as error:  # an expression may raise anything
        raise BrokenFile(
            f"{path}, line {node.lineno}: `{ast.unparse(node)}` in the signature can't be known ({error}); "
            "the file's imports and constants can be used there"
        ) from error


def _named(name: str, tree: ast.Module, path: Path) -> Any:
    """What a name stands for at the top of a file, without running the file."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) != name:
                    continue
                if isinstance(node, ast.ImportFrom):
                    return getattr(importlib.import_module(str(node.module)), alias.name)
                return importlib.import_module(alias.name if alias.asname else name)
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
            return _value(node.value, tree, path)
    return getattr(builtins, name)
