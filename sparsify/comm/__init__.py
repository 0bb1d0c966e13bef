"""Communicators: what a worker may ask of the others. Backends differ only in the collectives.

`Metered` wraps any of them, counts the bytes sent and splits the time into waiting and transferring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from sparsify import cost
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

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's tensor, in place; returns its argument."""

    def barrier(self) -> None:
        """Returns on each worker after the last one has come."""


class WorkerLost(ConnectionError):
    """Another worker ended or does not answer: the group can't go on."""


class Metered:
    """A communicator that counts and times another one, as the timer's mode asks.

    serialised: a barrier first, so that *wait* (this worker is ready, the last one is not) ends where
    *transfer* begins. production: nothing extra; whole durations, which `PhaseTimer.resolve` splits
    afterwards. as_published:
    one host clock around call and completion, as the published code timed Horovod's synchronize().
    """

    def __init__(self, comm: Comm, timer: PhaseTimer) -> None:
        self.comm, self.timer = comm, timer
        self.rank, self.size = comm.rank, comm.size
        self.sent_bytes = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sent_bytes += cost.all_reduce(tensor.nbytes, self.size).sent_bytes
        return self._timed(lambda: self.comm.all_reduce(tensor))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.sent_bytes += cost.all_gather(tensor.nbytes, self.size).sent_bytes
        return self._timed(lambda: self.comm.all_gather(tensor))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        self.sent_bytes += cost.broadcast(tensor.nbytes, self.size).sent_bytes
        return self._timed(lambda: self.comm.broadcast(tensor, root))

    def barrier(self) -> None:
        with self.timer.phase("wait"):
            self.comm.barrier()

    def _timed(self, collective: Callable[[], T]) -> T:
        if self.timer.mode == "serialised":
            self.barrier()
            with self.timer.phase("transfer"):
                return collective()
        if self.timer.mode == "production":
            with self.timer.collective():
                return collective()
        with self.timer.phase("synchronize"):
            result = collective()
            self.timer.synchronise()  # Horovod's synchronize() returns when the data are there
            return result
