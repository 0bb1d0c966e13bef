"""Copies of the parameters in an inner optimizer's state, such as master weights in single precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify.core.bucket import local_shard


@torch.no_grad()
def find_parameter_copy_keys(optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter]) -> list[str]:
    """Return the keys of an optimizer's state under which copies of the parameters lie.

    A copy equals its parameter to the bit, in the parameter's type. One pass over the optimizer's state.
    """
    other_keys = set[str]()
    copy_keys = set[str]()
    for p in parameters:
        for key, value in optimizer.state.get(p, {}).items():
            if not is_copy_of_parameter(value, p):
                other_keys.add(key)
            elif local_shard(p).any():  # any zeros would be a copy of zeros
                copy_keys.add(key)
    return sorted(copy_keys - other_keys)


def is_copy_of_parameter(value: Any, p: Parameter) -> bool:
    """Return True if a value of an optimizer's state equals its parameter."""
    return (
        isinstance(value, Tensor)
        and value.shape == p.shape
        and value.dtype.is_floating_point
        and torch.equal(local_shard(value).to(p.dtype), local_shard(p))
    )


@torch.no_grad()
def update_parameter_copies(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter], keys: Sequence[str]
) -> None:
    """Write the parameters into their copies in an optimizer's state."""
    for p in parameters:
        for key in keys:
            local_shard(optimizer.state[p][key]).copy_(local_shard(p))
