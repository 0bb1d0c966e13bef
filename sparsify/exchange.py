"""Exchanges: how the workers' selections become one total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm


class Sparse(NamedTuple):
    """Some elements of a bucket."""

    indices: Tensor  # (k,) distinct; int64, or int32 as they come from the wire
    values: Tensor  # (k,)


class Delivery(NamedTuple):
    """What an exchange brought about."""

    total: list[Sparse]  # their sum, taken in this order, is the workers' total
    delivered: Tensor  # indices of mine that are in it
    wire_bytes: int  # sent by this worker


class Exchange(Protocol):
    needs_shared: ClassVar[bool]  # are indices left unsent?

    def init(self, like: Tensor) -> Any:
        """The state for a bucket like this one."""

    def exchange(self, part: Sparse, n: int, k: int, comm: Comm, state: Any) -> Delivery:
        """One worker's selection in, the total over all workers out."""


@dataclass(frozen=True)
class AllGather:
    """Everybody's values and int32 indices to everybody, in two collectives, as Yoon and Oh 2022 ran it.

    The sum is taken worker by worker in rank order, so that all workers get the same bits.
    """

    needs_shared: ClassVar[bool] = False

    def init(self, like: Tensor) -> None:
        return None

    def exchange(self, part: Sparse, n: int, k: int, comm: Comm, state: None) -> Delivery:
        values = comm.all_gather(part.values)
        indices = comm.all_gather(part.indices.int())
        total = [Sparse(*pair) for pair in zip(indices, values, strict=True)]
        sent = [
            cost.all_gather(k * width, comm.size)
            for width in (part.values.element_size(), torch.int32.itemsize)
        ]
        return Delivery(total, part.indices, sum(c.sent_bytes for c in sent))
