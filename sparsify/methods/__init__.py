"""One file per published method: its citation, and how selector, feedback and exchange compose it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from sparsify.core.checks import explain_missing_torch
from sparsify.core.spec import Registry

REGISTRY = Registry("method", __name__, Path(__file__).parent)


def names() -> list[str]:
    """All methods."""
    return REGISTRY.names()


def per_step() -> list[str]:
    """Methods that average every step's gradients. The others are strategies of local steps: their first
    hyperparameter is `every`.
    """
    return [name for name in names() if [*defaults(name)][:1] != ["every"]]


def defaults(name: str) -> dict[str, Any]:
    """A method's hyperparameters and their defaults."""
    return REGISTRY.defaults(name)


def build(name: str, **hyperparameters: Any) -> Any:
    """The method `name`: a `sparsify.method.Method`, or a `sparsify.local.strategy.Local`.

    Raises:
        ValueError: an unknown name or hyperparameter (the message lists the known ones), a value out of
            range, or parts that do not fit together.
        ModuleNotFoundError: torch is not installed.
    """
    with explain_missing_torch("sparsify.build"):
        method = REGISTRY.build(name, hyperparameters)
    return method


def builder(name: str) -> Callable[..., Any]:
    """The method's own function, which checks what it is given as `build` does: `sparsify.topk`, ...

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    with explain_missing_torch(f"sparsify.{name}"):
        function = REGISTRY.function(name)

    @wraps(function)
    def checked(*values: Any, **hyperparameters: Any) -> Any:
        known = list(defaults(name))
        if len(values) > len(known):
            raise TypeError(f"{name} takes {len(known)} hyperparameters, and {len(values)} were given")
        return build(name, **dict(zip(known, values, strict=False)), **hyperparameters)

    return checked
