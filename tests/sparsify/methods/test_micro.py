"""MiCRO against a transcription of its algorithm."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import sparsify
from sparsify.comm import virtual
from sparsify.doors.aggregator import Aggregator
from tests.sparsify.laws import live
from tests.sparsify.methods.replays import equal_updates, exclusive_by_the_paper, gradients_of


@pytest.mark.parametrize("rule", ["intended", "published"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_micro_is_the_papers_algorithm(size: int, rule: str) -> None:
    method = sparsify.build("micro", density=0.1, threshold=2.2, rule=rule)
    lived = live(method, size, steps=25)
    updates, _ = exclusive_by_the_paper(gradients_of(lived), 0.1, 2.2, rule, None)
    equal_updates(lived, updates, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("name", "size"), [("micro", 1), ("micro", 4), ("exdyna", 2)])
@pytest.mark.parametrize("is_fixed", [True, False], ids=["fixed signs", "random signs"])
def test_the_threshold_rises_until_as_much_leaves_as_comes_in(name: str, size: int, is_fixed: bool) -> None:
    """On a stationary gradient: the docstring's fixed point, from below. Magnitudes are 0.8 on average."""
    density, steps = 0.05, 400
    rests = 0.8 / density if is_fixed else density**-0.5

    def body(comm: virtual.VirtualComm) -> tuple[float, float]:
        parameter = Parameter(torch.zeros(1000))
        method = sparsify.build(name, density=density, threshold=0.4 * rests)
        aggregator, counts = Aggregator(method, [("p", parameter)], comm), []
        own = torch.Generator().manual_seed(comm.rank)
        same = torch.randn(1000, generator=own)
        for _ in range(steps):
            parameter.grad = same.clone() if is_fixed else torch.randn(1000, generator=own)
            aggregator.gradients.collect()
            counts.append(aggregator.aggregate().selected)
        return aggregator.states[0].select.value, sum(counts[-100:]) / 100

    threshold, count = virtual.run(size, body)[0]
    assert 0.7 * rests < threshold < 2 * rests
    assert count == pytest.approx(density * 1000, rel=0.2)
