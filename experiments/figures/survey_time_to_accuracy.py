"""Who has an accuracy first, dense training that overlaps or Top-k? Whole trainings over a slow link.

Not a figure of a paper. Two workers with a core each, in real time; the clock stands while rank 0 validates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from analysis import plots
from analysis.claims import Claim
from analysis.evidence import ClaimEvidence
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import POSITIVE, Estimate, estimate_mean, final_mean, mean_curve
from analysis.tables import Table
from analysis.times.time_to_target import (
    CrossingBySeed,
    crossing_by_seed,
    is_reached_by_all_seeds,
    seconds_to_target,
    speedup_to_target,
)
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import TRAINED, scaled_settings, setting_axis, setting_values_text, span_grid
from experiments.figures.papers import make_claim, text_template_or_empty
from experiments.figures.survey_crossover_measured import DENSE as DENSE
from experiments.figures.survey_crossover_measured import (
    MODELS,
    SMALL,
    settings_by_variant_with_bucketed_dense,
)

SCALE = yoon2022.TRAINING_SCALE
TITLE = "Validation accuracy against time, whole trainings over a slow link"
TOPK = "topk-fused"
LINK = "ethernet_200m"
COLUMN = "val_top1"
SEEDS = {"smoke": [0], "laptop": [0, 1, 2], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [3, 4], "paper": [3, 4]}
SHARE = 98.0  # % of what dense ends at, the mean over its seeds: the target that is judged
LEVELS = (50.0, 60.0, 65.0, 70.0, 74.0)  # % top-1, all of them in the table
LOOKS = {
    DENSE: style.method_style("dense")._replace(label="dense, overlapped"),
    TOPK: style.method_style(TOPK)._replace(label="Top-k 0.01, fused"),
}
ONE_SECOND = Estimate.exact(1.0, 1, "runs")  # of seconds, which need no time of a step


def runs(profile: str, seeds_by_profile: Mapping[str, list[int]] = SEEDS) -> list[Run]:
    """Return both methods of a seed before the next seed."""
    shared = scaled_settings(TRAINED, "time-to-accuracy", profile) | {"link": LINK}
    methods = settings_by_variant_with_bucketed_dense(
        "time-to-accuracy", (MODELS | SMALL)[str(shared["task"])]
    )
    return span_grid(shared, setting_axis("seed", seeds_by_profile[profile]), methods.values())


more_runs = partial(runs, seeds_by_profile=MORE_SEEDS)


def run_keys_by_method(frames: Frames) -> dict[str, list[str]]:
    """Return the runs of each method.

    Raises:
        ValueError: one has none.
    """
    keys = {name: yoon2022.method_run_keys(frames, name) for name in LOOKS}
    if not all(keys.values()):
        raise ValueError(plots.NOTHING_TO_DRAW)
    return keys


def target_top1_percent(frames: Frames, percent_of_dense: float = SHARE) -> float | None:
    """Return this percentage of the mean top-1 at the end of dense training; None without any."""
    keys = yoon2022.method_run_keys(frames, DENSE)
    end = final_mean(frames, keys, COLUMN) if keys else None
    return end.value * percent_of_dense / 100 if end else None


def seconds_to_top1_by_seed(frames: Frames, method: str, top1_percent: float) -> CrossingBySeed:
    """Return the seconds of steps until a validation first shows this top-1, by seed."""
    return crossing_by_seed(
        frames, yoon2022.method_run_keys(frames, method), COLUMN, top1_percent, position_column="wall_s"
    )


def speedup_to_top1(frames: Frames, slow: str, fast: str, top1_percent: float) -> Estimate | None:
    """Return the slow method's time to this top-1 over the fast one's, paired by seed."""
    slow_s, fast_s = (seconds_to_top1_by_seed(frames, method, top1_percent) for method in (slow, fast))
    return speedup_to_target(slow_s, fast_s, ONE_SECOND)


def draw(frames: Frames, profile: str) -> plots.Figure:
    by_minutes = []
    by_steps = []
    for name, keys in run_keys_by_method(frames).items():
        table = mean_curve(frames, keys, COLUMN)
        by_minutes.append(plots.Curve(LOOKS[name], _validation_minutes(frames, keys), table))
        by_steps.append(plots.Curve(LOOKS[name], table["step"], table))
    axes: dict[str, Any] = {
        "reference_y": target_top1_percent(frames),
        "xlim": (0, None),
        "title": f"over {ClaimEvidence(frames).link_text()}",
    }
    panels = [
        plots.curves_panel(by_minutes, xlabel="Minutes of training", **axes),
        plots.curves_panel(by_steps, xlabel="Optimiser steps", **axes),
    ]
    return plots.compose_figure(panels, 2.9, ylabel="Validation top-1 (%)", sharey=True)


def _validation_minutes(frames: Frames, keys: Sequence[str]) -> list[float]:
    """Return the minutes until each validation, the mean over seeds."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].dropna(subset=[COLUMN])
    return list(epochs.groupby("epoch")["wall_s"].mean() / 60)


def table(frames: Frames) -> list[Table]:
    """Return the time to each level, the registered one first; and what the trainings came to."""
    level = target_top1_percent(frames)
    assert level is not None, "dense was trained"
    levels = {f"{format_number(SHARE)} % of dense's end ({format_number(level)})": level}
    levels |= {format_number(level): level for level in LEVELS}
    time_rows = [_time_row(frames, *labelled) for labelled in levels.items()]
    time_units = dict.fromkeys((look.label for look in LOOKS.values()), "s") | {"top-1": "%"}
    end_rows = []
    for name, keys in run_keys_by_method(frames).items():
        wall_s = _last_value(frames, keys, "wall_s")
        end_rows.append({
            "method": LOOKS[name].label, "at the end": final_mean(frames, keys, COLUMN),
            "step": wall_s.scale_by(1e3 / _last_value(frames, keys, "step").value),
            "in all": wall_s.scale_by(1 / 60), "seeds": len(keys),
        })  # fmt: skip
    end_units = {"at the end": "%", "step": "ms", "in all": "min"}
    note = text_template_or_empty("survey.time-to-accuracy.note")
    return [
        Table.from_rows("Time until a validation first shows an accuracy", time_rows, time_units, note),
        Table.from_rows("At the end of the trainings", end_rows, end_units),
    ]


def _time_row(frames: Frames, label: str, level: float) -> dict[str, object]:
    seconds = {name: seconds_to_top1_by_seed(frames, name, level) for name in LOOKS}
    reached = [
        f"{len(by_seed) - len(_missing_seeds(by_seed))} of {len(by_seed)}" for by_seed in seconds.values()
    ]
    return {
        "top-1": label,
        **{LOOKS[name].label: seconds_to_target(by_seed, 1.0) for name, by_seed in seconds.items()},
        "dense / Top-k": speedup_to_top1(frames, DENSE, TOPK, level),
        "seeds that get there": " and ".join(reached),
    }  # fmt: skip


def _missing_seeds(seconds: CrossingBySeed) -> list[int]:
    """Return the seeds that never get there."""
    return [seed for seed, crossing in seconds.items() if not is_reached_by_all_seeds({seed: crossing})]


def _last_value(frames: Frames, keys: Sequence[str], column: str) -> Estimate:
    """Return a mean over seeds of what a training had come to at its last validation."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].sort_values("epoch")
    return estimate_mean(epochs.groupby("key")[column].last().to_numpy(), POSITIVE)


def facts(frames: Frames) -> dict[str, object]:
    level = target_top1_percent(frames)
    assert level is not None, "what is drawn has dense trainings"
    missing = [
        f"{look.label} with seed {seed}"
        for name, look in LOOKS.items()
        for seed in _missing_seeds(seconds_to_top1_by_seed(frames, name, level))
    ]
    never = text_template_or_empty("survey.time-to-accuracy.never").format(
        who=captions.join_with_and(missing)
    )
    falls = [text.strip("[]") for text in captions.distinct_values(frames, "task.lr_milestones")]
    return {
        "link": ClaimEvidence(frames).link_text(), "share": format_number(SHARE),
        "target": format_number(level),
        "never": never * bool(missing), "falls": captions.join_with_and(falls),
        "every": setting_values_text(frames, "train.validate_every"),
    }  # fmt: skip


def claims() -> list[Claim]:
    return [
        make_claim("survey.time-to-accuracy.sooner", speedup_to_share_of_dense, DENSE, TOPK, SHARE, link=LINK,
              share=format_number(SHARE))
    ]  # fmt: skip


def speedup_to_share_of_dense(
    frames: Frames, slow: str, fast: str, percent_of_dense: float
) -> Estimate | None:
    """Return the slow method's time to this share of dense's end over the fast one's, paired by seed.

    0 where only the slow one gets there.
    """
    level = target_top1_percent(frames, percent_of_dense)
    return None if level is None else speedup_to_top1(frames, slow, fast, level)
