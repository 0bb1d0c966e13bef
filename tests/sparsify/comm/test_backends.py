"""Gloo processes and virtual ranks run the same code.

They come to the same weights and the same split of the communication time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsify.comm import virtual
from sparsify.methods import per_step_names
from tests.sparsify import worker_functions
from tests.sparsify.worker_functions import on_processes


def test_virtual_ranks_train_to_the_weights_of_gloo_processes(tmp_path: Path) -> None:
    size = 3
    real = on_processes(worker_functions.weights_after_20_steps, size, tmp_path)
    simulated = virtual.run(size, lambda comm: worker_functions.weights_after_20_steps(comm, comm.now_s))
    assert not torch.equal(simulated[0]["dense"], simulated[0]["topk"])  # they did train
    for name in worker_functions.METHODS:
        for rank in range(size):
            ours, theirs = simulated[rank][name], real[rank][name]
            if name == "dense":  # gloo's allreduce chooses the order of its sums
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("size", [3, 4])
def test_every_method_does_the_same_on_virtual_ranks_and_on_gloo_processes(size: int, tmp_path: Path) -> None:
    real = on_processes(worker_functions.updates_of_every_method, size, tmp_path)
    simulated = virtual.run(size, lambda comm: worker_functions.updates_of_every_method(comm, comm.now_s))
    for name in per_step_names():
        for rank in range(size):
            ours, theirs = simulated[rank][name], real[rank][name]
            if simulated[rank][f"{name} reduced"]:  # gloo's allreduce chooses the order of its sums
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(ours, theirs), name


def test_a_late_rank_shows_as_wait_on_the_others_and_not_as_transfer(tmp_path: Path) -> None:
    """A machine that is busy may delay anything by some milliseconds; a tenth of the delay is 40 ms."""
    real = on_processes(worker_functions.one_late_rank, 2, tmp_path)
    simulated = virtual.run(2, lambda comm: worker_functions.one_late_rank(comm, comm.now_s))
    late = worker_functions.LATE_S
    for on_time, delayed in (real, simulated):
        for mode in ("serialised", "production"):
            waits_and_transfers = torch.cat([on_time[mode], delayed[mode]])
            expected = waits_and_transfers.new_tensor([late, 0.0, 0.0, 0.0])
            torch.testing.assert_close(waits_and_transfers, expected, rtol=0.0, atol=0.1 * late)
