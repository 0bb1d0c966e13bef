"""Communicators: the collectives that a worker may call, which every backend implements.

`CountingComm` wraps any of them and counts the bytes sent; `InstrumentedComm` also splits the time into
waiting and transferring.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

# By name: importing sparsify.comm.torch makes that module what `torch` means in this package.
from torch import Tensor, cat, uint8
from torch import device as Device
from torch import tensor as to_tensor

from sparsify import cost
from sparsify.core import host_sync
from sparsify.core.grouping import group_consecutive_indices
from sparsify.core.timer import PhaseTimer

T = TypeVar("T")
MAX_MESSAGE_ELEMENTS = 2**24  # of several tensors in one message, which are copied for it


class PredictedCost(NamedTuple):
    """The cost of a collective for one worker, by closed forms."""

    cost: cost.CollectiveCost
    seconds: float  # that it should take; 0 where nobody has measured the link


class Comm(Protocol):
    """The collectives of a group of workers."""

    rank: int  # number of this worker, from 0
    size: int  # number of workers
    algorithm: str = "textbook"  # of its collectives, see `sparsify.cost.ALGORITHMS`
    links: Mapping[str, cost.Link] = {}  # of each kind of collective, where somebody has measured it

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all workers, in place, and return the argument.

        In all collectives a tensor may have any strides; one that is not contiguous travels as a copy.
        """

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every worker's tensor, by rank. All have the same shape, and must not be written to."""

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin an `all_reduce`, and return a function that waits for the sum.

        A backend that can't work in the background does everything in that function.
        """
        return partial(self.all_reduce, tensor)

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Begin an `all_gather` of each tensor, and return a function that waits for all of them."""
        return lambda: [self.all_gather(tensor) for tensor in tensors]

    def all_gather_several(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the result of `all_gather` for each tensor. All are under way at the same time."""
        return self.begin_all_gathers(tensors)()

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        """Send a part of a 1-D tensor to each worker, and return the parts for this one, by sender.

        Args:
            send: number of elements for each worker; the parts lie in the tensor in this order.
            receive: number of elements from each worker.
        """

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        """Send a tensor point to point along each (source, destination) of `route`.

        All workers call it, with tensors of the same shape and the same route. Returns the tensor that this
        worker received, None if none.
        """

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Write the root's tensor into all workers' tensors."""

    def barrier(self) -> None:
        """Return on each worker after the last one has called it."""

    def predict_cost(self, kind: str, nbytes: int, size: int) -> PredictedCost:
        """Return the cost of a collective by its algorithm, and its seconds by `links`.

        Args:
            kind: as in `cost.Network.collective_seconds`.
            nbytes: as in `cost.Network.collective_seconds`.
        """
        collective = cost.ALGORITHMS[self.algorithm][kind](nbytes, size)
        seconds = self.links[kind].transfer_seconds(collective) if kind in self.links else 0.0
        return PredictedCost(collective, seconds)

    def uses_torchcomms(self) -> bool:
        """Return True if TorchComms carries out the collectives, in the place of torch's own backends."""
        return False

    def lagged_max(self, number: int) -> int:
        """Hand in a number, 0 or more, and return the largest that was handed in at the call before.

        At the first call it returns 0. The numbers travel while the workers do something else.
        """


class ProcessComm(Comm):
    """A communicator between processes, which may be lost; its `lagged_max` travels in the background."""

    _wait_for_max: Callable[[], Any] | None = None  # for the result of the last `lagged_max`

    def lagged_max(self, number: int) -> int:
        before = self._finish_lagged_max()
        self._wait_for_max = self._begin_max(number)
        return before

    @abstractmethod
    def _begin_max(self, number: int) -> Callable[[], Any]:
        """Begin to find the largest of all workers' numbers, and return a function that waits for it."""

    def _finish_lagged_max(self) -> int:
        """Return the result of the `lagged_max` under way, 0 if there is none."""
        wait = self._wait_for_max
        self._wait_for_max = None
        return 0 if wait is None else int(wait())

    @abstractmethod
    def _is_lost_worker_error(self, error: RuntimeError) -> bool:
        """Return True if a collective failed because another worker is gone, or does not answer."""

    @contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        """Raise WorkerLost where a collective fails because of another worker; other errors stay as they are.

        Args:
            name: of the collective, for the error message, up to its first dot.
        """
        try:
            yield
        except RuntimeError as error:
            if not self._is_lost_worker_error(error):
                raise
            kind = name.partition(".")[0]
            raise WorkerLost(f"worker {self.rank} of {self.size} lost the others during {kind}") from error


class WorkerLost(ConnectionError):
    """The error that another worker ended or does not answer, so that this group can't continue."""


class JoinCancelled(WorkerLost):
    """The error that a worker stopped waiting for the others to join, so that there will be no group."""


def write_back(values: Tensor, tensor: Tensor) -> Tensor:
    """Write a collective's result into the tensor that was handed in, and return that tensor.

    Its memory may have gaps, or places that several of its elements share (an expanded buffer).

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
    """Write rank 0's values into all workers' tensors.

    They travel on `device`, many of one type in a message: over a long link each message takes a round trip.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        for indices in group_consecutive_indices([tensor.numel() for tensor in alike], MAX_MESSAGE_ELEMENTS):
            batch = [alike[index] for index in indices]
            flat = cat([tensor.detach().to(device).reshape(-1) for tensor in batch])
            comm.broadcast(flat.view(uint8))  # bytes: no backend has all types
            parts = flat.split([tensor.numel() for tensor in batch])
            for tensor, values in zip(batch, parts, strict=True):
                write_back(values.view(tensor.shape), tensor)


def gather_uneven(comm: Comm, tensor: Tensor) -> list[Tensor]:
    """Return every worker's 1-D tensor, of different lengths, by rank.

    Lengths are gathered first, then tensors padded to the longest: gloo refuses uneven ones, and in a ring
    the longest sets the pace anyway. One host synchronisation, for the lengths. If all are empty, only the
    lengths are sent. `cost.gather_uneven` has the bytes.
    """
    lengths = gather_lengths(comm, tensor)
    return gather_padded(comm, tensor, lengths) if max(lengths) else [tensor] * comm.size


def gather_lengths(comm: Comm, tensor: Tensor) -> list[int]:
    """Return the length of every worker's 1-D tensor, by rank. One host synchronisation."""
    length = host_sync.to_device([tensor.numel()], tensor)
    lengths: list[int] = host_sync.to_host(cat(comm.all_gather(length)))
    return lengths


def gather_padded(comm: Comm, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return every worker's 1-D tensor, of these lengths, by rank; they travel padded to the longest."""
    longest = max(lengths)
    padded = tensor if len(tensor) == longest else cat([tensor, tensor.new_zeros(longest - len(tensor))])
    return [other[:length] for other, length in zip(comm.all_gather(padded), lengths, strict=True)]


def exchange_pieces(comm: Comm, tensor: Tensor, send: Sequence[int]) -> list[Tensor]:
    """Make an `all_to_all` whose receivers do not know the lengths, which travel first.

    One host synchronisation.
    """
    ones = [1] * comm.size
    lengths = comm.all_to_all(host_sync.to_device(list(send), tensor), ones, ones)
    return comm.all_to_all(tensor, send, [int(length) for length in host_sync.to_host(cat(lengths))])


def gather_json(comm: Comm, value: Any, device: Device) -> list[Any]:
    """Return every worker's value, which JSON can write, by rank; they travel as tensors on `device`."""
    text = to_tensor(list(json.dumps(value).encode()), dtype=uint8, device=device)
    return [json.loads(bytes(message.tolist())) for message in gather_uneven(comm, text)]


class PartlyForwardingComm(Comm):
    """A communicator that forwards everything but all-reduce and all-gather to another one.

    Args:
        comm: the other communicator.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        return self.comm.all_to_all(tensor, send, receive)

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        return self.comm.permute(tensor, route)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.comm.broadcast(tensor, root)

    def barrier(self) -> None:
        self.comm.barrier()

    def predict_cost(self, kind: str, nbytes: int, size: int) -> PredictedCost:
        return self.comm.predict_cost(kind, nbytes, size)

    def uses_torchcomms(self) -> bool:
        return self.comm.uses_torchcomms()

    def lagged_max(self, number: int) -> int:
        return self.comm.lagged_max(number)


class SentCounts(NamedTuple):
    """Counts of what a worker has sent."""

    sent_bytes: int
    messages: int  # latency terms
    predicted_s: float  # seconds that all collectives should take, 0 where the links are not known


class CountingComm(PartlyForwardingComm):
    """A communicator that counts the bytes and latency terms that this worker sends by another one.

    They are what `sparsify.cost` says of each collective, with the algorithms of the other communicator.
    """

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self.sent_bytes = 0
        self.messages = 0  # latency terms
        self.collectives = 0
        self.predicted_s = 0.0  # of all collectives, on `links`; 0 without

    @property
    def counts(self) -> SentCounts:
        """Counts until now."""
        return SentCounts(self.sent_bytes, self.messages, self.predicted_s)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._count("all_reduce", tensor.nbytes, self.size)
        return self._run(lambda: partial(self.comm.all_reduce, tensor))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._count("all_gather", tensor.nbytes, self.size)
        return self._run(lambda: partial(self.comm.all_gather, tensor))

    def all_gather_several(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        for tensor in tensors:
            self._count("all_gather", tensor.nbytes, self.size)
        return self._run(partial(self.comm.begin_all_gathers, tensors))

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        kept_bytes = send[self.rank] * tensor.element_size()
        self._count("all_to_all", tensor.nbytes - kept_bytes, self.size)
        return self._run(lambda: partial(self.comm.all_to_all, tensor, send, receive))

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        self._count("permute", tensor.nbytes, len(route))
        return self._run(lambda: partial(self.comm.permute, tensor, route))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self._count("broadcast", tensor.nbytes, self.size)
        self._run(lambda: partial(self.comm.broadcast, tensor, root))

    def _count(self, kind: str, nbytes: int, size: int) -> None:
        """Add the cost of a collective."""
        collective, seconds = self.predict_cost(kind, nbytes, size)
        self.collectives += 1
        self.sent_bytes += collective.sent_bytes
        self.messages += collective.messages
        self.predicted_s += seconds

    def _run(self, begin: Callable[[], Callable[[], T]]) -> T:
        """Carry out a collective: `begin` begins it, and returns a function that waits for its result."""
        return begin()()


class InstrumentedComm(CountingComm):
    """A counting communicator that also times every collective, as the timer's mode asks.

    serialised: a barrier first, so that *wait* (this worker is ready, the last one is not) ends where
    *transfer* begins. production: no barrier; whole durations, which `PhaseTimer.resolve` splits
    afterwards. as_published: the host's time in the final wait, as the published code timed Horovod's
    synchronize().

    Args:
        before_wait: in the mode as_published called between the beginning of a collective and its end.
    """

    def __init__(self, comm: Comm, timer: PhaseTimer, before_wait: Callable[[], None] = lambda: None) -> None:
        super().__init__(comm)
        self.timer = timer
        self.before_wait = before_wait

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._count("all_reduce", tensor.nbytes, self.size)
        return self._run(partial(self.comm.begin_all_reduce, tensor))

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
