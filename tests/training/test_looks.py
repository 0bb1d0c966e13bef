"""Observations of a worker on its own gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from analysis.records.schema import ALL
from experiments.training.selection_observers import (
    DENSITIES,
    MIN_ELEMENTS,
    CapturedEnergyMeter,
    SelectionObserver,
    energy_shares_left_out_by_topk,
    histogram_in_rms_units,
    selected_region_mask,
)
from sparsify.core.bucket import Bucket
from sparsify.types import SparseVector
from tests.conftest import there
from tests.training.digits import Lines


class LookLines(Lines):
    """A log of looks in memory."""

    def of(self, what: str) -> list[dict[str, Any]]:
        return [line for line in super().of("look") if line["what"] == what]


def topk(values: torch.Tensor, k: int = 10) -> SparseVector:
    indices = values.abs().topk(k).indices
    return SparseVector(indices, values[indices])


def bell(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def looked_at(*buckets: Bucket) -> LookLines:
    """Return the log of a look at the first step."""
    log = LookLines()
    watch = there(SelectionObserver(buckets, log, 1, 0).hook_for_step(0))
    for bucket in buckets:
        watch(bucket.flat, topk(bucket.flat))
    return log


def test_a_bell_is_seen_as_a_bell() -> None:
    xs, densities = map(np.array, histogram_in_rms_units(3.0 * bell(100_000)))
    assert densities.sum() * (xs[1] - xs[0]) == pytest.approx(1.0, abs=1e-4)
    assert densities == pytest.approx(np.exp(-(xs**2) / 2) / math.sqrt(2 * math.pi), abs=0.02)
    assert histogram_in_rms_units(torch.zeros(10)) == ([], [])


def test_what_is_left_out_is_the_energy_that_topk_does_not_keep() -> None:
    values = bell(20_000)
    found = energy_shares_left_out_by_topk(values)
    for density, left in zip(DENSITIES, found, strict=True):
        k = max(1, int(density * len(values)))
        kept = topk(values, k).values.double().square().sum() / values.double().square().sum()
        assert left == pytest.approx(1 - float(kept), abs=1e-6)
    assert energy_shares_left_out_by_topk(torch.zeros(5)) == [0.0] * len(DENSITIES)


def test_captured_energy_is_the_share_of_all_buckets_together() -> None:
    watch = CapturedEnergyMeter()
    buckets = [bell(300), 2 * bell(500)]
    for values in buckets:
        watch(values, topk(values))
    sent = torch.cat([topk(values).values for values in buckets])
    expected = sent.square().sum() / torch.cat(buckets).square().sum()
    assert watch.captured_share() == pytest.approx(float(expected))


def test_regions_are_the_largest_by_norm_and_single_elements_what_was_selected() -> None:
    values = torch.zeros(95)
    values[42], values[93] = 3.0, 2.0
    selected = values != 0
    assert selected_region_mask(values, selected, 1, 2 / 95) is selected
    (found,) = selected_region_mask(values, selected, 10, 0.1).nonzero().T.tolist()
    assert found == [4]
    (found,) = selected_region_mask(values, selected, 10, 0.2).nonzero().T.tolist()
    assert found == [4, 9]


def test_what_stays_is_kept_and_what_moves_is_not() -> None:
    """Large values in one region, at another place of it in each step."""
    log = LookLines()
    looks = SelectionObserver([Bucket(torch.zeros(4000), ("weight",), ((40, 100),))], log, 5, 0)
    for step in range(12):
        acc = torch.zeros(4000)
        acc[100 + 8 * step : 108 + 8 * step] = 1.0
        watch = looks.hook_for_step(step)
        assert (watch is None) == (step % 5 != 0)
        if watch:
            watch(acc, topk(acc, 8))
    kept = {(line["of"], line["step"]): (line["xs"], line["values"]) for line in log.of("kept")}
    assert kept["weight/1", 10] == ([5.0, 10.0], [0.0, 0.0])
    assert kept["weight/100", 10] == ([5.0, 10.0], [1.0, 1.0])
    heat = log.of("heat")[0]["values"]
    assert heat[1] == pytest.approx(8 / 63, rel=0.05)
    assert sum(value > 0 for value in heat) == 1


def test_small_tensors_are_seen_as_part_of_the_whole_only_and_several_buckets_are_no_whole() -> None:
    log = looked_at(Bucket(bell(1010), ("bias", "weight"), ((10,), (MIN_ELEMENTS,))))
    assert [line["of"] for line in log.of("histogram")] == ["weight", ALL]
    assert {line["of"]: line["values"] for line in log.of("size")} == {"weight": [1000.0], ALL: [1010.0]}
    log = looked_at(Bucket(bell(1000), ("b",), ((1000,),)), Bucket(bell(2000), ("a",), ((2000,),)))
    for what in ("left_out", "histogram"):
        assert [line["of"] for line in log.of(what)] == ["b", "a"]
