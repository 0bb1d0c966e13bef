"""Contents of the report's pages of runs: a row for each, and of one its curves, phases and timeline."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis.pictures import style, timeline
from analysis.pictures.marks import readable_text_colour
from analysis.records import columns, configs, phases, steps
from analysis.records.frames import (
    NO_ROWS,
    Frames,
    empty_table,
    is_missing,
    row_positions_by_key,
    rows_as_dicts,
    run_states,
    select_runs,
    steps_of_run,
)
from analysis.records.steps import add_missing_outcomes

THIS_MACHINE, SHIPPED = "this machine", "shipped"  # where the record of a run is from
MAX_CURVE_POINTS = 300  # of a curve over steps
MAX_TIMELINE_STEPS = 5  # in a timeline
RUNS_PER_BATCH = 50  # runs whose warm steps are remembered at a time
# What a group of runs has in common stands in columns; a label says what varies within it.
GROUP_LEAVES = ("method.name", "task.name", "workers", "cluster.where", "timing.mode")
# Columns of the table of runs: of a run, and of its configuration.
RUN_COLUMNS = ("id", "run", "origin", "state", "simulated", "top1", "started", "items", "why", "drawn_as")
LEAF_BY_COLUMN = {
    "method": "method.name", "task": "task.name", "workers": "workers", "seed": "seed", "mode": "timing.mode",
}  # fmt: skip
LABEL_LEAVES = (*configs.DEFAULT_LEAVES, "workers")
SPAN_COLUMNS = ("step", "rank", "phase", "start_ms", "took_ms")  # of a span
# Of a run's hundred columns those that its page needs.
NEEDED_COLUMNS = (
    "key", "run_id", "config_json", "provenance_json", "started", "simulated", "diverged",
    "timing.warmup_steps", "resumed", *columns.OUTCOMES,
)  # fmt: skip
CURVES = ("train_loss", "val_loss", "val_top1", "val_top5", "test_loss", "test_top1")


@dataclass(frozen=True)
class RunPage:
    """A run, or one of the variants that took turns in it, for its row and its page."""

    id: str  # of its page
    run: str  # its name
    origin: str  # THIS_MACHINE or SHIPPED
    state: str
    config: Mapping[str, Any]  # {} where it can't be read
    key: str = ""
    variant: str = ""
    why: str = ""  # it failed, or does not count
    started: str = ""
    items: tuple[str, ...] = ()  # the figures that are drawn from it
    outcomes: dict[str, float] = field(default_factory=dict)
    simulated: bool = False
    provenance: dict[str, Any] = field(default_factory=dict)  # as leaves
    parts: dict[str, Any] = field(default_factory=dict)  # curves, phases, timeline
    logs: tuple[dict[str, Any], ...] = ()  # name and last lines of each
    commands: tuple[str, ...] = ()  # that tell more of it

    @cached_property
    def leaves(self) -> dict[str, Any]:
        """Configuration by dotted names."""
        return configs.flatten(self.config)

    @property
    def top1(self) -> float | None:
        """Final top-1 in percent, of the test set where that was asked."""
        return self.outcomes.get("test_top1", self.outcomes.get("val_top1"))

    @property
    def drawn_as(self) -> str:
        """Label of its method in figures; empty where its configuration can't be read."""
        if "method.name" not in self.leaves:
            return ""
        return style.method_style(style.method_id(self.leaves | {"variant": self.variant or None})).label

    def page_content(self) -> dict[str, Any]:
        """Return the content of the run's page, as data for its script."""
        values = {
            part.name: getattr(self, part.name) for part in fields(self) if part.name not in ("id", "parts")
        }
        label = configs.label_config(self.config, LABEL_LEAVES) if self.config else self.run
        return {**values, "label": label, "config": self.leaves, **self.parts}


def run_page_id(run: str, key: str) -> str:
    """Return the name of a run's data: its key, as in `list`, with its variant where it has one.

    Else a digest, for names may be anything.
    """
    digits, _, variant = key.partition("/")
    if re.fullmatch(r"[0-9a-f]{12}", digits) and run.endswith(f"-{digits}"):
        if not variant:
            return digits
        if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", variant):
            return f"{digits}-{variant}"
    return hashlib.sha256(f"{run}/{key}".encode()).hexdigest()[:16]


def run_table_columns(runs: Sequence[RunPage], labels: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of the table of runs, by column."""
    step_s = [run.outcomes.get("step_s") for run in runs]
    return {
        "label": [*labels],
        **{name: [getattr(run, name) for run in runs] for name in RUN_COLUMNS},
        **{name: [run.leaves.get(leaf) for run in runs] for name, leaf in LEAF_BY_COLUMN.items()},
        "loss": [run.outcomes.get("test_loss", run.outcomes.get("val_loss")) for run in runs],
        "step_ms": [None if seconds is None else 1e3 * seconds for seconds in step_s],
        "wire_bytes": [run.outcomes.get("wire_bytes") for run in runs],
    }


def distinct_run_labels(runs: Sequence[RunPage]) -> list[str]:
    """Return a label for each run, which tells it from the others of its method, task, workers and mode."""
    labels = [run.run for run in runs]
    places_by_group = defaultdict[Any, list[int]](list)
    for place, run in enumerate(runs):
        if run.config:
            places_by_group[tuple(str(run.leaves.get(name)) for name in GROUP_LEAVES)].append(place)
    for places in places_by_group.values():
        group_labels = configs.label_configs([runs[place].config for place in places])
        for place, label in zip(places, group_labels, strict=True):
            labels[place] = label or labels[place]
    return labels


def build_run_pages(frames: Frames, origin: str) -> Iterator[RunPage]:
    """Yield the page of each run of these frames, which are whole."""
    if not len(frames.runs):
        return
    if not {*columns.OUTCOMES} <= {*frames.runs}:  # older tables lack them
        frames = add_missing_outcomes(frames)
    needed = [name for name in NEEDED_COLUMNS if name in frames.runs]
    frames = frames._replace(runs=frames.runs[needed], looks=empty_table("looks"))
    keys = [*map(str, frames.runs["key"])]
    for first in range(0, len(keys), RUNS_PER_BATCH):
        batch = select_runs(frames, keys[first : first + RUNS_PER_BATCH])
        aligned = timeline.spans_from_step_start_ms(batch.spans).round({"start_ms": 4, "took_ms": 4})
        epoch_places = row_positions_by_key(batch.epochs)
        span_places = row_positions_by_key(batch.spans)
        for row, state in zip(rows_as_dicts(batch.runs), run_states(batch.runs), strict=True):
            spans = span_places.get(row["key"], NO_ROWS)
            run_frames = batch._replace(
                epochs=batch.epochs.take(epoch_places.get(row["key"], NO_ROWS)),
                spans=batch.spans.take(spans),
            )
            yield _run_page(run_frames, row, state, origin, aligned.take(spans))


def _run_page(
    frames: Frames, row: Mapping[str, Any], state: str, origin: str, spans: pd.DataFrame
) -> RunPage:
    """Return a run, whose epochs and spans these frames are; `spans`: see `spans_from_step_start_ms`."""
    key = str(row["key"])
    steps_table = steps_of_run(frames, key)
    has_steps = len(steps_table) > 0
    return RunPage(
        id=run_page_id(row["run_id"], key),
        run=row["run_id"],
        origin=origin,
        state=state,
        config=json.loads(row["config_json"]),
        key=key,
        variant=key.partition("/")[2],
        started="" if is_missing(row.get("started")) else row["started"],
        outcomes={name: float(row[name]) for name in columns.OUTCOMES if not is_missing(row.get(name))},
        simulated=bool(row["simulated"]),
        provenance=configs.flatten(json.loads(row["provenance_json"])),
        parts={
            "curves": _epoch_curves(frames.epochs),
            "steps": _step_curves(steps_table),
            "phases": _phase_ms(frames, key) if has_steps else {},
            "timeline": _drawn_steps(frames, key, spans) if has_steps and len(spans) else [],
        },
    )


def _epoch_curves(epochs: pd.DataFrame) -> dict[str, list[Any]]:
    """Return the measurements of each epoch."""
    ordered = epochs.sort_values("epoch", kind="stable")
    measured = [name for name in CURVES if name in ordered and ordered[name].notna().any()]
    if not measured:
        return {}
    return {name: ordered[name].tolist() for name in ("epoch", "step", *measured) if name in ordered}


def _step_curves(steps_table: pd.DataFrame) -> dict[str, list[Any]]:
    """Return loss on rank 0 and time on the slowest rank, of evenly chosen steps."""
    if not len(steps_table):
        return {}
    slowest = steps.slowest_rank_seconds_by_step(steps_table)
    shown_s = slowest.iloc[_spread_evenly(len(slowest), MAX_CURVE_POINTS)]
    losses = steps_table[["step", "loss"]].dropna().drop_duplicates("step")
    loss_by_step = dict(zip(losses["step"].tolist(), losses["loss"].tolist(), strict=True))
    step_ms = (1e3 * shown_s).round(3).tolist()
    return {
        "step": shown_s.index.tolist(),
        "loss": [*map(loss_by_step.get, shown_s.index)],
        "step_ms": step_ms,
    }


def _phase_ms(frames: Frames, key: str) -> dict[str, float]:
    """Return mean milliseconds of each phase over ranks and warm steps, in the order of a step."""
    means = 1e3 * steps.warm_phase_seconds_rank_mean(frames, key).drop(columns="step").mean()
    return {str(phase): round(float(ms), 4) for phase, ms in means.items() if ms > 0}


def _drawn_steps(frames: Frames, key: str, spans: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the typical step first, then others evenly, each with its spans.

    Of a span: rank, phase, start and length in ms.
    """
    typical = timeline.find_typical_step_with_spans(frames, key)
    recorded = [step for step in np.unique(spans["step"]).tolist() if step != typical]
    other_steps = [recorded[place] for place in _spread_evenly(len(recorded), MAX_TIMELINE_STEPS - 1)]
    spans_by_step: dict[int, list[list[Any]]] = {step: [] for step in (typical, *other_steps)}
    drawn_spans = spans.take(np.flatnonzero(np.isin(spans["step"].to_numpy(), [*spans_by_step])))
    for step, *span in zip(*(drawn_spans[name].tolist() for name in SPAN_COLUMNS), strict=True):
        spans_by_step[step].append(span)
    return [{"step": step, "spans": step_spans} for step, step_spans in spans_by_step.items()]


def _spread_evenly(n: int, most: int) -> list[int]:
    """Return up to so many of n places, the first and the last among them."""
    return sorted(set(np.linspace(0, n - 1, min(n, most)).round().astype(int).tolist())) if n else []


def list_settings_with_accuracy_points(
    runs: Sequence[RunPage], labels: Sequence[str]
) -> list[dict[str, Any]]:
    """Return accuracy and bytes of the methods of each setting, a setting with more methods first.

    A method counts at the learning rate that was best in validation.
    """
    points: dict[str, dict[str, dict[str, list[RunPage]]]] = {}
    for run, label in zip(runs, labels, strict=True):
        if run.top1 is not None and run.outcomes.get("wire_bytes"):
            name = re.sub(r" (seed|task\.lr)=\S+", "", label)
            by_rate = points.setdefault(_setting_text(run), {}).setdefault(name, {})
            by_rate.setdefault(str(run.leaves.get("task.lr")), []).append(run)
    settings = [
        {"name": setting, "points": [_accuracy_point(name, by_rate) for name, by_rate in methods.items()]}
        for setting, methods in points.items()
    ]
    return sorted(settings, key=lambda setting: (-len(setting["points"]), setting["name"]))


def _setting_text(run: RunPage) -> str:
    """Return the facts that runs must share for their accuracies to compare."""
    leaf = run.leaves
    return (
        f"{leaf.get('task.name')}, {leaf.get('workers')} workers x batch {leaf.get('task.batch_size')}, "
        f"{leaf.get('train.epochs')} epochs"
    )


def _accuracy_point(name: str, by_rate: Mapping[str, Sequence[RunPage]]) -> dict[str, Any]:
    def validated(rate: str) -> float:
        return float(np.mean([run.outcomes.get("val_top1", np.nan) for run in by_rate[rate]]))

    rate = max(by_rate, key=validated)
    top1 = [run.top1 for run in by_rate[rate] if run.top1 is not None]
    sent = [run.outcomes["wire_bytes"] for run in by_rate[rate]]
    return {
        "name": name, "lr": rate, "rates": len(by_rate), "n": len(top1), "top1": float(np.mean(top1)),
        "low": min(top1), "high": max(top1), "bytes": float(np.mean(sent)),
    }  # fmt: skip


def phase_label_and_colours_by_name() -> dict[str, list[str]]:
    """Return label, colour, and colour of text on it, of each phase by its name."""
    return {
        name: [phase.label, phase.colour, readable_text_colour(phase.colour)]
        for name, phase in phases.PHASE_BY_NAME.items()
    }
