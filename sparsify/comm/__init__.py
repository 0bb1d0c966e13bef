"""Communicators: the collectives that a worker may call. Backends differ in nothing else.

`CountingComm` wraps any of them and counts the bytes sent; `InstrumentedComm` also splits the time into
waiting and transferring.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

# By name: importing sparsify.comm.torch makes that module what `torch` means in this package.
from torch import Tensor, cat, uint8
from torch import device as Device
from torch import tensor as to_tensor

from sparsify import cost
from sparsify.core import host_sync
from sparsify.core.timer import PhaseTimer

T = TypeVar("T")
MAX_MESSAGE_ELEMENTS = 2**24  # elements of a message of several tensors, which are copied for it


class Comm(Protocol):
    """Collectives of a group of workers. Backends inherit what is said of them here."""

    rank: int  # number of this worker, from 0
    size: int  # number of workers
    algorithm: str = "textbook"  # of its collectives, see `sparsify.cost.ALGORITHMS`
    links: Mapping[str, cost.Link] = {}  # of each kind of collective, where somebody has measured it

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place; returns its argument. Here and elsewhere a tensor may have any
        strides; one that is not contiguous travels as a copy.
        """

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every worker's tensor, by rank; all have the same shape. Not to be written to."""

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin an `all_reduce`; what this returns waits for the sum. A backend that can't work in the
        background does everything there.
        """
        return partial(self.all_reduce, tensor)

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Begin one `all_gather` each, in flight together; what this returns waits for all of them."""
        return lambda: [self.all_gather(tensor) for tensor in tensors]

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        """Pieces of a 1-D tensor, `send[r]` elements of it to each worker r; returns the pieces for this
        worker, by rank of their senders, `receive[r]` elements from each.
        """

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        """Point to point: a tensor travels along each (source, destination) of `route`. All workers call it,
        with tensors of the same shape and the same route. Returns what this worker received, None if nothing.
        """

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's tensor, in place; returns its argument."""

    def barrier(self) -> None:
        """Returns on each worker after the last one has called it."""

    def predict_cost(self, kind: str, nbytes: int, size: int) -> tuple[cost.CollectiveCost, float]:
        """Cost of a collective by its algorithm (`kind` and `nbytes` as in `cost.Network.collective_seconds`), and the
        seconds that it takes by `links`: 0 where nobody has measured it.
        """
        collective = cost.ALGORITHMS[self.algorithm][kind](nbytes, size)
        return collective, self.links[kind].transfer_seconds(collective) if kind in self.links else 0.0

    def lagged_max(self, number: int) -> int:
        """Hand in this worker's number, 0 or more; returns the largest that any worker handed in at the call
        before this one, 0 at the first call. Numbers travel while the workers do something else.
        """


class WorkerLost(ConnectionError):
    """Another worker ended or does not answer: this group can't continue."""


class JoinCancelled(WorkerLost):
    """A worker stopped waiting for the others to join: there will be no group."""


def write_back(values: Tensor, tensor: Tensor) -> Tensor:
    """Write what a collective brought into the tensor that was handed in, whose memory may have gaps, or
    places that several of its elements share (an expanded buffer). Returns `tensor`.

    Raises:
        ValueError: elements that share a place should become different.
    """
    if values is tensor:
        return tensor
    places = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor.detach()[places].copy_(values[places])
    if 0 in tensor.stride() and not tensor.detach().equal(values):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} shares memory between elements that other workers have "
            "different values for; give it memory of its own on all workers, with .clone()"
        )
    return tensor


def broadcast_tensors(comm: Comm, tensors: Sequence[Tensor], device: Device) -> None:
    """Write rank 0's values into all workers' tensors. They travel on `device`, many of one type in a
    message, as over a long link each message takes a way of its own.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        waiting = [tensor for tensor in tensors if tensor.dtype == dtype]
        while waiting:
            batch = [waiting.pop(0)]
            while waiting and sum(tensor.numel() for tensor in (*batch, waiting[0])) <= MAX_MESSAGE_ELEMENTS:
                batch.append(waiting.pop(0))
            flat = cat([tensor.detach().to(device).reshape(-1) for tensor in batch])
            received = comm.broadcast(flat.view(uint8)).view(dtype)  # bytes: no backend has all types
            theirs = received.split([tensor.numel() for tensor in batch])
            for tensor, values in zip(batch, theirs, strict=True):
                write_back(values.view(tensor.shape), tensor)


def gather_uneven(comm: Comm, tensor: Tensor) -> list[Tensor]:
    """All-gather of 1-D tensors of different lengths. `cost.gather_uneven` has its bytes.

    Lengths are gathered first, then tensors padded to the longest: gloo refuses uneven ones, and in a ring
    the longest sets the pace anyway. One host synchronisation, for the lengths. If all are empty, only the
    lengths are sent.
    """
    length = host_sync.to_device([tensor.numel()], tensor)
    lengths = [int(length) for length in host_sync.to_host(cat(comm.all_gather(length)))]
    if not (longest := max(lengths)):
        return [tensor] * comm.size
    padded = tensor if len(tensor) == longest else cat([tensor, tensor.new_zeros(longest - len(tensor))])
    return [theirs[:length] for theirs, length in zip(comm.all_gather(padded), lengths, strict=True)]


def exchange_pieces(comm: Comm, tensor: Tensor, send: Sequence[int]) -> list[Tensor]:
    """`all_to_all` for receivers that do not know how much they will get: lengths first. One host
    synchronisation.
    """
    ones = [1] * comm.size
    lengths = comm.all_to_all(host_sync.to_device(list(send), tensor), ones, ones)
    return comm.all_to_all(tensor, send, [int(length) for length in host_sync.to_host(cat(lengths))])


def gather_json(comm: Comm, value: Any, device: Device) -> list[Any]:
    """All-gather of values that JSON can write, by way of tensors on `device`."""
    text = to_tensor(list(json.dumps(value).encode()), dtype=uint8, device=device)
    return [json.loads(bytes(theirs.tolist())) for theirs in gather_uneven(comm, text)]


class CountingComm(Comm):
    """Counts the bytes that this worker sends by way of another communicator, and their latency terms: for
    each collective what `sparsify.cost` says of it, with the algorithms of the communicator's backend.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.sent_bytes = self.messages = self.collectives = 0
        self.predicted_s = 0.0  # of all collectives, on `links`; 0 without

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._count("all_reduce", tensor.nbytes, self.size)
        return self._run(lambda: partial(self.comm.all_reduce, tensor))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._count("all_gather", tensor.nbytes, self.size)
        return self._run(lambda: partial(self.comm.all_gather, tensor))

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._count("all_reduce", tensor.nbytes, self.size)
        return self.comm.begin_all_reduce(tensor)

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        for tensor in tensors:
            self._count("all_gather", tensor.nbytes, self.size)
        return self.comm.begin_all_gathers(tensors)

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        kept = send[self.rank] * tensor.element_size()
        self._count("all_to_all", tensor.nbytes - kept, self.size)
        return self._run(lambda: partial(self.comm.all_to_all, tensor, send, receive))

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        self._count("permute", tensor.nbytes, len(route))
        return self._run(lambda: partial(self.comm.permute, tensor, route))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        self._count("broadcast", tensor.nbytes, self.size)
        return self._run(lambda: partial(self.comm.broadcast, tensor, root))

    def barrier(self) -> None:
        self.comm.barrier()

    def predict_cost(self, kind: str, nbytes: int, size: int) -> tuple[cost.CollectiveCost, float]:
        return self.comm.predict_cost(kind, nbytes, size)

    def lagged_max(self, number: int) -> int:
        return self.comm.lagged_max(number)  # no part of a step: neither counted nor timed

    @property
    def counts(self) -> tuple[int, int, float]:
        """Counts until now: bytes, latency terms, and the seconds that they are predicted to take."""
        return self.sent_bytes, self.messages, self.predicted_s

    def _count(self, kind: str, nbytes: int, size: int) -> None:
        collective, seconds = self.predict_cost(kind, nbytes, size)
        self.collectives += 1
        self.sent_bytes += collective.sent_bytes
        self.messages += collective.messages
        self.predicted_s += seconds

    def _run(self, begin: Callable[[], Callable[[], T]]) -> T:
        """Carry out a collective: `begin` begins it, and returns what waits for its result."""
        return begin()()


class InstrumentedComm(CountingComm):
    """Counts bytes and times every collective, as the timer's mode asks.

    serialised: a barrier first, so that *wait* (this worker is ready, the last one is not) ends where
    *transfer* begins. production: nothing extra; whole durations, which `PhaseTimer.resolve` splits
    afterwards. as_published: the host's time in the final wait, as the published code timed Horovod's
    synchronize().

    Args:
        before_wait: as_published, called between the beginning of a collective and the wait for it.
    """

    def __init__(self, comm: Comm, timer: PhaseTimer, before_wait: Callable[[], None] = lambda: None) -> None:
        super().__init__(comm)
        self.timer, self.before_wait = timer, before_wait

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._count("all_reduce", tensor.nbytes, self.size)
        return self._run(lambda: self.comm.begin_all_reduce(tensor))

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        return partial(self.all_reduce, tensor)  # begun when it is waited for: what is timed stays whole

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        return partial(self._run, partial(super().begin_all_gathers, tensors))

    def barrier(self) -> None:
        with self.timer.phase("wait"):
            self.comm.barrier()

    def _run(self, begin: Callable[[], Callable[[], T]]) -> T:
        if self.timer.mode == "serialised":
            self.barrier()
            with self.timer.phase("transfer"):
                return begin()()
        if self.timer.mode == "production":
            with self.timer.collective():
                return begin()()
        finish = begin()
        self.before_wait()
        with self.timer.phase("synchronize"):
            result = finish()
            self.timer.synchronise()  # Horovod's synchronize() returns when the data are there
            return result
