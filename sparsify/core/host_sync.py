"""Functions by which the host waits for the device, and which count how often it does.

The count is that of a run on CUDA; on a CPU nothing waits, but the same places are counted.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

# Each virtual rank has a context of its own, so the ranks' counts do not mix.
_num_syncs: ContextVar[int] = ContextVar("host synchronisations so far", default=0)


def num_syncs() -> int:
    """Return the number of host synchronisations of this worker so far."""
    return _num_syncs.get()


def record_syncs(times: int = 1) -> None:
    """Count an operation about to run that synchronises: its output's size depends on the data."""
    _num_syncs.set(_num_syncs.get() + times)


def to_host(tensor: Tensor) -> Any:
    """Return a tensor's elements as Python numbers, nested like its shape; one synchronisation."""
    record_syncs()
    return tensor.tolist()


def to_device(numbers: Any, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return Python numbers, nested or not, as a tensor on the device of `like`.

    They go to a GPU from pinned memory: an ordinary copy would make the host wait until the device has
    reached it.
    """
    if not like.is_cuda:
        return torch.tensor(numbers, dtype=dtype, device=like.device)
    pinned = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=True)
    return pinned.to(like.device, non_blocking=True)


def nonzero(mask: Tensor) -> Tensor:
    """Return the indices (m,) int64 at which a mask (n,) is not zero; one synchronisation, for m."""
    record_syncs()
    return mask.nonzero().squeeze(1)
