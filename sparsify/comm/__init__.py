"""Communicators: what a worker may ask of the others. Backends differ only in the collectives.

`Metered` wraps any of them, counts the bytes sent and splits the time into waiting and transferring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

# By name: importing sparsify.comm.torch makes that module what `torch` means in this package.
from torch import Tensor, cat

from sparsify import cost, host
from sparsify.timer import PhaseTimer

T = TypeVar("T")


class Comm(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place; returns its argument."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, by rank; all have the same shape. Not to be written to."""

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """`all_reduce`, begun; what this returns waits for the sum. Without asynchrony all is done there."""

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """One `all_gather` each, in flight together; what this returns waits for all of them."""

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        """Pieces of a 1-D tensor, `send[r]` elements of it to each worker r; returns the pieces for this
        worker, by rank of their senders, `receive[r]` elements from each.
        """

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        """Point to point: along each (source, destination) of `route` a tensor travels; all workers call,
        with tensors of the same shape and the same route. Returns what came here, if anything did.
        """

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's tensor, in place; returns its argument."""

    def barrier(self) -> None:
        """Returns on each worker after the last one has come."""

    def vote(self, word: int) -> int:
        """Hands in this worker's word, 0 or more, and returns the largest that anybody handed in at the call
        before this one; 0 at the first. Words travel while the workers do something else.
        """


class WorkerLost(ConnectionError):
    """Another worker ended or does not answer: the group can't go on."""


class GivenUp(WorkerLost):
    """A worker would not wait any longer for the others to come: there will be no group."""


def gather_uneven(comm: Comm, tensor: Tensor) -> list[Tensor]:
    """Everybody's 1-D tensor, by rank, of whatever length. `cost.gather_uneven` has its bytes.

    Lengths are gathered first, then tensors padded to the longest: gloo refuses uneven ones, and in a ring
        the
    longest sets the pace anyway. One host synchronisation, for the lengths. Nobody has anything: nothing
    sent.
    """
    mine = host.put([tensor.numel()], tensor)
    lengths = [int(length) for length in host.read(cat(comm.all_gather(mine)))]
    if not (longest := max(lengths)):
        return [tensor] * comm.size
    padded = tensor if len(tensor) == longest else cat([tensor, tensor.new_zeros(longest - len(tensor))])
    return [one[:length] for one, length in zip(comm.all_gather(padded), lengths, strict=True)]


def exchange_pieces(comm: Comm, tensor: Tensor, send: Sequence[int]) -> list[Tensor]:
    """`all_to_all` for receivers that do not know how much comes: lengths first. One host synchronisation."""
    ones = [1] * comm.size
    lengths = comm.all_to_all(host.put(list(send), tensor), ones, ones)
    return comm.all_to_all(tensor, send, [int(length) for length in host.read(cat(lengths))])


class Metered:
    """A communicator that counts and times another one, as the timer's mode asks.

    serialised: a barrier first, so that *wait* (this worker is ready, the last one is not) ends where
    *transfer* begins. production: nothing extra; whole durations, which `PhaseTimer.resolve` splits
    afterwards. as_published: the host's time in the final wait, as the published code timed Horovod's
    synchronize().
    """

    def __init__(self, comm: Comm, timer: PhaseTimer) -> None:
        self.comm, self.timer = comm, timer
        self.rank, self.size = comm.rank, comm.size
        self.sent_bytes = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sent_bytes += cost.all_reduce(tensor.nbytes, self.size).sent_bytes
        return self._timed(lambda: self.comm.begin_all_reduce(tensor))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.sent_bytes += cost.all_gather(tensor.nbytes, self.size).sent_bytes
        return self._timed(lambda: partial(self.comm.all_gather, tensor))

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        return partial(self.all_reduce, tensor)  # begun when it is waited for: what is timed stays whole

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        self.sent_bytes += sum(cost.all_gather(one.nbytes, self.size).sent_bytes for one in tensors)
        return partial(self._timed, lambda: self.comm.begin_all_gathers(tensors))

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        kept = send[self.rank] * tensor.element_size()
        self.sent_bytes += cost.all_to_all(tensor.nbytes - kept, self.size).sent_bytes
        return self._timed(lambda: partial(self.comm.all_to_all, tensor, send, receive))

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        self.sent_bytes += cost.permute(tensor.nbytes, len(route)).sent_bytes
        return self._timed(lambda: partial(self.comm.permute, tensor, route))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        self.sent_bytes += cost.broadcast(tensor.nbytes, self.size).sent_bytes
        return self._timed(lambda: partial(self.comm.broadcast, tensor, root))

    def barrier(self) -> None:
        with self.timer.phase("wait"):
            self.comm.barrier()

    def vote(self, word: int) -> int:
        return self.comm.vote(word)  # no part of a step: neither timed nor counted

    def _timed(self, begin: Callable[[], Callable[[], T]]) -> T:
        if self.timer.mode == "serialised":
            self.barrier()
            with self.timer.phase("transfer"):
                return begin()()
        if self.timer.mode == "production":
            with self.timer.collective():
                return begin()()
        finish = begin()
        with self.timer.phase("synchronize"):
            result = finish()
            self.timer.synchronise()  # Horovod's synchronize() returns when the data are there
            return result
