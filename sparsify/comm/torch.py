"""Workers as processes, over torch.distributed: gloo on CPUs, nccl on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from sparsify.comm import GivenUp, WorkerLost

T = TypeVar("T")
# A worker that hangs rather than dies is noticed after this long. Others wait while rank 0 validates, so it
# must exceed the longest validation.
TIMEOUT = timedelta(minutes=30)
POLL_S = 0.02
VERDICT, GO, GIVE_UP, LATE = "verdict", "go", "give up", "late"  # in the store where workers meet


class TorchComm:
    """The default process group. Start it with `TorchComm.start` or `meet`, end it with `close`."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._voters: dist.ProcessGroup | None = None  # made by the first vote
        self._vote: tuple[dist.Work, Tensor] | None = None  # that is under way

    @classmethod
    def start(cls, init_method: str, rank: int, size: int, device: torch.device) -> TorchComm:
        """Join the group; returns when all are there.

        Args:
            init_method: where the workers meet, `file:///shared/path` or `tcp://host:port`.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=TIMEOUT)
        return cls()

    @classmethod
    def meet(
        cls,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        patience: timedelta,
        give_up: Callable[[], bool] = lambda: False,
    ) -> TorchComm:
        """Join the group of those who come to `store`.

        Args:
            give_up: asked while waiting; True ends it as if nobody would come any more.

        Raises:
            GivenUp: somebody's `give_up` said so.
            WorkerLost: somebody did not come.
        """
        come(store, rank, size, patience, give_up)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        return cls()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise self._lost("all_reduce") from error
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(gathered, tensor)
        except RuntimeError as error:
            raise self._lost("all_gather") from error
        return gathered

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        try:
            work = dist.all_reduce(tensor, async_op=True)
        except RuntimeError as error:
            raise self._lost("all_reduce") from error
        return lambda: self._waited("all_reduce", [work], tensor)

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        gathered = [[torch.empty_like(one) for _ in range(self.size)] for one in tensors]
        pairs = zip(gathered, tensors, strict=True)
        try:
            works = [dist.all_gather(theirs, mine, async_op=True) for theirs, mine in pairs]
        except RuntimeError as error:
            raise self._lost("all_gather") from error
        return lambda: self._waited("all_gather", works, gathered)

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        received = tensor.new_empty(sum(receive))
        try:
            dist.all_to_all_single(received, tensor.contiguous(), list(receive), list(send))
        except RuntimeError as error:
            raise self._lost("all_to_all") from error
        return list(received.split(list(receive)))

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        received, operations = None, []
        for source, destination in route:
            if source == self.rank:
                operations.append(dist.P2POp(dist.isend, tensor, destination))
            if destination == self.rank:
                received = torch.empty_like(tensor)
                operations.append(dist.P2POp(dist.irecv, received, source))
        try:
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        except RuntimeError as error:
            raise self._lost("permute") from error
        return received

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        try:
            dist.broadcast(tensor, root)
        except RuntimeError as error:
            raise self._lost("broadcast") from error
        return tensor

    def barrier(self) -> None:
        try:
            dist.barrier()
        except RuntimeError as error:
            raise self._lost("barrier") from error

    def vote(self, word: int) -> int:
        """On a gloo group of its own, also beside nccl: words are the host's, no stream waits for them."""
        if self._voters is None:
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            assert isinstance(group, dist.ProcessGroup)  # every worker is in it
            self._voters = group
        before = self._counted()
        mine = torch.tensor([word])
        try:
            work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._voters, async_op=True)
        except RuntimeError as error:
            raise self._lost("a vote") from error
        self._vote = work, mine
        return before

    def close(self) -> None:
        self._counted()
        dist.destroy_process_group()

    def _counted(self) -> int:
        """The outcome of the vote under way, 0 if there is none."""
        if self._vote is None:
            return 0
        (work, word), self._vote = self._vote, None
        return int(self._waited("a vote", [work], word))

    def _waited(self, collective: str, works: Sequence[dist.Work], result: T) -> T:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._lost(collective) from error
        return result

    def _lost(self, collective: str) -> WorkerLost:
        return WorkerLost(f"worker {self.rank} of {self.size} lost the others during {collective}")


def come(store: Store, rank: int, size: int, patience: timedelta, give_up: Callable[[], bool]) -> None:
    """Returns when all workers have come to `store`, or raises on all of them: the first to know decides.

    Raises:
        GivenUp: somebody's `give_up` said so.
        WorkerLost: somebody did not come.
    """
    who = f"worker {rank} of {size}"
    deadline = time.monotonic() + patience.total_seconds()
    try:
        store.set(f"here/{rank}", "")
        while True:
            missing = [other for other in range(size) if not store.check([f"here/{other}"])]
            mine = None
            if not missing or store.check([VERDICT]):
                mine = GO
            elif give_up():
                mine = GIVE_UP
            elif time.monotonic() > deadline:
                mine = LATE
            if mine:
                verdict = store.compare_set(VERDICT, "", mine).decode()  # the first one's
                break
            time.sleep(POLL_S)
    except RuntimeError as error:  # rank 0 serves the store
        raise WorkerLost(f"{who} lost rank 0 while it waited for the others; its log may say why") from error
    if verdict == GIVE_UP:
        raise GivenUp(f"{who} goes: there was no more waiting for the others to come")
    if verdict == LATE:
        others = ", ".join(map(str, missing)) or "some"
        raise WorkerLost(
            f"{who} waits in vain: of the others, these did not come: {others}; their logs may say why"
        )
