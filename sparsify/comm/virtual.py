"""P ranks of the same code in one process, in lockstep: a cluster that fits in a test, or on one GPU.

Exactly one rank computes at a time, and ranks switch only at collectives, in rank order: everything is
deterministic. Each rank has a clock that advances by its own computing; at a collective all clocks move to
the latest one plus the alpha-beta cost of the network. Times read from these clocks are *simulated* and must
be labelled so. Reading a clock makes the host wait for the device; a mark, which is read later, does not.

What all ranks hold alike need not be there P times: see `VirtualComm.first` and `VirtualComm.once`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from sparsify.comm import Comm, write_back
from sparsify.comm.clocks import ClockMark, DeviceClocks, HostClocks, TimedEvent
from sparsify.core.modes import autocast_devices, set_autocast_devices
from sparsify.cost import Link, Network

T = TypeVar("T")
NO_NETWORK = Network(Link(0.0, 0.0))
PIECE_BYTES = 2**17  # of each rank's tensor: small enough that those of some ranks stay in a core's cache


class Meeting(NamedTuple):
    """A rank that waits in a collective."""

    name: str
    alike: Any  # what must be the same on all ranks
    brought: Any  # what this rank contributes
    combine: Callable[[Sequence[Any]], Any]
    price_s: float | None  # of the network; None: the clocks take no notice
    is_computing: bool = False  # is `combine` what every rank would compute, at the same time?


class VirtualCluster:
    """Owns what the ranks share. Use `run`."""

    def __init__(self, size: int, network: Network, clocks: HostClocks | DeviceClocks) -> None:
        self.size, self.network, self.clocks = size, network, clocks
        self.calls: dict[int, Meeting] = {}
        self.result: Any = None
        self.made: list[Any] = []  # by rank 0 for all, in the order of its calls of `first`
        self.scheduler, self.thread = getcurrent(), threading.get_ident()

    def carry_out_collective(self) -> None:
        """All ranks wait in a collective: carry it out, and move their clocks."""
        first = self.calls[min(self.calls)]
        if len(self.calls) < self.size:
            ended = [rank for rank in range(self.size) if rank not in self.calls]
            raise RuntimeError(
                f"rank {min(self.calls)} waits in {first.name}, but ended already: ranks {ended}"
            )
        names = {rank: call.name for rank, call in self.calls.items()}
        alike = {rank: call.alike for rank, call in self.calls.items()}
        if len(set(names.values())) > 1 or len(set(alike.values())) > 1:
            raise RuntimeError(f"the ranks do not stand at the same collective: {names}, shapes {alike}")
        brought = [self.calls[rank].brought for rank in range(self.size)]
        if first.is_computing:
            self.result = self.clocks.together(lambda: first.combine(brought))
        else:
            self.result = first.combine(brought)
            prices = [call.price_s for call in self.calls.values() if call.price_s is not None]
            self.clocks.meet(max(prices, default=None))
        self.calls.clear()

    def meet(self, rank: int, call: Meeting) -> Any:
        """Rank `rank` calls a collective; returns the combined result when all ranks have called it."""
        if threading.get_ident() != self.thread:
            raise ValueError(
                "virtual ranks take turns in one thread, so nothing of theirs overlaps; take processes, or "
                "leave overlap out"
            )
        self.clocks.leave(rank)
        self.calls[rank] = call
        grad_mode = torch.is_grad_enabled()  # thread-local in torch, and all ranks share one thread
        cast_kinds = autocast_devices()  # these, too
        self.scheduler.switch()
        torch.set_grad_enabled(grad_mode)
        set_autocast_devices(cast_kinds)
        self.clocks.resume(rank)
        return self.result


class VirtualComm(Comm):
    """One virtual rank's communicator. Its group is the cluster; workers of another group are another one.
    There is one link: nothing is saved by having several collectives in flight together.
    """

    def __init__(self, cluster: VirtualCluster, rank: int) -> None:
        self.cluster, self.rank, self.size = cluster, rank, cluster.size
        self.largest = 0  # the result of the last `lagged_max`
        self.num_first = 0  # calls of `first`

    def now(self) -> float:
        """Seconds that this rank has lived on its virtual clock; with events, those of the host's clock."""
        return self.cluster.clocks.now(self.rank)

    def mark(self) -> ClockMark:
        """This point in its time, to be compared with others later. Only with events."""
        assert isinstance(self.cluster.clocks, DeviceClocks)
        return self.cluster.clocks.mark(self.rank)

    def idle(self, seconds: float) -> None:
        """This rank's clock passes so many seconds in which it does nothing; nobody has to wait for that."""
        self.cluster.clocks.idle(self.rank, seconds)

    def make_on_rank_0(self, make: Callable[[], T]) -> T:
        """Object that rank 0 made in the same call, for what all ranks hold alike: the very object, so that
        it is there once; or the error that it met. All ranks make the same calls, but it is no collective:
        rank 0 is always the first to come by.
        """
        made, call = self.cluster.made, self.num_first
        if call == len(made):
            try:
                made.append((make(), None))
            except Exception as error:
                made.append((None, error))
        self.num_first += 1
        found: T
        found, met = made[call]
        if self.rank == self.size - 1:
            made[call] = None  # all have it
        if met is not None:
            raise met
        return found

    def run_on_rank_0(self, work: Callable[[], None]) -> None:
        """Run what all ranks would do alike to something that they hold in common: rank 0's `work` is done
        when all have come, and each rank is charged the time.
        """
        self._meet("once", work, lambda works: works[0](), None, None, True)

    def is_equal_on_all_ranks(self, tensor: Tensor) -> Tensor:
        """() bool on its device: has every rank brought the same bits? The clocks take no notice: no worker
        of a real group would ask.
        """
        found: Tensor = self._meet("same", tensor, same_bits, None)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        price_s = self.cluster.network.collective_seconds("all_reduce", tensor.nbytes, self.size)
        totals: list[Tensor] = self._meet("all_reduce", tensor, totals_in_rank_order, price_s)
        return write_back(totals[self.rank], tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        snapshot = tensor.detach().clone()  # its owner may write to it before the last rank has read it
        price_s = self.cluster.network.collective_seconds("all_gather", tensor.nbytes, self.size)
        gathered: list[Tensor] = self._meet("all_gather", snapshot, list, price_s)
        return gathered

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        pieces = tensor.detach().clone().split(list(send))
        leaves = tensor.nbytes - pieces[self.rank].nbytes
        price_s = self.cluster.network.collective_seconds("all_to_all", leaves, self.size)
        everyones = self._meet("all_to_all", pieces, list, price_s, alike=str(tensor.dtype))
        mine: list[Tensor] = [theirs[self.rank] for theirs in everyones]
        if [len(piece) for piece in mine] != list(receive):
            lengths = [len(piece) for piece in mine]
            raise RuntimeError(f"rank {self.rank} expects pieces of {list(receive)}, and gets {lengths}")
        return mine

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        price_s = self.cluster.network.permute_seconds(tensor.nbytes, route)
        alike = (tuple(tensor.shape), tuple(route))
        tensors = self._meet("permute", tensor.detach().clone(), list, price_s, alike)
        sources = [source for source, destination in route if destination == self.rank]
        return tensors[sources[0]] if sources else None

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        price_s = self.cluster.network.collective_seconds("broadcast", tensor.nbytes, self.size)
        return write_back(self._meet("broadcast", tensor, lambda all_: all_[root].clone(), price_s), tensor)

    def barrier(self) -> None:
        self._meet("barrier", None, lambda _: None, 0.0)

    def lagged_max(self, number: int) -> int:
        before, self.largest = self.largest, self._meet("lagged_max", number, max, None)
        return before

    def _meet(
        self,
        name: str,
        brought: Any,
        combine: Callable[[Sequence[Any]], Any],
        price_s: float | None,
        alike: Any = None,
        is_computing: bool = False,
    ) -> Any:
        if isinstance(brought, Tensor) and alike is None:
            alike = tuple(brought.shape)
        return self.cluster.meet(self.rank, Meeting(name, alike, brought, combine, price_s, is_computing))


def run(
    size: int,
    body: Callable[[VirtualComm], T],
    network: Network = NO_NETWORK,
    synchronise: Callable[[], None] = lambda: None,
    event: Callable[[], TimedEvent] | None = None,
) -> list[T]:
    """Run `body` as `size` ranks; returns what each returned, by rank. What a rank raises is raised here.

    Args:
        network: what joins the ranks, for their clocks.
        synchronise: waits for the device, e.g. torch.cuda.synchronize, so that each rank is charged its own
            kernels.
        event: notes a point in the device's time, e.g. a recorded torch.cuda.Event: no collective waits then,
            and times are compared by `VirtualComm.mark`.
    """
    if size < 1:
        raise ValueError(f"{size=}: there must be at least one rank")
    clocks = HostClocks(size, synchronise) if event is None else DeviceClocks(size, event)
    cluster, results = VirtualCluster(size, network, clocks), dict[int, T]()
    grad_mode, cast_kinds = torch.is_grad_enabled(), autocast_devices()
    ranks = [greenlet(body) for _ in range(size)]
    try:
        while len(results) < size:
            for rank, life in enumerate(ranks):
                if life.dead:
                    continue
                torch.set_grad_enabled(grad_mode)  # for a rank that starts; others restore their own
                set_autocast_devices(cast_kinds)
                if life:
                    result = life.switch()
                else:
                    clocks.resume(rank)
                    result = life.switch(VirtualComm(cluster, rank))
                if life.dead:
                    results[rank] = result
            if cluster.calls:
                cluster.carry_out_collective()
    finally:
        for life in ranks:
            if not life.dead:  # another rank failed: this one's `finally` blocks run, then it ends
                life.throw(GreenletExit)
        torch.set_grad_enabled(grad_mode)
        set_autocast_devices(cast_kinds)
    return [results[rank] for rank in range(size)]


def totals_in_rank_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every rank's copy of the sum: in place of what it brought, where each has memory of its own."""
    if len({tensor.data_ptr() for tensor in tensors}) < len(tensors) or not all(
        tensor.is_contiguous() for tensor in tensors
    ):
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total.add_(tensor)
        return [total] * len(tensors)
    flat = [tensor.detach().view(-1) for tensor in tensors]
    piece = (
        PIECE_BYTES // tensors[0].element_size() if tensors[0].device.type == "cpu" else tensors[0].numel()
    )
    for first, *others in zip(*(tensor.split(max(1, piece)) for tensor in flat), strict=True):
        for other in others:
            first.add_(other)
        for other in others:
            other.copy_(first)
    return list(tensors)


def same_bits(tensors: Sequence[Tensor]) -> Tensor:
    """() bool on their device, without waiting for it. Zeros of two signs differ; a NaN equals itself."""
    width = 8 if tensors[0].nbytes % 8 == 0 else tensors[0].element_size()  # wide ones are compared faster
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    first, *others = (tensor.detach().view(whole) for tensor in tensors)
    if first.device.type == "cpu":
        return torch.tensor(all(torch.equal(first, other) for other in others), device="cpu")
    different = [(first != other).any() for other in others]
    return ~torch.stack(different).any() if different else first.new_ones((), dtype=torch.bool)
