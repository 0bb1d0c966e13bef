"""Sharded models on meshes of replicas and shards: equal at density 1, and nothing is lost below it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sparsify
from sparsify.doors.sharded import units
from tests.sparsify import worker_functions
from tests.sparsify.doors.sharded.uses_sharded import (
    GRIDS,
    KINDS,
    KINDS_OF_MESH,
    NAMES,
    REFUSED_OF_SHARDS,
    RESUMED,
    blocks,
    kinds_in,
    optimiser_of,
    sharded,
    sparse_on,
    ways_on,
    whole_in,
)
from tests.sparsify.local.uses_guards import NEUTRAL, REFUSED, WROTE
from tests.sparsify.worker_functions import on_processes

Ranks = list[dict[str, Tensor]]
SIZES = sorted({replicas * shards for replicas, shards in GRIDS})


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    """What gloo processes lived through, by their number and by rank."""
    return {
        size: on_processes(worker_functions.uses_of_shards, size, tmp_path_factory.mktemp(f"shards{size}"))
        for size in SIZES
    }


def of(used: dict[int, Ranks], grid: tuple[int, int], part: str) -> Ranks:
    """What each rank of a grid found in one part."""
    at = f"{grid}: {part}: "
    return [
        {name.removeprefix(at): tensor for name, tensor in found.items() if name.startswith(at)}
        for found in used[grid[0] * grid[1]]
    ]


@pytest.mark.parametrize(("grid", "way"), [(grid, way) for grid in GRIDS for way in ways_on(grid)], ids=str)
def test_at_density_1_a_training_ends_where_torch_alone_does(
    way: str, grid: tuple[int, int], used: dict[int, Ranks]
) -> None:
    for found in of(used, grid, "ends"):
        expected = found[f"{way}, by torch"]
        assert torch.isfinite(expected).all()
        for name in whole_in(way, grid):
            for kind in kinds_in(way, grid):
                end = found[f"{way}, {name}, {kind}"]
                # Two gradients have one sum; the sum of three depends on their order, which rings change.
                if grid[0] == 2 or name == "dense":
                    assert torch.equal(end, expected), (name, kind)
                else:
                    loose = 2e-2 if "bfloat16" in way else 1e-5
                    torch.testing.assert_close(end, expected, rtol=loose, atol=loose)


CASES = [(grid, name) for grid in GRIDS for name in sparse_on(grid)]


@pytest.mark.parametrize(("grid", "name"), CASES, ids=str)
def test_replicas_agree_and_nothing_is_lost(name: str, grid: tuple[int, int], used: dict[int, Ranks]) -> None:
    ranks, (replicas, shards) = of(used, grid, "account"), grid
    for found in ranks:
        assert torch.equal(found[f"{name}: weights"], ranks[0][f"{name}: weights"])
    for shard in range(shards):
        column = [ranks[replica * shards + shard] for replica in range(replicas)]
        seen, got, owed = (
            torch.stack([found[f"{name}: {what}"] for found in column]) for what in ("seen", "got", "owed")
        )
        assert all(torch.equal(own, got[0]) for own in got)
        torch.testing.assert_close(got[0] + owed.mean(0), seen.mean(0), rtol=1e-4, atol=1e-5)
        assert seen.any()
        assert owed.any()
        assert owed.shape[1] == int(column[0][f"{name}: bytes"][2])  # one residual a shard


@pytest.mark.parametrize(("grid", "name"), [case for case in CASES if "topk" in case[1][:4]], ids=str)
def test_a_worker_sends_its_own_to_the_other_replicas(
    name: str, grid: tuple[int, int], used: dict[int, Ranks]
) -> None:
    for found in of(used, grid, "account"):
        sent, selected, n = found[f"{name}: bytes"].tolist()
        assert sent == 8 * (grid[0] - 1) * selected  # a value and an index of 4 bytes each
        assert 0 < selected < n / 3


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gradients_are_means_over_replicas_and_shards_whatever_the_type(
    grid: tuple[int, int], used: dict[int, Ranks]
) -> None:
    size = grid[0] * grid[1]
    for found in of(used, grid, "means"):
        assert len(found) == 9
        for name, mean in found.items():
            close = 1e-6 if "float32" in name else 1e-2
            torch.testing.assert_close(mean, torch.full((7, 3), (size + 1) / 2), rtol=close, atol=0, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RESUMED)
def test_training_resumes_to_the_bit(name: str, kind: str, used: dict[int, Ranks]) -> None:
    ends = [found[name] for found in of(used, (2, 2), "resumed")]
    for found, end in zip(of(used, (2, 2), "resumed"), ends, strict=True):
        assert torch.equal(end, ends[0])
        assert torch.equal(found[f"{name}, {kind}"], end)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_reduce_scatter_of_rounded_gradients(grid: tuple[int, int], used: dict[int, Ranks]) -> None:
    for found in of(used, grid, "rounded"):
        error, largest = (found["rounded"] - found["plain"]).abs().max(), found["plain"].abs().max()
        assert 0 < error < largest / 60  # half a level of 127, of gradients before they are averaged
        blocks = sum(-(-size // 64) for size in found["sizes"].tolist())
        assert int(found["bytes"]) == (grid[1] - 1) * (int(found["sizes"].sum()) + 4 * blocks)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_local_steps_of_shards_are_those_of_whole_replicas(
    grid: tuple[int, int], used: dict[int, Ranks]
) -> None:
    ranks = of(used, grid, "locally")
    for found in ranks:
        for name in ("localsgd", "diloco"):
            for kind in ("both", "shards"):
                torch.testing.assert_close(found[f"{name}, {kind}"], found[f"{name}, whole"])
        for way in ("averaged", "divided"):  # with a round of one step of plain SGD
            torch.testing.assert_close(found[f"{way} by local steps"], found[f"{way} by torch"])
        for name in ("sparseloco", "diloco, both"):
            assert torch.equal(found[name], ranks[0][name])
        assert not torch.equal(found["sparseloco, on"], found["sparseloco"])
        assert torch.equal(found["sparseloco, on"], found["sparseloco, resumed"])


@pytest.mark.parametrize("kind", KINDS_OF_MESH)
@pytest.mark.parametrize("case", [*REFUSED_OF_SHARDS, "read in place"])
def test_between_local_steps_what_an_exchange_would_undo_is_refused(
    case: str, kind: str, used: dict[int, Ranks]
) -> None:
    sentence = REFUSED[case][1] if case in REFUSED else WROTE
    for found in of(used, (2, 2), "guarded"):
        assert sentence in bytes(found[f"refused, {kind}: {case}"].tolist()).decode()


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("kind", KINDS_OF_MESH)
@pytest.mark.parametrize("case", NEUTRAL)
def test_between_local_steps_what_changes_no_weights_changes_no_training(
    case: str, kind: str, reshards: bool, used: dict[int, Ranks]
) -> None:
    for found in of(used, (2, 2), "guarded"):
        end = found[f"end, {kind}, {reshards}: {case}"]
        assert torch.equal(end, found[f"end, {kind}, True: nothing"])


def test_an_optimiser_of_whole_matrices_steps_within_its_replica(used: dict[int, Ranks]) -> None:
    ranks = of(used, (2, 2), "orthogonally")
    for found in ranks:
        for kind in KINDS_OF_MESH:  # Muon computes in bfloat16, with sums in another order
            torch.testing.assert_close(found[kind], found["whole"], rtol=0, atol=5e-3)
    assert not torch.equal(ranks[0]["both"], ranks[2]["both"])  # in the middle of a round


@pytest.mark.parametrize("kind", KINDS_OF_MESH)
def test_a_sharded_model_may_have_several_optimisers_of_local_steps(
    kind: str, used: dict[int, Ranks]
) -> None:
    ranks = of(used, (2, 2), "by two optimisers")
    for found in ranks:
        assert torch.equal(found[f"{kind}, two"], found[f"{kind}, one"])
        assert torch.equal(found[f"{kind}, two"], ranks[0][f"{kind}, two"])


SENTENCES = {
    "a plain model": "shard takes a model that is sharded, and this Blocks is not; call torch.distributed",
    "no replicas": "says nothing of replicas; hand over the other one: sparsify.shard(..., replicas=",
    "the shards as replicas": "who share a replica, are among them; hand over the other dimension",
    "both dimensions": "has a group for each of its 2 dimensions; hand over the one whose",
    "global": "scope='global' chooses from the gradient of the whole model, and FSDP reduces it unit by unit",
    "clipped": "clip_norm needs the norm of the whole gradient",
    "momentum twice": "the method applies momentum itself, and the optimiser has 0.9 too",
    "within": "has no reduce-scatter; within a replica take sparsify.qgz(bits=8)",
    "no method": "'topk' is not a method; build one",
    "hooked": "the whole model has an all-reduce hook already, and takes no other",
    "twice": "sparsify.shard was called for this model already; go on with what that returned",
    "two meshes": "shard exchanges all units between the same replicas",
    "partly": "is trained and in no unit, so that nobody would average it; call fully_shard on the whole",
    "before sharding": "is not the optimiser's, with whose state its residual is saved; make one optimiser",
    "differently": "Disagreement: the workers disagree on method: ranks [0, 2] have ",
    "NaN": "NonFiniteShard: rank 0, step 0: the gradient of blocks.1 has a NaN or Inf; it reached no",
    "scaled": "a GradScaler steps the optimiser, so residuals would hold gradients of different scales",
    "halfway": "state_dict() came between backward and step",
    "frozen later": "a parameter was not used in this step, or frozen or unfrozen since",
    "unfrozen": "blocks.0.0.weight was frozen when sparsify.shard was called, and is trained now",
    "hooked later": "the whole model was given another all-reduce hook after sparsify.shard",
    "half wrapped": "output.weight is trained, and no optimiser of local steps has it",
    "NaN, local": "NonFiniteDrift: rank 3, round 0: body.weight has a NaN or Inf after the local steps",
    "of another shard": "and this is rank",
    "nothing on some": "ranks [1, 3] have no: there is nothing to aggregate: all parameters are empty",
    "flattened": "With flatten_optimizer_state_dict=True torch reads back only what the optimiser itself",
    "of none": "torch reads back only what the optimiser itself remembers: save and load without it",
    "of another method": "the saved state is of another method, or of a model with other units",
    "loaded before": "residuals that would be lost; load it after sparsify.shard",
}


@pytest.mark.parametrize("case", SENTENCES)
def test_what_can_not_be_is_refused_in_a_sentence_by_all(case: str, used: dict[int, Ranks]) -> None:
    said = [bytes(found[case].tolist()).decode() for found in of(used, (2, 2), "refusals")]
    assert SENTENCES[case] in said[0]
    tells_own_ranks = ("the shards as replicas", "two meshes", "of another shard")
    assert len(set(said)) == 1 or case in tells_own_ranks


@pytest.mark.usefixtures("group_of_one")
def test_one_replica_alone_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=NAMES)
    model = sharded(blocks(), mesh)
    with pytest.raises(ValueError, match="there is one replica only, of 1 shards"):
        sparsify.shard(model, optimiser_of(model), sparsify.dense())


def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.raises(ValueError, match=r"works with torch 2\.11 to 2\.15, and this is 2\.16\.0"):
        units.units_of(torch.nn.Linear(1, 1))
