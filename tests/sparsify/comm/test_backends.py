"""The same code on gloo processes and on virtual ranks: same weights, same split of the communication
time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from sparsify.comm import virtual
from sparsify.methods import per_step
from tests.sparsify import worker_functions
from tests.sparsify.worker_functions import on_processes


@pytest.mark.parametrize("size", [2, 3])
def test_virtual_ranks_train_to_the_weights_of_gloo_processes(size: int, tmp_path: Path) -> None:
    real = on_processes(worker_functions.weights_after_20_steps, size, tmp_path)
    simulated = virtual.run(size, lambda comm: worker_functions.weights_after_20_steps(comm, comm.now))
    start = TASKS.build("cnn_digits", {})
    data = datasets.load("digits", None, torch.device("cpu"))
    initial = torch.cat(
        [p.flatten() for p in start.model(data, 0, torch.device("cpu"), torch.float64).parameters()]
    )
    for name in worker_functions.METHODS:
        for rank in range(size):
            ours, theirs = simulated[rank][name], real[rank][name]
            assert (ours - initial).norm() > 0.1  # they did train
            if name == "dense":  # gloo's allreduce chooses the order of its sums
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_method_does_the_same_on_virtual_ranks_and_on_gloo_processes(size: int, tmp_path: Path) -> None:
    real = on_processes(worker_functions.updates_of_every_method, size, tmp_path)
    simulated = virtual.run(size, lambda comm: worker_functions.updates_of_every_method(comm, comm.now))
    for name in per_step():
        for rank in range(size):
            ours, theirs = simulated[rank][name], real[rank][name]
            if simulated[rank][f"{name} reduced"]:  # gloo's allreduce chooses the order of its sums
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("where", ["virtual", "gloo"])
def test_a_late_rank_shows_as_wait_on_the_others_and_not_as_transfer(where: str, tmp_path: Path) -> None:
    if where == "gloo":
        found = on_processes(worker_functions.one_late_rank, 2, tmp_path)
    else:
        found = virtual.run(2, lambda comm: worker_functions.one_late_rank(comm, comm.now))
    late = worker_functions.LATE_S
    for mode in ("serialised", "production"):
        (wait_0, transfer_0), (wait_1, transfer_1) = (found[rank][mode].tolist() for rank in (0, 1))
        # A machine that is busy may delay anything by some milliseconds; a tenth of the delay is 40 ms.
        assert wait_0 == pytest.approx(late, abs=0.1 * late), mode
        assert wait_1 < 0.1 * late, mode
        assert transfer_0 < 0.1 * late, mode
        assert transfer_1 < 0.1 * late, mode
