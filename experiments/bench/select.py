"""Selecting k of n, with error feedback."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from experiments.bench import Device
from experiments.bench._compared_rows import (
    BYTE_TERMS,
    FLOORS,
    SELECT_ROWS,
    STANDARD_SELECTION_CASE,
    SelectionCase,
)
from experiments.bench._gradients import DECODER, DISTRIBUTIONS, FIRST_TIED, NETWORKS
from experiments.bench._pages import SELECT_PAGE
from experiments.bench._runner import (
    WRONG,
    Benchmark,
    Record,
    check_known_names,
    round_to_significant_digits,
    summarise_median_and_range,
    summarise_turn_ratios,
    summarise_turn_times,
)
from experiments.bench._select_comparison import (
    RowSamples,
    SelectionComparison,
    cache_flush_bytes,
    mark_rows_beyond_memory,
)
from experiments.bench._select_steps import STEP_KINDS
from experiments.bench._targets import BenchmarkTarget
from experiments.bench._timing import (
    DEFAULT_REPEATS,
    choose_device_and_set_threads,
    describe_machine_and_code,
)
from experiments.config.folders import ResultFolders
from sparsify.ranges import NonNegativeFloat, NonNegativeInt, PositiveFraction, PositiveInt
from sparsify.types import num_selected

SIZES = (270_000, 11_200_000, 14_700_000, 25_600_000, 138_000_000, 345_000_000)
DENSITIES = (0.0001, 0.001, 0.01, 0.1)
IMAGE_NETWORKS = tuple(name for name in NETWORKS if name != DECODER)  # which need no files
REAL = "real"  # all of these
NUMEL_OF_OTHER_DISTRIBUTIONS = 14_700_000
RATIOS = (
    ("eager", "fused"), ("eager_hugepages", "fused"), ("fused", "add"), ("fused", "copy"),
    ("threshold", "add"),
)  # fmt: skip
FLOAT_BYTES = 4
CPU_ONLY = "eager_hugepages"
EAGER_ROWS = ("eager", CPU_ONLY)
TARGETS = {  # of the standard case, by device
    "cpu": (
        BenchmarkTarget(("eager_over_fused",), 30.0, is_lower_bound=True),
        BenchmarkTarget(("eager_hugepages_over_fused",), 15.0, is_lower_bound=True),
        BenchmarkTarget(("fused_over_add",), 1.2),
    ),
    "cuda": (
        BenchmarkTarget(("eager_over_fused",), 6.0, is_lower_bound=True),
        BenchmarkTarget(("fused_over_add",), 1.35),
    ),
}


def select(
    *,
    n: Sequence[PositiveInt] = (),
    density: Sequence[PositiveFraction] = (),
    distribution: Sequence[str] = (),
    rows: Sequence[str] = (),
    repeats: PositiveInt | None = None,
    seconds: NonNegativeFloat = 6.0,
    device: Device | None = None,
    threads: PositiveInt | None = None,
    flush: NonNegativeInt | None = None,
    gradients: str | None = None,
) -> Benchmark:
    """Time whole steps side by side: acc += grad, select k of n, indices and values out, zeros in acc.

    Without options: every n at density 0.001, every density at 25.6 million, every distribution but the
    decoder's at 14.7 million (real gradients: at their own size). In each case residual and gradients are the
    same for all rows; every repetition goes through all rows in turn, each with cold caches, so that ratios
    are of neighbours in time. The residual evolves as in training, by exact Top-k. Each row's first step is
    not counted, but checked: those that are exact must select the same magnitudes. Residual and gradients lie
    in huge pages where the system has them, as `sparsify` allocates them, so all rows gain from these; what
    torch.topk allocates itself does not.

    The last lines say which targets are met. The very last is one JSON object, for n = 25.6 million, density
    0.001, normal numbers.

    Args:
        n: numbers of elements.
        density: k/n.
        distribution: normal, laplace, mixed, ties, zeros, first_tied, vgg16, resnet18, decoder; real: vgg16
            and resnet18.
        rows: some of add, copy, fused, eager, eager_hugepages, fallback, threshold, dgc, gaussiank,
            compile, sort, paper_kernel; all by default.
        repeats: repetitions; by default 11 on a CPU, 50 on a GPU.
        seconds: time after which a row stops repeating.
        device: cpu or cuda; by default cuda where there is a GPU.
        threads: CPU threads; by default torch's number.
        flush: MiB that are read before each step; by default more than the last cache holds.
        gradients: folder where gradients of the networks are kept.
    """
    check_known_names("row", rows, STEP_KINDS)
    names = [name for name in STEP_KINDS if name in (rows or STEP_KINDS)]
    cases = plan_cases(n, density, distribution)
    torch_device = choose_device_and_set_threads(device, threads)
    folder = Path(gradients) if gradients else ResultFolders().results / "bench" / "gradients"
    flush_bytes = cache_flush_bytes(torch_device) if flush is None else flush * 2**20
    repeats = repeats or DEFAULT_REPEATS[torch_device.type]

    def measure(case: Record) -> Iterator[Record]:
        selection = SelectionCase(**case)
        samples_by_row = {name: RowSamples() for name in names}
        source = "Not run"
        faults = dict[str, str]()
        mark_rows_beyond_memory(selection, samples_by_row, torch_device, flush_bytes)
        if not all(samples.why_not_run for samples in samples_by_row.values()):
            comparison = SelectionComparison(
                selection, samples_by_row, set(rows), flush_bytes, folder, torch_device
            )
            faults = comparison.time_rows_and_find_faults(repeats, seconds)
            source = comparison.inputs.source
            del comparison  # and its memory
        for name in names:
            yield make_row_record(selection, name, samples_by_row, source, torch_device.type) | {
                WRONG: faults.get(name)
            }
        if torch_device.type == "cuda":
            torch.cuda.empty_cache()

    return Benchmark(
        machine=describe_machine_and_code(torch_device),
        description=f"{repeats} repetitions, fewer of rows that take long; before each step "
        f"{flush_bytes >> 20} MiB are read",
        cases=[case._asdict() for case in cases],
        settings={"rows": names, "repeats": repeats, "seconds": seconds, "flush_bytes": flush_bytes},
        measure=measure,
        case_title=lambda case: str(SelectionCase(**case)),
        format_rows=lambda case_rows: (
            f"{case_rows[0]['source']}\n\n{SELECT_PAGE.format_case_table(case_rows)}"
        ),
        summarise=summarise_ratios,
        targets=lambda result: (
            TARGETS[torch_device.type] if selection_case_of(result) == STANDARD_SELECTION_CASE else ()
        ),
        draw=SELECT_PAGE.draw_device,
    )


def selection_case_of(record: Record) -> SelectionCase:
    return SelectionCase(*(record[field] for field in SelectionCase._fields))


def plan_cases(
    n: Sequence[int], density: Sequence[float], distribution: Sequence[str]
) -> list[SelectionCase]:
    """Return every combination of the options, or the default plan without any.

    Raises:
        ValueError: there is no such distribution.
    """
    names = list[str]()
    for name in distribution:
        names += IMAGE_NETWORKS if name == REAL else [name]
    check_known_names("distribution", names, [*DISTRIBUTIONS, REAL])
    size, share, normal = STANDARD_SELECTION_CASE
    others = [name for name in DISTRIBUTIONS if name not in (normal, DECODER)]
    if n or density or names:
        plan = [*product(n or (size,), density or (share,), names or (normal,))]
    else:
        plan = [
            *product(SIZES, (share,), (normal,)),
            *product((size,), DENSITIES, (normal,)),
            *product((NUMEL_OF_OTHER_DISTRIBUTIONS,), (share,), others),
        ]
    cases = list[SelectionCase]()
    for size, share, name in plan:
        real_size = NETWORKS[name].num_parameters if name in NETWORKS else size
        cases.append(SelectionCase(real_size, share, name))
    return list(dict.fromkeys(cases))


def make_row_record(
    case: SelectionCase, name: str, samples_by_row: dict[str, RowSamples], source: str, device: str
) -> Record:
    """Return the record of a row."""
    n = case.n
    k = num_selected(n, case.density)
    samples = samples_by_row[name]
    row: Record = {
        "k": k, "source": source, "row": name, "what": SELECT_ROWS[name]["what"],
        "exact": STEP_KINDS[name].is_exact,
    }  # fmt: skip
    if not samples.wall_ms_by_turn:
        return row | {"why": samples.why_not_run}
    repeats = len(samples.wall_ms_by_turn)
    stats = samples.stats
    selected = statistics.mean(samples.selected_counts) if samples.selected_counts else None
    candidates = stats.candidates / stats.steps if stats.steps else None
    bytes_per_element, bytes_words = count_traffic_bytes_per_element(
        name, device, 2 if case.distribution == FIRST_TIED else FLOAT_BYTES, selected=(selected or 0) / n,
        candidates=(candidates or 0) / n, thresholds=samples.num_host_syncs / repeats,
    )  # fmt: skip
    spread = summarise_median_and_range([*samples.wall_ms_by_turn.values()])
    row |= {
        "kernel": samples.kernel_name,
        "repeats": repeats,
        **{f"{number}_ms": spread[number] for number in ("median", "low", "high")},
        "spread": spread["spread"],
        "cpu_ms": summarise_turn_times(samples.cpu_ms_by_turn),
    }
    for clock, field in (("", "wall_ms_by_turn"), ("cpu_", "cpu_ms_by_turn")):
        row_ms = getattr(samples, field)
        for reference_row in (*FLOORS, *EAGER_ROWS):
            reference_ms = getattr(samples_by_row.get(reference_row), field, None)
            if reference_row in FLOORS:
                row[f"{clock}over_{reference_row}"] = summarise_turn_ratios(row_ms, reference_ms)
            else:
                row[f"{clock}{reference_row}_over"] = summarise_turn_ratios(reference_ms, row_ms)
    return row | {
        "bytes_per_element": None if bytes_per_element is None else round(bytes_per_element, 3),
        "bytes_words": bytes_words,
        "fallback_rate": stats.fallbacks / stats.steps if stats.steps else None,
        "candidates_over_k": None if candidates is None else round(candidates / k, 4),
        "host_syncs": samples.num_host_syncs / repeats,
        "selected_over_k": None if selected is None else round(selected / k, 4),
        "samples_ms": [round_to_significant_digits(ms) for ms in samples.wall_ms_by_turn.values()],
    }


def count_traffic_bytes_per_element(
    row: str, device: str, gradient_bytes: int, **counts: float
) -> tuple[float | None, str]:
    """Return the bytes of memory traffic per element that a row's algorithm causes, and their sum in words.

    They are None where they are not counted. The terms are in select_rows.yaml.

    Args:
        gradient_bytes: of an element of the gradient.
        counts: selected, candidates and thresholds, per element.
    """
    if row == "sort" and device == "cpu":
        return None, "not counted: merges, as deep as log n"
    counts |= {"element": 1, "adding": 2 * FLOAT_BYTES + gradient_bytes}
    terms = [(BYTE_TERMS["any"] | BYTE_TERMS[device])[name] for name in SELECT_ROWS[row]["bytes"]]
    nbytes = sum(factor * counts[count] for factor, count, _ in terms)
    return nbytes, " + ".join(words.format(**counts) for _, _, words in terms)


def summarise_ratios(rows: list[Record]) -> Record:
    """Return the ratios of the standard case, or of the first where that was not measured."""
    cases = [selection_case_of(row) for row in rows]
    case = STANDARD_SELECTION_CASE if STANDARD_SELECTION_CASE in cases else cases[0]
    row_by_name = {row["row"]: row for row in rows if selection_case_of(row) == case}
    is_cpu = rows[0]["device"] == "cpu"
    ratios = Record()
    cpu_ratios = Record()
    reasons = Record()
    for numerator, denominator in RATIOS:
        if not is_cpu and CPU_ONLY in (numerator, denominator):
            continue
        name = f"{numerator}_over_{denominator}"
        # A row knows how it compares with the floors, and with torch.topk.
        owner, field = (
            (numerator, f"over_{denominator}")
            if denominator in FLOORS
            else (denominator, f"{numerator}_over")
        )
        row = row_by_name.get(owner, {})
        ratios[name] = row.get(field)
        cpu_ratios[name] = row.get(f"cpu_{field}")
        if ratios[name] is None:
            why = [explain_missing_times(row_name, row_by_name) for row_name in (numerator, denominator)]
            reasons[name] = "; ".join(filter(None, why))
    result = {"torch": rows[0]["torch"], **case._asdict(), **ratios}
    if is_cpu:
        result["cpu_time"] = cpu_ratios  # of all threads together
    return result | ({"why": reasons} if reasons else {})


def explain_missing_times(row: str, row_by_name: dict[str, Record]) -> str:
    """Return why a row has no times; empty where it has."""
    if row not in row_by_name:
        return f"{row} was not asked for"
    return "" if "median_ms" in row_by_name[row] else f"{row} not run: {row_by_name[row]['why']}"
