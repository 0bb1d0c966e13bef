"""Virtual ranks: P workers in one process, in lockstep, as in a cluster that fits in a test or on one GPU.

Exactly one rank computes at a time, and ranks switch only at collectives, in rank order: everything is
deterministic. Each rank has a clock that advances by its own computing; at a collective all clocks move to
the latest one plus the alpha-beta cost of the network. Times read from these clocks are *simulated* and must
be labelled so. Reading a clock makes the host wait for the device; a mark, which is read later, does not.

Objects that all ranks hold alike need not exist P times: see `VirtualComm.make_on_rank_0` and
`VirtualComm.run_on_rank_0`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from sparsify.comm import Comm, write_back
from sparsify.comm.clocks import ClockMark, EventClocks, HostClocks, TimedEvent
from sparsify.core.bucket import INTEGER_BY_NBYTES
from sparsify.core.modes import autocast_devices, set_autocast_devices
from sparsify.cost import Link, Network

C = TypeVar("C")
T = TypeVar("T")
INSTANT_NETWORK = Network(Link(0.0, 0.0))
PIECE_BYTES = 2**17  # of each rank's tensor: small enough that those of some ranks stay in a core's cache


class PendingCollective(NamedTuple):
    """A collective in which a rank waits for the others."""

    name: str
    signature: Any  # must be equal on all ranks
    contribution: Any  # of this rank
    combine: Callable[[Sequence[Any]], Any]
    network_s: float | None  # that it takes; None: no clock takes notice
    charges_combine_to_all: bool = False  # True: `combine` is work that every rank would do, at the same time


class VirtualCluster:
    """The state that virtual ranks share, and the switching between them. Use `run`."""

    def __init__(self, size: int, network: Network, clocks: EventClocks) -> None:
        self.size = size
        self.network = network
        self.clocks = clocks
        self.calls: dict[int, PendingCollective] = {}  # by rank
        self.result: Any = None
        self.made_by_rank_0: list[Any] = []  # in the order of its calls of `make_on_rank_0`
        self.scheduler = getcurrent()
        self.thread = threading.get_ident()

    def carry_out_collective(self) -> None:
        """Carry out the collective in which all ranks wait, and move their clocks."""
        calls = list(self.calls.values())  # in rank order
        first = calls[0]
        if len(calls) < self.size:
            ended = [rank for rank in range(self.size) if rank not in self.calls]
            raise RuntimeError(
                f"rank {min(self.calls)} waits in {first.name}, but ended already: ranks {ended}"
            )
        if len({(call.name, call.signature) for call in calls}) > 1:
            names = {rank: call.name for rank, call in self.calls.items()}
            signatures = {rank: call.signature for rank, call in self.calls.items()}
            raise RuntimeError(f"the ranks do not stand at the same collective: {names}, shapes {signatures}")
        contributions = [call.contribution for call in calls]
        if first.charges_combine_to_all:
            self.result = self.clocks.run_and_charge_all(lambda: first.combine(contributions))
        else:
            self.result = first.combine(contributions)
            if first.network_s is None:
                self.clocks.finish_unnoticed_collective()
            else:
                self.clocks.finish_collective(max(call.network_s or 0.0 for call in calls))
        self.calls.clear()

    def wait_for_combined_result(self, rank: int, call: PendingCollective) -> Any:
        """Let the other ranks run until all have called a collective, and return its result."""
        if threading.get_ident() != self.thread:
            raise ValueError(
                "virtual ranks take turns in one thread, so nothing of theirs overlaps; take processes, or "
                "leave overlap out"
            )
        self.clocks.pause(rank)
        self.calls[rank] = call
        # Both are thread-local in torch, and all ranks share one thread.
        grad_mode = torch.is_grad_enabled()
        autocast_modes = autocast_devices()
        self.scheduler.switch()
        torch.set_grad_enabled(grad_mode)
        set_autocast_devices(autocast_modes)
        self.clocks.resume(rank)
        return self.result


class VirtualComm(Comm):
    """The communicator of one virtual rank, whose group is the whole cluster.

    All collectives share one link: several in flight together take as long as one after the other.
    """

    def __init__(self, cluster: VirtualCluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.size = cluster.size
        self.lagged_result = 0  # of the last `lagged_max`
        self.num_made = 0  # calls of `make_on_rank_0`

    def now_s(self) -> float:
        """Return the seconds on this rank's virtual clock; with events, those of the host's clock."""
        clocks = self.cluster.clocks
        return clocks.now_s(self.rank) if isinstance(clocks, HostClocks) else time.perf_counter()

    def record_mark(self) -> ClockMark:
        """Return this point in the rank's time, to be compared with others later."""
        return self.cluster.clocks.record_mark(self.rank)

    def idle(self, seconds: float) -> None:
        """Advance this rank's clock by seconds in which it does nothing, and for which nobody has to wait."""
        self.cluster.clocks.idle(self.rank, seconds)

    def make_on_rank_0(self, make: Callable[[], T]) -> T:
        """Return the object that rank 0 has made in this call, so that all ranks share it.

        An error of rank 0 is raised on all ranks. All ranks make the same calls, but it is no collective:
        rank 0 is always the first to come by.
        """
        outcomes = self.cluster.made_by_rank_0
        index = self.num_made
        self.num_made += 1
        if index == len(outcomes):
            outcomes.append(Future())
            try:
                outcomes[index].set_result(make())
            except Exception as error:
                outcomes[index].set_exception(error)
        outcome: Future[T] = outcomes[index]
        if self.rank == self.size - 1:
            outcomes[index] = None  # all ranks have it
        return outcome.result()

    def run_on_rank_0(self, work: Callable[[], None]) -> None:
        """Do work once that all ranks would do alike to an object that they share.

        Rank 0's `work` is done when all ranks have called this, and each rank is charged the time.
        """
        self._join_collective("once", work, lambda works: works[0](), None, charges_combine_to_all=True)

    def is_equal_on_all_ranks(self, tensor: Tensor) -> Tensor:
        """Compare a tensor's bits over all ranks, and return () bool on its device, True if equal.

        The clocks take no notice: no worker of a real group would ask.
        """
        return self._join_collective("same", tensor, have_equal_bits, None)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        totals = self._communicate("all_reduce", tensor.nbytes, tensor, all_reduce_in_rank_order)
        return write_back(totals[self.rank], tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        snapshot = tensor.detach().clone()  # its owner may write to it before the last rank has read it
        return self._communicate("all_gather", tensor.nbytes, snapshot, list)

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        pieces = tensor.detach().clone().split(list(send))
        sent_bytes = tensor.nbytes - pieces[self.rank].nbytes
        pieces_by_sender = self._communicate("all_to_all", sent_bytes, pieces, list, str(tensor.dtype))
        received = [sent[self.rank] for sent in pieces_by_sender]
        lengths = [len(piece) for piece in received]
        if lengths != list(receive):
            raise RuntimeError(f"rank {self.rank} expects pieces of {list(receive)}, and gets {lengths}")
        return received

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        network_s = self.cluster.network.permute_seconds(tensor.nbytes, route)
        signature = (tuple(tensor.shape), tuple(route))
        tensors = self._join_collective("permute", tensor.detach().clone(), list, network_s, signature)
        sources = [source for source, destination in route if destination == self.rank]
        return tensors[sources[0]] if sources else None

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        values = self._communicate("broadcast", tensor.nbytes, tensor, lambda tensors: tensors[root].clone())
        write_back(values, tensor)

    def barrier(self) -> None:
        self._join_collective("barrier", None, lambda _: None, 0.0)

    def lagged_max(self, number: int) -> int:
        before = self.lagged_result
        self.lagged_result = self._join_collective("lagged_max", number, max, None)
        return before

    def _communicate(
        self,
        kind: str,
        nbytes: int,
        contribution: C,
        combine: Callable[[Sequence[C]], T],
        signature: Any = None,
    ) -> T:
        """Join a collective that takes as long as one of its kind and bytes on the cluster's network."""
        network_s = self.cluster.network.collective_seconds(kind, nbytes, self.size)
        return self._join_collective(kind, contribution, combine, network_s, signature)

    def _join_collective(
        self,
        name: str,
        contribution: C,
        combine: Callable[[Sequence[C]], T],
        network_s: float | None,
        signature: Any = None,
        charges_combine_to_all: bool = False,
    ) -> T:
        """Wait for all ranks, and return the result of `combine`; arguments as `PendingCollective`."""
        if isinstance(contribution, Tensor) and signature is None:
            signature = tuple(contribution.shape)
        call = PendingCollective(name, signature, contribution, combine, network_s, charges_combine_to_all)
        result: T = self.cluster.wait_for_combined_result(self.rank, call)
        return result


def run(
    size: int,
    body: Callable[[VirtualComm], T],
    network: Network = INSTANT_NETWORK,
    synchronise: Callable[[], None] = lambda: None,
    record_event: Callable[[], TimedEvent] | None = None,
) -> list[T]:
    """Run `body` as `size` virtual ranks, and return the result of each, by rank.

    An error that a rank raises is raised from this function.

    Args:
        network: joins the ranks, for their clocks.
        synchronise: waits for the device, e.g. torch.cuda.synchronize, so that each rank is charged its own
            kernels.
        record_event: notes a point in the device's time, e.g. a recorded torch.cuda.Event: no collective
            waits then, and times are compared by `VirtualComm.record_mark`.
    """
    if size < 1:
        raise ValueError(f"{size=}: there must be at least one rank")
    clocks = HostClocks(size, synchronise) if record_event is None else EventClocks(size, record_event)
    cluster = VirtualCluster(size, network, clocks)
    grad_mode = torch.is_grad_enabled()
    autocast_modes = autocast_devices()
    greenlets = [greenlet(body) for _ in range(size)]
    results = list[T]()  # by rank; None of ranks that have not ended
    try:
        for rank, worker in enumerate(greenlets):
            torch.set_grad_enabled(grad_mode)
            set_autocast_devices(autocast_modes)
            clocks.resume(rank)
            results.append(worker.switch(VirtualComm(cluster, rank)))
        while cluster.calls:
            cluster.carry_out_collective()
            for rank, worker in enumerate(greenlets):
                if not worker.dead:
                    results[rank] = worker.switch()
    finally:
        for rank, worker in enumerate(greenlets):
            if not worker.dead:  # another rank failed: this one's `finally` blocks run, then it ends
                clocks.resume(rank)
                worker.throw(GreenletExit)
        torch.set_grad_enabled(grad_mode)
        set_autocast_devices(autocast_modes)
    return results


def all_reduce_in_rank_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Add tensors in rank order, and return the sum for every rank.

    It lies in the rank's own tensor, unless some of them share memory.
    """
    have_own_memory = len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    if not have_own_memory or not all(tensor.is_contiguous() for tensor in tensors):
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total.add_(tensor)
        return [total] * len(tensors)
    first_tensor = tensors[0]
    piece_numel = first_tensor.numel()
    if first_tensor.device.type == "cpu":
        piece_numel = PIECE_BYTES // first_tensor.element_size()
    pieces_by_rank = [tensor.detach().view(-1).split(max(1, piece_numel)) for tensor in tensors]
    for first, *others in zip(*pieces_by_rank, strict=True):
        for other in others:
            first.add_(other)
        for other in others:
            other.copy_(first)
    return list(tensors)


def have_equal_bits(tensors: Sequence[Tensor]) -> Tensor:
    """Compare the bits of tensors, and return () bool on their device without waiting for it.

    Zeros of two signs differ; a NaN equals itself.
    """
    width = 8 if tensors[0].nbytes % 8 == 0 else tensors[0].element_size()  # wide ones are compared faster
    first, *others = (tensor.detach().view(INTEGER_BY_NBYTES[width]) for tensor in tensors)
    if first.device.type == "cpu":
        return torch.tensor(all(torch.equal(first, other) for other in others), device="cpu")
    return torch.stack([(first == other).all() for other in others or [first]]).all()
