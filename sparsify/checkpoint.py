"""States of methods as plain trees of tensors and numbers, for `torch.load(weights_only=True)`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Generator, Tensor


def dump(state: Any) -> Any:
    """A copy of a state: dataclasses and named tuples become dicts, generators their state. Fields whose
    metadata say `saved: False` (work buffers) are left out.
    """
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Generator):
        return state.get_state()
    if is_dataclass(state) and not isinstance(state, type):
        return {name: dump(getattr(state, name)) for name in saved_fields(state)}
    if hasattr(state, "_asdict"):
        return {name: dump(value) for name, value in state._asdict().items()}
    if isinstance(state, Mapping):
        return {name: dump(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [dump(value) for value in state]
    assert state is None or isinstance(state, bool | int | float | str), f"{type(state)} can't be saved"
    return copy.copy(state)


def restore(state: Any, saved: Any) -> Any:
    """`state`, as made by `init`, with what `dump` saved; tensors of the same size are written in place."""
    if isinstance(state, Tensor) and isinstance(saved, Tensor):
        if state.shape == saved.shape and state.dtype == saved.dtype:
            return state.copy_(saved)
        return saved.to(state.device, copy=True)
    if isinstance(saved, Tensor) and not isinstance(state, Generator):
        return saved.clone()
    if isinstance(state, Generator):
        state.set_state(saved.cpu())
        return state
    if is_dataclass(state) and not isinstance(state, type):
        for name in saved_fields(state):
            setattr(state, name, restore(getattr(state, name), saved[name]))
        return state
    if hasattr(state, "_asdict"):
        return state._replace(
            **{name: restore(value, saved[name]) for name, value in state._asdict().items()}
        )
    if isinstance(state, Mapping):
        return {name: restore(state.get(name), value) for name, value in saved.items()}
    if isinstance(state, list | tuple) and len(state) == len(saved):
        return type(state)(restore(item, value) for item, value in zip(state, saved, strict=True))
    return copy.deepcopy(saved)


def saved_fields(state: Any) -> list[str]:
    return [field.name for field in fields(state) if field.metadata.get("saved", True)]
