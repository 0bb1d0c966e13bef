"""The count of host synchronisations."""

from __future__ import annotations

from typing import Any

import torch

from sparsify.comm import virtual
from sparsify.core import host_sync


def test_counts_of_virtual_ranks_do_not_mix() -> None:
    def body(comm: virtual.VirtualComm) -> tuple[int, Any, list[int]]:
        before = host_sync.num_syncs()
        for turn in range(3):
            if turn <= comm.rank:
                read = host_sync.to_host(torch.tensor([comm.rank, 7]))
            comm.barrier()  # the others go on
            found = host_sync.nonzero(torch.tensor([0, 1, 1]))
        host_sync.record_syncs(10)
        return host_sync.num_syncs() - before, read, found.tolist()

    outside = host_sync.num_syncs()
    assert virtual.run(3, body) == [(rank + 1 + 3 + 10, [rank, 7], [1, 2]) for rank in range(3)]
    assert host_sync.num_syncs() == outside
