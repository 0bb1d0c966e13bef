"""Local steps on real processes: what virtual ranks do, and the same numbers from an overlapping thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slurm.emulated.network import EmulatedNetwork
from sparsify.comm import virtual
from tests.slurm.emulated.links import a_link, needs_namespaces
from tests.sparsify.local.rounds import STRATEGIES, anchors_of_all, sent_by_all
from tests.sparsify.worker_functions import on_processes


@pytest.mark.parametrize("size", [2, 3])
def test_local_steps_are_the_same_on_virtual_ranks_and_on_gloo_processes(size: int, tmp_path: Path) -> None:
    real = on_processes(anchors_of_all, size, tmp_path)
    simulated = virtual.run(size, lambda comm: anchors_of_all(comm, comm.now_s))
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


@needs_namespaces
def test_what_is_counted_leaves_by_the_interface_and_nothing_between_exchanges(tmp_path: Path) -> None:
    nodes = EmulatedNetwork(a_link(1e9), 2)
    try:
        found = on_processes(sent_by_all, 2, tmp_path, nodes=nodes)
    finally:
        nodes.close()
    acknowledgements = 400  # bytes, of what came at the end of the step before
    for rank in found:
        assert rank.keys() == STRATEGIES.keys()
        for name, sent in rank.items():
            left, counted = sent.T
            exchanges = counted > 0
            assert exchanges.sum() == 2 * STRATEGIES[name].fragments, name
            assert (left[~exchanges] < acknowledgements).all(), (name, sent)
            assert (left >= counted).all(), (name, sent)
            # Headers, and gloo's own messages.
            assert (left < 1.04 * counted + 6000)[exchanges].all(), (name, sent)
