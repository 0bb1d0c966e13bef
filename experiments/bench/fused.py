"""The fused selection beside torch.topk, with pages of the same size for both, in launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.bench._compared_rows import PAGE_SIZES, README_CASE, FusedCase, PageSize, SelectionCase
from experiments.bench._gradients import DECODER, DISTRIBUTIONS, NETWORKS, load_or_train_inputs
from experiments.bench._launches import (
    CPU,
    LaunchPlan,
    run_launches,
    summarise_launch_median_ratios,
    summarise_launch_medians,
)
from experiments.bench._page_sizes import (
    check_pages_can_be_had,
    malloc_tuned_for,
    measure_huge_page_share,
    switch_off_huge_pages,
)
from experiments.bench._pages import FUSED_PAGE
from experiments.bench._runner import (
    WRONG,
    Benchmark,
    Record,
    check_known_names,
    is_measured_by_this_code,
    round_to_significant_digits,
    summarise_median_and_range,
)
from experiments.bench._select_comparison import (
    MAX_NUMEL_OF_MANY_GRADIENTS,
    MIN_REPEATS,
    RowSamples,
    SelectionComparison,
    cache_flush_bytes,
    mark_rows_beyond_memory,
)
from experiments.bench._select_steps import StepUnavailableError
from experiments.bench._timing import describe_single_thread_cpu_machine
from experiments.config.folders import ResultFolders
from sparsify.comm import Comm
from sparsify.ranges import NonNegativeFloat, NonNegativeInt, PositiveFraction, PositiveInt
from sparsify.types import num_selected

STEPS = ("eager", "fused")  # rows of BENCH=select
SIZES = (10**5, 10**6, 10**7, 10**8)
DENSITIES = (0.001, 0.01)
LARGEST_DENSITY = 0.1
NUMEL_OF_LARGEST_DENSITY = 10**7
REAL_GRADIENTS = ("vgg16", DECODER)
TOPK_TEMPORARY_BYTES = 16  # per element, that torch.topk allocates on a CPU
NEGLIGIBLE_SHARE = 0.001


def fused(
    *,
    n: Sequence[PositiveInt] = (),
    density: Sequence[PositiveFraction] = (),
    gradient: Sequence[str] = (),
    pages: Sequence[PageSize] = (),
    launches: PositiveInt = 5,
    turns: PositiveInt = 11,
    seconds: NonNegativeFloat = 3.0,
    flush: NonNegativeInt | None = None,
    gradients: str | None = None,
) -> Benchmark:
    """Time torch.topk's step over the fused selection's, by n, density, size of pages and gradient.

    A launch is a fresh process of one thread. In it both steps (acc += grad, select k of n, indices and
    values out, zeros in acc) take turns on the same residual and gradient, each with cold caches. A launch's
    ratio is the median of those within a turn; what is reported is the median over launches, with the
    smallest and the largest. Times are CPU time; wall time, which a busy machine stretches, is recorded
    beside it. Each launch checks once that both steps select the same magnitudes.

    Pages of a launch are *huge* for both steps (glibc's malloc is tuned; residual and gradients ask for
    them), *small* for both (the process gets no transparent huge pages), or the *default*: small ones from
    malloc, huge ones where `sparsify` asks for them. Each row says which share of the memory had huge pages.

    Without options: normal numbers of 10^5 to 10^8 elements, and gradients of VGG-16 and of a decoder, at
    density 0.001 and 0.01, with huge and with small pages; density 0.1 at 10^7; and the README's case.

    Args:
        n: numbers of elements; gradients of networks have their own.
        density: k/n.
        gradient: normal, laplace, mixed, ties, zeros, first_tied, vgg16, resnet18, decoder.
        pages: huge, small, default.
        launches: number of launches.
        turns: turns of a launch; at most three of more than 30 million elements.
        seconds: time after which a step takes no further turn in a launch, but for the first three.
        flush: MiB that are read before each step; by default more than the last cache holds.
        gradients: folder where gradients of the networks are kept.
    """
    cases = plan_cases(n, density, gradient, pages)
    folder = Path(gradients) if gradients else ResultFolders().results / "bench" / "gradients"
    flush_bytes = cache_flush_bytes(CPU) if flush is None else flush * 2**20

    def measure(case: Record) -> Iterator[Record]:
        row: Record = {"row": "fused", "k": num_selected(case["n"], case["density"])}
        try:
            check_pages_can_be_had(case["pages"])
            if case["gradient"] in NETWORKS:  # trained before the launches, whose memory stays untouched
                load_or_train_inputs(case["gradient"], folder, CPU)
        except (StepUnavailableError, ValueError) as error:
            yield row | {"why": str(error)}
            return
        case_turns = turns if case["n"] <= MAX_NUMEL_OF_MANY_GRADIENTS else min(turns, MIN_REPEATS)
        with malloc_tuned_for(case["pages"]):
            reports = run_launches(
                plan_selection_steps, launches, 1, case_turns, uses_virtual_comm=True, case=case,
                seconds=seconds, flush_bytes=flush_bytes, folder=str(folder.resolve()),
            )  # fmt: skip
        yield row | summarise_launches(reports, case["pages"])

    return Benchmark(
        machine=describe_single_thread_cpu_machine("1 thread a process"),
        description=f"{launches} launches; ratios are medians over launches [smallest, largest]; before each "
        f"step {flush_bytes >> 20} MiB are read",
        cases=[case._asdict() for case in cases],
        settings={"launches": launches, "turns": turns, "seconds": seconds, "flush_bytes": flush_bytes},
        measure=measure,
        header="gradient | n | density | pages | torch.topk, ms | fused, ms | torch.topk / fused | in wall "
        "time | launches | huge: residual | huge: malloc",
        row_format="{gradient} | {n:,} | {density:g} | {pages} | {torch_ms[median]:.3g} | "
        "{fused_ms[median]:.3g} | {ratio:.3g} | {wall_ratio:.3g} | {ratio[n]} | "
        "{residual_huge_share[median]:.0%} | {malloc_huge_share[median]:.0%}",
        summarise=lambda rows: {
            "torch": rows[0]["torch"],
            "torch_over_fused": {str(fused_case_of(row)): row.get("ratio") for row in rows},
        },
        is_settled=lambda rows: is_measured_by_this_code(rows) and not rows[0].get("why"),
        draw=FUSED_PAGE.draw_device,
    )


def fused_case_of(record: Record) -> FusedCase:
    return FusedCase(*(record[field] for field in FusedCase._fields))


def plan_cases(
    n: Sequence[int], density: Sequence[float], gradient: Sequence[str], pages: Sequence[PageSize]
) -> list[FusedCase]:
    """Return every combination of the options, or the default plan without any.

    Raises:
        ValueError: there is no such gradient.
    """
    check_known_names("gradient", gradient, DISTRIBUTIONS)
    both = PAGE_SIZES[:2]
    if n or density or gradient:
        plan = [*product(gradient or ("normal",), n or SIZES, density or DENSITIES, pages or both)]
    else:
        plan = [
            *product(("normal",), SIZES, DENSITIES, pages or both),
            *product(("normal",), (NUMEL_OF_LARGEST_DENSITY,), (LARGEST_DENSITY,), pages or both),
            *product(REAL_GRADIENTS, (0,), DENSITIES, pages or both),
            *(() if pages else (README_CASE,)),
        ]
    cases = list[FusedCase]()
    for name, size, share, page_size in plan:
        real_size = NETWORKS[name].num_parameters if name in NETWORKS else size
        cases.append(FusedCase(name, real_size, share, page_size))
    return list(dict.fromkeys(cases))


def plan_selection_steps(comm: Comm, options: Any) -> LaunchPlan:
    """Plan to time both steps in this process, with pages of the case's size."""
    if options.case["pages"] == "small":
        switch_off_huge_pages()
    return LaunchPlan(make_report=lambda: time_selection_steps(options))


def time_selection_steps(options: Any) -> Record:
    """Return the times of both steps by turn, what was found wrong, and the pages that the memory has."""
    case = FusedCase(**options.case)
    selection = SelectionCase(case.n, case.density, case.gradient)
    samples_by_row = {name: RowSamples() for name in STEPS}
    mark_rows_beyond_memory(selection, samples_by_row, CPU, options.flush_bytes)
    faults = dict[str, str]()
    if not any(samples.why_not_run for samples in samples_by_row.values()):
        comparison = SelectionComparison(
            selection, samples_by_row, set(), options.flush_bytes, Path(options.folder), CPU
        )
        faults = comparison.time_rows_and_find_faults(options.turns, options.seconds)
    for samples in samples_by_row.values():
        if samples.why_not_run:
            return {"why": samples.why_not_run}
    residual_share = measure_huge_page_share(comparison.residual)
    temporary = torch.zeros(TOPK_TEMPORARY_BYTES * case.n, dtype=torch.int8).fill_(1)  # as torch.topk's
    return {
        "source": comparison.inputs.source,
        "kernel": samples_by_row["fused"].kernel_name,
        "residual_huge_share": residual_share,
        "malloc_huge_share": measure_huge_page_share(temporary),
        "faults": [*faults.values()],
        "samples_ms": {
            name: {
                "wall": round_samples(samples.wall_ms_by_turn),
                "cpu": round_samples(samples.cpu_ms_by_turn),
            }
            for name, samples in samples_by_row.items()
        },
    }


def round_samples(ms_by_turn: Mapping[int, float]) -> list[float]:
    return [round_to_significant_digits(ms) for ms in ms_by_turn.values()]


def summarise_launches(reports: Sequence[Record], pages: PageSize) -> Record:
    """Return what a case's launches found, or the reason why one of them did not run."""
    for report in reports:
        if report.get("why"):
            return {"why": report["why"]}
    row: Record = {name: reports[0][name] for name in ("source", "kernel")}
    launches = [report["samples_ms"] for report in reports]
    for prefix, clock in (("", "cpu"), ("wall_", "wall")):
        row[f"{prefix}torch_ms"] = summarise_launch_medians(launches, "eager", clock)
        row[f"{prefix}fused_ms"] = summarise_launch_medians(launches, "fused", clock)
        row[f"{prefix}ratio"] = summarise_launch_median_ratios(launches, "eager", "fused", clock)
    faults = [fault for report in reports for fault in report["faults"]]
    for field in ("residual_huge_share", "malloc_huge_share"):
        shares = [report[field] for report in reports]
        row[field] = summarise_median_and_range(shares)
        if pages == "small" and max(shares) > NEGLIGIBLE_SHARE:
            faults.append(f"{field} is {max(shares):.1%} where huge pages were switched off")
    row["turns"] = [len(samples["eager"]["wall"]) for samples in launches]
    row["samples_ms"] = launches
    return row | {WRONG: "; ".join(dict.fromkeys(faults)) or None}
