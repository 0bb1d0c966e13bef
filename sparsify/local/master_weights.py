"""Weights that an inner optimizer keeps beside the parameters, such as master weights in single precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify.core.bucket import local_shard


@torch.no_grad()
def find_copies(optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter]) -> list[str]:
    """Return the names of what an optimizer remembers that are copies of the parameters: they equal them, in
    the parameters' type, to the bit. One pass over the optimizer's state.
    """
    others = set[str]()
    copies = set[str]()
    for p in parameters:
        for name, value in optimizer.state.get(p, {}).items():
            if not is_copy(value, p):
                others.add(name)
            elif local_shard(p).any():  # of zeros anything is a copy
                copies.add(name)
    return sorted(copies - others)


def is_copy(value: Any, p: Parameter) -> bool:
    """Does a part of an optimizer's state equal its parameter?"""
    if not isinstance(value, Tensor) or value.shape != p.shape or not value.dtype.is_floating_point:
        return False
    return torch.equal(local_shard(value).to(p.dtype), local_shard(p))


@torch.no_grad()
def update_copies(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter], names: Sequence[str]
) -> None:
    """Let the copies follow their parameters."""
    for p in parameters:
        for name in names:
            local_shard(optimizer.state[p][name]).copy_(local_shard(p))
