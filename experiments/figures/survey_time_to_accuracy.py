"""Who has an accuracy first, dense training that overlaps or Top-k? Whole trainings over a slow link.

Not a figure of a paper. Two workers with a core each, in real time; the clock stands while rank 0 validates.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis import plots
from analysis.claims import Claim
from analysis.evidence import Evidence
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_brief, format_number
from analysis.records.frames import Frames
from analysis.stats import POSITIVE, Estimate, estimate_mean, final_value, mean_curve
from analysis.tables import Table
from analysis.times.reaching import (
    CrossingBySeed,
    all_seeds_reach,
    crossing_by_seed,
    seconds_to_target,
    speedup_to_target,
)
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import TRAINED, scale
from experiments.figures.papers import claim, words
from experiments.figures.survey_crossover_measured import DENSE as DENSE
from experiments.figures.survey_crossover_measured import MODELS, SMALL, variants_in_buckets

SCALE = yoon2022.TRAINING_SCALE
TITLE = "Validation accuracy against time, whole trainings over a slow link"
TOPK, LINK, COLUMN = "topk-fused", "ethernet_200m", "val_top1"
SEEDS = {"smoke": [0], "laptop": [0, 1, 2], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [3, 4], "paper": [3, 4]}
SHARE = 98.0  # % of what dense ends at, the mean over its seeds: the target that is judged
LEVELS = (50.0, 60.0, 65.0, 70.0, 74.0)  # % top-1, all of them in the table
LOOKS = {
    DENSE: style.method_style("dense")._replace(label="dense, overlapped"),
    TOPK: style.method_style(TOPK)._replace(label="Top-k 0.01, fused"),
}
ONCE = Estimate.exact(1.0, 1, "runs")  # of seconds, which need no time of a step


def runs(profile: str) -> list[Run]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: Sequence[int]) -> list[Run]:
    """Both methods of a seed before the next seed."""
    shared = {**TRAINED, "profile": profile, **scale("time-to-accuracy", profile), "link": LINK}
    methods = variants_in_buckets("time-to-accuracy", (MODELS | SMALL)[str(shared["task"])])
    return [Run({**shared, **own, "seed": seed}) for seed in seeds for own in methods.values()]


def trainings(frames: Frames) -> dict[str, list[str]]:
    """The runs of each method.

    Raises:
        ValueError: one has none.
    """
    found = {name: yoon2022.keys(frames, name) for name in LOOKS}
    if not all(found.values()):
        raise ValueError(plots.NOTHING_TO_DRAW)
    return found


def target(frames: Frames, share: float = SHARE) -> float | None:
    """Percent of top-1: so many percent of what dense ends at."""
    keys = yoon2022.keys(frames, DENSE)
    ends = final_value(frames, keys, COLUMN) if keys else None
    return ends.value * share / 100 if ends else None


def seconds(frames: Frames, name: str, level: float) -> CrossingBySeed:
    """Seconds of steps until a validation of each training first shows so many percent, by seed."""
    return crossing_by_seed(frames, yoon2022.keys(frames, name), COLUMN, level, by="wall_s")


def times_as_soon(frames: Frames, slow: str, fast: str, level: float) -> Estimate | None:
    return speedup_to_target(seconds(frames, slow, level), seconds(frames, fast, level), ONCE)


def draw(frames: Frames, profile: str) -> plots.Figure:
    found, level = trainings(frames), target(frames)
    curves = {name: mean_curve(frames, keys, COLUMN) for name, keys in found.items()}
    minutes = {name: _minutes(frames, keys) for name, keys in found.items()}
    title = f"over {Evidence(frames).link()}"
    panels = [
        plots.curves_panel(
            [plots.Curve(LOOKS[name], x(name), at) for name, at in curves.items()],
            level=level, xlabel=xlabel, xlim=(0, None), title=title,
        )
        for x, xlabel in (
            (lambda name: minutes[name], "Minutes of training"),
            (lambda name: curves[name]["step"], "Optimiser steps"),
        )
    ]  # fmt: skip
    return plots.compose_figure(panels, 2.9, ylabel="Validation top-1 (%)", sharey=True)


def _minutes(frames: Frames, keys: Sequence[str]) -> list[float]:
    """Of each validation, the mean over seeds."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].dropna(subset=[COLUMN])
    return list(epochs.groupby("epoch")["wall_s"].mean() / 60)


def table(frames: Frames) -> list[Table]:
    """The time to each level, the registered one first; and what the trainings came to."""
    found, level = trainings(frames), target(frames)
    assert level is not None, "dense was trained"
    registered = f"{format_number(SHARE)} % of dense's end ({format_brief(level)})"
    rows = [
        _row(frames, *each) for each in [(registered, level), *((format_number(at), at) for at in LEVELS)]
    ]
    units = dict.fromkeys((look.label for look in LOOKS.values()), "s") | {"top-1": "%"}
    ends = [
        {
            "method": LOOKS[name].label, "at the end": final_value(frames, keys, COLUMN),
            "step": _step_ms(frames, keys), "in all": _last(frames, keys, "wall_s").times(1 / 60),
            "seeds": len(keys),
        }
        for name, keys in found.items()
    ]  # fmt: skip
    note = words("survey.time-to-accuracy.note")
    return [
        Table.of("Time until a validation first shows an accuracy", rows, units, note),
        Table.of("At the end of the trainings", ends, {"at the end": "%", "step": "ms", "in all": "min"}),
    ]


def _row(frames: Frames, label: str, level: float) -> dict[str, object]:
    times = {name: seconds(frames, name, level) for name in LOOKS}
    taken = {LOOKS[name].label: seconds_to_target(own, 1.0) for name, own in times.items()}
    there = [
        f"{sum(all_seeds_reach({0: each}) for each in own.values())} of {len(own)}" for own in times.values()
    ]
    return {
        "top-1": label, **taken, "dense / Top-k": times_as_soon(frames, DENSE, TOPK, level),
        "seeds that get there": " and ".join(there),
    }  # fmt: skip


def _last(frames: Frames, keys: Sequence[str], column: str) -> Estimate:
    """A mean over seeds of what a training had come to at its last validation."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].sort_values("epoch")
    return estimate_mean(epochs.groupby("key")[column].last().to_numpy(), POSITIVE)


def _step_ms(frames: Frames, keys: Sequence[str]) -> Estimate:
    return _last(frames, keys, "wall_s").times(1e3 / _last(frames, keys, "step").value)


def facts(frames: Frames) -> dict[str, object]:
    level = target(frames)
    assert level is not None, "what is drawn has dense trainings"
    missing = [
        f"{LOOKS[name].label} with seed {seed}"
        for name in LOOKS
        for seed, each in seconds(frames, name, level).items()
        if not all_seeds_reach({seed: each})
    ]
    never = words("survey.time-to-accuracy.never").format(who=captions.join_words(missing))
    falls = [each.strip("[]") for each in captions.distinct_values(frames, "task.lr_milestones")]
    return {
        "link": Evidence(frames).link(), "share": format_number(SHARE), "target": format_brief(level),
        "never": never * bool(missing), "falls": captions.join_words(falls),
        "every": captions.join_words(captions.distinct_values(frames, "train.validate_every")),
    }  # fmt: skip


def claims() -> list[Claim]:
    return [
        claim("survey.time-to-accuracy.sooner", sooner_at_share, DENSE, TOPK, SHARE, link=LINK,
              share=format_number(SHARE))
    ]  # fmt: skip


def sooner_at_share(frames: Frames, slow: str, fast: str, share: float) -> Estimate | None:
    """The slow one's time to this share of dense's end over the fast one's, paired by seed; 0 where only the
    slow one gets there.
    """
    level = target(frames, share)
    return times_as_soon(frames, slow, fast, level) if level is not None else None
