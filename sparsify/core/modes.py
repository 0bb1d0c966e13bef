"""Modes of a process or a thread that change what torch's operators do: autocast, and a default device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
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


def has_default_device() -> bool:
    """Do new tensors go to another device than the host, where they don't say to which?"""
    # Where no mode is on at all, as nearly always, the second question is spared.
    return torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"


def outside_of_modes(function: F) -> F:
    """Let a function compute in the types and on the devices of its tensors, wherever it is called: outside
    of autocast, and without a default device.
    """

    @wraps(function)
    def plainly(*args: Any, **options: Any) -> Any:
        kinds = autocast_kinds()
        is_elsewhere = has_default_device()
        if not kinds and not is_elsewhere:
            return function(*args, **options)
        set_autocast_kinds([])
        try:
            with torch.device("cpu") if is_elsewhere else nullcontext():
                return function(*args, **options)
        finally:
            set_autocast_kinds(kinds)

    return cast(F, plainly)
