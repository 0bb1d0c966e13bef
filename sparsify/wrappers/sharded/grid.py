"""Workers in rows and columns: a row shares one replica of the model, a column has the same shard of it."""

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

NAMES = ("replicate", "shard")


class ShardGrid(NamedTuple):
    """Both groups of this worker."""

    replicas: TorchComm  # those with the same shard
    shards: TorchComm  # those of the same replica
    mesh: DeviceMesh  # of all, (replicas, shards)
    device: torch.device  # on which tensors travel

    @classmethod
    def of(
        cls, replicas: dist.ProcessGroup | None, shards: dist.ProcessGroup, device: torch.device
    ) -> ShardGrid:
        """The grid that these groups make up. Collective, over all its workers.

        Raises:
            ValueError: there is one replica only, or the groups make up none.
        """
        column, row = TorchComm(replicas), TorchComm(shards)
        if column.size == 1:
            raise ValueError(
                f"there is one replica only, of {row.size} shards, so nothing is exchanged between replicas; "
                "take a mesh with two or more, such as init_device_mesh('cuda', (2, 4), "
                f"mesh_dim_names={NAMES}), or leave sparsify.shard out"
            )
        mine = dist.get_process_group_ranks(shards)
        told = torch.tensor([len(mine), *mine], device=device)
        lengths = host_sync.to_host(torch.cat(column.all_gather(told[:1])))
        if set(lengths) != {len(mine)}:
            raise ValueError(f"the replicas have {lengths} shards, and must have equally many")
        rows = [theirs[1:] for theirs in host_sync.to_host(torch.stack(column.all_gather(told)))]
        ranks = [rank for each in rows for rank in each]
        if len(set(ranks)) < len(ranks):
            raise ValueError(
                f"the workers {dist.get_process_group_ranks(column.group)} should have the same shard, but "
                f"{mine}, who share a replica, are among them; hand over the other dimension of the mesh: "
                "replicas=mesh['replicate']"
            )
        groups = [cast(dist.ProcessGroup, column.group), cast(dist.ProcessGroup, row.group)]
        mesh = DeviceMesh.from_group(
            groups, device.type, mesh=torch.tensor(rows, device="cpu"), mesh_dim_names=NAMES
        )
        return cls(column, row, mesh, device)

    def all_workers(self) -> Comm:
        """All workers, for what all must know."""
        return cast(Comm, GridComm(self.replicas, self.shards))

    def stack_workers(self, own: Tensor) -> DTensor:
        """A tensor of each worker's, of the same shape on all, as one: (replicas, shards, *shape). So
        `torch.distributed.checkpoint` saves and loads all of them.
        """
        found: DTensor = DTensor.from_local(own[None, None], self.mesh, [Shard(0), Shard(1)], run_check=False)
        return found


class GridComm:
    """As much of a communicator of all workers, row by row, as those who agree need: it gathers, first in
    rows, then in columns.
    """

    def __init__(self, columns: TorchComm, rows: TorchComm) -> None:
        self.rows, self.columns = rows, columns
        self.size = rows.size * columns.size
        self.rank = columns.rank * rows.size + rows.rank

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every worker's tensor, by rank; all have the same shape."""
        mine = torch.stack(self.rows.all_gather(tensor))
        return [theirs for row in self.columns.all_gather(mine) for theirs in row.unbind()]
