"""What DistributedDataParallel hands over when a bucket of its own is full, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.futures import Future

from sparsify.core.bucket import TensorKind


class Known(NamedTuple):
    """What is known of a bucket of DDP's until its parameters change."""

    ids: list[int]  # of its parameters
    kind: TensorKind  # of its buffer
    names: list[str]
    sizes: list[int]  # real numbers of each
    filled: list[int]  # which of them have elements
    strides: list[tuple[int, ...]]


class FullBucket(NamedTuple):
    """A bucket of DDP's whose gradients are all there; of the tensors that have elements."""

    buffer: Tensor  # (n,)
    names: list[str]
    grads: Sequence[Tensor]  # (m,) of each, a view of the buffer
    used: list[bool]  # has this worker used each since the last step?
    averaged: Future[Tensor]
    back: Callable[[Tensor], Tensor]  # makes of the average what DDP takes
    filled: Any  # an event on the stream that filled it; None on the CPU


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
