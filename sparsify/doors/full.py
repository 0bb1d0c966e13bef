"""What DistributedDataParallel hands over when a bucket of its own is full, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from sparsify.core.bucket import TensorKind

Flags = Sequence[bool] | None  # None: all


class KnownBucket(NamedTuple):
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
    known: KnownBucket
    used: list[bool] | None  # of each tensor, has this worker used it since the last step? None: it must
    averaged: Future[Tensor]
    back: Callable[[Tensor], Tensor]  # makes of the average what DDP takes
    filled: Any  # an event on the stream that filled it; None on the CPU

    def grads(self) -> Sequence[Tensor]:
        """(m,) of each tensor, views."""
        return torch.split(self.numbers, self.known.sizes)


def used_anywhere(full: list[FullBucket], ask: Callable[..., list[bool]] | None) -> list[list[bool]]:
    """Of each tensor of these buckets, has any worker used it since the last step?

    Args:
        ask: agrees on that with the others; None: there is nothing to agree on.
    """
    flags, sizes = (
        [[True] * len(one.known.names) for one in full],
        [n for one in full for n in one.known.sizes],
    )
    if ask is None or not any(sizes):
        return flags
    knows = full[0].used is not None
    used = [flag for one in full for flag in one.used or []] if knows else None
    names = [name for one in full for name in one.known.names]
    anywhere = iter(ask([one.numbers for one in full], names, sizes, used))
    return [[next(anywhere) for _ in own] for own in flags] if knows else flags


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
