"""Entries that are functions: the signature is the schema, the docstring the help.

A `Registry` is a folder in which each file defines one function of its own name. To list and to configure
entries must not need what building them needs, so a file is first executed *lightly*: whatever it imports
beyond the standard library and `light` is a stand-in (as with Sphinx's `autodoc_mock_imports`), and its
function is asked for its signature. A broken file is named, and breaks no other entry.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_args

from sparsify import ranges

REQUIRED = "???"  # Hydra's word for a value that has no default
LIGHT = ("sparsify.ranges",)  # imported in earnest, besides the standard library,
QUICK = sys.stdlib_module_names - {"dataclasses"}  # of which making dataclasses takes half of the time


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
    """The files of one folder, each with a function of its own name, and the functions of a table beside it.

    Args:
        light: modules beside the standard library that signatures use, and that are quick to import.
        table: entries without a file; a file stands in for a row of its name.
    """

    noun: str
    package: str
    folder: Path
    light: tuple[str, ...] = LIGHT
    table: Mapping[str, Callable[..., Any]] = field(default_factory=dict, compare=False)

    def names(self) -> list[str]:
        """Names of files and rows, in the order of the alphabet."""
        files = (path.stem for path in self.folder.glob("*.py") if not path.stem.startswith("_"))
        return sorted({*files, *self.table})

    def described(self, name: str) -> Callable[..., Any]:
        """A function with the entry's signature and docstring, which need not work."""
        path = self.folder / f"{name}.py"
        if name in self.table and not path.exists():
            return self.table[name]
        return _described(path, f"{self.package}.{name}", path.stat().st_mtime_ns, self.light)

    def function(self, name: str) -> Callable[..., Any]:
        """The function that builds the entry."""
        if name in self.table and not (self.folder / f"{name}.py").exists():
            return self.table[name]
        return function_of(self.package, name)

    def check_name(self, name: str) -> None:
        """Refuse a name that no entry has."""
        if name not in self.names():
            raise ValueError(ranges.describe_unknown(self.noun, name, self.names()))

    def sound(self) -> list[str]:
        """The entries whose file can be read."""
        return [name for name in self.names() if not self.why_broken(name)]

    def why_broken(self, name: str) -> str:
        """The reason why an entry's file can't be read; empty where it can."""
        try:
            self.parameters(name)
        except BrokenFile as broken:
            return str(broken)
        return ""

    def parameters(self, name: str) -> dict[str, Parameter]:
        """Hyperparameters of an entry.

        Raises:
            BrokenFile: the file can't be read, or a default or an annotation in its signature is wrong.
        """
        self.check_name(name)
        return parameters_of(self.described(name))

    def defaults(self, name: str) -> dict[str, Any]:
        """Hyperparameters of an entry and their defaults, '???' where one must be given."""
        return {key: parameter.default for key, parameter in self.parameters(name).items()}

    def docstring(self, name: str) -> str:
        """An entry's docstring; `BrokenFile` where the file can't be read."""
        self.check_name(name)
        return inspect.getdoc(self.described(name)) or ""

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
                hint = ranges.suggest_similar(key, list(known))
                raise ValueError(
                    f"{self.noun} {name!r} has no {ranges.format_value(key)!r}{hint}; it has: {listing}"
                )
            if isinstance(value, str) and value == REQUIRED:
                raise ValueError(f"{self.noun} {name!r} needs {prefix}{key}, which has no default")
            ranges.check_value(f"{prefix}{key}", value, known[key].allowed)

    def build(self, name: str, values: Mapping[str, Any]) -> Any:
        """Call the entry's function."""
        self.check(name, values)
        return self.function(name)(**values)


def function_of(package: str, name: str) -> Callable[..., Any]:
    """The function of its own name in a module of a package.

    Raises:
        BrokenFile: the module can't be imported, or has no such function.
    """
    module = imported(f"{package}.{name}")
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise BrokenFile(no_function(module.__file__, name))
    return function


def no_function(path: object, name: str) -> str:
    """The sentence for a file without the function that it should have."""
    return f"{path} has no function {name}: each file there has one of its own name"


def imported(module: str) -> ModuleType:
    """The module, which one file of a folder is.

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
        raise broken(error) from error


def broken(error: Exception, path: Path | None = None) -> BrokenFile:
    """Sentence with the line on what went wrong while a file was executed."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename or path}" + (f", line {error.lineno}" if error.lineno else "")
        return BrokenFile(f"{place}: {error.msg}")
    *_, last = (at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith("<"))
    return BrokenFile(f"{last.filename}, line {last.lineno}: {type(error).__name__}: {error}")


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of a function, by its signature.

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
    return {
        name: Parameter(
            REQUIRED if one.default is empty else one.default,
            Any if one.annotation is empty else one.annotation,
            one.kind is inspect.Parameter.KEYWORD_ONLY,
        )
        for name, one in signature.parameters.items()
        if one.kind is not inspect.Parameter.VAR_KEYWORD  # which takes what others have named
    }


def constant(path: Path, name: str) -> Any:
    """Value that a file assigns to a name at its top, without what it imports; None where it doesn't."""
    value = getattr(_lightly(path, path.stem, path.stat().st_mtime_ns, LIGHT, name), name, None)
    return None if isinstance(value, StandIn) else value


class StandIn:
    """Stands for what a file imports while only its signature is asked for: may be called, subclassed, ..."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    __iter__ = None  # else `__getitem__` would never end
    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __call__
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = __or__ = __ror__ = __neg__ = __call__


def _stands_in(value: Any) -> bool:
    return isinstance(value, StandIn) or any(_stands_in(one) for one in get_args(value))


@cache
def _described(path: Path, module: str, modified_ns: int, light: tuple[str, ...]) -> Callable[..., Any]:
    """The file's function, executed lightly, or in earnest where its signature needs what was stood for."""
    name = path.stem
    function = getattr(_lightly(path, module, modified_ns, light), name, None)
    if isinstance(function, FunctionType):
        known = parameters_of(function).values()
        if not any(_stands_in(one.default) or _stands_in(one.allowed) for one in known):
            return function
    elif function is None:
        raise BrokenFile(no_function(path, name))
    found: Callable[..., Any] = getattr(_executed(_new(path, module)), name)
    return found


@cache
def _lightly(
    path: Path, module: str, modified_ns: int, light: tuple[str, ...], until: str | None = None
) -> ModuleType:
    """A file, executed lightly, or until a name is assigned; in earnest where stand-ins were not enough."""
    made = _new(path, module)
    try:
        return _executed(made, light)
    except SyntaxError as error:
        raise broken(error, path) from error
    except Exception as error:  # what runs may raise anything
        if until is not None and hasattr(made, until):
            return made
        try:
            return _executed(_new(path, module))
        except Exception as earnest:
            cause = error if isinstance(earnest, ModuleNotFoundError) else earnest
            raise broken(cause, path) from cause


def _executed(made: ModuleType, light: tuple[str, ...] | None = None) -> ModuleType:
    """The module, executed: lightly, with these modules in earnest; all of them, where none is named."""
    if light is not None:

        def stand_in(name: str, *others: Any) -> Any:
            level = others[3] if len(others) > 3 else 0
            is_light = name in light or name.partition(".")[0] in QUICK
            return builtins.__import__(name, *others) if is_light and not level else StandIn()

        made.__dict__["__builtins__"] = {**vars(builtins), "__import__": stand_in}
    assert made.__spec__ is not None
    assert made.__spec__.loader is not None
    sys.modules[made.__name__] = made  # where dataclasses look for it
    try:
        made.__spec__.loader.exec_module(made)
    finally:
        del sys.modules[made.__name__]
    return made


def _new(path: Path, module: str) -> ModuleType:
    """A file as a module of its own, which nobody else will import."""
    spec = spec_from_file_location(f"{module} as a file", path)
    assert spec is not None
    made = module_from_spec(spec)
    made.__package__ = module.rpartition(".")[0]
    return made
