"""Where the host waits for the device: every such place goes through here and is counted.

The count is what would be waited for on CUDA; on a CPU nothing waits, but the same places are passed.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

# Each virtual rank has a context of its own, so the ranks' counts do not mix.
_waits: ContextVar[int] = ContextVar("host synchronisations so far", default=0)


def waits() -> int:
    """Host synchronisations of this worker so far."""
    return _waits.get()


def waited(times: int = 1) -> None:
    """Note that an operation about to run synchronises: one whose output's size depends on the data."""
    _waits.set(_waits.get() + times)


def read(tensor: Tensor) -> Any:
    """A tensor's elements as Python numbers, nested like its shape; one synchronisation."""
    waited()
    return tensor.tolist()


def put(numbers: Any, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Python numbers, nested or not, as a tensor where `like` lies. From pinned memory to a GPU: a usual copy
    would make the host wait until the device has come to it.
    """
    if not like.is_cuda:
        return torch.tensor(numbers, dtype=dtype, device=like.device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(like.device, non_blocking=True)


def nonzero(mask: Tensor) -> Tensor:
    """(n,) -> (m,) int64: where the mask is not zero; one synchronisation, for m."""
    waited()
    return mask.nonzero().squeeze(1)
