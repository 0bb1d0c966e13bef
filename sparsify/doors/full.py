"""What DistributedDataParallel hands over when a bucket of its own is full, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from sparsify.core.bucket import TensorKind


class Known(NamedTuple):
    """What is known of a bucket of DDP's until its parameters change."""

    ids: list[int]  # of its parameters
    kind: TensorKind  # of its buffer
    names: list[str]
    sizes: list[int]  # real numbers of each
    strides: list[tuple[int, ...]]


class FullBucket(NamedTuple):
    """A bucket of DDP's whose gradients are all there."""

    buffer: Tensor  # (n,)
    numbers: Tensor  # the same as real numbers
    known: Known
    used: list[bool] | None  # of each tensor, has this worker used it since the last step? None: it must
    averaged: Future[Tensor]
    back: Callable[[Tensor], Tensor]  # makes of the average what DDP takes
    filled: Any  # an event on the stream that filled it; None on the CPU

    def grads(self) -> Sequence[Tensor]:
        """(m,) of each tensor, views."""
        return torch.split(self.numbers, self.known.sizes)


def dense(buffer: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(n,), and the way back: a sparse embedding's gradient lies alone in its bucket, as a sparse tensor."""
    if not buffer.is_sparse:
        return buffer, unchanged
    return buffer.to_dense().view(-1), partial(sparse, like=buffer)


def unchanged(average: Tensor) -> Tensor:
    """The average as it is."""
    return average


def sparse(average: Tensor, like: Tensor) -> Tensor:
    """(n,) in the shape of the sparse tensor `like`; rows of zeros are left out."""
    return average.view(like.shape).to_sparse(like.sparse_dim())
