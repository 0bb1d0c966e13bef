"""Up to which bandwidth does Top-k take less than dense training that overlaps? Measured on slow links.

Not a figure of a paper. Two workers with a core each, which carry what is asked of links up to 2 Gbit/s.
Beside what is measured stands what the alpha-beta model predicts from computing and selecting in the same
launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.links import FOUND_GBIT_S_COLUMN, LINK_COLUMN
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, find_run_keys, select_runs
from analysis.records.steps import mean_phase_seconds
from analysis.stats import Estimate, IncomparableRunsError, phase_time, step_time_ratio
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _links, _predicted
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._links import (
    ABOVE_LINKS,
    BELOW_LINKS,
    BETA_COLUMN,
    BreakEvenBandwidths,
    split_by_link,
)
from experiments.figures._runs import TIMED, scaled_settings, setting_values_text, settings_by_variant
from experiments.figures.papers import make_claim

SCALE = yoon2022.TIMING_SCALE
TITLE = "Up to which bandwidth Top-k beats overlapped dense training, measured"
DENSE = "dense-buckets-overlapped"
SELECTIONS = ("topk", "topk-fused")
LOOKS = {"topk": style.method_style("topk")._replace(label="torch.topk"),
         "topk-fused": style.method_style("topk-fused")._replace(label="fused search")}  # fmt: skip
SERIALISED = tuple(f"{method}-serialised" for method in SELECTIONS)
MODE = "production"
LINKS = ("ethernet_100m", "ethernet_200m", "ethernet_500m", "ethernet_1g", "ethernet_2g")
SMOKE_LINKS = ("ethernet_500m", "ethernet_2g")
BATCHES = (8, 32)  # of a worker
TICKS = (0.1, 0.2, 0.5, 1, 2)  # Gbit/s, and ratios


class MeasuredModel(NamedTuple):
    """A network that is measured, the buckets of its dense training, and how long variants alternate."""

    label: str
    dense_bucket_mb: float  # of dense: several, so that there is something to overlap
    limit_min: float  # of the first three launches together


MODELS = {
    "vgg16_cifar10": MeasuredModel("VGG-16", 8, 4.5),
    "slimvgg_cifar10": MeasuredModel("slim VGG-16", 1, 1.2),
}
SMALL = {"cnn_digits": MeasuredModel("CNN", 0.05, 0.06)}
CELLS = [(task, batch) for task in MODELS for batch in BATCHES]


# --- runs


def runs(profile: str) -> list[Run]:
    """Return one group of processes for each model, batch and link."""
    shared = scaled_settings(TIMED, "crossover-measured", profile) | {"timing.mode": MODE}
    is_smoke = profile == "smoke"
    return [
        Run(
            {**shared, "task": task, "task.batch_size": batch, "link": link,
             "alternate.limit_min": model.limit_min},
            settings_by_variant_with_bucketed_dense("crossover-measured", model),
        )
        for task, model in (SMALL if is_smoke else MODELS).items()
        for batch in (BATCHES[:1] if is_smoke else BATCHES)
        for link in (SMOKE_LINKS if is_smoke else LINKS)
    ]  # fmt: skip


def settings_by_variant_with_bucketed_dense(item: str, model: MeasuredModel) -> dict[str, RunSettings]:
    """Return an item's variants, dense with buckets in the size that suits the model."""
    settings_by_name = dict(settings_by_variant(item))
    settings_by_name[DENSE] = {**settings_by_name[DENSE], "method.scope": model.dense_bucket_mb}
    return settings_by_name


# --- what was measured: of a cell, which is a task and a batch


@cache_by_frames
def select_task_and_batch(frames: Frames, task: str, batch: int) -> Frames:
    """Return the runs of a task with a batch per worker: a cell."""
    return select_runs(frames, find_run_keys(frames, {"task.name": task, "task.batch_size": batch}))


def measured_tasks_and_batches(frames: Frames) -> list[tuple[str, int]]:
    """Return the cells, a task and a batch each, that were measured, in the order of the models."""
    return [
        (task, batch)
        for task in dict.fromkeys((*MODELS, *captions.distinct_values(frames, "task.name")))
        for batch in captions.distinct_values(frames, "task.batch_size")
        if len(select_task_and_batch(frames, task, batch).runs)
    ]


def step_time_ratio_on_link(
    frames: Frames, task: str, batch: int, link: str, method: str, baseline: str
) -> Estimate | None:
    """Return the step time of a method over that of another on a link; None where it was not measured."""
    cell = split_by_link(select_task_and_batch(frames, task, batch)).get(link)
    return cell and yoon2022.step_time_ratio_to_baseline(cell, method, baseline, MODE)


def median_found_gbit_s(frames: Frames) -> float:
    """Return the bandwidth of a link while both nodes send, the median over runs."""
    return float(frames.runs[FOUND_GBIT_S_COLUMN].astype(float).median())


@cache_by_frames
def step_ratios_of_complete_launches(frames: Frames, method: str) -> pd.DataFrame:
    """Return the step time of a method over that of overlapped dense: (launches, links).

    Only of launches that went over all links.

    Args:
        frames: of one cell.
    """
    ratios: dict[str, dict[int, float]] = {}
    for link, runs in split_by_link(frames).items():
        ratios[link] = {}
        for launch in captions.distinct_values(runs, "seed"):
            keys = find_run_keys(runs, {"seed": launch})
            sparse, dense = (
                [key for key in yoon2022.method_run_keys(runs, name, MODE) if key in keys]
                for name in (method, DENSE)
            )
            ratio = step_time_ratio(runs, sparse, dense)
            if ratio:
                ratios[link][launch] = ratio.value
    complete: pd.DataFrame = pd.DataFrame(ratios).dropna()
    return complete


@cache_by_frames
def measured_break_even_bandwidths(frames: Frames, task: str, batch: int, method: str) -> BreakEvenBandwidths:
    """Return the bandwidths up to which a method takes less than overlapped dense, by launch."""
    cell = select_task_and_batch(frames, task, batch)
    ratios = step_ratios_of_complete_launches(cell, method)
    table = cell.runs.reindex(columns=["seed", LINK_COLUMN, FOUND_GBIT_S_COLUMN]).astype(
        {FOUND_GBIT_S_COLUMN: float}
    )
    link_gbit_s = table.pivot_table(
        index="seed", columns=LINK_COLUMN, values=FOUND_GBIT_S_COLUMN, aggfunc="median"
    )
    return BreakEvenBandwidths.interpolate_between_links(link_gbit_s, ratios)


# --- what the alpha-beta model predicts


class PredictedStep(NamedTuple):
    """A step as the alpha-beta model predicts it, from measured computing and selecting."""

    rest_compute_s: float  # of computing, without backward
    backward_s: float
    select_s: float
    elements: int
    workers: int
    density: float

    def break_even_gbit_s(self, method: str) -> float:
        """Return the bandwidth up to which the method takes less than overlapped dense.

        Dense's exchange hides behind backward as far as it can: its step takes what computes before and
        after, and the longer one of backward and exchange. So Top-k is quicker where what dense sends more
        takes longer than backward and selecting together.
        """
        return _predicted.predicted_break_even_gbit_s(
            method, self.select_s, self.density, self.workers, self.elements, self.backward_s
        )

    def step_ratio_to_dense(self, method: str, gbit_s: float) -> float:
        """Return the time of the method's step over one of overlapped dense."""
        dense_s, sparse_s = (
            _predicted.predicted_exchange_s(
                name, self.elements, self.density, self.workers, _predicted.ethernet_link(gbit_s)
            )
            for name in ("dense", method)
        )
        method_s = self.rest_compute_s + self.backward_s + self.select_s + sparse_s
        return method_s / (self.rest_compute_s + max(self.backward_s, dense_s))


@cache_by_frames
def predict_step_from_serialised(frames: Frames, method: str) -> PredictedStep | None:
    """Return a method's step as its serialised steps predict it; None where they were not measured.

    Computing is the same for both selections: the mean of both counts.
    """
    work = _predicted.measured_compute_and_select(frames, f"{method}-serialised")
    works = [_predicted.measured_compute_and_select(frames, name) for name in SERIALISED]
    computing = [other.compute_s for other in works if other]
    if work is None or len(computing) < len(SERIALISED):
        return None
    keys = [yoon2022.method_run_keys(frames, name) for name in SERIALISED]
    backward_s = float(
        np.mean([mean_phase_seconds(frames, variant_keys)["backward"] for variant_keys in keys])
    )
    run = frames.runs[frames.runs["key"].eq(keys[0][0])].iloc[0]
    return PredictedStep(
        float(np.mean(computing)) - backward_s, backward_s, work.select_s, int(run["parameters"]),
        int(run["workers"]), float(run["method.density"]),
    )  # fmt: skip


@cache_by_frames
def predicted_break_even_gbit_s_by_launch(
    frames: Frames, task: str, batch: int, method: str
) -> pd.Series[float]:
    """Return the bandwidth that the model predicts from each launch that went over all links."""
    cell = select_task_and_batch(frames, task, batch)
    gbit_s = {}
    for launch in step_ratios_of_complete_launches(cell, method).index:
        model = predict_step_from_serialised(select_runs(cell, find_run_keys(cell, {"seed": launch})), method)
        if model:
            gbit_s[launch] = model.break_even_gbit_s(method)
    by_launch: pd.Series[float] = pd.Series(gbit_s, dtype=float)
    return by_launch


# --- claims


def claims() -> list[Claim]:
    all_links = f"{LINKS[0]} to {LINKS[-1]}"
    family = "survey.crossover-measured"
    made = []
    for task, batch in CELLS:
        words: dict[str, Any] = {"model": MODELS[task].label, "batch": batch}
        cell = f"{task.removesuffix('_cifar10')}-{batch}"
        made += [
            make_claim(
                f"{family}.narrow", step_time_ratio_on_link, task, batch, LINKS[0], DENSE, method,
                case=f"{cell}.{method}", selection=LOOKS[method].label, link=LINKS[0], **words,
            )
            for method in SELECTIONS
        ]  # fmt: skip
        made += [
            make_claim(
                f"{family}.as-predicted", break_even_prediction_error_factor, task, batch, method,
                case=f"{cell}.{method}", selection=LOOKS[method].label, link=all_links, **words,
            )
            for method in SELECTIONS
        ]  # fmt: skip
        made.append(
            make_claim(f"{family}.fused-higher", break_even_ratio_of_selections, task, batch, *SELECTIONS,
                  case=cell, link=all_links, **words)
        )  # fmt: skip
    return made


def break_even_prediction_error_factor(frames: Frames, task: str, batch: int, method: str) -> Estimate | None:
    """Return the factor between the measured bandwidth and the predicted one, whichever is larger.

    Raises:
        IncomparableRunsError: in some launch there is no such bandwidth within the links.
    """
    measured = measured_break_even_bandwidths(frames, task, batch, method)
    predicted = predicted_break_even_gbit_s_by_launch(frames, task, batch, method)
    if not len(measured.gbit_s) or not len(predicted):
        return None
    if measured.mean_if_within_links() is None:
        raise IncomparableRunsError(
            f"no crossing to compare: {measured.describe_outside()}; predicted "
            f"{format_number(float(predicted.mean()))} Gbit/s"
        )
    ratio = _links.mean_ratio_over_launches(measured.gbit_s, predicted)
    assert ratio is not None, "both are of the same launches"
    factor = max(ratio.value, 1 / ratio.value)
    if ratio.low is None or ratio.high is None:
        return ratio._replace(value=factor)
    low = max(1.0, ratio.low, 1 / ratio.high)
    return ratio._replace(value=factor, low=low, high=max(ratio.high, 1 / ratio.low))


def break_even_ratio_of_selections(
    frames: Frames, task: str, batch: int, slow_method: str, fast_method: str
) -> Estimate | None:
    """Return the break-even bandwidth of the faster selection over the other's, paired by launch.

    Raises:
        IncomparableRunsError: in some launch both lie outside the links at the same end.
    """
    slow, fast = (
        measured_break_even_bandwidths(frames, task, batch, method) for method in (slow_method, fast_method)
    )
    return _links.mean_break_even_ratio(fast, slow, "crossings")


# --- picture and table


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [_panel(frames, task, batch) for task, batch in measured_tasks_and_batches(frames)]
    rows = 2 if len(panels) == len(CELLS) else 1
    return plots.compose_figure(
        panels, 2.4 * rows + 0.4, num_rows=rows, sharex=True, ylabel="Step time / overlapped dense"
    )


def _panel(frames: Frames, task: str, batch: int) -> plots.Panel:
    cell = select_task_and_batch(frames, task, batch)
    runs_by_bandwidth = {median_found_gbit_s(runs): runs for runs in split_by_link(cell).values()}
    ends = min(runs_by_bandwidth), max(runs_by_bandwidth)
    lines = []
    for height, method in enumerate(SELECTIONS):
        look = LOOKS[method]
        ratios = {
            x: yoon2022.step_time_ratio_to_baseline(runs, method, DENSE, MODE)
            for x, runs in runs_by_bandwidth.items()
        }
        measured = {x: ratio for x, ratio in ratios.items() if ratio}
        lines.append(plots.Curve(look, list(measured), list(measured.values())))
        model = predict_step_from_serialised(cell, method)
        if model:
            x = np.geomspace(*ends, 61)
            y = [model.step_ratio_to_dense(method, gbit_s) for gbit_s in x]
            dashed = {"linestyle": (0, (4, 2)), "marker": "", "label": f"{look.label}, predicted"}
            lines.append(plots.Curve(look, x, y, dashed))
        lines += _crossing_marks(
            measured_break_even_bandwidths(frames, task, batch, method), look, ends, 1.06 - 0.12 * height
        )
    return plots.curves_panel(
        lines, log_y_ticks=TICKS, doubling_x_ticks=TICKS, reference_y=1.0,
        title=f"{_label(task)}, batch {batch}", xlabel="Bandwidth found (Gbit/s)",
    )  # fmt: skip


def _crossing_marks(
    crossings: BreakEvenBandwidths, look: style.MethodStyle, ends: Sequence[float], height: float
) -> list[plots.Curve]:
    """Return a diamond on the level of 1 with its interval, or arrows at the ends outside which it lies."""
    large = {"markersize": 6, "markeredgecolor": "white", "label": None, "zorder": 5, "clip_on": False}
    mean = crossings.mean_if_within_links()
    if mean:
        edges = [] if mean.low is None else [mean.low, mean.high]
        interval = {"marker": "|", "linewidth": 2.5, "label": None}
        line = plots.Curve(look, edges, [1.0] * len(edges), interval)
        return [line, plots.Curve(look, [mean.value], [1.0], {**large, "marker": "D"})]
    return [
        plots.Curve(look, [x], [height], {**large, "marker": marker})
        for x, marker, end in zip(ends, "<>", (BELOW_LINKS, ABOVE_LINKS), strict=True)
        if (crossings.gbit_s == end).any()
    ]


def _label(task: str) -> str:
    return MODELS[task].label if task in MODELS else task


def table(frames: Frames) -> list[Table]:
    """Return the break-even bandwidths, and the ratios at each link."""
    crossing_rows = []
    link_rows = []
    for task, batch in measured_tasks_and_batches(frames):
        cell_columns = {"model": _label(task), "batch": batch}
        for method in SELECTIONS:
            crossings = measured_break_even_bandwidths(frames, task, batch, method)
            mean = crossings.mean_if_within_links()
            crossing_rows.append(
                {
                    **cell_columns,
                    "selection": LOOKS[method].label,
                    "as long as dense at": mean,
                    "outside": "" if mean else crossings.describe_outside(),
                    "predicted": _links.mean_if_within_links(
                        predicted_break_even_gbit_s_by_launch(frames, task, batch, method)
                    ),
                    "launches": len(crossings.gbit_s),
                }
            )
        for runs in split_by_link(select_task_and_batch(frames, task, batch)).values():
            link_rows.append(
                {
                    **cell_columns,
                    "asked": 8e-9 / float(runs.runs[BETA_COLUMN].iloc[0]),
                    "found": median_found_gbit_s(runs),
                    "dense, overlapped": phase_time(
                        runs, yoon2022.method_run_keys(runs, DENSE, MODE), "slowest", units_per_second=1e3
                    ),
                    **{
                        f"{LOOKS[method].label} / dense": yoon2022.step_time_ratio_to_baseline(
                            runs, method, DENSE, MODE
                        )
                        for method in SELECTIONS
                    },
                }
            )
    gbit_s = dict.fromkeys(("as long as dense at", "predicted"), "Gbit/s")
    units = {"asked": "Gbit/s", "found": "Gbit/s", "dense, overlapped": "ms"}
    return [
        Table.from_rows(
            "Bandwidth up to which Top-k takes less than overlapped dense", crossing_rows, gbit_s
        ),
        Table.from_rows("Time per step at each link", link_rows, units),
    ]


def facts(frames: Frames) -> dict[str, object]:
    buckets = [f"{format_number(model.dense_bucket_mb)} MB for {model.label}" for model in MODELS.values()]
    return {
        "launches": len(captions.distinct_values(frames, "seed")), "buckets": captions.join_with_and(buckets),
        "density": setting_values_text(frames, "method.density"),
    }  # fmt: skip
