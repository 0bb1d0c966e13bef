"""One file per published method: its citation, and how selector, feedback and exchange compose it."""

from pathlib import Path
from typing import Any

from sparsify.registry import Registry

REGISTRY = Registry("method", __name__, Path(__file__).parent)


def names() -> list[str]:
    """All methods."""
    return REGISTRY.names()


def defaults(name: str) -> dict[str, Any]:
    """A method's hyperparameters and their defaults."""
    return REGISTRY.defaults(name)


def build(name: str, **hyperparameters: Any) -> Any:
    """The method `name`, a `sparsify.aggregate.Method`.

    Raises:
        ValueError: an unknown name or hyperparameter (lists what there is), a value out of range, or parts
        that do
            not fit together.
    """
    return REGISTRY.build(name, hyperparameters)
