"""Cost of a step for the host and the memory, once a method has settled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from sparsify.comm import virtual
from sparsify.core import host_sync
from sparsify.wrappers.aggregator import Aggregator
from tests.sparsify.laws import METHODS, build, gradient, parse_choices
from tests.training.waits import Watch, watched

SHAPE = (100, 200)  # of one tensor
SIZE = 3  # workers
SETTLED = 12  # steps before a method is watched
WATCHED = 3  # steps
N = SHAPE[0] * SHAPE[1]
SCALE = 0.005  # small gradients: fixed thresholds then select about as few as the others
NEVER_WAIT = """
    topk
    topk index=delta16 value=bf16
    randomk
    randomk exchange=allreduce shared=true feedback=gradient
    blockrandomk
    blockrandomk exchange=allreduce
    gtopk
    stable_topk every=100 block=20
"""
WAIT_FREE = [*map(parse_choices, NEVER_WAIT.strip().splitlines())]
OTHERS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in METHODS if (name, {}) not in WAIT_FREE]


def settle(method: Any, watch: Watch, select: str) -> list[list[int]]:
    """Run the method, watch the last steps, and return each rank's own count of waits in them, by step."""

    def body(comm: virtual.VirtualComm) -> list[int]:
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(SHAPE)))], comm, select=select)
        counts = []
        for step in range(SETTLED + WATCHED):
            aggregator.gradients.flat.copy_(SCALE * gradient(comm.rank, step, SHAPE).flatten())
            comm.barrier()
            watch.on = step >= SETTLED
            before = host_sync.num_syncs()
            report = aggregator.aggregate()
            assert host_sync.num_syncs() - before == report.host_syncs
            comm.barrier()
            watch.on = False
            comm.barrier()
            counts.append(report.host_syncs)
        return counts[SETTLED:]

    return virtual.run(SIZE, body)


@pytest.mark.parametrize(("name", "choices"), WAIT_FREE + OTHERS)
def test_waits_are_counted_and_a_settled_step_allocates_nothing_of_the_size_of_the_model(
    name: str, choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is searched or transformed at once is a slab, whatever the size of the model.
    monkeypatch.setattr("sparsify.core.chunks.BATCH_NUMEL", N // 8)
    method = build(name, 0.01, **choices)
    with watched(monkeypatch, N) as watch:
        plain = settle(method, watch, "torch")
        assert sum(map(sum, plain)) == len(watch.waits), watch.waits
        # Of a fused search the watch sees the memory only, for it knows torch's operators.
        fused = settle(method, watch, "auto")
    assert fused == plain
    assert watch.allocations == []
    assert not watch.waits or (name, choices) not in WAIT_FREE
