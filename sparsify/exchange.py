"""Exchanges: how the workers' selections become one total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sparsify.comm import Comm, gather_uneven
from sparsify.types import BucketContext, Delivery, Part, Slice, Sparse, index_dtype
from sparsify.wire import Wire, joined, split


class Exchange(Protocol):
    @property
    def needs_shared(self) -> bool:
        """Are indices left unsent, so that every worker must have chosen the same?"""

    @property
    def needs_exact(self) -> bool:
        """Must every worker bring the same number of elements?"""

    def init(self, like: Tensor, context: BucketContext) -> Any:
        """The state for a bucket like this one."""

    def exchange(self, part: Sparse, n: int, k: int, comm: Comm, state: Any) -> Delivery:
        """One worker's selection in, the total over all workers out. Alike on all workers, to the bit."""

    def broken_laws(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class AllGather(Part):
    """All-gather of values and indices, in one packed message (`wire` says how it is written).

    The sum is taken worker by worker in rank order, so that all workers get the same bits. Yoon and Oh 2022
    sent values and indices in two collectives, in flight together; `packed=False` does.

    Args:
        uneven: the workers bring different numbers of elements: lengths are gathered first.
    """

    wire: Wire = Wire()
    uneven: bool = False
    packed: bool = True
    needs_shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.packed and (self.uneven or self.wire != Wire()):
            raise ValueError(
                "packed=False is the published form: exactly k elements, int32 indices, values as they are; "
                "leave packed=True for anything else"
            )

    @property
    def needs_exact(self) -> bool:
        return not self.uneven

    def init(self, like: Tensor, context: BucketContext) -> None:
        return None

    def exchange(self, part: Sparse, n: int, k: int, comm: Comm, state: None) -> Delivery:
        if not self.packed:
            values, indices = comm.begin_all_gathers([part.values, part.indices.int()])()
            return Delivery([Sparse(*pair) for pair in zip(indices, values, strict=True)], [part])
        mine = self.wire.write(part, n)
        messages = gather_uneven(comm, mine) if self.uneven else comm.all_gather(mine)
        total = [self.wire.read_all(message, n, part.values.dtype) for message in messages]
        return Delivery([*total], [self.wire.rounded(part)])


@dataclass(frozen=True)
class AllGatherBlocks(Part):
    """All-gather of consecutive indices: one start and k values from each worker. Eghlidi and Jaggi 2020."""

    needs_shared: ClassVar[bool] = False
    needs_exact: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> None:
        return None

    def exchange(self, part: Sparse, n: int, k: int, comm: Comm, state: None) -> Delivery:
        start = index_dtype(n)
        messages = comm.all_gather(joined(part.indices[:1].to(start), part.values))
        row, total = torch.arange(k, device=part.values.device), list[Sparse | Slice]()
        for message in messages:
            first, values = split(message, (start, 1), (part.values.dtype, k))
            total.append(Sparse((first + row) % n, values))
        return Delivery(total, [part])


@dataclass(frozen=True)
class AllReduce(Part):
    """All-reduce of values: no indices are sent, so all workers must have chosen alike."""

    needs_shared: ClassVar[bool] = True
    needs_exact: ClassVar[bool] = False

    def init(self, like: Tensor, context: BucketContext) -> None:
        return None

    def exchange(self, part: Sparse, n: int, k: int, comm: Comm, state: None) -> Delivery:
        if not part.values.numel():
            return Delivery([], [])  # alike everywhere, since the choice is
        total = Sparse(part.indices, comm.all_reduce(part.values.clone()))
        return Delivery([total], [part])
