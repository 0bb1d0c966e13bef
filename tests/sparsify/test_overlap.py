"""Aggregation while backpropagation goes on: the same weights, begun with earlier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sparsify
from sparsify.aggregator import Aggregator, Report
from sparsify.comm.torch import TorchComm
from sparsify.overlap import Overlap
from tests import worker_functions
from tests.worker_functions import on_processes


def test_overlapped_processes_train_to_the_same_weights(tmp_path: Path) -> None:
    ranks = on_processes(worker_functions.overlapped_and_not, 2, tmp_path)
    for found in ranks:
        for name, overlapped in found.items():
            if name.endswith("True"):
                assert torch.equal(overlapped, found[name.replace("True", "False")]), name
                assert torch.equal(overlapped, ranks[0][name]), name


class Alone(TorchComm):
    """A group of one, without processes."""

    rank, size = 0, 1

    def __init__(self) -> None: ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


def model_and_overlap(**choices: object) -> tuple[nn.Sequential, Overlap]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    method = sparsify.build("topk", **{"density": 0.5, "scope": "layer", **choices})
    return model, Overlap(Aggregator(method, model.named_parameters(), Alone()))


def test_a_bucket_is_begun_with_while_others_are_still_to_come() -> None:
    model, overlap = model_and_overlap()
    seen: list[int] = []
    first = model[0].weight
    assert isinstance(first, nn.Parameter)
    first.register_hook(lambda grad: seen.append(len(overlap.futures)))
    overlap.begin()
    model(torch.ones(2, 4)).sum().backward()
    assert 0 < seen[0] < 6  # of six buckets, when the first layer's turn comes
    report = overlap.finish()
    assert isinstance(report, Report)
    assert report.selected == sum(p.numel() // 2 for p in model.parameters())
    overlap.close()


def test_parameters_without_a_gradient_are_aggregated_at_the_end() -> None:
    model, overlap = model_and_overlap()
    overlap.begin()
    model[2](torch.ones(2, 3)).sum().backward()
    assert len(overlap.futures) == 2
    overlap.finish()
    assert len(overlap.futures) == 6
    overlap.close()


def test_backward_passes_that_were_not_announced_are_left_alone() -> None:
    model, overlap = model_and_overlap()
    model(torch.ones(2, 4)).sum().backward()
    assert overlap.futures == []
    overlap.close()


def test_an_error_in_the_other_thread_reaches_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, overlap = model_and_overlap()

    def broken(at: int, step: object) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr(overlap.aggregator, "aggregate_bucket", broken)
    overlap.begin()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(OSError, match="network is down"):
        overlap.finish()
    overlap.close()


def test_what_can_not_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="take scope=layer"):
        model_and_overlap(scope="global")
    model = nn.Linear(4, 5)
    for dense_vectors in (False, True):
        method = sparsify.build("dgc", density=0.5, clip_norm=1.0, dense_vectors=dense_vectors)
        with pytest.raises(ValueError, match="clip_norm"):
            Overlap(Aggregator(method, model.named_parameters(), Alone()))


def test_gradients_that_lie_elsewhere_are_aggregated_too() -> None:
    """Cleared to None, the gradient is a new tensor; and where none comes, it is zero."""
    model, overlap = model_and_overlap(density=1.0, feedback="none")
    overlap.aggregator.gradients.flat.fill_(7.0)
    model.zero_grad()  # to None
    overlap.begin()
    model[2](torch.ones(2, 3)).sum().backward()
    overlap.finish()
    found = torch.cat(overlap.aggregator.gradients.views)
    assert found[:8].tolist() == [2.0] * 8
    assert not found[8:].any()
    overlap.close()
