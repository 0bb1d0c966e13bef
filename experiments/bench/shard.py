"""Whole steps of a sharded model, with torch's own all-reduce between replicas and with ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsify
from experiments.bench._launches import (
    CLOCKS,
    LaunchPlan,
    TimedVariant,
    compare_variants_with_base,
    run_launches,
)
from experiments.bench._runner import Benchmark, Record
from experiments.bench._timing import describe_single_thread_cpu_machine
from sparsify.comm import Comm
from sparsify.method import Method
from sparsify.ranges import PositiveFraction, PositiveInt

HSDP = "hsdp"  # torch's own
METHOD_MAKERS: dict[str, Callable[[float], Method]] = {
    "dense": lambda density: sparsify.dense(),
    "topk_bucket": lambda density: sparsify.topk(density=density, scope="bucket"),
    "topk_layer": lambda density: sparsify.topk(density=density, scope="layer"),
}
MethodName = Literal["dense", "topk_bucket", "topk_layer"]


def shard(
    *,
    ways: Sequence[MethodName] = ("dense", "topk_bucket", "topk_layer"),
    replicas: PositiveInt = 2,
    shards: PositiveInt = 2,
    width: PositiveInt = 256,
    layers: PositiveInt = 4,
    batch: PositiveInt = 4,
    length: PositiveInt = 64,
    density: PositiveFraction = 0.01,
    launches: PositiveInt = 5,
    turns: PositiveInt = 20,
) -> Benchmark:
    """Time whole steps of a sharded transformer with `sparsify.shard` and with torch's HSDP, side by side.

    Worker processes of one thread each, over loopback. A launch is a fresh set of them; in it all rows take
    their steps in turns, in random order, and its ratio is the median of those within a turn. What is
    reported is the median over launches, with the smallest and the largest. CPU time is that of all workers,
    wall time that of the slowest.

    Args:
        ways: methods to compare with torch's own HSDP.
        replicas, shards: sizes of the mesh.
        width, layers: sizes of the transformer.
        batch, length: sizes of random inputs.
        density: k/n of topk.
        launches: number of launches.
        turns: steps of each row in a launch.
    """
    size: dict[str, Any] = {
        "width": width,
        "layers": layers,
        "batch": batch,
        "length": length,
        "density": density,
    }

    def measure(case: Record) -> Iterator[Record]:
        reports = run_launches(
            plan_sharded_steps, launches, replicas * shards, turns,
            **size, mesh_shape=(replicas, shards), methods=ways,
        )  # fmt: skip
        yield from compare_variants_with_base(reports, HSDP)

    return Benchmark(
        machine=describe_single_thread_cpu_machine(f"{replicas * shards} workers of 1 thread"),
        description=f"a transformer of {layers} layers of {width}, {replicas} replicas of {shards} shards; "
        f"{launches} launches; ratios are medians over launches [smallest, largest]",
        cases=[{"replicas": replicas, "shards": shards, **size, "turns": turns}],
        settings={"ways": [*ways], "launches": launches},
        measure=measure,
        header="row | CPU, ms | CPU / HSDP | wall, ms | wall / HSDP",
        row_format="{row} | {cpu_ms[median]:.0f} | {cpu_over_hsdp:.3f} | {wall_ms[median]:.0f} | "
        "{wall_over_hsdp:.3f}",
        summarise=lambda rows: {
            f"{clock}_over_hsdp": {
                row["row"]: row[f"{clock}_over_hsdp"] for row in rows if row["row"] != HSDP
            }
            for clock in CLOCKS
        },
    )


def plan_sharded_steps(comm: Comm, options: Any) -> LaunchPlan:
    """Plan to time the steps of HSDP and of all methods."""
    mesh = init_device_mesh("cpu", options.mesh_shape, mesh_dim_names=("replicate", "shard"))
    return LaunchPlan({
        name: TimedVariant(make_sharded_step(name, mesh, options)) for name in (HSDP, *options.methods)
    })  # fmt: skip


def make_sharded_step(name: str, mesh: DeviceMesh, options: Any) -> Callable[[], None]:
    """Return a training step of a sharded model of its own."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(options.layers):
        model.append(nn.TransformerEncoderLayer(options.width, 4, 4 * options.width, 0.0, batch_first=True))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name != HSDP:
        sparsify.shard(model, optimizer, METHOD_MAKERS[name](options.density))
    rng = torch.Generator().manual_seed(mesh.get_rank())
    inputs = torch.randn(options.batch, options.length, options.width, generator=rng)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step
