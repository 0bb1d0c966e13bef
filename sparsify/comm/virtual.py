"""P ranks of the same code in one process, in lockstep: a cluster that fits in a test, or on one GPU.

Exactly one rank computes at a time, and ranks switch only at collectives, in rank order: everything is
deterministic. Each rank has a clock that advances by its own computing; at a collective all clocks move to
the latest one plus the alpha-beta cost of the network. Times read from these clocks are *simulated* and must
be labelled so. Reading a clock makes the host wait for the device; a mark, which is read later, does not.

What all ranks hold alike need not be there P times: see `VirtualComm.first` and `VirtualComm.once`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from sparsify.comm import put
from sparsify.cost import Link, Network

T = TypeVar("T")
NO_NETWORK = Network(Link(0.0, 0.0))
PIECE_BYTES = 2**17  # of each rank's tensor: small enough that those of some ranks stay in a core's cache


class Call(NamedTuple):
    """A rank that waits in a collective."""

    name: str
    alike: Any  # what must be the same on all ranks
    brought: Any  # what this rank contributes
    combine: Callable[[Sequence[Any]], Any]
    price_s: float | None  # of the network; None: the clocks take no notice
    is_computing: bool = False  # is `combine` what every rank would compute, at the same time?


class Event(Protocol):
    """A point in the device's time, as torch.cuda.Event."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`; the device must have passed both."""


class Clocks(Protocol):
    """The clocks of all ranks."""

    def resume(self, rank: int) -> None:
        """This rank computes from now on."""

    def leave(self, rank: int) -> None:
        """It has come to a collective."""

    def meet(self, price_s: float | None) -> None:
        """The collective is over; without a price the clocks take no notice of it."""

    def together(self, work: Callable[[], T]) -> T:
        """Do what every rank does at this moment, once: each is charged for it, and none waits for others."""

    def idle(self, rank: int, seconds: float) -> None:
        """The computing rank does nothing for so long."""

    def now(self, rank: int) -> float: ...


class HostClocks:
    """Read by the host, which waits for the device each time: else a rank would be charged for the kernels
    that another one has queued.
    """

    def __init__(self, size: int, synchronise: Callable[[], None]) -> None:
        self.synchronise = synchronise
        self.lived = [0.0] * size  # seconds of each rank, up to its last switch
        self.resumed = [0.0] * size  # when the computing rank took over, on the host's clock

    def resume(self, rank: int) -> None:
        self.resumed[rank] = time.perf_counter()

    def leave(self, rank: int) -> None:
        self.synchronise()
        self.lived[rank] += time.perf_counter() - self.resumed[rank]

    def meet(self, price_s: float | None) -> None:
        self.synchronise()  # combining is charged to no rank
        if price_s is not None:
            self.lived = [max(self.lived) + price_s] * len(self.lived)

    def together(self, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = work()
        self.synchronise()
        took = time.perf_counter() - began
        self.lived = [lived + took for lived in self.lived]
        return result

    def idle(self, rank: int, seconds: float) -> None:
        self.lived[rank] += seconds

    def now(self, rank: int) -> float:
        self.synchronise()
        return self.lived[rank] + time.perf_counter() - self.resumed[rank]


@dataclass
class Turn:
    """What a rank computes between two collectives."""

    began_s: float = 0.0  # on its clock; known when the turns before are settled
    start: Event | None = None
    end: Event | None = None

    def at_s(self, event: Event | None) -> float:
        """When the rank's clock showed an event of this turn."""
        assert self.start is not None
        return self.began_s + self.start.elapsed_time(event) / 1e3


@dataclass
class Mark:
    """A point in a rank's time."""

    clocks: DeviceClocks
    turn: Turn
    event: Event

    def elapsed_time(self, end: Mark) -> float:
        """Milliseconds to a later mark of this rank; the device must have passed it."""
        self.clocks.settle()
        return 1e3 * (end.turn.at_s(end.event) - self.turn.at_s(self.event))


class Between(NamedTuple):
    """What lies between some ranks' turns and their next ones."""

    before: list[Turn]
    after: list[Turn]
    began: Callable[[list[float]], list[float]]  # ends of the former -> beginnings of the latter, in seconds


class DeviceClocks:
    """Kept by the device: turns begin and end with events, and nothing waits until marks are compared."""

    def __init__(self, size: int, event: Callable[[], Event]) -> None:
        self.event = event
        self.turns = [Turn() for _ in range(size)]
        self.unsettled: list[Between] = []

    def resume(self, rank: int) -> None:
        self.turns[rank].start = self.event()

    def leave(self, rank: int) -> None:
        self.turns[rank].end = self.event()

    def meet(self, price_s: float | None) -> None:
        if price_s is None:
            self._turn(lambda ends: ends)
        else:
            self._turn(lambda ends: [max(ends) + price_s] * len(ends))

    def together(self, work: Callable[[], T]) -> T:
        began = self.event()
        result = work()
        ended = self.event()
        self._turn(lambda ends: [end + began.elapsed_time(ended) / 1e3 for end in ends])
        return result

    def idle(self, rank: int, seconds: float) -> None:
        self.leave(rank)
        before, self.turns[rank] = self.turns[rank], Turn()
        self.unsettled.append(Between([before], [self.turns[rank]], lambda ends: [ends[0] + seconds]))
        self.resume(rank)

    def now(self, rank: int) -> float:
        return time.perf_counter()  # the host's own: how far the device is, it would have to wait for

    def mark(self, rank: int) -> Mark:
        return Mark(self, self.turns[rank], self.event())

    def settle(self) -> None:
        """Work out when each turn began. The device must have passed all that are over."""
        for before, after, began in self.unsettled:
            beginnings = began([turn.at_s(turn.end) for turn in before])
            for turn, beginning in zip(after, beginnings, strict=True):
                turn.began_s = beginning
        self.unsettled.clear()

    def _turn(self, began: Callable[[list[float]], list[float]]) -> None:
        """All ranks' turns are over."""
        before, self.turns = self.turns, [Turn() for _ in self.turns]
        self.unsettled.append(Between(before, self.turns, began))


class Cluster:
    """Runs the ranks and owns what they share. Use `run`."""

    def __init__(self, size: int, network: Network, clocks: Clocks) -> None:
        self.size, self.network, self.clocks = size, network, clocks
        self.calls: dict[int, Call] = {}
        self.result: Any = None
        self.made: list[Any] = []  # by rank 0 for all, in the order of its calls of `first`
        self.scheduler, self.thread = getcurrent(), threading.get_ident()

    def run(self, body: Callable[[VirtualComm], T]) -> list[T]:
        results: dict[int, T] = {}

        def live(rank: int) -> None:
            self.clocks.resume(rank)
            results[rank] = body(VirtualComm(self, rank))

        grad_mode = torch.is_grad_enabled()
        ranks = [greenlet(lambda rank=rank: live(rank)) for rank in range(self.size)]
        try:
            while len(results) < self.size:
                for rank in ranks:
                    if not rank.dead:
                        torch.set_grad_enabled(grad_mode)  # for a rank that starts; others restore their own
                        rank.switch()
                if self.calls:
                    self._complete()
        finally:
            for rank in ranks:
                if not rank.dead:  # another rank failed: this one's `finally` blocks run, then it ends
                    rank.throw(GreenletExit)
            torch.set_grad_enabled(grad_mode)
        return [results[rank] for rank in range(self.size)]

    def _complete(self) -> None:
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

    def meet(self, rank: int, call: Call) -> Any:
        """Rank `rank` calls a collective; returns the combined result when all ranks have called it."""
        if threading.get_ident() != self.thread:
            raise ValueError(
                "virtual ranks take turns in one thread, so nothing of theirs overlaps; take processes, or "
                "leave overlap out"
            )
        self.clocks.leave(rank)
        self.calls[rank] = call
        grad_mode = torch.is_grad_enabled()  # thread-local in torch, and all ranks share one thread
        self.scheduler.switch()
        torch.set_grad_enabled(grad_mode)
        self.clocks.resume(rank)
        return self.result


class VirtualComm:
    """One virtual rank's communicator. Its group is the cluster; workers of another group are another one."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank, self.size = cluster, rank, cluster.size
        self.largest = 0  # the result of the last `lagged_max`
        self.num_first = 0  # calls of `first`

    def now(self) -> float:
        """Seconds that this rank has lived on its virtual clock; with events, those of the host's clock."""
        return self.cluster.clocks.now(self.rank)

    def mark(self) -> Mark:
        """This point in its time, to be compared with others later. Only with events."""
        assert isinstance(self.cluster.clocks, DeviceClocks)
        return self.cluster.clocks.mark(self.rank)

    def idle(self, seconds: float) -> None:
        """This rank's clock passes so many seconds in which it does nothing; nobody has to wait for that."""
        self.cluster.clocks.idle(self.rank, seconds)

    def first(self, make: Callable[[], T]) -> T:
        """What rank 0 made in the same call, for what all ranks hold alike: the very object, so that it is
        there once; or the error that it met. All ranks make the same calls, but it is no collective: rank 0
        is always the first to come by.
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

    def once(self, work: Callable[[], None]) -> None:
        """What all ranks would do alike to something that they hold in common: rank 0's `work` is done when
        all have come, and each rank is charged the time.
        """
        self._meet("once", work, lambda works: works[0](), None, None, True)

    def same(self, tensor: Tensor) -> Tensor:
        """() bool on its device: has every rank brought the same bits? The clocks take no notice: no worker
        of a real group would ask.
        """
        found: Tensor = self._meet("same", tensor, same_bits, None)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        price_s = self.cluster.network.seconds("all_reduce", tensor.nbytes, self.size)
        totals: list[Tensor] = self._meet("all_reduce", tensor, totals_in_rank_order, price_s)
        return put(totals[self.rank], tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        snapshot = tensor.detach().clone()  # its owner may write to it before the last rank has read it
        price_s = self.cluster.network.seconds("all_gather", tensor.nbytes, self.size)
        gathered: list[Tensor] = self._meet("all_gather", snapshot, list, price_s)
        return gathered

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        return partial(self.all_reduce, tensor)

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        # One link: nothing is saved by having them in flight together.
        return lambda: [self.all_gather(tensor) for tensor in tensors]

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        pieces = tensor.detach().clone().split(list(send))
        leaves = tensor.nbytes - pieces[self.rank].nbytes
        price_s = self.cluster.network.seconds("all_to_all", leaves, self.size)
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
        price_s = self.cluster.network.seconds("broadcast", tensor.nbytes, self.size)
        return put(self._meet("broadcast", tensor, lambda all_: all_[root].clone(), price_s), tensor)

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
        return self.cluster.meet(self.rank, Call(name, alike, brought, combine, price_s, is_computing))


def run(
    size: int,
    body: Callable[[VirtualComm], T],
    network: Network = NO_NETWORK,
    synchronise: Callable[[], None] = lambda: None,
    event: Callable[[], Event] | None = None,
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
    return Cluster(size, network, clocks).run(body)


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
        return torch.tensor(all(torch.equal(first, other) for other in others))
    different = [(first != other).any() for other in others]
    return ~torch.stack(different).any() if different else torch.ones((), dtype=torch.bool)
