"""Host synchronisations: wherever the host waits for the device, it does so by these functions, which count.

The count is that of a run on CUDA; on a CPU nothing waits, but the same places are counted.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

# Each virtual rank has a context of its own, so the ranks' counts do not mix.
_syncs: ContextVar[int] = ContextVar("host synchronisations so far", default=0)


def num_syncs() -> int:
    """Host synchronisations of this worker so far."""
    return _syncs.get()


def count_sync(times: int = 1) -> None:
    """Note that an operation about to run synchronises: one whose output's size depends on the data."""
    _syncs.set(_syncs.get() + times)


def to_host(tensor: Tensor) -> Any:
    """A tensor's elements as Python numbers, nested like its shape; one synchronisation."""
    count_sync()
    return tensor.tolist()


def to_device(numbers: Any, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Python numbers, nested or not, as a tensor on the device of `like`. To a GPU from pinned memory: an
    ordinary copy would make the host wait until the device has reached it.
    """
    if not like.is_cuda:
        return torch.tensor(numbers, dtype=dtype, device=like.device)
    pinned = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=True)
    return pinned.to(like.device, non_blocking=True)


def nonzero(mask: Tensor) -> Tensor:
    """(n,) -> (m,) int64: where the mask is not zero; one synchronisation, for m."""
    count_sync()
    return mask.nonzero().squeeze(1)
