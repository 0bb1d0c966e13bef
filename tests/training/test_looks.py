"""What a worker sees of its own gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from analysis.records.schema import ALL
from experiments.training import looks
from experiments.training.looks import DENSITIES, Looks, histogram, left_out, regions
from sparsify.core.bucket import Bucket
from sparsify.types import Sparse
from tests.conftest import there
from tests.training.digits import Lines


class LookLines(Lines):
    """A log of looks in memory."""

    def of(self, what: str) -> list[dict[str, Any]]:
        return [line for line in super().of("look") if line["what"] == what]


def topk(values: torch.Tensor, k: int) -> Sparse:
    indices = values.abs().topk(k).indices
    return Sparse(indices, values[indices])


def test_a_bell_is_seen_as_a_bell() -> None:
    values = 3.0 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    xs, found = histogram(values)
    assert sum(found) * (xs[1] - xs[0]) == pytest.approx(1.0, abs=1e-4)
    for x, density in zip(xs, found, strict=True):
        assert density == pytest.approx(math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi), abs=0.02)
    assert histogram(torch.zeros(10)) == ([], [])


def test_what_is_left_out_lies_between_nothing_and_what_random_k_leaves() -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    found = left_out(values)
    for density, left in zip(DENSITIES, found, strict=True):
        k = max(1, int(density * len(values)))
        kept = topk(values, k).values.double().square().sum() / values.double().square().sum()
        assert left == pytest.approx(1 - float(kept), abs=1e-6)
        assert 0 <= left <= 1 - k / len(values)
    assert left_out(torch.zeros(5)) == [0.0] * len(DENSITIES)


def test_regions_are_the_largest_by_norm_and_single_elements_what_was_selected() -> None:
    values = torch.zeros(95)
    values[42], values[93] = 3.0, 2.0
    selected = values != 0
    assert regions(values, selected, 1, 2 / 95) is selected
    (found,) = regions(values, selected, 10, 0.1).nonzero().T.tolist()
    assert found == [4]
    (found,) = regions(values, selected, 10, 0.2).nonzero().T.tolist()
    assert found == [4, 9]


def test_what_stays_is_kept_and_what_moves_is_not() -> None:
    """Large values in one region, at another place of it in each step."""
    n, log = 4000, LookLines()
    flat = torch.zeros(n)
    watched = Looks([Bucket(flat, ("weight",), ((40, 100),))], log, 5, 0)
    for step in range(12):
        acc = torch.zeros(n)
        acc[100 + 8 * step : 100 + 8 * step + 8] = 1.0
        watch = watched.at(step)
        assert (watch is None) == (step % 5 != 0)
        if watch:
            watch(acc, topk(acc, 8))
    kept = {
        (line["of"], line["step"]): dict(zip(line["xs"], line["values"], strict=True))
        for line in log.of("kept")
    }
    assert kept["weight/1", 5] == {5.0: 0.0}
    assert kept["weight/1", 10] == {5.0: 0.0, 10.0: 0.0}
    assert kept["weight/100", 10] == {5.0: 1.0, 10.0: 1.0}
    assert {line["of"] for line in log.of("shuffled")} == {line["of"] for line in log.of("kept")}
    (heat,) = [line["values"] for line in log.of("heat") if line["step"] == 0]
    assert heat[1] == pytest.approx(8 / 63, rel=0.05)
    assert sum(value > 0 for value in heat) == 1


def test_small_tensors_are_seen_as_part_of_the_whole_only() -> None:
    log = LookLines()
    flat = torch.randn(1010, generator=torch.Generator().manual_seed(0))
    watch = there(Looks([Bucket(flat, ("bias", "weight"), ((10,), (1000,)))], log, 1, 0).at(0))
    watch(flat, topk(flat, 10))
    assert [line["of"] for line in log.of("histogram")] == ["weight", ALL]
    assert {line["of"]: line["values"] for line in log.of("size")} == {"weight": [1000.0], ALL: [1010.0]}


def test_of_several_buckets_each_is_a_whole_of_its_own() -> None:
    log = LookLines()
    flat = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    buckets = [Bucket(flat[:1000], ("b",), ((1000,),)), Bucket(flat[1000:], ("a",), ((2000,),))]
    watch = there(Looks(buckets, log, 1, 0).at(0))
    for bucket in buckets:
        watch(bucket.flat, topk(bucket.flat, 10))
    assert [line["of"] for line in log.of("left_out")] == ["b", "a"]
    assert [line["of"] for line in log.of("histogram")] == ["b", "a"]
    assert looks.LARGE == 1000
