"""The communicator of Horovod, between processes, which the main paper ran; `make horovod` installs it.

Horovod negotiates every collective by its name before it carries it out, at most every millisecond
(HOROVOD_CYCLE_TIME), and remembers under that name what it negotiated. So the names are alike on all workers,
and a name comes back with the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from sparsify.comm import ProcessComm, WorkerLost, write_back
from sparsify.comm.torch import wait_for_workers
from sparsify.core.bucket import INTEGER_BY_NBYTES

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

SUMMABLE_DTYPES = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
# Types that Horovod can't sum are summed in a wider one, exactly where sums fit; a message has its width.
WIDER_DTYPES = {torch.bfloat16: torch.float32}
MOVABLE_DTYPES = (*SUMMABLE_DTYPES, torch.uint8, torch.int8, torch.int16)
# A worker that hangs rather than dies is noticed after this long, by Horovod's Gloo. The threads that notice
# run beside validation and whatever else a worker does.
TIMEOUT = timedelta(minutes=30)


class HorovodComm(ProcessComm):
    """A communicator over the processes that Horovod knows, or over those of a process set.

    Ranks are those within the set. `join` and `join_at_store` start Horovod, `close` ends it, and stops
    `server_to_stop`.

    Raises:
        ValueError: this worker does not belong to `process_set`.
    """

    def __init__(
        self,
        server_to_stop: RendezvousServer | None = None,
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ) -> None:
        if not process_set.included():
            raise ValueError(
                f"worker {hvd.rank()} is not in the process set of ranks {process_set.ranks}; call this in "
                "the members of a set only"
            )
        self.rank = process_set.rank()
        self.size = process_set.size()
        self._server = server_to_stop
        self._process_set = process_set

    @classmethod
    def join(cls, device: torch.device, server_to_stop: RendezvousServer | None = None) -> HorovodComm:
        """Join the processes that mpirun or horovodrun started, or that `join_at_store` has described.

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
        except ValueError as error:  # which says no more than "Please check log messages above"
            raise WorkerLost(
                "Horovod could not bring the workers together; its own words are above"
            ) from error
        return cls(server_to_stop)

    @classmethod
    def join_at_store(
        cls,
        store: Store,
        address: str,
        rank: int,
        size: int,
        node: str,
        interface: str | None,
        set_environment: Callable[[Mapping[str, str]], None],
        device: torch.device,
        patience: timedelta,
        give_up: Callable[[], bool] = lambda: False,
    ) -> HorovodComm:
        """Join the group of the workers that meet at `store`; neither mpirun nor horovodrun is needed.

        Args:
            address: of rank 0's machine, where Horovod opens its own rendezvous.
            node: a name of the machine, alike in all processes on it.
            interface: network interface to use; by default that of the host's name.
            set_environment: sets environment variables, from which Horovod takes its settings.
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
        local_ranks = [other for other in range(size) if nodes[other] == node]
        local_rank = local_ranks.index(rank)
        # Nodes with a process of this local rank, which are the "cross" group of hierarchical operations.
        cross_nodes = [name for name in dict.fromkeys(nodes) if nodes.count(name) > local_rank]
        settings = {
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": local_rank,
            "HOROVOD_LOCAL_SIZE": len(local_ranks),
            "HOROVOD_CROSS_RANK": cross_nodes.index(node),
            "HOROVOD_CROSS_SIZE": len(cross_nodes),
            "HOROVOD_HOSTNAME": node,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": store.get("horovod").decode(),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": int(TIMEOUT.total_seconds()),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        if interface is not None:
            settings["HOROVOD_GLOO_IFACE"] = interface
        set_environment({name: str(value) for name, value in settings.items()})
        return cls.join(device, server)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        if not tensor.numel():
            return lambda: tensor
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        summable = real
        if real.dtype not in SUMMABLE_DTYPES:
            summable = real.to(WIDER_DTYPES.get(real.dtype, torch.int32))
        wait = self._begin("all_reduce", partial(hvd.allreduce_async_, op=hvd.Sum), summable.contiguous())

        def finish() -> Tensor:
            write_back(wait(), real)
            return tensor

        return finish

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.begin_all_gathers([tensor])()[0]

    def begin_all_gathers(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        waits = [
            self._begin(f"all_gather.{index}", hvd.allgather_async, flatten_as_movable_dtype(tensor))
            for index, tensor in enumerate(tensors)
        ]
        pairs = list(zip(waits, tensors, strict=True))
        return lambda: [[*wait().view(like.dtype).view(self.size, *like.shape)] for wait, like in pairs]

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
        splits = torch.tensor(list(send), dtype=torch.int32, device="cpu")
        # The length differs from worker to worker, so it must not be a part of the name.
        exchange = partial(hvd.alltoall_async, splits=splits)
        received, _ = self._begin(
            "all_to_all", exchange, flatten_as_movable_dtype(tensor), names_size=False
        )()
        return [*received.view(tensor.dtype).split(list(receive))]

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        flat = tensor.reshape(-1)
        destinations = [destination for source, destination in route if source == self.rank]
        sources = [source for source, destination in route if destination == self.rank]
        send = [len(flat) * (rank in destinations) for rank in range(self.size)]
        receive = [len(flat) * (rank in sources) for rank in range(self.size)]
        pieces = self.all_to_all(flat.repeat(len(destinations)), send, receive)
        return pieces[sources[0]].view_as(tensor) if sources else None

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if not tensor.numel():
            return
        flat = flatten_as_movable_dtype(tensor)
        is_global = self._process_set is hvd.global_process_set
        global_root = root if is_global else self._process_set.ranks[root]
        self._begin(f"broadcast.{root}", partial(hvd.broadcast_async_, root_rank=global_root), flat)()
        if not tensor.is_contiguous():
            write_back(flat.view(tensor.dtype).view(tensor.shape), tensor)

    def barrier(self) -> None:
        with self._collective("barrier"):
            hvd.barrier(self._process_set)

    def _begin_max(self, number: int) -> Callable[[], Any]:
        largest = torch.tensor([number], dtype=torch.int32, device="cpu")  # also beside NCCL
        return self._begin("vote", partial(hvd.allreduce_async_, op=hvd.Max), largest)

    def close(self) -> None:
        """End Horovod in this process."""
        self._finish_lagged_max()
        hvd.shutdown()
        if self._server is not None:
            self._server.stop()

    def _begin(
        self, name: str, collective: Callable[..., int], tensor: Tensor, names_size: bool = True
    ) -> Callable[[], Any]:
        """Hand a collective to Horovod, and return a function that waits for its result.

        Args:
            names_size: True: the number of elements is a part of the collective's name.
        """
        size = f".{tensor.numel()}" if names_size else ""
        with self._collective(name):
            handle = collective(tensor, name=f"{name}.{tensor.dtype}{size}", process_set=self._process_set)
        return partial(self._finish, name, handle)

    def _finish(self, name: str, handle: int) -> Any:
        """Wait for a collective, and return its result."""
        with self._collective(name):
            return hvd.synchronize(handle)

    def _is_lost_worker_error(self, error: RuntimeError) -> bool:
        # In a mismatch all workers are there, but call different collectives.
        return isinstance(error, hvd.HorovodInternalError) and "Mismatched" not in str(error)


def flatten_as_movable_dtype(tensor: Tensor) -> Tensor:
    """Return a flat tensor of the same bits, of a type that Horovod moves.

    It is no copy where the memory is in order.
    """
    flat = tensor.contiguous().view(-1)
    return flat if tensor.dtype in MOVABLE_DTYPES else flat.view(INTEGER_BY_NBYTES[tensor.element_size()])
