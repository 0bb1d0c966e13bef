"""A folder in which each file defines one function of its own name: the file is the entry, the signature its
schema.

Signatures are read from the source, so that listing and configuring entries needs none of what building them
needs.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = "???"  # Hydra's word for a value that has no default


def did_you_mean(word: str, known: list[str]) -> str:
    """' (did you mean X?)' where something known is close to `word`, else nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


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
            hint = did_you_mean(name, self.names())
            raise ValueError(f"no {self.noun} {name!r}{hint}; there are: {', '.join(self.names())}")

    def _function(self, name: str) -> ast.FunctionDef:
        self.check_name(name)
        tree = ast.parse((self.folder / f"{name}.py").read_text())
        return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)

    def defaults(self, name: str) -> dict[str, Any]:
        """Hyperparameters of an entry and their defaults, '???' where one must be given."""
        arguments = self._function(name).args
        positional = [*arguments.posonlyargs, *arguments.args]
        values: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
        pairs = [
            *zip(positional, [*values, *arguments.defaults], strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        return {a.arg: REQUIRED if value is None else ast.literal_eval(value) for a, value in pairs}

    def summary(self, name: str) -> str:
        """The first line of an entry's docstring."""
        return (ast.get_docstring(self._function(name)) or "").partition("\n")[0]

    def check(self, name: str, values: Mapping[str, Any]) -> None:
        """Refuse a hyperparameter that the entry does not have, listing those that it has."""
        known = self.defaults(name)
        for key in values:
            if key not in known:
                listing = ", ".join(f"{k}={v}" for k, v in known.items()) or "none"
                hint = did_you_mean(key, list(known))
                raise ValueError(f"{self.noun} {name!r} has no {key!r}{hint}; it has: {listing}")

    def build(self, name: str, values: Mapping[str, Any]) -> Any:
        """Call the entry's function."""
        self.check(name, values)
        function: Callable[..., Any] = getattr(importlib.import_module(f"{self.package}.{name}"), name)
        return function(**values)
