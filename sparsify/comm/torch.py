"""The communicator of torch.distributed, between processes: gloo on CPUs, nccl on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from sparsify.comm import JoinCancelled, ProcessComm, WorkerLost, write_back

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup  # for methods that torch hands one to
ReduceOp = dist.ReduceOp
# A worker that hangs rather than dies is noticed after this long. Others wait while rank 0 validates, so it
# must exceed the longest validation.
TIMEOUT = timedelta(minutes=30)
POLL_S = 0.02
# Parts of the messages of gloo, where it closes a connection after a timeout, and of nccl.
LOST_WORKER_MESSAGES = (
    "pair closure",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL timeout",
    "timed out",
    "was aborted",
)
SINGLE_TENSOR_BACKENDS = {"gloo", "nccl"}  # that gather into one tensor; mpi knows lists only
# Its name since torch 2.14, and before.
all_gather_single = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
# In the store where workers meet: the key of the decision, and its values.
DECISION_KEY = "verdict"
JOIN = "go"
CANCEL = "give up"
TIMED_OUT = "late"


class TorchComm(ProcessComm):
    """A communicator over a process group: torch.distributed's default one, or `group`.

    Ranks are those within the group. `join` and `join_at_store` make the default group; `close` ends it.

    Raises:
        ValueError: this worker does not belong to `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._host_group: dist.ProcessGroup | None = None  # made by the first `lagged_max`
        backends = str(dist.get_backend_config(group)).split(",")  # such as cpu:gloo, cuda:nccl
        self.algorithm = "gloo" if "gloo" in str(dist.get_backend(group)) else "textbook"
        backend_names = {name.rpartition(":")[2] for name in backends}
        self._gathers_into_single = backend_names <= SINGLE_TENSOR_BACKENDS
        if self.rank < 0:
            raise ValueError(
                f"worker {dist.get_rank()} is not in the process group that it was given; call this in the "
                "members of a group only"
            )

    @classmethod
    def join(cls, init_method: str, rank: int, size: int, device: torch.device) -> TorchComm:
        """Join the default group, and return when all workers are there.

        Args:
            init_method: where the workers meet, `file:///shared/path` or `tcp://host:port`.
        """
        return cls._join(device, init_method=init_method, rank=rank, world_size=size)

    @classmethod
    def join_at_store(
        cls,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        patience: timedelta,
        give_up: Callable[[], bool] = lambda: False,
    ) -> TorchComm:
        """Join the default group of the workers that meet at `store`.

        Args:
            give_up: called while waiting; True ends the waiting on all workers.

        Raises:
            JoinCancelled: a worker's `give_up` returned True.
            WorkerLost: a worker did not come.
        """
        wait_for_workers(store, rank, size, patience, give_up)
        return cls._join(device, store=store, rank=rank, world_size=size)

    @classmethod
    def _join(cls, device: torch.device, **options: Any) -> TorchComm:
        """Join the default group, given the other options of `init_process_group`."""
        dist.init_process_group(timeout=TIMEOUT, **init_process_group_options(device), **options)
        return cls()

    @classmethod
    def with_new_group(cls) -> TorchComm:
        """Make a new group of all workers, for a thread of its own, and return its communicator.

        Collectives of two threads in one group would meet each other. All workers call this together. The
        group ends with the default one.

        NCCL's collectives of two groups must reach the device in the same order on all workers, or they may
        wait for each other for ever. So the groups take turns: once the thread has work, only it
        communicates, until whoever gave it work has waited for all of it; streams wait for each other at
        both ends. NCCL_LAUNCH_ORDER_IMPLICIT is no help where they don't, for it takes the order in which the
        host launches, and two threads of a worker have none.
        """
        return cls(make_group_of_all(None))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = tensor.contiguous()
        with self._collective("all_reduce"):
            dist.all_reduce(total, group=self.group)
        return write_back(total, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        with self._collective("all_gather"):
            gathered, _ = self._begin_all_gather(tensor.contiguous(), in_background=False)
        return gathered

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        total = tensor.contiguous()
        with self._collective("all_reduce"):
            work = dist.all_reduce(total, group=self.group, async_op=True)
        return lambda: write_back(self._wait("all_reduce", [work], total), tensor)

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        contiguous = [tensor.contiguous() for tensor in tensors]
        with self._collective("all_gather"):
            begun = [self._begin_all_gather(tensor, in_background=True) for tensor in contiguous]
        works = [work for _, work in begun if work is not None]
        return lambda: self._wait("all_gather", works, [gathered for gathered, _ in begun])

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        received = tensor.new_empty(sum(receive))
        with self._collective("all_to_all"):
            dist.all_to_all_single(received, tensor.contiguous(), list(receive), list(send), self.group)
        return list(received.split(list(receive)))

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        sent = tensor.contiguous()
        received = None
        operations = []
        # Receives come first: gloo's sender waits for the word that its receiver is ready, and this word
        # waits behind all that the receiver has begun to send by the same connection.
        for source, destination in route:
            if destination == self.rank:
                received = torch.empty_like(sent)
                operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        for source, destination in route:
            if source == self.rank:
                operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=destination))
        with self._collective("permute"):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        return received

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        values = tensor.contiguous()
        with self._collective("broadcast"):
            dist.broadcast(values, group=self.group, group_src=root)
        write_back(values, tensor)

    def barrier(self) -> None:
        with self._collective("barrier"):
            dist.barrier(self.group)

    def uses_torchcomms(self) -> bool:
        is_told = getattr(getattr(dist, "config", None), "use_torchcomms", False)  # newer versions have it
        return bool(is_told) and find_spec("torchcomms") is not None

    def _begin_max(self, number: int) -> Callable[[], Tensor]:
        # On a gloo group of its own, also beside nccl: numbers are the host's, so no stream waits for them.
        if self._host_group is None:
            if self.group is not None:
                # Made by members alone, a group would put torch's names of groups out of step on the others.
                raise ValueError("lagged_max works in the default process group only")
            self._host_group = make_group_of_all("gloo")
        largest = torch.tensor([number], device="cpu")
        with self._collective("a vote"):
            work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._host_group, async_op=True)
        return partial(self._wait, "a vote", [work], largest)

    def close(self) -> None:
        """End the default group and all others; a group that was given is left to its owner."""
        self._finish_lagged_max()
        if self.group is None:
            dist.destroy_process_group()

    def _begin_all_gather(self, tensor: Tensor, in_background: bool) -> tuple[list[Tensor], dist.Work | None]:
        """Begin an `all_gather`, and return the tensors that it will fill."""
        if not self._gathers_into_single:
            gathered = [torch.empty_like(tensor) for _ in range(self.size)]
            return gathered, dist.all_gather(gathered, tensor, self.group, in_background)
        # nccl would copy each tensor of a list out of a single one.
        stacked = tensor.new_empty((self.size, *tensor.shape))
        work = all_gather_single(stacked.view(-1), tensor.view(-1), self.group, in_background)
        return list(stacked.unbind()), work

    def _wait(self, collective: str, works: Sequence[dist.Work], result: T) -> T:
        """Wait for all of `works`, and return `result`, which they have filled."""
        with self._collective(collective):
            for work in works:
                work.wait()
        return result

    def _is_lost_worker_error(self, error: RuntimeError) -> bool:
        return is_lost_worker_error(error)


def make_group_of_all(backend: str | None) -> dist.ProcessGroup:
    """Make a new group of all workers, which call this together.

    Args:
        backend: None: that of the default group.
    """
    group = dist.new_group(backend=backend, timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)  # every worker is in it
    return group


def init_process_group_options(device: torch.device) -> dict[str, Any]:
    """Return the options of `init_process_group` that choose the backend for tensors of a device.

    nccl is told which GPU is this worker's: it then connects at once, so that errors of connecting come at
    once, and neither barriers nor other groups have to guess.
    """
    if device.type != "cuda":
        return {"backend": "gloo"}
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"backend": "nccl", "device_id": torch.device("cuda", index)}


def is_lost_worker_error(error: RuntimeError) -> bool:
    """Return True if a collective failed because another worker is gone, or does not answer.

    Gloo and nccl have no types for that, only words.
    """
    message = str(error)
    if isinstance(error, dist.DistNetworkError):
        return True
    if "gloo/transport/" in message:  # connections, as opposed to arguments
        return "enforce fail" not in message
    return any(part in message for part in LOST_WORKER_MESSAGES)


def wait_for_workers(
    store: Store, rank: int, size: int, patience: timedelta, give_up: Callable[[], bool]
) -> None:
    """Wait until all workers have come to `store`, or raise on all of them.

    Arguments and errors as `TorchComm.join_at_store`. The first worker that knows the outcome decides it.
    """
    worker = f"worker {rank} of {size}"
    deadline = time.monotonic() + patience.total_seconds()
    try:
        store.set(f"here/{rank}", "")
        proposal = None
        while proposal is None:
            missing = [other for other in range(size) if not store.check([f"here/{other}"])]
            if not missing or store.check([DECISION_KEY]):
                proposal = JOIN
            elif give_up():
                proposal = CANCEL
            elif time.monotonic() > deadline:
                proposal = TIMED_OUT
            else:
                time.sleep(POLL_S)
        decision = store.compare_set(DECISION_KEY, "", proposal).decode()  # the first worker's
    except RuntimeError as error:  # rank 0 serves the store
        raise WorkerLost(
            f"{worker} lost rank 0 while it waited for the others; its log may say why"
        ) from error
    if decision == CANCEL:
        raise JoinCancelled(f"{worker} goes: there was no more waiting for the others to come")
    if decision == TIMED_OUT:
        others = ", ".join(map(str, missing)) or "some"
        raise WorkerLost(
            f"{worker} waits in vain: of the others, these did not come: {others}; their logs may say why"
        )
