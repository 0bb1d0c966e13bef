"""Times of exchanges over a really limited link, against the predictions of the alpha-beta model.

Every exchange, several P and k, over emulated links.

A prediction uses two kinds of numbers. What a step sent is counted as it was sent (`sparsify.cost`, by gloo's
algorithms): latency terms and bytes of each collective. Alpha and beta of each kind of collective are fitted
to its times at a few sizes that the same workers measured before the run (experiments/worker/link_probe.py).
Once a step comes what they found small messages to take longer where they compute before and after them:
workers that share cores take them from each other. Nothing is fitted to what is predicted.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style, timeline
from analysis.pictures.links import LINK_COLUMN, describe_link
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames
from analysis.records.steps import warm_steps
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import papers
from experiments.figures._links import (
    MAX_MEDIAN_ERROR_PERCENT,
    MAX_P90_ERROR_PERCENT,
    absolute_percent_errors,
    prediction_error_claims,
    summarize_errors_by_group,
)
from experiments.figures._runs import setting_values_text

TITLE = "The alpha-beta model against exchanges over a limited link"
MIN_BYTES = 64 * 2**10  # sent by a worker in a step: below, latency and the scheduler decide
COMPUTING_COLUMN = "provenance.machine.link.computing_s"  # see experiments/worker/link_probe.py
DENSITIES = (0.0001, 0.001, 0.01, 0.1)  # of n = 1,000,000 elements 100 to 100,000
_DATA = papers.item_settings("survey.link-model")
DENSE, SPARSE = _DATA["dense"], _DATA["sparse"]  # of each exchange its label, and its settings
LABELS: dict[str, str] = {name: entry["label"] for name, entry in (DENSE | SPARSE).items()}
LOOKS = {2: ("#0072B2", "o"), 4: ("#D55E00", "s"), 8: ("#009E73", "^")}  # by number of workers


def runs(profile: str) -> list[Run]:
    """Return one group of processes per link and P, in which all exchanges take turns."""
    densities = DENSITIES if profile != "smoke" else DENSITIES[-2:]
    variants = {name: entry["settings"] for name, entry in DENSE.items()}
    for name, entry in SPARSE.items():
        for number, density in enumerate(densities):
            variants[f"{name}-{number}"] = {**entry["settings"], "method.density": density}
    return [
        Run({**_DATA["runs"][profile], "profile": profile, "link": link, "workers": size}, variants)
        for link in _DATA["links"][profile]
        for size in _DATA["workers"][profile]
    ]


COLUMNS = [
    "exchange", "density", "link", "workers", "bytes", "messages", "predicted", "measured", "ratio", "blocks",
]  # fmt: skip


@cache_by_frames
def exchange_case_table(frames: Frames) -> pd.DataFrame:
    """Return a row per exchange, k, P and link: what was sent, predicted and measured, and their ratio.

    `blocks` has the measured seconds of each turn.
    """
    rows = []
    for run in frames.runs.to_dict("records"):
        key = str(run["key"])
        steps = warm_steps(frames, key).steps
        if not steps["predicted_s"].gt(0).any():
            continue
        # The one that sends most is on the critical path.
        slowest = steps.groupby("step").agg({
            "transfer_s": "max", "wire_bytes": "max", "messages": "max", "predicted_s": "max",
            "block": "first",
        })  # fmt: skip
        predicted_s = slowest["predicted_s"].mean() + run[COMPUTING_COLUMN]
        by_block = slowest.groupby("block")["transfer_s"].mean().to_numpy()
        blocks = timeline.collective_stretch_ratio(frames, key) * by_block
        measured_s = float(np.median(blocks))
        rows.append({
            "exchange": LABELS.get(str(run["method.name"]), str(run["method.name"])),
            "density": run.get("method.density"),
            "link": run[LINK_COLUMN],
            "workers": int(run["workers"]),
            "bytes": round(slowest["wire_bytes"].mean()),
            "messages": slowest["messages"].mean(),
            "predicted": predicted_s,
            "measured": measured_s,
            "ratio": predicted_s / measured_s,
            "blocks": blocks,
        })  # fmt: skip
    cases: pd.DataFrame = pd.DataFrame(rows, columns=COLUMNS)
    return cases


def exchange_cases_above_min_bytes(frames: Frames) -> pd.DataFrame:
    """Return the cases that the aims are about."""
    cases = exchange_case_table(frames)
    large: pd.DataFrame = cases[cases["bytes"] > MIN_BYTES]
    return large


def draw(frames: Frames, profile: str) -> plots.Figure:
    cases = exchange_case_table(frames)
    if not len(cases):
        raise ValueError("nothing to draw: no run of this item has a probed link")
    labels = [label for label in LABELS.values() if label in set(cases["exchange"])]
    sizes = sorted(set(cases["workers"]))
    by_exchange = []
    by_bytes = []
    for case in cases.to_dict("records"):
        look = _style(case["workers"])
        fill = look.colour if case["bytes"] > MIN_BYTES else "white"
        how = {"mec": look.colour, "ms": 3, "mew": 0.7, "mfc": fill, "label": None}
        aside = 0.22 * (sizes.index(case["workers"]) - 1)
        by_exchange.append(plots.Curve(look, case["ratio"], labels.index(case["exchange"]) + aside, how))
        by_bytes.append(plots.Curve(look, case["bytes"], case["ratio"], how))
    least = cases["ratio"].min() / 1.5
    most = cases["ratio"].max() * 1.5
    ticks = [tick for tick in marks.FACTOR_TICKS if least <= tick <= most]
    axes: dict[str, Any] = {"xscale": "log", "xlabel": "Bytes that a worker sends in a step"}
    ratios = plots.dots_panel(
        by_exchange, row_labels=labels, has_factor_axis=True, xlabel="Predicted / measured"
    )
    smallest = plots.vertical_line_panel(MIN_BYTES)
    panels = [
        plots.overlay_panels(*_allowed_errors("x"), ratios),
        plots.overlay_panels(
            *_allowed_errors("y"), smallest, plots.dots_panel(by_bytes, log_y_ticks=ticks, **axes)
        ),
    ]
    keys = marks.dot_legend_handles({look.label: (look.marker, look.colour) for look in map(_style, sizes)})
    return plots.compose_figure(
        panels, 0.9 + 0.2 * len(labels), first_legend_entries=keys, width_ratios=(1.7, 1)
    )


def _style(size: int) -> style.MethodStyle:
    return style.MethodStyle(f"P = {size}", *LOOKS.get(size, ("#555555", "D")), "")


def _allowed_errors(along: Literal["x", "y"]) -> list[plots.Panel]:
    """Return areas of the errors that the aims allow."""
    edges = ((MAX_P90_ERROR_PERCENT / 100, "#F0F0F0"), (MAX_MEDIAN_ERROR_PERCENT / 100, "#DDDDDD"))
    return [plots.shaded_span_panel(along, 1 - error, 1 + error, colour) for error, colour in edges]


def table(frames: Frames) -> list[Table]:
    cases = exchange_case_table(frames)
    shown = cases.drop(columns="blocks").assign(
        link=cases["link"].map(describe_link),
        predicted=1e3 * cases["predicted"],
        measured=1e3 * cases["measured"],
    )
    units = {"bytes": "B", "predicted": "ms", "measured": "ms"}
    error_units = dict.fromkeys(("median error", "90th percentile", "largest error"), "%")
    large = exchange_cases_above_min_bytes(frames)
    return [
        Table("Errors by exchange", summarize_cases_by_column(large, "exchange"), error_units),
        Table("Errors by number of workers", summarize_cases_by_column(large, "workers"), error_units),
        Table("Every case", shown, units),
    ]


def summarize_cases_by_column(cases: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return ratios and errors of the predictions, for each value of a column."""
    errors = absolute_percent_errors(cases["predicted"], cases["measured"])
    summary = summarize_errors_by_group(errors, cases[column])
    summary.insert(1, "predicted / measured", cases.groupby(column)["ratio"].median())
    summary["largest error"] = errors.groupby(cases[column]).max()
    table: pd.DataFrame = summary.reset_index()
    return table


def claims() -> list[Claim]:
    return prediction_error_claims("survey.error", percent_error_quantile)


def percent_error_quantile(frames: Frames, quantile: float) -> Estimate | None:
    """Return this quantile of the errors in percent. Its interval is a bootstrap over turns."""
    cases = exchange_cases_above_min_bytes(frames)
    if not len(cases):
        return None
    blocks = list(cases["blocks"])
    errors = np.abs(cases["predicted"].to_numpy()[:, None] / _resampled_medians(blocks) - 1)
    low, high = np.quantile(np.quantile(errors, quantile, axis=0), (0.025, 0.975))
    value = np.quantile((cases["ratio"] - 1).abs(), quantile)
    return Estimate(float(value), float(low), float(high), min(map(len, blocks)), "blocks").scale_by(100)


def facts(frames: Frames) -> dict[str, object]:
    return {
        "kib": format_number(MIN_BYTES // 1024),
        "median": format_number(MAX_MEDIAN_ERROR_PERCENT),
        "most": format_number(MAX_P90_ERROR_PERCENT),
        "sizes": setting_values_text(frames, "workers"),
        "links": captions.join_distinct_values(frames, LINK_COLUMN, describe_link),
        "computing": _describe_computing(frames),
        "off": _describe_errors(exchange_cases_above_min_bytes(frames)),
    }


def _describe_computing(frames: Frames) -> str:
    """Return the time that small messages took longer, for each number of workers."""
    by_size = frames.runs.groupby("workers")[COMPUTING_COLUMN].mean()
    return captions.join_with_and(
        f"{format_number(1e3 * longer)} ms at P = {size}" for size, longer in by_size.items()
    )


def _describe_errors(cases: pd.DataFrame) -> str:
    """Return a sentence on where the model is off, and by how much."""
    if not len(cases):
        return ""
    by_size = cases.groupby("workers", sort=False)["ratio"].median()
    by_exchange = cases.groupby("exchange", sort=False)["ratio"].median()
    farthest = by_exchange[(by_exchange - 1).abs().sort_values(ascending=False).index][:3]
    return papers.text_template_or_empty("survey.link-model.where-off").format(
        by_size=captions.join_with_and(
            f"{format_number(value)} at P = {size}" for size, value in by_size.items()
        ),
        by_exchange=captions.join_with_and(
            f"{format_number(value)} ({name})" for name, value in farthest.items()
        ),
    )


def _resampled_medians(samples: list[np.ndarray], draws: int = 1000) -> np.ndarray:
    """Return the medians of each sample's resamples, the same ones whenever called: (samples, draws)."""
    generator = np.random.default_rng(0)
    medians = [np.median(generator.choice(sample, (draws, len(sample))), axis=1) for sample in samples]
    return np.array(medians)
