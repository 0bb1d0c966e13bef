"""The grid of all workers: a row shares one replica of the model, a column has equal shards of it."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from sparsify.comm import Comm
from sparsify.comm.torch import TorchComm
from sparsify.core import host_sync

MESH_DIM_NAMES = ("replicate", "shard")


class ShardGrid(NamedTuple):
    """The two groups of a worker, and the mesh of all workers."""

    replica_comm: TorchComm  # the workers that have the same shard as this one
    shard_comm: TorchComm  # the workers that share a replica with this one
    mesh: DeviceMesh  # of all, (replicas, shards)
    device: torch.device  # on which tensors travel

    @classmethod
    def from_groups(
        cls, replicas: dist.ProcessGroup, shards: dist.ProcessGroup, device: torch.device
    ) -> ShardGrid:
        """Return the grid that the groups of all workers make up. Collective, over all of them.

        Raises:
            ValueError: there is one replica only, or the groups make up no grid.
        """
        column = TorchComm(replicas)
        row = TorchComm(shards)
        if column.size == 1:
            raise ValueError(
                f"there is one replica only, of {row.size} shards, so nothing is exchanged between replicas; "
                "take a mesh with two or more, such as init_device_mesh('cuda', (2, 4), "
                f"mesh_dim_names={MESH_DIM_NAMES}), or leave sparsify.shard out"
            )
        row_ranks = dist.get_process_group_ranks(shards)
        message = torch.tensor([len(row_ranks), *row_ranks], device=device)
        lengths = host_sync.to_host(torch.cat(column.all_gather(message[:1])))
        if set(lengths) != {len(row_ranks)}:
            raise ValueError(f"the replicas have {lengths} shards, and must have equally many")
        messages = host_sync.to_host(torch.stack(column.all_gather(message)))
        rows = [ranks_of_row[1:] for ranks_of_row in messages]
        ranks = [rank for row_of_ranks in rows for rank in row_of_ranks]
        if len(set(ranks)) < len(ranks):
            raise ValueError(
                f"the workers {dist.get_process_group_ranks(replicas)} should have the same shard, but "
                f"{row_ranks}, who share a replica, are among them; hand over the other dimension of the "
                "mesh: replicas=mesh['replicate']"
            )
        mesh = DeviceMesh.from_group(
            [replicas, shards],
            device.type,
            mesh=torch.tensor(rows, device="cpu"),
            mesh_dim_names=MESH_DIM_NAMES,
        )
        return cls(column, row, mesh, device)

    def all_workers_comm(self) -> Comm:
        """Return a communicator of all workers."""
        return cast(Comm, _GatherOnlyGridComm(self.replica_comm, self.shard_comm))

    def stack_workers(self, tensor: Tensor) -> DTensor:
        """Return a DTensor (replicas, shards, *shape) of every worker's tensor, of one shape on all workers.

        `torch.distributed.checkpoint` saves and loads all parts of it.
        """
        stacked: DTensor = DTensor.from_local(
            tensor[None, None], self.mesh, [Shard(0), Shard(1)], run_check=False
        )
        return stacked


class _GatherOnlyGridComm:
    """A communicator of all workers of a grid, numbered row by row, that can only all-gather.

    It gathers first in rows, then in columns.
    """

    def __init__(self, columns: TorchComm, rows: TorchComm) -> None:
        self.rows = rows
        self.columns = columns
        self.size = rows.size * columns.size
        self.rank = columns.rank * rows.size + rows.rank

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every worker's tensor, by rank; all have one shape."""
        own_row = torch.stack(self.rows.all_gather(tensor))
        rows = self.columns.all_gather(own_row)
        return [shard for row in rows for shard in row.unbind()]
