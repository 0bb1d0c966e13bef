"""The published methods, one file each: a citation, and the parts that the method is composed of."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from sparsify.core.checks import explain_missing_torch
from sparsify.core.spec import Registry

REGISTRY = Registry("method", __name__, Path(__file__).parent)


def names() -> list[str]:
    """Return the names of all methods."""
    return REGISTRY.names()


def per_step_names() -> list[str]:
    """Return the names of the methods that average every step's gradients.

    The others take local steps: their first hyperparameter is `every`.
    """
    return [name for name in names() if [*defaults(name)][:1] != ["every"]]


def defaults(name: str) -> dict[str, Any]:
    """Return the default of each hyperparameter of a method, by name."""
    return REGISTRY.defaults(name)


def build(name: str, **hyperparameters: Any) -> Any:
    """Build the method `name`: a `sparsify.method.Method`, or a `sparsify.local.strategy.LocalSteps`.

    Raises:
        ValueError: an unknown name or hyperparameter (the message lists the known ones), a value out of
            range, or parts that do not fit together.
        ModuleNotFoundError: torch is not installed.
    """
    with explain_missing_torch("sparsify.build"):
        method = REGISTRY.build(name, hyperparameters)
    return method


def make_checked_builder(name: str) -> Callable[..., Any]:
    """Return a method's own function, such as `sparsify.topk`, with the checks of `build`.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    with explain_missing_torch(f"sparsify.{name}"):
        function = REGISTRY.import_function(name)

    @wraps(function)
    def checked_builder(*values: Any, **hyperparameters: Any) -> Any:
        known = list(defaults(name))
        if len(values) > len(known):
            raise TypeError(f"{name} takes {len(known)} hyperparameters, and {len(values)} were given")
        return build(name, **dict(zip(known, values, strict=False)), **hyperparameters)

    return checked_builder
