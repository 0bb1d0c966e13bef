"""Direct collectives, for long links: every worker sends to all others at once, where a ring passes on."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sparsify.comm import Comm, PartlyForwardingComm, PredictedCost, write_back
from sparsify.cost import Link

DIRECT_ALGORITHM = "direct"  # of `sparsify.cost.ALGORITHMS`
DIRECT_KINDS = ("all_reduce", "all_gather")


class DirectComm(PartlyForwardingComm):
    """A communicator whose all-gather takes one step and whose all-reduce takes two.

    That holds for any number P of workers; a ring takes P-1 and 2 (P-1) steps. The bytes are the same.

    An all-gather is sent to all others at once. An all-reduce is a reduce-scatter and such an all-gather:
    each worker gets all pieces of its own region at once and sums them in the order of ranks (the pairwise
    exchange of Thakur, Rabenseifner and Gropp 2005, all pairs at once). So all workers get the same bits,
    those of virtual ranks. P-1 messages arrive at once where a ring brings one, and memory holds P of them.

    Two workers swap their tensors, and sum them: the bytes of an all-reduce's two steps, in one.

    Args:
        comm: another communicator, which carries out all other collectives.
        max_bytes_by_kind: bytes up to which all_reduce and all_gather are sent directly; None: all are.
        links: of direct collectives, where somebody has measured them.

    Raises:
        ValueError: TorchComms carries out the collectives.
    """

    def __init__(
        self,
        comm: Comm,
        max_bytes_by_kind: Mapping[str, float] | None = None,
        links: Mapping[str, Link] | None = None,
    ) -> None:
        if comm.uses_torchcomms():
            raise ValueError(
                "DirectComm was not tried with TorchComms, to which torch leaves its collectives where "
                "TORCH_DISTRIBUTED_USE_TORCHCOMMS=1: unset that variable, or do without DirectComm "
                "(collectives=backend)"
            )
        super().__init__(comm)
        self.algorithm = DIRECT_ALGORITHM
        self.links = links or {}
        if max_bytes_by_kind is None:
            max_bytes_by_kind = dict.fromkeys(DIRECT_KINDS, math.inf)
        self.max_bytes_by_kind = max_bytes_by_kind

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not self.is_direct("all_reduce", tensor.nbytes):
            return self.comm.all_reduce(tensor)
        flat = tensor.detach().reshape(-1)
        if self.size == 2:
            total = flat + self._swap(flat)
        else:
            region_numel = -(-flat.numel() // self.size)
            padded = torch.cat([flat, flat.new_zeros(region_numel * self.size - flat.numel())])
            lengths = [region_numel] * self.size
            region, *others = self.comm.all_to_all(padded, lengths, lengths)
            for other in others:
                region.add_(other)
            total = torch.cat(self._gather(region))[: flat.numel()]
        return write_back(total.view(tensor.shape), tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if not self.is_direct("all_gather", tensor.nbytes):
            return self.comm.all_gather(tensor)
        return [other.view(tensor.shape) for other in self._gather(tensor.detach().reshape(-1))]

    def is_direct(self, kind: str, nbytes: int) -> bool:
        """Return True if a collective of so many bytes is sent directly. Alike on all workers."""
        return self.size > 1 and nbytes <= self.max_bytes_by_kind.get(kind, -1)

    def predict_cost(self, kind: str, nbytes: int, size: int) -> PredictedCost:
        if self.is_direct(kind, nbytes):
            return Comm.predict_cost(self, kind, nbytes, size)
        return self.comm.predict_cost(kind, nbytes, size)

    def _gather(self, flat: Tensor) -> list[Tensor]:
        """Return all workers' 1-D tensors, which are equally long."""
        if self.size == 2:
            both = [flat.clone(), self._swap(flat)]
            return both if self.rank == 0 else both[::-1]
        lengths = [flat.numel()] * self.size
        return self.comm.all_to_all(flat.repeat(self.size), lengths, lengths)

    def _swap(self, flat: Tensor) -> Tensor:
        """Return the other worker's tensor, where there are two.

        Not by all_to_all: there the word that a worker may send can wait behind all that the other one sends.
        """
        other = self.comm.permute(flat, [(0, 1), (1, 0)])
        assert other is not None, "both receive"
        return other
