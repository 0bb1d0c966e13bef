"""What MiCRO, ExDyna and DEFT share."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

import sparsify
from sparsify.kernels import Workspace
from sparsify.method import Sparsifier
from sparsify.methods.exdyna import ExDyna
from sparsify.methods.micro import Micro, Threshold
from sparsify.ranges import FollowRule
from tests.sparsify.laws import SHAPES, gradient, live
from tests.sparsify.methods.replays import select

EXCLUSIVE = ["deft", "exdyna", "micro"]


@pytest.mark.parametrize("name", EXCLUSIVE)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_each_worker_selects_in_a_part_of_its_own_so_nothing_is_sent_twice(name: str, size: int) -> None:
    method = sparsify.build(name, density=0.1)
    assert isinstance(method, Sparsifier)
    selector = method.select
    accs = [gradient(rank, 0, (227,)) for rank in range(size)]
    shapes = tuple(SHAPES[::-1])
    chosen, _ = select(selector, size, accs, 22, steps=4, shapes=shapes)
    for step in range(4):
        assert len(set(chosen[0][step])) == len(chosen[0][step])
        assert all(rank[step] == chosen[0][step] for rank in chosen)


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_two_host_synchronisations_however_many_tensors(name: str) -> None:
    """Published DEFT waits once per fragment."""
    lived = live(sparsify.build(name, density=0.1), 4, shapes=[(5, 3)] * 20)
    assert all(rank.host_syncs == [2] * 5 for rank in lived)


def test_the_published_factors_and_the_branch_that_never_runs() -> None:
    for selector in (Micro("published"), Micro("intended")):
        for count, factor in ((112, 1.005), (105, 1.00125), (50, 0.995)):
            state = Threshold(Workspace(torch.empty(0)), 1.0)
            selector.follow(count, 100, 4, state)
            assert state.value == factor
    in_band = {rule: Threshold(Workspace(torch.empty(0)), 1.0) for rule in get_args(FollowRule)}
    for rule, state in in_band.items():
        Micro(rule).follow(95, 100, 4, state)
    assert in_band["published"].value == 1.00125  # above its aim and below: it always rises
    assert in_band["intended"].value == 0.9987


def test_the_published_threshold_runs_away_where_the_workers_are_more_than_k() -> None:
    """Each worker sends one element at least, so that r = P / k lies above the band for ever."""
    ends = {}
    for rule in ("published", "intended"):
        accs = [gradient(rank, 0, (50,)) for rank in range(4)]
        _, states = select(Micro(rule, threshold=50.0), 4, accs, 2, steps=100)
        ends[rule] = states[0].value
    assert ends["published"] == pytest.approx(50 * 1.005**100, rel=1e-12)
    assert ends["intended"] < 50


def test_the_first_threshold_is_the_published_one() -> None:
    n, k = 400, 25
    _, states = select(Micro(), 2, [torch.zeros(n)] * 2, k)
    # Two elements were sent of 25: below the band.
    assert states[0].value == 0.995 / (2 * 25**0.5)


@pytest.mark.parametrize("selector", [Micro(), ExDyna()])
def test_thresholds_and_blocks_are_alike_on_all_workers(selector: Micro) -> None:
    accs = [gradient(rank, 0, (3000,)) * (1 + rank) for rank in range(3)]
    _, states = select(selector, 3, accs, 300, steps=20)
    assert {(state.value, state.step, tuple(state.blocks)) for state in states} == {
        (states[0].value, 20, tuple(states[0].blocks))
    }


@pytest.mark.parametrize("selector", [Micro(threshold=9.0), ExDyna(threshold=9.0)])
def test_a_worker_that_finds_nothing_sends_one_element_another_one_in_each_step(selector: Micro) -> None:
    chosen, _ = select(selector, 2, [torch.zeros(8), torch.zeros(8)], 2, steps=5)
    # In step t worker r looks at partition (t + r) mod 2; the union is listed in the order of the workers.
    assert chosen[0] == [[0, 4], [5, 1], [2, 6], [7, 3], [0, 4]]


@pytest.mark.parametrize("selector", [Micro(), ExDyna()])
@pytest.mark.parametrize(("n", "size"), [(1, 4), (3, 4), (5, 16), (33, 4), (227, 1)])
def test_buckets_smaller_than_the_number_of_workers_or_blocks_work(
    selector: Micro, n: int, size: int
) -> None:
    """Published ExDyna divides by zero below 32,768 elements, and both stop where P = 1."""
    chosen, _ = select(selector, size, [torch.zeros(n)] * size, 1, steps=3)
    assert [len(step) for step in chosen[0]] == [min(n, size)] * 3


def test_all_of_a_bucket_is_sent_where_k_is_n() -> None:
    for name in ("micro", "exdyna"):
        lived = live(sparsify.build(name, density=1.0), 3, make=lambda *at: 1e-9 * gradient(*at))
        assert lived[0].selected == [227] * 5
