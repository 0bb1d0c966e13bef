"""Modes of a process or a thread that change what torch's operators do: autocast, and a default device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
DEVICE_TYPES = ("cpu", "cuda")  # each has a switch of its own in every thread


def autocast_devices() -> list[str]:
    """Return the types of devices on which autocast is on."""
    return [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]


def set_autocast_devices(devices: Sequence[str]) -> None:
    """Turn autocast on for these types of devices, and off for the others."""
    for device in DEVICE_TYPES:
        torch.set_autocast_enabled(device, device in devices)


def has_other_default_device() -> bool:
    """Tell whether tensors whose device is not named are made on another device than the host."""
    # Where no mode is on at all, as nearly always, the second question is spared.
    return torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"


def without_torch_modes(function: F) -> F:
    """Make a function run outside of autocast, and without a default device, wherever it is called.

    So it computes in the types and on the devices of its tensors.
    """

    @wraps(function)
    def run_without_modes(*args: Any, **options: Any) -> Any:
        devices = autocast_devices()
        has_default_device = has_other_default_device()
        if not devices and not has_default_device:
            return function(*args, **options)
        set_autocast_devices([])
        try:
            with torch.device("cpu") if has_default_device else nullcontext():
                return function(*args, **options)
        finally:
            set_autocast_devices(devices)

    return cast(F, run_without_modes)
