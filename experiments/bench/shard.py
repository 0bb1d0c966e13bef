"""Whole steps of a sharded model, with torch's own all-reduce between replicas and with ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsify
from experiments.bench._runner import Bench, Record
from experiments.bench._step_launches import CLOCKS, launched, meet, take_turns
from experiments.bench._timing import device_of, facts
from experiments.bench.step import times
from sparsify.method import Method
from sparsify.ranges import PositiveFraction, PositiveInt

HSDP = "hsdp"  # torch's own
OURS: dict[str, Callable[[float], Method]] = {
    "dense": lambda density: sparsify.dense(),
    "topk_bucket": lambda density: sparsify.topk(density=density, scope="bucket"),
    "topk_layer": lambda density: sparsify.topk(density=density, scope="layer"),
}
ShardedWay = Literal["dense", "topk_bucket", "topk_layer"]


def shard(
    *,
    ways: Sequence[ShardedWay] = ("dense", "topk_bucket", "topk_layer"),
    replicas: PositiveInt = 2,
    shards: PositiveInt = 2,
    width: PositiveInt = 256,
    layers: PositiveInt = 4,
    batch: PositiveInt = 4,
    length: PositiveInt = 64,
    density: PositiveFraction = 0.01,
    launches: PositiveInt = 5,
    turns: PositiveInt = 20,
) -> Bench:
    """What `sparsify.shard` costs: whole steps of a transformer, sharded and replicated, side by side.

    Worker processes of one thread each, over loopback. A launch is a fresh set of them; in it all ways take
    their steps in turns, in random order, and its ratio is the median of those within a turn. What is
    reported is the median over launches, with the smallest and the largest. CPU time is that of all workers,
    wall time that of the slowest.

    Args:
        ways: what is compared with torch's own HSDP.
        replicas, shards: of the mesh.
        width, layers: of the transformer.
        batch, length: of random inputs.
        density: k/n of topk.
        launches: sets of processes.
        turns: steps of each way in a launch.
    """
    about = facts(device_of("cpu"), threads=1)
    own = {"width": width, "layers": layers, "batch": batch, "length": length, "density": density}
    asked = SimpleNamespace(**own, workers=replicas * shards, grid=(replicas, shards), turns=turns, ways=ways)

    def measure(case: Record) -> list[Record]:
        told = [SimpleNamespace(**vars(asked), launch=launch) for launch in range(launches)]
        return [*times([launched(time_ways, one) for one in told], HSDP)]

    return Bench(
        about=about | {"name": f"{about['cpu']}, {replicas * shards} workers of 1 thread"},
        head=f"a transformer of {layers} layers of {width}, {replicas} replicas of {shards} shards; "
        f"{launches} launches; ratios are medians over launches [smallest, largest]",
        cases=[{"replicas": replicas, "shards": shards, **own, "turns": turns}],
        setting={"ways": [*ways], "launches": launches},
        measure=measure,
        heading="row | CPU, ms | CPU / HSDP | wall, ms | wall / HSDP",
        row="{row} | {cpu_ms[median]:.0f} | {cpu_over_hsdp[median]:.3f} "
        "[{cpu_over_hsdp[low]:.3f}, {cpu_over_hsdp[high]:.3f}] | {wall_ms[median]:.0f} | "
        "{wall_over_hsdp[median]:.3f} [{wall_over_hsdp[low]:.3f}, {wall_over_hsdp[high]:.3f}]",
        last=lambda rows: {
            f"{clock}_over_hsdp": {
                row["row"]: row[f"{clock}_over_hsdp"] for row in rows if row["row"] != HSDP
            }
            for clock in CLOCKS
        },
    )


def time_ways(rank: int, asked: Any, folder: str) -> None:
    """Steps of all ways, in each turn in another order, the same on all workers."""
    comm = meet(rank, asked, folder)
    mesh = init_device_mesh("cpu", asked.grid, mesh_dim_names=("replicate", "shard"))
    steps = {name: step_of(name, mesh, asked) for name in (HSDP, *asked.ways)}
    take_turns(comm, asked, steps, folder)


def step_of(name: str, mesh: DeviceMesh, asked: Any) -> Callable[[], None]:
    """A step of one way, each with a model of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.TransformerEncoderLayer(asked.width, 4, 4 * asked.width, 0.0, batch_first=True)
            for _ in range(asked.layers)
        )
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name != HSDP:
        sparsify.shard(model, optimiser, OURS[name](asked.density))
    drawn = torch.Generator().manual_seed(mesh.get_rank())
    inputs = torch.randn(asked.batch, asked.length, asked.width, generator=drawn)
    return partial(step, model, optimiser, inputs)


def step(model: nn.Module, optimiser: torch.optim.Optimizer, inputs: Tensor) -> None:
    """Forward, backward and the optimiser's own."""
    optimiser.zero_grad()
    model(inputs).square().mean().backward()
    optimiser.step()
