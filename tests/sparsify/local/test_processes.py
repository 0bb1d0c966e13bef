"""Local steps on real processes: what virtual ranks do, and the same numbers from an overlapping thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsify.comm import virtual
from tests.sparsify import worker_functions
from tests.sparsify.local.rounds import STRATEGIES
from tests.sparsify.worker_functions import on_processes


@pytest.mark.parametrize("size", [2, 3])
def test_local_steps_are_the_same_on_virtual_ranks_and_on_gloo_processes(size: int, tmp_path: Path) -> None:
    real = on_processes(worker_functions.anchors_of_local_steps, size, tmp_path)
    simulated = virtual.run(size, lambda comm: worker_functions.anchors_of_local_steps(comm, comm.now))
    for ours, theirs in zip(simulated, real, strict=True):
        for name in STRATEGIES:
            if size == 2 or name in ("noloco", "sparseloco", "streaming", "late Top-k"):  # gather in order
                assert torch.equal(ours[name], theirs[name]), name
            else:  # gloo's allreduce chooses the order of its sums
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-10, atol=1e-12)
        overlapped = [name for name in theirs if name.endswith("overlapped")]
        assert len(overlapped) == 2
        for name in overlapped:
            assert torch.equal(theirs[name], theirs[name.removesuffix(" overlapped")]), name
