"""Collectives for links with distance: everybody sends to everybody at once, where rings pass on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsify.comm import Comm, write_back
from sparsify.cost import ALGORITHMS, CollectiveCost, Link

DIRECT = "direct"  # of `sparsify.cost.ALGORITHMS`
DIRECT_KINDS = ("all_reduce", "all_gather")


class DirectComm(Comm):
    """Another communicator, of whose collectives an all-gather takes one step and an all-reduce two, whatever
    the number of workers; a ring takes P-1 and 2 (P-1). The bytes are the same.

    An all-gather is sent to all others at once. An all-reduce is a reduce-scatter and such an all-gather:
    each worker gets all pieces of its own region at once and sums them in the order of ranks (the pairwise
    exchange of Thakur, Rabenseifner and Gropp 2005, all pairs at once). So all workers get the same bits,
    those of virtual ranks. P-1 messages arrive at once where a ring brings one, and memory holds P of them.

    Two workers swap their tensors, and sum them: the bytes of an all-reduce's two steps, in one.

    Args:
        comm: the other one, which carries out all else.
        most: bytes up to which all_reduce and all_gather are sent directly; without it, all are.
        links: of direct collectives, where somebody has measured them.
    """

    def __init__(
        self, comm: Comm, most: Mapping[str, float] | None = None, links: Mapping[str, Link] | None = None
    ) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.algorithm, self.links = comm.algorithm, comm.links
        self.most: Mapping[str, float] = dict.fromkeys(DIRECT_KINDS, math.inf) if most is None else most
        self.direct_links = links or {}

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not self.is_direct("all_reduce", tensor.nbytes):
            return self.comm.all_reduce(tensor)
        flat = tensor.detach().reshape(-1)
        if self.size == 2:
            return write_back((flat + self._swapped(flat)).view(tensor.shape), tensor)
        share = -(-flat.numel() // self.size)  # of a region; the last ones may be shorter
        padded = flat.new_zeros(share * self.size)
        padded[: flat.numel()] = flat
        first, *others = self.comm.all_to_all(padded, [share] * self.size, [share] * self.size)
        region = first.clone()
        for other in others:
            region.add_(other)
        return write_back(torch.cat(self._gather(region))[: flat.numel()].view(tensor.shape), tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if not self.is_direct("all_gather", tensor.nbytes):
            return self.comm.all_gather(tensor)
        return [theirs.view(tensor.shape) for theirs in self._gather(tensor.detach().reshape(-1))]

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        return self.comm.all_to_all(tensor, send, receive)

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        return self.comm.permute(tensor, route)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return self.comm.broadcast(tensor, root)

    def barrier(self) -> None:
        self.comm.barrier()

    def lagged_max(self, number: int) -> int:
        return self.comm.lagged_max(number)

    def is_direct(self, kind: str, nbytes: int) -> bool:
        """Tell whether a collective of so many bytes is sent directly. Alike on all workers."""
        return self.size > 1 and nbytes <= self.most.get(kind, -1)

    def predict_cost(self, kind: str, nbytes: int, size: int) -> tuple[CollectiveCost, float]:
        if not self.is_direct(kind, nbytes):
            return self.comm.predict_cost(kind, nbytes, size)
        cost, link = ALGORITHMS[DIRECT][kind](nbytes, size), self.direct_links.get(kind)
        return cost, link.transfer_seconds(cost) if link else 0.0

    def _gather(self, flat: Tensor) -> list[Tensor]:
        """All workers' 1-D tensors, which are equally long."""
        if self.size == 2:
            both = [flat.clone(), self._swapped(flat)]
            return both if self.rank == 0 else both[::-1]
        n = flat.numel()
        return self.comm.all_to_all(flat.repeat(self.size), [n] * self.size, [n] * self.size)

    def _swapped(self, flat: Tensor) -> Tensor:
        """The other's tensor, of two workers. Not by all_to_all: there the word that a worker may send can
        wait behind all that the other one sends itself.
        """
        other = self.comm.permute(flat, [(0, 1), (1, 0)])
        assert other is not None, "both receive"
        return other
