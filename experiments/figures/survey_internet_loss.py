"""Time to a loss over a link with distance: every step's gradients averaged, or local steps.

Not a figure of a paper. Trajectories are those of local-loss; what their steps take is measured by processes
that the link joins. A whole training in real time shows what this composition is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.evidence import ClaimEvidence
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, find_run_keys, select_runs
from analysis.stats import Estimate, final_mean, mean_curve
from analysis.tables import Table
from analysis.times.exchange_rounds import LocalAndExchangingSeconds, step_seconds_by_launch
from analysis.times.time_to_target import (
    CrossingBySeed,
    crossing_by_seed,
    is_reached_by_all_seeds,
    seconds_to_target,
    speedup_to_target,
)
from experiments.config.run import Run, RunSettings
from experiments.figures import _trainings, papers
from experiments.figures import survey_local_loss as local_loss
from experiments.figures._links import mean_over_launches, mean_ratio_over_launches, quantity_by_launch
from experiments.figures._runs import TIMED, profile_settings, setting_values_text
from experiments.figures.papers import make_claim, text_template_or_empty
from experiments.figures.survey_local_loss import TRAININGS, MethodWithPeriod

TITLE = "Loss of a small language model against time, over a link with distance"
SCALE = local_loss.SCALE
COLUMN = _trainings.COLUMN
_DATA = papers.item_settings("survey.internet-loss")
LINK: str = _DATA["link"]
DENSE = MethodWithPeriod("dense")
RINGS = MethodWithPeriod("dense-rings")  # dense by gloo's rings, which differs in time alone
COMPARED = [MethodWithPeriod(*pair) for pair in _DATA["compared"]]
# Trained in real time, by profile.
WHOLE = {profile: [MethodWithPeriod(*pair) for pair in pairs] for profile, pairs in _DATA["whole"].items()}
SHARE = 10.0  # % above what dense ends at: the loss that is judged
SHARES = (5.0, 10.0, 15.0, 20.0)  # all of them in the table
NETNS = {"cluster.where": "netns"}  # on emulated nodes


def runs(profile: str) -> list[Run]:
    local = profile_settings("local-loss", profile)
    model = {name: local[name] for name in ("task", "workers", "task.batch_size") if name in local}
    shared = {
        **TIMED,
        "profile": profile,
        **model,
        "link": LINK,
        **profile_settings("internet-loss", profile),
    }
    turns = {_case(method): _turn_settings(method) for method in _planned_methods(profile)}
    in_turns = Run({**shared, "timing.mode": "production"}, turns)
    real_time: RunSettings = {
        "cluster": "netns", "link": LINK, "launch.on_mismatch": "label", "device": "cpu",
    }  # fmt: skip
    whole = [run | real_time for run in TRAININGS.runs(profile, [0], WHOLE[profile])]
    return [in_turns, *_trajectories(profile, local_loss.SEEDS), *whole]


def more_runs(profile: str) -> list[Run]:
    return _trajectories(profile, local_loss.MORE_SEEDS)


def _planned_methods(profile: str) -> list[MethodWithPeriod]:
    """Return what a profile compares: local steps at the H of local-loss."""
    return [method for method in COMPARED if method.every in (None, *local_loss.EVERY[profile])]


def _turn_settings(method: MethodWithPeriod) -> RunSettings:
    """Return in what a method in turns differs; rates don't matter to times, and all take the task's."""
    settings = TRAININGS.settings_by_name[_trained_method(method)]
    settings = {key: value for key, value in settings.items() if not key.startswith("task.")}
    return {**settings, "collectives": "backend"} if method == RINGS else settings


def _trained_method(method: MethodWithPeriod) -> MethodWithPeriod:
    return DENSE if method == RINGS else method


def _trajectories(profile: str, seeds_by_profile: Mapping[str, list[int]]) -> list[Run]:
    """Return the trainings of local-loss that are compared."""
    methods = [method for method in _planned_methods(profile) if method != RINGS]
    return TRAININGS.runs(profile, seeds_by_profile[profile], methods)


# --- what the runs are


def training_run_keys(
    frames: Frames, method: MethodWithPeriod, where: Literal["virtual", "netns"] = "virtual"
) -> list[str]:
    """Return the trainings of a method, one a seed; those in real time are on emulated nodes."""
    columns = {"cluster.where": where, "train.validate": "epoch"}
    return TRAININGS.run_keys(frames, _trained_method(method), columns)


@cache_by_frames
def method_step_seconds_by_launch(
    frames: Frames, method: MethodWithPeriod
) -> dict[int, LocalAndExchangingSeconds]:
    """Return the steps of the launches in which a method took turns, by launch."""
    columns = {**NETNS, "train.validate": "never", "collectives": "backend" if method == RINGS else "auto"}
    return step_seconds_by_launch(frames, TRAININGS.run_keys(frames, _trained_method(method), columns))


def mean_step_s(frames: Frames, method: MethodWithPeriod) -> Estimate | None:
    """Return the seconds of a method's mean step, over launches."""
    return mean_over_launches(_step_s_by_launch(frames, method))


def mean_step_ratio(frames: Frames, slow: MethodWithPeriod, fast: MethodWithPeriod) -> Estimate | None:
    """Return the mean step of the slow method over that of the fast one, paired by launch."""
    slow_s, fast_s = (_step_s_by_launch(frames, method) for method in (slow, fast))
    return mean_ratio_over_launches(slow_s, fast_s)


def _step_s_by_launch(frames: Frames, method: MethodWithPeriod) -> pd.Series[float]:
    return quantity_by_launch(
        method_step_seconds_by_launch(frames, method), lambda step: step.mean_step_s(method.every)
    )


def mean_step_s_by_method(frames: Frames) -> dict[MethodWithPeriod, Estimate]:
    """Return the mean step of each method that was both trained and timed."""
    steps = {method: mean_step_s(frames, method) for method in COMPARED if training_run_keys(frames, method)}
    return {method: step for method, step in steps.items() if step}


def target_loss(frames: Frames, percent_above_dense: float = SHARE) -> float | None:
    """Return the mean loss at the end of dense training plus this percentage of it; None without any."""
    keys = training_run_keys(frames, DENSE)
    end = final_mean(frames, keys, COLUMN) if keys else None
    return end.value * (1 + percent_above_dense / 100) if end else None


def steps_to_loss_by_seed(frames: Frames, method: MethodWithPeriod, loss: float) -> CrossingBySeed:
    """Return the steps until a validation shows the loss, by seed."""
    return crossing_by_seed(frames, training_run_keys(frames, method), COLUMN, loss, falls=True)


def speedup_to_loss(
    frames: Frames, fast: MethodWithPeriod, percent_above_dense: float = SHARE, slow: MethodWithPeriod = DENSE
) -> Estimate | None:
    """Return the slow method's time to the target loss over the fast one's; None where either was not timed.

    Paired by seed; a step's time by launches.
    """
    loss = target_loss(frames, percent_above_dense)
    ratio = mean_step_ratio(frames, slow, fast)
    if loss is None or ratio is None:
        return None
    return speedup_to_target(
        steps_to_loss_by_seed(frames, slow, loss), steps_to_loss_by_seed(frames, fast, loss), ratio
    )


# --- composed against real


class RealTimeCheck(NamedTuple):
    """A training in real time beside what was composed for it."""

    real_s: float  # in steps, until its last validation
    composed_s: float

    @property
    def percent_error(self) -> float:
        """Percent by which the composed time is off."""
        return 100 * abs(self.composed_s / self.real_s - 1)


def real_time_check_by_method(frames: Frames) -> dict[MethodWithPeriod, RealTimeCheck]:
    """Return a check for each training in real time."""
    checks = {}
    for method in COMPARED:
        keys = training_run_keys(frames, method, where="netns")
        step = mean_step_s(frames, method)
        if method != RINGS and keys and step:
            epochs = frames.epochs[frames.epochs["key"].isin(keys)].sort_values("epoch")
            last = epochs.groupby("key").last()
            checks[method] = RealTimeCheck(
                float(last["wall_s"].mean()), float(last["step"].mean() * step.value)
            )
    return checks


def worst_composed_time_percent_error(frames: Frames) -> Estimate | None:
    """Return by how many percent the composed time of a whole training is off, of the worst one."""
    errors = [check.percent_error for check in real_time_check_by_method(frames).values()]
    return Estimate(max(errors), n=len(errors)) if errors else None


# --- picture and table


def _label(method: MethodWithPeriod) -> str:
    return str(_DATA["rings"]) if method == RINGS else method.label


def _style(method: MethodWithPeriod) -> style.MethodStyle:
    return local_loss.LOOKS[_trained_method(method).name]._replace(label=_label(method))


def draw(frames: Frames, profile: str) -> plots.Figure:
    steps = mean_step_s_by_method(frames)
    if DENSE not in steps:
        raise ValueError(plots.NOTHING_TO_DRAW)
    positions = _trainings.relative_position_by_name(
        sorted({method.every for method in steps if method.every})
    )
    curves = []
    for method, step in steps.items():
        table = mean_curve(frames, training_run_keys(frames, method), COLUMN)
        line_style: dict[str, Any] = {"alpha": 1 - 0.6 * positions.get(method.every or 0, 0.0), "ms": 3}
        line_style |= {"linestyle": "--"} if method == RINGS else {}
        curves.append(plots.Curve(_style(method), table["step"] * step.value / 60, table, line_style))
    losses = plots.curves_panel(
        curves,
        reference_y=target_loss(frames),
        xlabel="Minutes in steps, composed",
        xscale="log",
        title=f"over {_describe_link(frames)}",
        ylabel="Validation loss (nats a character)",
    )
    computing_ms = 1e3 * mean_local_step_s(frames)
    panels = [losses, _steps_panel(steps, computing_ms)]
    return plots.compose_figure(panels, 3.8, width_ratios=(1.6, 1))


def _describe_link(frames: Frames) -> str:
    return ClaimEvidence(select_runs(frames, find_run_keys(frames, NETNS))).link_text()


@plots.panel_maker
def _steps_panel(
    axes: plots.Axes, /, steps: Mapping[MethodWithPeriod, Estimate], computing_ms: float
) -> None:
    """Draw a step of each method: computing, and what exchanging takes besides."""
    for place, (method, step_s) in enumerate(steps.items()):
        step = step_s.scale_by(1e3)
        colour = _style(method).colour
        axes.barh(place, computing_ms, color=colour, alpha=0.35)
        axes.barh(place, max(0.0, step.value - computing_ms), left=computing_ms, color=colour)
        if step.low is not None and step.high is not None:
            axes.plot([step.low, step.high], [place, place], color="#111111", linewidth=1)
    plots.set_y_row_labels(axes, [_label(method) for method in steps])
    axes.set(xlabel="Mean step (ms); pale: computing")


@cache_by_frames
def mean_local_step_s(frames: Frames) -> float:
    """Return the seconds of a local step, which exchanges nothing: over launches and methods."""
    seconds = [
        step.local_s
        for method in COMPARED
        for step in method_step_seconds_by_launch(frames, method).values()
        if step.local_s
    ]
    return float(np.mean(seconds)) if seconds else 0.0


def table(frames: Frames) -> list[Table]:
    """Return times to each loss, what steps take, and what trainings in real time took."""
    steps = mean_step_s_by_method(frames)
    columns = {f"{format_number(share)} %": share for share in SHARES}
    minute_rows = [
        {"method": _label(method),
         **{name: _minutes_to_loss(frames, method, step, share) for name, share in columns.items()}}
        for method, step in steps.items()
    ]  # fmt: skip
    speedup_rows = [
        {
            "method": _label(method),
            **{name: speedup_to_loss(frames, method, share) for name, share in columns.items()},
            "over gloo's rings": speedup_to_loss(frames, method, SHARE, RINGS),
        }
        for method in steps
    ]
    step_rows = [_step_row(frames, method, step) for method, step in steps.items()]
    check_rows = [
        {"training": _label(method), "in real time": check.real_s / 60, "composed": check.composed_s / 60,
         "error": check.percent_error}
        for method, check in real_time_check_by_method(frames).items()
    ]  # fmt: skip
    end = format_number(target_loss(frames, 0.0) or 0.0)
    title = f"Minutes until the loss is so much above dense's end ({end} nats), composed"
    step_units = dict.fromkeys(("local step", "exchanging step", "mean step"), "ms")
    tables = [
        Table.from_rows(
            title,
            minute_rows,
            dict.fromkeys(columns, "min"),
            text_template_or_empty("survey.internet-loss.note"),
        ),
        Table.from_rows("Dense's time to that loss over a method's", speedup_rows),
        Table.from_rows("Steps", step_rows, step_units),
    ]
    if check_rows:
        units = {"in real time": "min", "composed": "min", "error": "%"}
        tables.append(Table.from_rows("Whole trainings in real time", check_rows, units))
    return tables


def _minutes_to_loss(
    frames: Frames, method: MethodWithPeriod, step: Estimate, share: float
) -> Estimate | None:
    loss = target_loss(frames, share)
    return (
        None
        if loss is None
        else seconds_to_target(steps_to_loss_by_seed(frames, method, loss), step.value / 60)
    )


def _step_row(frames: Frames, method: MethodWithPeriod, step: Estimate) -> dict[str, object]:
    times = method_step_seconds_by_launch(frames, method)
    local_ms = quantity_by_launch(times, lambda step: 1e3 * step.local_s)
    exchanging_ms = quantity_by_launch(times, lambda step: 1e3 * step.exchanging_s)
    return {
        "method": _label(method), "local step": mean_over_launches(local_ms) if local_ms.all() else None,
        "exchanging step": mean_over_launches(exchanging_ms),
        "mean step": step.scale_by(1e3), "computing": 100 * min(1.0, mean_local_step_s(frames) / step.value),
        "launches": len(times),
    }  # fmt: skip


def facts(frames: Frames) -> dict[str, object]:
    loss = target_loss(frames) or 0.0
    never = [
        _label(method)
        for method in mean_step_s_by_method(frames)
        if loss and not is_reached_by_all_seeds(steps_to_loss_by_seed(frames, method, loss))
    ]
    return {
        "link": _describe_link(frames),
        "share": format_number(SHARE),
        "target": format_number(loss),
        "never": f" Not in all seeds: {captions.join_with_and(never)}." * bool(never),
        "launches": len(method_step_seconds_by_launch(frames, DENSE)),
        "seeds": setting_values_text(frames, "seed"),
    }


def claims() -> list[Claim]:
    sooner = [
        make_claim("survey.internet-loss.sooner", speedup_to_loss, method, case=_case(method),
              method=_label(method), link=LINK, share=format_number(SHARE))
        for method in COMPARED if method not in (DENSE, RINGS)
    ]  # fmt: skip
    rings = make_claim("survey.internet-loss.rings", mean_step_ratio, RINGS, DENSE, link=LINK)
    return [
        *sooner,
        rings,
        make_claim("survey.internet-loss.composed", worst_composed_time_percent_error, link=LINK),
    ]


def _case(method: MethodWithPeriod) -> str:
    return f"{method.name}-{method.every}" if method.every else method.name
