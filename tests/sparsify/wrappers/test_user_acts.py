"""Each act of users with each wrapper: replicas stay equal, nothing is lost, and overlap changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.sparsify.worker_functions import on_processes
from tests.sparsify.wrappers import user_acts
from tests.sparsify.wrappers.user_acts import ACTS, AVERAGING, METHODS, Lived, check_balanced, check_equal

Ranks = list[dict[str, Any]]
Used = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    """Return what two gloo processes lived through, by rank, given the part of all acts."""

    @cache
    def run(part: int) -> Ranks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(user_acts.PART, str(part))
            return on_processes(user_acts.acts_of_part, 2, tmp_path_factory.mktemp("acts"))

    return run


def lived(used: Used, name: str, scope: str | float, wrapper: str) -> list[Lived]:
    """Return what each rank lived through."""
    ranks = [found[f"{name}|{scope}|{wrapper}"] for found in used(user_acts.part_of(name))]
    for rank in ranks:
        assert not isinstance(rank, str), f"{name}, {scope}, {wrapper}: {rank}"
    return [Lived(*rank) for rank in ranks]


@pytest.mark.parametrize("name", ACTS)
def test_an_act_loses_nothing_and_ends_alike_on_all_workers_and_with_overlap(name: str, used: Used) -> None:
    act = ACTS[name]
    for scope in act.scopes:
        wrappers = act.in_scope(scope).wrappers
        assert wrappers
        for wrapper in wrappers:
            ranks = lived(used, name, scope, wrapper)
            assert any(p.any() for p in ranks[0].seen.values())
            check = check_balanced if act.keeps_mass else check_equal
            check(ranks)
            overlapped = f"{wrapper}, overlapped"
            if overlapped in wrappers and not name.startswith("skipped"):
                check_same_bits(ranks, lived(used, name, scope, overlapped))


def check_same_bits(ranks: list[Lived], others: list[Lived], error: float = 0.0, case: str = "") -> None:
    """Check that weights and residuals are the same on each worker, up to a relative error."""
    for rank, other in zip(ranks, others, strict=True):
        found, expected = ((one.end, one.owed, one.report["sent"]) for one in (other, rank))
        torch.testing.assert_close(
            found, expected, rtol=error, atol=error, msg=lambda text: f"{case}: {text}"
        )


@pytest.mark.parametrize("name", ["resumed", "by closures"])
def test_an_act_ends_where_plain_training_does(name: str, used: Used) -> None:
    act = ACTS[name]
    for scope in act.scopes:
        if scope == "bucket":  # DDP begins with other buckets than it has after a step
            continue
        for wrapper in act.in_scope(scope).wrappers:
            check_same_bits(lived(used, "nothing", scope, wrapper), lived(used, name, scope, wrapper))


@pytest.mark.parametrize("name", ["nothing", "warm-up", "scheduled: factors"])
def test_an_act_ends_alike_under_ddp(name: str, used: Used) -> None:
    check_same_bits(lived(used, name, "layer", "distribute"), lived(used, name, "layer", "register"))


def test_float32_is_searched_and_written_at_once_to_the_bits_of_torch(used: Used) -> None:
    act = ACTS["in float32"]
    for scope in act.scopes:
        for wrapper in act.in_scope(scope).wrappers:
            expected, found = (
                lived(used, name, scope, wrapper) for name in ("in float32, by torch", "in float32")
            )
            check_same_bits(expected, found)


@pytest.mark.parametrize("wrapper", AVERAGING)
def test_each_worker_reports_what_it_sends(wrapper: str, used: Used) -> None:
    for rank in lived(used, "nothing", "layer", wrapper):
        sizes = [p.numel() for p in rank.end.values()]
        selected = sum(max(1, n // 10) for n in sizes)
        assert rank.report["sent"].tolist() == [[selected, sum(sizes)]]
        assert rank.report["bytes"].tolist() == [12 * selected]  # a value of 8 bytes and an index of 4 each
    for rank in lived(used, "dense, longer", "layer", wrapper):
        assert rank.report["sent"].tolist() == [[sum(sizes), sum(sizes)]]


def test_every_method_ends_alike_with_every_wrapper(used: Used) -> None:
    """To the bit, but for sums that DDP makes in another order: those of dense, and of a norm to clip to."""
    for name, act in METHODS.items():
        error = 1e-12 if name in ("dense", "clipped dgc") else 0.0
        for scope in act.scopes:
            expected = lived(used, name, scope, "distribute")
            check_equal(expected)
            for wrapper in act.in_scope(scope).wrappers:
                found = lived(used, name, scope, wrapper)
                check_same_bits(expected, found, error, f"{name}, {scope}, {wrapper}")
