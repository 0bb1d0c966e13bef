"""Muon for matrices and AdamW for the rest, as docs/own-training.md says, with each wrapper."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.sparsify.worker_functions import on_processes
from tests.sparsify.wrappers import uses_muon
from tests.sparsify.wrappers.uses_muon import WRAPPERS


def test_muon_beside_adamw_trains_and_resumes_to_the_bit(tmp_path: Path) -> None:
    """With local steps in the middle of a round; with shards also by the names of parameters."""
    ranks = on_processes(uses_muon.trained, 4, tmp_path)
    for found in ranks:
        expected, *others = (found.pop(f"{wrapper}, of all") for wrapper in WRAPPERS[:3])
        for end in others:  # Muon computes in bfloat16
            torch.testing.assert_close(end, expected, rtol=0, atol=5e-3)
        assert found.keys() == {*WRAPPERS, "shard, by names"}
        for way, (start, saved, straight, resumed) in found.items():
            assert not torch.equal(start, saved), way
            assert not torch.equal(saved, straight), way
            assert torch.equal(straight, resumed), way
            if way != "local_steps":
                assert torch.equal(straight, ranks[0][way][2]), way
    assert not torch.equal(ranks[0]["local_steps"][2], ranks[1]["local_steps"][2])
