"""One file per published method: its citation, and how selector, feedback and exchange compose it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsify.checks import needs_torch
from sparsify.registry import Registry

if TYPE_CHECKING:  # it imports torch
    from sparsify.method import Method

REGISTRY = Registry("method", __name__, Path(__file__).parent)


def names() -> list[str]:
    """All methods."""
    return REGISTRY.names()


def defaults(name: str) -> dict[str, Any]:
    """A method's hyperparameters and their defaults."""
    return REGISTRY.defaults(name)


def build(name: str, **hyperparameters: Any) -> Method:
    """The method `name`.

    Raises:
        ValueError: an unknown name or hyperparameter (the message lists the known ones), a value out of
            range, or parts that do not fit together.
        ModuleNotFoundError: torch is not installed.
    """
    with needs_torch("sparsify.build"):
        method: Method = REGISTRY.build(name, hyperparameters)
    return method
