"""Sharded models on meshes of replicas and shards: equal at density 1, and nothing is lost below it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import sparsify
from sparsify.wrappers.sharded import units
from tests.sparsify.local import uses_guards
from tests.sparsify.worker_functions import on_processes
from tests.sparsify.wrappers.sharded import uses_sharded
from tests.sparsify.wrappers.sharded.uses_sharded import (
    GRIDS,
    KINDS_OF_MESH,
    NAMES,
    REFUSED,
    REFUSED_OF_SHARDS,
    WAYS,
    blocks,
    optimizer_of,
    sharded,
)
from tests.sparsify.wrappers.user_acts import Lived, check_balanced

Ranks = list[Any]
Used = Callable[..., Ranks]
FIRST = GRIDS[0]
ALL_GRIDS = pytest.mark.parametrize(
    "grid", [FIRST, *(pytest.param(grid, marks=pytest.mark.extended) for grid in GRIDS[1:])], ids=str
)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    """Return a function for what each rank of a grid found in one part.

    Its processes are started for the first caller.
    """

    @cache
    def run(group: int, size: int) -> Ranks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(uses_sharded.GROUP, str(group))
            return on_processes(uses_sharded.uses_of_group, size, tmp_path_factory.mktemp("shards"))

    def of(part: str, grid: tuple[int, int] = FIRST) -> Ranks:
        (group,) = [number for number, parts in enumerate(uses_sharded.GROUPS) if part in parts]
        return [found[str(grid)][part] for found in run(group, grid[0] * grid[1])]

    return of


def check_ends(way: str, grid: tuple[int, int], used: Used) -> None:
    """Check that a training with each method ended where that by torch alone did."""
    for found in used("ends", grid):
        expected = found[way]["torch"]
        assert torch.isfinite(expected).all()
        assert len(found[way]) >= 3
        for name, end in found[way].items():
            # Two gradients have one sum; the sum of three depends on their order, which rings change.
            is_exact = grid[0] == 2 or name.startswith("dense")
            error = 0.0 if is_exact else 2e-2 if "bfloat16" in way else 1e-5
            torch.testing.assert_close(end, expected, rtol=error, atol=error, msg=f"{way}, {name}")


@pytest.mark.parametrize("way", WAYS)
def test_at_density_1_a_training_ends_where_torch_alone_does(way: str, used: Used) -> None:
    check_ends(way, FIRST, used)


@pytest.mark.extended
@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_at_density_1_larger_grids_end_where_torch_alone_does(grid: tuple[int, int], used: Used) -> None:
    for way in [*WAYS][:2]:
        check_ends(way, grid, used)


@ALL_GRIDS
def test_replicas_agree_nothing_is_lost_and_each_worker_sends_its_own(
    grid: tuple[int, int], used: Used
) -> None:
    ranks = used("sparse", grid)
    for name in ranks[0]:
        lived = [Lived(*found[name]) for found in ranks]
        assert any(residual.any() for residual in lived[0].owed.values()), name
        check_balanced(lived)
        for rank in lived if name.startswith("topk") else ():
            ((selected, n),) = rank.report["sent"].tolist()
            assert rank.report["bytes"].tolist() == [12 * (grid[0] - 1) * selected]  # 8 a value, 4 an index
            assert 0 < selected < n / 3


@ALL_GRIDS
def test_a_reduce_scatter_of_rounded_gradients(grid: tuple[int, int], used: Used) -> None:
    for found in used("rounded", grid):
        error, largest = (found["rounded"] - found["plain"]).abs().max(), found["plain"].abs().max()
        assert 0 < error < largest / 60  # half a level of 127, of gradients before they are averaged
        scales = sum(-(-size // 64) for size in found["sizes"].tolist())
        assert int(found["bytes"]) == (grid[1] - 1) * (int(found["sizes"].sum()) + 4 * scales)


@ALL_GRIDS
def test_local_steps_of_shards_are_those_of_whole_replicas(grid: tuple[int, int], used: Used) -> None:
    ranks = used("locally", grid)
    for found in ranks:
        for name in uses_sharded.LOCALLY:
            error = 5e-3 if name == "muloco" else 1e-6  # Muon computes in bfloat16, with other sums
            for kind in KINDS_OF_MESH:
                ends = found[f"{name}, {kind}"], found[f"{name}, whole"]
                torch.testing.assert_close(*ends, rtol=0, atol=error, msg=f"{name}, {kind}")
    assert not torch.equal(ranks[0]["diloco, both"], ranks[-1]["diloco, both"])  # in the middle of a round


@ALL_GRIDS
def test_sparse_local_steps_of_shards_agree_and_resume_to_the_bit(grid: tuple[int, int], used: Used) -> None:
    ranks = used("resumed locally", grid)
    for after_two_rounds, straight, resumed in ranks:
        assert torch.equal(after_two_rounds, ranks[0][0])
        assert not torch.equal(straight, after_two_rounds)
        assert torch.equal(resumed, straight)


def test_training_resumes_to_the_bit(used: Used) -> None:
    ranks = used("resumed")
    for found in ranks:
        for name, (straight, resumed) in found.items():
            assert torch.equal(resumed, straight), name
            assert torch.equal(straight, ranks[0][name][0]), name


@pytest.mark.parametrize("kind", KINDS_OF_MESH)
def test_between_local_steps_what_an_exchange_would_undo_is_refused(kind: str, used: Used) -> None:
    """And what changes no weights changes no training."""
    sentences = {case: uses_guards.REFUSED[case][1] for case in REFUSED_OF_SHARDS}
    for found in used("guarded"):
        for case, sentence in {**sentences, "read in place": uses_guards.WROTE}.items():
            assert sentence in found[f"{case}, {kind}"], case
        for case in uses_guards.NEUTRAL:
            assert torch.equal(found[f"{case}, {kind}"], found[f"nothing, {kind}"]), case


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused_in_a_sentence_by_all(case: str, used: Used) -> None:
    said = [found[case] for found in used("refused")]
    assert REFUSED[case][1] in said[0]
    tells_own_ranks = ("the shards as replicas", "two meshes", "of another shard", "skipped by some")
    assert len(set(said)) == 1 or case.startswith(tells_own_ranks)


@pytest.mark.usefixtures("group_of_one")
def test_one_replica_alone_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=NAMES)
    model = sharded(blocks(), mesh)
    with pytest.raises(ValueError, match="there is one replica only, of 1 shards"):
        sparsify.shard(model, optimizer_of(model), sparsify.dense())


def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.raises(ValueError, match=r"works with torch 2\.11 to 2\.15, and this is 2\.16\.0"):
        units.find_units(torch.nn.Linear(1, 1))
