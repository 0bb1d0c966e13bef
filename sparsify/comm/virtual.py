"""P ranks of the same code in one process, in lockstep: a cluster that fits in a test, or on one GPU.

Exactly one rank computes at a time, and ranks switch only at collectives, in rank order: everything is
deterministic. Each rank has a clock that advances by its own computing; at a collective all clocks move to
the latest one plus the alpha-beta cost of the link. Times read from these clocks are *simulated* and must be
labelled so. Reading a clock makes the host wait for the device; a mark, which is read later, does not.
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

from sparsify import cost
from sparsify.comm import put
from sparsify.cost import Cost, Link

T = TypeVar("T")
NO_LINK = Link(0.0, 0.0)


class Call(NamedTuple):
    """A rank that waits in a collective."""

    name: str
    alike: Any  # what must be the same on all ranks
    brought: Any  # what this rank contributes
    combine: Callable[[Sequence[Any]], Any]
    cost: Cost | None  # None: the clocks take no notice


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
        self.lived[rank] = self.now(rank)

    def meet(self, price_s: float | None) -> None:
        self.synchronise()  # combining is charged to no rank
        if price_s is not None:
            self.lived = [max(self.lived) + price_s] * len(self.lived)

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


class DeviceClocks:
    """Kept by the device: turns begin and end with events, and nothing waits until marks are compared."""

    def __init__(self, size: int, event: Callable[[], Event]) -> None:
        self.event = event
        self.turns = [Turn() for _ in range(size)]
        self.unsettled: list[
            tuple[list[Turn], float | None, list[Turn]]
        ] = []  # before and after a collective

    def resume(self, rank: int) -> None:
        self.turns[rank].start = self.event()

    def leave(self, rank: int) -> None:
        self.turns[rank].end = self.event()

    def meet(self, price_s: float | None) -> None:
        before, self.turns = self.turns, [Turn() for _ in self.turns]
        self.unsettled.append((before, price_s, self.turns))

    def now(self, rank: int) -> float:
        return time.perf_counter()  # the host's own: how far the device is, it would have to wait for

    def mark(self, rank: int) -> Mark:
        return Mark(self, self.turns[rank], self.event())

    def settle(self) -> None:
        """Work out when each turn began. The device must have passed all that are over."""
        for before, price_s, after in self.unsettled:
            ends = [turn.at_s(turn.end) for turn in before]
            for turn, end in zip(after, ends, strict=True):
                turn.began_s = end if price_s is None else max(ends) + price_s
        self.unsettled.clear()


class Cluster:
    """Runs the ranks and owns what they share. Use `run`."""

    def __init__(self, size: int, link: Link, clocks: Clocks) -> None:
        self.size, self.link, self.clocks = size, link, clocks
        self.calls: dict[int, Call] = {}
        self.result: Any = None
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
        self.result = first.combine([self.calls[rank].brought for rank in range(self.size)])
        costs = [call.cost for call in self.calls.values() if call.cost is not None]
        self.clocks.meet(max(map(self.link.seconds, costs)) if costs else None)
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

    def now(self) -> float:
        """Seconds that this rank has lived on its virtual clock; with events, those of the host's clock."""
        return self.cluster.clocks.now(self.rank)

    def mark(self) -> Mark:
        """This point in its time, to be compared with others later. Only with events."""
        assert isinstance(self.cluster.clocks, DeviceClocks)
        return self.cluster.clocks.mark(self.rank)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        price = cost.all_reduce(tensor.nbytes, self.size)
        return put(self._meet("all_reduce", tensor, total_in_rank_order, price), tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        snapshot = tensor.detach().clone()  # its owner may write to it before the last rank has read it
        gathered: list[Tensor] = self._meet(
            "all_gather", snapshot, list, cost.all_gather(tensor.nbytes, self.size)
        )
        return gathered

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        return partial(self.all_reduce, tensor)

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        # One link: nothing is saved by having them in flight together.
        return lambda: [self.all_gather(tensor) for tensor in tensors]

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        pieces = tensor.detach().clone().split(list(send))
        price = cost.all_to_all(tensor.nbytes - pieces[self.rank].nbytes, self.size)
        everyones = self._meet("all_to_all", pieces, list, price, alike=str(tensor.dtype))
        mine: list[Tensor] = [theirs[self.rank] for theirs in everyones]
        if [len(piece) for piece in mine] != list(receive):
            lengths = [len(piece) for piece in mine]
            raise RuntimeError(f"rank {self.rank} expects pieces of {list(receive)}, and gets {lengths}")
        return mine

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        price = cost.permute(tensor.nbytes, len(route))
        alike = (tuple(tensor.shape), tuple(route))
        tensors = self._meet("permute", tensor.detach().clone(), list, price, alike)
        sources = [source for source, destination in route if destination == self.rank]
        return tensors[sources[0]] if sources else None

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        price = cost.broadcast(tensor.nbytes, self.size)
        return put(self._meet("broadcast", tensor, lambda all_: all_[root].clone(), price), tensor)

    def barrier(self) -> None:
        self._meet("barrier", None, lambda _: None, Cost(0, 0))

    def lagged_max(self, number: int) -> int:
        before, self.largest = self.largest, self._meet("lagged_max", number, max, None)
        return before

    def _meet(
        self,
        name: str,
        brought: Any,
        combine: Callable[[Sequence[Any]], Any],
        price: Cost | None,
        alike: Any = None,
    ) -> Any:
        if isinstance(brought, Tensor) and alike is None:
            alike = tuple(brought.shape)
        return self.cluster.meet(self.rank, Call(name, alike, brought, combine, price))


def run(
    size: int,
    body: Callable[[VirtualComm], T],
    link: Link = NO_LINK,
    synchronise: Callable[[], None] = lambda: None,
    event: Callable[[], Event] | None = None,
) -> list[T]:
    """Run `body` as `size` ranks; returns what each returned, by rank. What a rank raises is raised here.

    Args:
        synchronise: waits for the device, e.g. torch.cuda.synchronize, so that each rank is charged its own
            kernels.
        event: notes a point in the device's time, e.g. a recorded torch.cuda.Event: no collective waits then,
            and times are compared by `VirtualComm.mark`.
    """
    if size < 1:
        raise ValueError(f"{size=}: there must be at least one rank")
    clocks = HostClocks(size, synchronise) if event is None else DeviceClocks(size, event)
    return Cluster(size, link, clocks).run(body)


def total_in_rank_order(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total
