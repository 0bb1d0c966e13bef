"""Whole training steps, ours beside those that users of DDP have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from experiments.bench._compared_rows import AROUND_ROWS, DDP
from experiments.bench._launches import CLOCKS, compare_variants_with_base, run_launches
from experiments.bench._pages import STEP_PAGE, step_case_title
from experiments.bench._runner import Benchmark, Record, check_known_names, summarise_median_and_range
from experiments.bench._step_plans import count_step_operators, plan_times_around_search, plan_whole_steps
from experiments.bench._step_variants import NETWORKS, STEP_MAKERS, NetworkName
from experiments.bench._targets import BenchmarkTarget
from experiments.bench._timing import describe_single_thread_cpu_machine
from sparsify.ranges import PositiveFloat, PositiveFraction, PositiveInt

Part: TypeAlias = Literal["time", "counts", "around"]
DENSITY_AROUND_SEARCH = 0.001  # that of BENCH=select
BYTES_PER_ADDED_ELEMENT = 12  # of the in-place add: two numbers read, one written
LAYERS = 121
TARGETS = (  # of the default cases
    BenchmarkTarget(("cpu_over_ddp", "linears", "register_topk_layer"), 1.3),
    BenchmarkTarget(("cpu_over_ddp", "linears", "distribute_topk_layer"), 1.3),
    BenchmarkTarget(("cpu_over_ddp", "linears", "register_dense_overlap"), 1.015),  # 1.01, to its digits
    BenchmarkTarget(("operations", "resnet50", "register_topk_layer"), 150),
    BenchmarkTarget(("aggregate_over_add",), 1.35),
    BenchmarkTarget(("around_bytes_per_element",), 20.5),  # 20, and what goes with k
    BenchmarkTarget(("candidates_over_k",), 1.2),
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
) -> Benchmark:
    """Time whole training steps of plain DDP, DDP with torch's own hooks, and our wrappers, side by side.

    *time*: zero_grad, forward, backward, averaging and the optimizer's step, of small images, so that what
    averaging costs is not lost in what the network computes. A launch is a fresh set of processes of one
    thread each; in it all rows take their steps in turns, in random order, and its ratio is the median of
    those within a turn. What is reported is the median over launches, with the smallest and the largest. CPU
    time is of all threads and workers; wall time stands beside it.

    *counts*: one settled step of `--count-workers` workers: its collectives, but for those of buffers, and
    the tensor operations where gradients are averaged, without views and allocations.

    *around*: one process without a network, of the largest of the networks' shapes: `aggregate` alone (the
    check and the averaging), and with `zero_grad` and the accumulation by autograd, beside the in-place add
    of as many elements, with cold caches; density 0.001.

    The last lines say which targets are met, where the cases are the default ones.

    Args:
        parts: time, counts, around.
        networks: linears, which has two small tensors a layer; resnet50; vgg16.
        ways: rows to compare; by default all. `ddp` is always among them.
        workers: numbers of timed processes, of one thread each; one process with all rows of ResNet-50 takes
            5 GB.
        count_workers: number of processes whose step is counted.
        launches: number of launches.
        turns: steps of each row in a launch; by default 40 of linears, 9 of other networks.
        density: k/n of topk.
        bucket_mb: scope of the rows whose scope is in MB.
        layers: number of layers of linears.
    """
    check_known_names("way", ways, STEP_MAKERS)
    timed_names = [name for name in STEP_MAKERS if name == DDP or name in (ways or STEP_MAKERS)]
    counted_names = [
        name for name in timed_names if name == DDP or ("topk" in name and "overlap" not in name)
    ]
    sizes = {name: sum(p.numel() for p in NETWORKS[name].make(layers).parameters()) for name in networks}
    largest = max(sizes, key=lambda name: sizes[name])
    cases = list[Record]()
    for name in networks if "time" in parts else ():
        network = NETWORKS[name]
        training = {
            "batch": network.batch_per_worker,
            "shape": [*network.sample_shape],
            "turns": turns or network.default_turns,
        }
        for size in workers:
            cases.append({"part": "time", "network": name, "workers": size, **training, "density": density})
    for name in networks if "counts" in parts else ():
        cases.append({"part": "counts", "network": name, "workers": count_workers, "density": density})
    if "around" in parts:
        cases.append({
            "part": "around", "network": largest, "workers": 1,
            "turns": turns or NETWORKS["resnet50"].default_turns, "density": DENSITY_AROUND_SEARCH,
        })  # fmt: skip
    for case in cases:
        if case["network"] == "linears":
            case["layers"] = layers

    def measure(case: Record) -> Iterator[Record]:
        options = {
            "network": case["network"], "layers": layers, "density": case["density"], "bucket_mb": bucket_mb
        }  # fmt: skip
        if case["part"] == "counts":
            (report,) = run_launches(count_step_operators, 1, case["workers"], **options, ways=counted_names)
            for name, numbers in report["counts"].items():  # each of DDP's buckets is one collective
                yield {"row": name, "ddp_buckets": report["counts"][DDP]["collectives"], **numbers}
        elif case["part"] == "time":
            reports = run_launches(
                plan_whole_steps, launches, case["workers"], case["turns"], **options, ways=timed_names
            )
            yield from compare_variants_with_base(reports, DDP)
        else:
            yield from around_search_rows(
                run_launches(plan_times_around_search, launches, 1, case["turns"], **options)
            )

    return Benchmark(
        machine=describe_single_thread_cpu_machine("1 thread a process"),
        description=f"{launches} launches; ratios are medians over launches [smallest, largest]",
        cases=cases,
        settings={"ways": timed_names, "launches": launches, "bucket_mb": bucket_mb, "layers": layers},
        measure=measure,
        case_title=step_case_title,
        format_rows=STEP_PAGE.format_case_table,
        summarise=summarise_by_network,
        targets=lambda result: list_targets(result) if layers == LAYERS and largest == "resnet50" else (),
        draw=STEP_PAGE.draw_device,
    )


def around_search_rows(reports: Sequence[Record]) -> Iterator[Record]:
    """Yield the row of the in-place add, and of the parts of a step that are compared with it."""
    first = reports[0]
    rows = {row["row"]: row for row in compare_variants_with_base(reports, "add")}
    ratios = [report["candidates_over_k"] for report in reports if report["candidates_over_k"] is not None]
    rows["aggregate"]["candidates_over_k"] = summarise_median_and_range(ratios) if ratios else None
    over_add = rows["around"]["cpu_over_add"]
    bounds = {name: round(BYTES_PER_ADDED_ELEMENT * over_add[name], 3) for name in ("median", "low", "high")}
    rows["around"] |= {
        "operators": first["operators"],
        "bytes_per_element": round(first["operator_bytes"] / first["n"], 3),
        "bytes_by_time": over_add | bounds,
    }
    for name in AROUND_ROWS:
        yield {**rows[name], "n": first["n"]}


def summarise_by_network(rows: list[Record]) -> Record:
    """Return ratios and counts by network and variant, of the fewest workers that were timed."""
    timed_rows = [row for row in rows if row["part"] == "time"]
    fewest_workers = min((row["workers"] for row in timed_rows), default=1)
    compared_rows = [row for row in timed_rows if row["workers"] == fewest_workers and row["row"] != DDP]
    counted_rows = [row for row in rows if row["part"] == "counts"]
    around = {row["row"]: row for row in rows if row["part"] == "around"}
    aggregate = around.get("aggregate", {})
    whole = around.get("around", {})
    return {
        "torch": rows[0]["torch"],
        "workers": fewest_workers,
        **{
            f"{clock}_over_ddp": value_by_network_and_variant(compared_rows, f"{clock}_over_ddp")
            for clock in CLOCKS
        },
        "ddp_buckets": {row["network"]: row["ddp_buckets"] for row in counted_rows},
        **{
            field: value_by_network_and_variant(counted_rows, field)
            for field in ("collectives", "operations", "around_search")
        },
        "aggregate_over_add": aggregate.get("cpu_over_add"),
        "around_over_add": whole.get("cpu_over_add"),
        "around_bytes_per_element": whole.get("bytes_per_element"),
        "around_bytes_by_time": whole.get("bytes_by_time"),
        "candidates_over_k": aggregate.get("candidates_over_k"),
    }


def value_by_network_and_variant(rows: Sequence[Record], field: str) -> dict[str, dict[str, Any]]:
    """Return a field of the rows that have it, by network and variant."""
    values = dict[str, dict[str, Any]]()
    for row in rows:
        if field in row:
            values.setdefault(row["network"], {})[row["row"]] = row[field]
    return values


def list_targets(result: Record) -> list[BenchmarkTarget]:
    """Return all targets, with a bound on collectives where the number of DDP's buckets is known."""
    buckets = result["ddp_buckets"].get("resnet50")
    if buckets is None:
        return [*TARGETS]
    path = ("collectives", "resnet50", "register_topk_layer")
    return [*TARGETS, BenchmarkTarget(path, buckets + 1)]
