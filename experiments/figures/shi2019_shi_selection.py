"""Cost of selecting by number of elements: exact searches, and approximate ones by the distribution.

Shi et al. 2019, "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv:1911.08772, propose
an approximate selection that is cheap on GPUs. `make bench BENCH=select` times the same operators alone, with
sorting and memory's floor beside them; here they stand in whole steps of one worker, so that they are runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.records.frames import Frames, cache_by_frames, find_run_keys, value_of_run
from analysis.records.steps import warm_steps
from analysis.stats import COUNTED, Estimate, phase_time, phase_time_ratio
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._runs import TIMED, profile_entry, setting_values_text, with_density_except_dense
from experiments.figures.papers import make_claim, make_claims_by_case

TITLE = "Time of selecting by number of elements, exact and approximate"
DENSITY = 0.001
SCALE = {"method.density": DENSITY}
EXACT, PUBLISHED = "topk", "gaussiank-published"  # torch.topk, which everything is compared with
_DATA = papers.item_settings("shi2019.shi-selection")
METHODS: dict[str, RunSettings] = {name: entry["settings"] for name, entry in _DATA["methods"].items()}
LOOKS = {
    name: style.method_style(name)._replace(label=entry["label"], **entry.get("look", {}))
    for name, entry in _DATA["methods"].items()
}
SIZES: dict[str, dict[int, float]] = _DATA["minutes"]
Measure = Callable[[Frames, str, int], Estimate | None]
DENSITIES = {"smoke": 0.01, "laptop": DENSITY, "paper": DENSITY}
CONTENT = 4 / 3  # of k: the most that the published rule is content with


def runs(profile: str) -> list[Run]:
    """Return a process for each number of elements, in which all methods take turns."""
    variants = with_density_except_dense(METHODS, DENSITIES[profile])
    shared = {
        **TIMED, "profile": profile, "task": "vector", "task.tensors": 1, "cluster": "local", "workers": 1,
    }  # fmt: skip
    return [
        Run({**shared, "task.elements": elements, "alternate.limit_min": minutes}, variants)
        for elements, minutes in profile_entry(SIZES, profile).items()
    ]


def measured_element_counts(frames: Frames) -> list[int]:
    """Return the numbers of elements, ascending."""
    return [int(elements) for elements in captions.distinct_values(frames, "task.elements")]


def timed_run_keys(frames: Frames, method: str, elements: int) -> list[str]:
    """Return the runs of a method on a vector of this many elements."""
    return find_run_keys(frames, {"variant": method, "task.elements": elements})


def selection_ms(frames: Frames, method: str, elements: int) -> Estimate | None:
    """Return the milliseconds of adding gradient to residual, searching, and emptying the residual."""
    return phase_time(frames, timed_run_keys(frames, method, elements), "select", units_per_second=1e3)


@cache_by_frames
def selection_speedup(frames: Frames, method: str, elements: int, baseline: str = EXACT) -> Estimate | None:
    """Return the baseline's time of selecting over that of the method, paired by turns."""
    baseline_keys, keys = (timed_run_keys(frames, name, elements) for name in (baseline, method))
    return phase_time_ratio(frames, baseline_keys, keys, "select")


def mean_selected_over_k(frames: Frames, method: str, elements: int) -> float | None:
    """Return the elements that are selected in a step over k, the mean over steps; None without runs."""
    keys = timed_run_keys(frames, method, elements)
    if not keys:
        return None
    k = max(1, int(float(value_of_run(frames, keys[0], "method.density")) * elements))
    return float(warm_steps(frames, keys[0]).steps["sent_density"].mean()) * elements / k


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not len(frames.runs):
        raise ValueError(plots.NOTHING_TO_DRAW)
    approximate = {method: look for method, look in LOOKS.items() if method != EXACT}
    exact = plots.Curve(LOOKS[EXACT]._replace(label=""), None, Estimate(1.0))
    panels = [
        _panel(frames, selection_ms, LOOKS, [], "Time of selecting (ms)"),
        _panel(frames, selection_speedup, approximate, [exact], "Time of torch.topk / own"),
    ]
    return plots.compose_figure(panels, 3.2, legend_columns=3)


def _panel(
    frames: Frames,
    measure: Measure,
    looks: Mapping[str, style.MethodStyle],
    lines: list[plots.Curve],
    ylabel: str,
) -> plots.Panel:
    sizes = measured_element_counts(frames)
    levels = []
    curves = []
    for method, look in LOOKS.items():
        estimates = {elements: measure(frames, method, elements) for elements in sizes}
        measured = {elements: estimate for elements, estimate in estimates.items() if estimate}
        levels += [estimate.value for estimate in measured.values()]
        if method in looks:
            curves.append(plots.Curve(look, list(measured), list(measured.values())))
    # An interval over few turns that resemble each other may span powers of ten.
    limits: dict[str, Any] = {"ylim": (min(levels) / 2, 2 * max(levels))} if levels else {}
    return plots.curves_panel(
        [*curves, *lines], doubling_x_ticks=sizes, grid="y", xlabel="Elements", yscale="log", ylabel=ylabel,
        xticklabels=[f"$2^{{{elements.bit_length() - 1}}}$" for elements in sizes], **limits,
    )  # fmt: skip


def table(frames: Frames) -> list[Table]:
    return [
        _table(frames, "Time of selecting by number of elements", selection_ms, "ms"),
        _table(frames, "Time of torch.topk over that of each", selection_speedup, "x"),
        _table(frames, "Elements selected over k", mean_selected_over_k),
    ]


def _table(frames: Frames, title: str, cell: Callable[[Frames, str, int], object], unit: str = "") -> Table:
    """Return a table with a row for each method and a column for each number of elements."""
    columns = {f"{elements:,}": elements for elements in measured_element_counts(frames)}
    rows = [
        {"method": look.label, **{name: cell(frames, method, elements) for name, elements in columns.items()}}
        for method, look in LOOKS.items()
    ]
    return Table.from_rows(title, rows, dict.fromkeys(columns, unit))


def facts(frames: Frames) -> dict[str, object]:
    threads = setting_values_text(frames, "threads")
    threads += " thread" if threads == "1" else " threads"
    return {"threads": threads, "densities": setting_values_text(frames, "method.density")}


def claims() -> list[Claim]:
    methods = (PUBLISHED, "gaussiank", "dgc", "sidco", "topk-fused")
    labels = {method: LOOKS[method].label for method in methods}
    return [
        make_claim("shi2019.gaussiank-much-faster", least_selection_speedup, PUBLISHED),
        *make_claims_by_case("shi2019.faster", least_selection_speedup, labels),
        make_claim("shi2019.fused-faster-than-gaussiank", least_selection_speedup, "topk-fused", PUBLISHED),
        make_claim("shi2019.gaussiank-selects", most_selected_over_k, tolerance=CONTENT),
    ]


def least_selection_speedup(frames: Frames, method: str, baseline: str = EXACT) -> Estimate | None:
    """Return the speed-up of selecting at the number of elements where it is least."""
    speedups = [
        selection_speedup(frames, method, elements, baseline) for elements in measured_element_counts(frames)
    ]
    return min(filter(None, speedups), key=lambda speedup: speedup.value, default=None)


def most_selected_over_k(frames: Frames) -> Estimate | None:
    """Return what Gaussian-k as published selects over k, at the number of elements where it is most."""
    ratios = [
        mean_selected_over_k(frames, PUBLISHED, elements) for elements in measured_element_counts(frames)
    ]
    counted = [ratio for ratio in ratios if ratio is not None]
    return Estimate.exact(max(counted), len(counted), COUNTED) if counted else None
