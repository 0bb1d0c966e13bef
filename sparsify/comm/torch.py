"""Workers as processes, over torch.distributed: gloo on CPUs, nccl on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sparsify.comm import WorkerLost

# A worker that hangs rather than dies is noticed after this long. Others wait while rank 0 validates, so it
# must exceed the longest validation.
TIMEOUT = timedelta(minutes=30)


class TorchComm:
    """The default process group. Start it with `TorchComm.start`, end it with `close`."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @classmethod
    def start(cls, init_method: str, rank: int, size: int, device: torch.device) -> TorchComm:
        """Join the group; returns when all are there.

        Args:
            init_method: where the workers meet, `file:///shared/path` or `tcp://host:port`.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=TIMEOUT)
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

    def close(self) -> None:
        dist.destroy_process_group()

    def _lost(self, collective: str) -> WorkerLost:
        return WorkerLost(f"worker {self.rank} of {self.size} lost the others during {collective}")
