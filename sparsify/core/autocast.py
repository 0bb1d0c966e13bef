"""Arithmetic in the types of its tensors, also where somebody steps within `torch.autocast`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
KINDS = ("cpu", "cuda")  # of devices, each of which has a switch of its own in every thread


def autocast_kinds() -> list[str]:
    """Return the kinds of devices on which autocast is on."""
    return [kind for kind in KINDS if torch.is_autocast_enabled(kind)]


def set_autocast_kinds(kinds: Sequence[str]) -> None:
    """Turn autocast on for these kinds of devices, and off for the others."""
    for kind in KINDS:
        torch.set_autocast_enabled(kind, kind in kinds)


def without_autocast(function: F) -> F:
    """Let a function compute outside of autocast, wherever it is called."""

    @wraps(function)
    def uncast(*args: Any, **options: Any) -> Any:
        kinds = autocast_kinds()
        if not kinds:
            return function(*args, **options)
        set_autocast_kinds([])
        try:
            return function(*args, **options)
        finally:
            set_autocast_kinds(kinds)

    return cast(F, uncast)
