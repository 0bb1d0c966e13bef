"""Whole training steps, ours beside those that users of DDP have."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from operator import truediv
from typing import Any, Literal, TypeAlias

from experiments.bench._runner import Bench, Record, spread
from experiments.bench._step_launches import (
    AROUND,
    CLOCKS,
    LaunchAsked,
    Samples,
    count_ways,
    launched,
    time_around,
    time_ways,
)
from experiments.bench._step_page import ADD_BYTES, DDP, PAGE, table, title
from experiments.bench._step_ways import NETWORKS, WAYS, NetworkName, ways_here
from experiments.bench._timing import device_of, facts
from sparsify.ranges import PositiveFloat, PositiveFraction, PositiveInt, describe_unknown

Part: TypeAlias = Literal["time", "counts", "around"]
COUNTED = [name for name in WAYS if name == DDP or ("topk" in name and "overlap" not in name)]
AROUND_DENSITY = 0.001  # that of BENCH=select
LAYERS = 121
# What is wanted of the default cases: where it is in the last line, and the most that it may be.
TARGETS = (
    (("cpu_over_ddp", "linears", "register_topk_layer"), 1.3),
    (("cpu_over_ddp", "linears", "distribute_topk_layer"), 1.3),
    (("cpu_over_ddp", "linears", "register_dense_overlap"), 1.015),  # 1.01, to its digits
    (("operations", "resnet50", "register_topk_layer"), 150),
    (("aggregate_over_add",), 1.35),
    (("around_bytes_per_element",), 20.5),  # 20, and what goes with k
    (("candidates_over_k",), 1.2),
)


def step(
    *,
    parts: Sequence[Part] = ("time", "counts", "around"),
    networks: Sequence[NetworkName] = ("linears", "resnet50", "vgg16"),
    ways: Sequence[str] = (),
    workers: Sequence[PositiveInt] = (1,),
    count_workers: PositiveInt = 4,
    launches: PositiveInt = 5,
    turns: PositiveInt | None = None,
    density: PositiveFraction = 0.01,
    bucket_mb: PositiveFloat = 4.0,
    layers: PositiveInt = LAYERS,
) -> Bench:
    """What a whole step costs: plain DDP, DDP with torch's own hooks, and our wrappers, side by side.

    *time*: zero_grad, forward, backward, averaging and the optimiser's step, of small images, so that what
    averaging costs is not lost in what the network computes. A launch is a fresh set of processes of one
    thread each; in it all ways take their steps in turns, in random order, and its ratio is the median of
    those within a turn. What is reported is the median over launches, with the smallest and the largest. CPU
    time is of all threads and workers; wall time stands beside it.

    *counts*: one settled step of `--count-workers` workers: its collectives, but for those of buffers, and
    the tensor operations within our door, without views and allocations.

    *around*: one process without a network, of the largest of the networks' shapes: `aggregate` alone (the
    check and the averaging), and with `zero_grad` and the accumulation by autograd, beside the in-place add
    of as many elements, with cold caches; density 0.001.

    The last lines say which targets are met, where the cases are the default ones.

    Args:
        parts: time, counts, around.
        networks: linears, which has two small tensors a layer; resnet50; vgg16.
        ways: some of those that are compared; all by default. `ddp` is always among them.
        workers: processes, of one thread each, that are timed; one of all ways of ResNet-50 takes 5 GB.
        count_workers: those of which a step is counted.
        launches: sets of processes.
        turns: steps of each way in a launch; 40 of linears, 9 of others by default.
        density: k/n of topk.
        bucket_mb: scope of the ways that have one in MB.
        layers: of linears.
    """
    for name in ways:
        if name not in WAYS:
            raise ValueError(describe_unknown("way", name, [*WAYS]))
    here = ways_here()
    if missing := [name for name in ways if name not in here]:
        raise ValueError(f"{missing[0]} can't be run: this library's topk has no such scope; leave it out")
    chosen = [name for name in here if name == DDP or name in (ways or here)]
    counted = [name for name in chosen if name in COUNTED]
    about = facts(device_of("cpu"), threads=1)
    by_size = {name: sum(p.numel() for p in NETWORKS[name].make(layers).parameters()) for name in networks}
    largest = max(by_size, key=lambda name: by_size[name])
    cases: list[Record] = []
    for name in networks if "time" in parts else ():
        network = NETWORKS[name]
        trained = {"batch": network.batch, "shape": [*network.shape], "turns": turns or network.turns}
        for size in workers:
            case = {"part": "time", "network": name, "workers": size, **trained, "density": density}
            cases.append(case)
    for name in networks if "counts" in parts else ():
        cases.append({"part": "counts", "network": name, "workers": count_workers, "density": density})
    if "around" in parts:
        cases.append({
            "part": "around", "network": largest, "workers": 1,
            "turns": turns or NETWORKS["resnet50"].turns, "density": AROUND_DENSITY,
        })  # fmt: skip

    for case in cases:
        case |= {"layers": layers} if case["network"] == "linears" else {}

    def measure(case: Record) -> Iterator[Record]:
        asked = [
            LaunchAsked(
                case["network"], layers, case["workers"], counted if case["part"] == "counts" else chosen,
                case.get("turns", 1), case["density"], bucket_mb, launch,
            )
            for launch in range(launches)
        ]  # fmt: skip
        if case["part"] == "counts":
            yield from counts(launched(count_ways, asked[0]))
        elif case["part"] == "time":
            yield from times([launched(time_ways, one) for one in asked], DDP)
        else:
            yield from around([launched(time_around, one) for one in asked])

    return Bench(
        about=about | {"name": f"{about['cpu']}, 1 thread a process"},
        head=f"{launches} launches; ratios are medians over launches [smallest, largest]",
        cases=cases,
        setting={"ways": chosen, "launches": launches, "bucket_mb": bucket_mb, "layers": layers},
        measure=measure,
        title=title,
        text=table,
        last=summary,
        end=lambda line: verdicts(line) if layers == LAYERS and largest == "resnet50" else (),
        draw=PAGE.draw_one,
    )


def times(launches: Sequence[Samples], base: str) -> Iterator[Record]:
    """The row of each way: what it takes, and how often as long as `base`."""
    for name in launches[0]:
        row: Record = {"row": name}
        for clock in CLOCKS:
            row[f"{clock}_ms"] = spread([statistics.median(one[name][clock]) for one in launches])
            row[f"{clock}_over_{base}"] = spread([
                statistics.median(map(truediv, one[name][clock], one[base][clock])) for one in launches
            ])  # fmt: skip
        yield row | {"samples_ms": [one[name] for one in launches]}


def counts(found: Mapping[str, Record]) -> Iterator[Record]:
    """The row of each way, with DDP's number of buckets, of which each is one collective."""
    for name, counted in found.items():
        yield {"row": name, "ddp_buckets": found[DDP]["collectives"], **counted}


def around(launches: Sequence[Record]) -> Iterator[Record]:
    """The row of the in-place add, and those that are compared with it."""
    n, first = launches[0]["n"], launches[0]
    rows = {row["row"]: row for row in times([one["samples_ms"] for one in launches], "add")}
    kept = [one["candidates_over_k"] for one in launches if one["candidates_over_k"] is not None]
    rows["aggregate"]["candidates_over_k"] = spread(kept) if kept else None
    rows["around"]["operators"] = first["operators"]
    rows["around"]["bytes_per_element"] = round(first["operator_bytes"] / n, 3)
    rows["around"]["bytes_by_time"] = scaled(rows["around"]["cpu_over_add"], ADD_BYTES)
    for name in AROUND:
        yield {**rows[name], "n": n}


def scaled(ratio: Record, factor: float) -> Record:
    return ratio | {limit: round(factor * ratio[limit], 3) for limit in ("median", "low", "high")}


def summary(rows: list[Record]) -> Record:
    """The last line: ratios and counts by network and way; of the fewest workers that were timed."""
    line: Record = {"torch": rows[0]["torch"]}
    timed = [row for row in rows if row["part"] == "time"]
    least = min((row["workers"] for row in timed), default=1)
    line |= {"workers": least}
    for clock in CLOCKS:
        line[f"{clock}_over_ddp"] = by_network(
            [row for row in timed if row["workers"] == least and row["row"] != DDP], f"{clock}_over_ddp"
        )
    counted = [row for row in rows if row["part"] == "counts"]
    line["ddp_buckets"] = {row["network"]: row["ddp_buckets"] for row in counted}
    for name in ("collectives", "operations", "around_search"):
        line[name] = by_network(counted, name)
    of = {row["row"]: row for row in rows if row["part"] == "around"}
    return line | {
        "aggregate_over_add": of.get("aggregate", {}).get("cpu_over_add"),
        "around_over_add": of.get("around", {}).get("cpu_over_add"),
        "around_bytes_per_element": of.get("around", {}).get("bytes_per_element"),
        "around_bytes_by_time": of.get("around", {}).get("bytes_by_time"),
        "candidates_over_k": of.get("aggregate", {}).get("candidates_over_k"),
    }


def by_network(rows: Sequence[Record], field: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if field in row:
            found.setdefault(row["network"], {})[row["row"]] = row[field]
    return found


def verdicts(line: Record) -> list[str]:
    """A sentence for each target that was measured, by the medians."""
    buckets = line["ddp_buckets"].get("resnet50")
    wanted: list[tuple[tuple[str, ...], float]] = [*TARGETS]
    if buckets is not None:
        wanted.append((("collectives", "resnet50", "register_topk_layer"), buckets + 1))
    said = []
    for path, most in wanted:
        found: Any = line
        for name in path:
            found = (found or {}).get(name)
        if found is None:
            continue
        median = found["median"] if isinstance(found, dict) else found
        range_ = (
            f" [{found['low']:.4g}, {found['high']:.4g}], n = {found['n']}" if found is not median else ""
        )
        met = "met" if median <= most else "MISSED"
        said.append(f"{' '.join(path)}: at most {most:g} wanted, {median:.4g}{range_} measured: {met}")
    return said
