"""Workers as processes, over Horovod, which the main paper ran. `make horovod` builds and installs it.

Horovod negotiates every collective by its name before it carries it out, at most every millisecond
(HOROVOD_CYCLE_TIME), and remembers what it negotiated under that name: names here are alike on all workers,
and come back with the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from sparsify.comm import Comm, WorkerLost, write_back
from sparsify.comm.torch import wait_for_workers

try:
    import horovod.torch as hvd
    from horovod.runner.http.http_server import RendezvousServer
except ModuleNotFoundError as error:
    raise ValueError(
        f"comm=horovod needs Horovod, which is not installed here (no module {error.name}); `make horovod` "
        "builds and installs it, or leave comm=torch"
    ) from error
except ImportError as error:
    raise ValueError(
        "the installed Horovod does not fit the installed torch; `make horovod` builds it again"
    ) from error

SUMMED = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
# What Horovod can't sum is summed in a wider type, exactly where sums fit; on the wire that costs its width.
WIDER = {torch.bfloat16: torch.float32}
MOVED = (*SUMMED, torch.uint8, torch.int8, torch.int16)
SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> what may carry them
# A worker that hangs rather than dies is noticed after this long, by Horovod's Gloo. The threads that notice
# run beside validation and whatever else a worker does.
TIMEOUT = timedelta(minutes=30)


class HorovodComm(Comm):
    """The processes that Horovod knows, or those of a process set; ranks are those within it. Start it with
    `join` or `meet`, end it with `close`.

    Raises:
        ValueError: this worker does not belong to `process_set`.
    """

    def __init__(
        self, server: RendezvousServer | None = None, process_set: hvd.ProcessSet = hvd.global_process_set
    ) -> None:
        if not process_set.included():
            raise ValueError(
                f"worker {hvd.rank()} is not in the process set of ranks {process_set.ranks}; call this in "
                "the members of a set only"
            )
        self.rank, self.size = process_set.rank(), process_set.size()
        self._server, self._set = server, process_set
        self._pending: int | None = None  # the handle of the `lagged_max` under way

    @classmethod
    def join(cls, device: torch.device, server: RendezvousServer | None = None) -> HorovodComm:
        """Become one of the processes that mpirun or horovodrun started, or that `meet` told Horovod of.

        Raises:
            ValueError: this Horovod can't work on that device.
            WorkerLost: the others did not come.
        """
        if device.type == "cuda" and not hvd.nccl_built():
            raise ValueError(
                "comm=horovod with device=cuda needs a Horovod with NCCL, and the installed one has none; "
                "`make horovod` where nvcc and nccl.h are builds one that has"
            )
        try:
            hvd.init()
        except ValueError as error:  # in so many words: "Please check log messages above"
            raise WorkerLost(
                "Horovod could not bring the workers together; its own words are above"
            ) from error
        return cls(server)

    @classmethod
    def join_at_store(
        cls,
        store: Store,
        address: str,
        rank: int,
        size: int,
        node: str,
        interface: str | None,
        tell: Callable[[Mapping[str, str]], None],
        device: torch.device,
        patience: timedelta,
        give_up: Callable[[], bool] = lambda: False,
    ) -> HorovodComm:
        """Join the group of the workers that meet at `store`; neither mpirun nor horovodrun is needed.

        Args:
            address: of rank 0's machine, where Horovod's own meeting point is opened.
            node: names the machine, alike in all processes on it.
            interface: of the network to use; by default that of the host's name.
            tell: sets environment variables, as which Horovod takes its settings.
            give_up: called while waiting; True ends the waiting on all workers.

        Raises:
            WorkerLost: a worker did not come.
        """
        server = None
        if rank == 0:
            server = RendezvousServer()
            store.set("horovod", str(server.start()))
        store.set(f"node/{rank}", node)
        wait_for_workers(store, rank, size, patience, give_up)
        nodes = [store.get(f"node/{other}").decode() for other in range(size)]
        names = list(dict.fromkeys(nodes))
        neighbours = [other for other in range(size) if nodes[other] == node]
        local_rank = neighbours.index(rank)
        # Of every node, the process with this local rank: the "cross" group of hierarchical operations.
        counterparts = [name for name in names if nodes.count(name) > local_rank]
        settings = {
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": local_rank,
            "HOROVOD_LOCAL_SIZE": len(neighbours),
            "HOROVOD_CROSS_RANK": counterparts.index(node),
            "HOROVOD_CROSS_SIZE": len(counterparts),
            "HOROVOD_HOSTNAME": node,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": store.get("horovod").decode(),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": int(TIMEOUT.total_seconds()),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        if interface is not None:
            settings["HOROVOD_GLOO_IFACE"] = interface
        tell({name: str(value) for name, value in settings.items()})
        return cls.join(device, server)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        if not tensor.numel():
            return lambda: tensor
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        addend = real if real.dtype in SUMMED else real.to(WIDER.get(real.dtype, torch.int32))
        wait = self._begin("all_reduce", partial(hvd.allreduce_async_, op=hvd.Sum), addend.contiguous())

        def finish() -> Tensor:
            write_back(wait(), real)
            return tensor

        return finish

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.begin_all_gathers([tensor])()[0]

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        waits = [
            self._begin(f"all_gather.{at}", hvd.allgather_async, _movable(tensor))
            for at, tensor in enumerate(tensors)
        ]
        pairs = list(zip(waits, tensors, strict=True))
        return lambda: [[*wait().view(mine.dtype).view(self.size, *mine.shape)] for wait, mine in pairs]

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        splits = torch.tensor(list(send), dtype=torch.int32, device="cpu")
        # What is sent differs in length from worker to worker, so the name must not tell it.
        exchange = partial(hvd.alltoall_async, splits=splits)
        received, _ = self._begin("all_to_all", exchange, _movable(tensor), sized=False)()
        return [*received.view(tensor.dtype).split(list(receive))]

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        n = tensor.numel()
        send, receive = [0] * self.size, [0] * self.size
        for source, destination in route:
            if source == self.rank:
                send[destination] = n
            if destination == self.rank:
                receive[source] = n
        copies = tensor.reshape(-1).repeat(sum(send) // n) if n else tensor.reshape(-1)
        pieces = self.all_to_all(copies, send, receive)
        came = [piece for piece, length in zip(pieces, receive, strict=True) if length]
        return came[0].view_as(tensor) if came else None

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        if not tensor.numel():
            return tensor
        flat = _movable(tensor)
        of_all = root if self._set is hvd.global_process_set else self._set.ranks[root]
        self._begin(f"broadcast.{root}", partial(hvd.broadcast_async_, root_rank=of_all), flat)()
        shared = flat.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()
        return tensor if shared else write_back(flat.view(tensor.dtype).view(tensor.shape), tensor)

    def barrier(self) -> None:
        with self._collective("barrier"):
            hvd.barrier(self._set)

    def lagged_max(self, number: int) -> int:
        before = self._finish_pending()
        mine = torch.tensor([number], dtype=torch.int32, device="cpu")  # beside NCCL
        with self._collective("vote"):
            self._pending = hvd.allreduce_async_(mine, name="vote", op=hvd.Max, process_set=self._set)
        return before

    def close(self) -> None:
        """End Horovod in this process."""
        self._finish_pending()
        hvd.shutdown()
        if self._server is not None:
            self._server.stop()

    def _finish_pending(self) -> int:
        """The result of the `lagged_max` under way, 0 if there is none."""
        if self._pending is None:
            return 0
        handle, self._pending = self._pending, None
        return int(self._finish("vote", handle))

    def _begin(
        self, name: str, collective: Callable[..., int], tensor: Tensor, sized: bool = True
    ) -> Callable[[], Any]:
        """Hand a collective to Horovod; what this returns waits for its result."""
        size = f".{tensor.numel()}" if sized else ""
        with self._collective(name):
            handle = collective(tensor, name=f"{name}.{tensor.dtype}{size}", process_set=self._set)
        return partial(self._finish, name, handle)

    def _finish(self, name: str, handle: int) -> Any:
        with self._collective(name):
            return hvd.synchronize(handle)

    @contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        """Tells a lost worker from workers that are all there, and do not do the same."""
        try:
            yield
        except hvd.HorovodInternalError as error:
            if "Mismatched" in str(error):
                raise RuntimeError(str(error)) from error
            who, collective = f"worker {self.rank} of {self.size}", name.partition(".")[0]
            raise WorkerLost(f"{who} lost the others during {collective}") from error


def _movable(tensor: Tensor) -> Tensor:
    """The same bits as a flat tensor of a type that Horovod moves; not a copy where memory is in order."""
    flat = tensor.contiguous().view(-1)
    return flat if tensor.dtype in MOVED else flat.view(SAME_WIDTH[tensor.element_size()])
