"""The training speeds in the text of Yoon and Oh 2022: samples per second and what sparsification costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.published import rederived
from analysis.published.block_intervals import combine_estimates
from analysis.published.rederived import JOB_BY_GPU_AND_METHOD
from analysis.published.validation_free import validation_free_step_ms
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim, of_methods, value

TITLE = "Training speed of dense, Top-k and Random-k SGD"
MODE, PUBLISHED_MODE = "production", "as_published"
WHOLE_EPOCHS = {"alternate.block_steps": 49, "alternate.limit_min": 60}  # each with one validation
SCALE = yoon2022.TIMING_SCALE
published_results = yoon2022.published_results
ORIGIN = {MODE: "ours", PUBLISHED_MODE: "ours, the published protocol"}
SPARSE = ("topk", "randomk")


def runs(profile: str) -> list[Run]:
    production = yoon2022.timing_runs(profile, MODE)
    if profile != "paper":  # a turn of 49 steps takes a laptop a minute; speed-protocol has a smaller model
        return production
    return production + yoon2022.timing_runs(profile, PUBLISHED_MODE, more=WHOLE_EPOCHS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    theirs = {
        method: {
            "published, 8 A100": Estimate(value("yoon2022.speed-a100")["dense"] / speed),
            "published, corrected": _without_validation(method),
        }
        for method, speed in value("yoon2022.speed-a100").items()
    }
    return picture(frames, _modes(frames), theirs)


def picture(
    frames: Frames, modes: Sequence[str], theirs: Mapping[str, Mapping[str, Estimate]] = {}
) -> plots.Figure:
    """Samples per second of every method, and time per iteration relative to dense beside the paper's."""
    methods, simulated = yoon2022.measured_methods(frames), captions.simulated_suffix(frames)

    def groups(found: Mapping[str, Mapping[str, Estimate | None]]) -> plots.BarGroups:
        looks = {method: style.method_style(method) for method in found}
        return {
            looks[method].label: [(looks[method], origin, each) for origin, each in own.items() if each]
            for method, own in found.items()
        }

    speeds = groups({
        method: {ORIGIN[mode]: yoon2022.method_speed(frames, method, mode) for mode in modes}
        for method in methods
    })  # fmt: skip
    ratios = groups({
        method: {ORIGIN[mode]: yoon2022.step_ratio(frames, method, mode=mode) for mode in modes}
        | dict(theirs.get(method, {}))
        for method in methods
        if method != "dense"
    })  # fmt: skip
    shown = {origin for group in (*speeds.values(), *ratios.values()) for _, origin, _ in group}
    return plots.compose_figure(
        [
            plots.grouped_bars_panel(speeds, ylabel=f"Samples per second{simulated}"),
            plots.grouped_bars_panel(ratios, ylabel=f"Time per iteration / dense{simulated}", level=1),
        ],
        2.6,
        keys=marks.origin_legend_handles(
            origin for origin in marks.FILL_BY_ORIGIN if theirs and origin in shown
        ),
        width_ratios=(2, 3) if theirs else (1, 1),
    )


def table(frames: Frames) -> Table:
    """Speed and slowdown per method and mode, with intervals."""
    return speeds(frames, _modes(frames))


def speeds(frames: Frames, modes: Sequence[str]) -> Table:
    """Samples per second and time per iteration relative to dense, a row per mode and method."""
    rows = []
    for mode in modes:
        for method in yoon2022.measured_methods(frames, mode):
            speed = yoon2022.method_speed(frames, method, mode)
            assert speed is not None  # `present` lists methods that have runs
            ratio = Estimate(1.0) if method == "dense" else yoon2022.step_ratio(frames, method, mode=mode)
            label, n = style.method_style(method).label, f"{speed.n} {speed.sample_kind}"
            rows.append({"method": label, "mode": mode, "speed": speed, "time per iteration": ratio, "n": n})
    units = {"speed": "samples/s", "time per iteration": "dense = 1"}
    return Table.from_rows(f"Training speed{captions.simulated_suffix(frames)}", rows, units)


def claims() -> list[Claim]:
    found = [
        claim("yoon2022.speed.faster.dense-topk", yoon2022.percent_longer, "topk"),
        claim("yoon2022.speed.faster.dense-randomk", yoon2022.percent_longer, "randomk"),
        claim("yoon2022.speed.faster.randomk-topk", yoon2022.percent_longer, "topk", "randomk"),
        *of_methods("yoon2022.speed.ratio", _ratio, SPARSE),
    ]
    for method in SPARSE:
        corrected = round(_without_validation(method).value, 2)
        found += of_methods("yoon2022.speed.corrected", yoon2022.step_ratio, [method], paper=corrected)
    for method in yoon2022.METHODS:
        free = format_number(
            rederived.samples_per_s(validation_free_step_ms(JOB_BY_GPU_AND_METHOD["A100", method]).value)
        )
        found += of_methods("yoon2022.speed.speed.a100", _speed, [method], free=free)
    return [
        *found,
        claim("yoon2022.speed.speed.v100.dense", _speed, "dense"),
        claim("yoon2022.speed.speed.v100.topk", _speed, "topk"),
        claim("yoon2022.speed.ratio.topk.v100", _ratio, "topk"),
    ]


def _without_validation(method: str) -> Estimate:
    """Time per iteration relative to dense, from the logs of their 8 A100."""
    job, dense = JOB_BY_GPU_AND_METHOD["A100", method], JOB_BY_GPU_AND_METHOD["A100", "dense"]
    return combine_estimates(
        lambda long, short: long / short, validation_free_step_ms(job), validation_free_step_ms(dense)
    )


def _modes(frames: Frames) -> list[str]:
    found = set(frames.runs["timing.mode"]) if len(frames.runs) else set()
    return [mode for mode in ORIGIN if mode in found]


def _comparable(frames: Frames) -> str:
    """The mode to hold beside the published numbers: theirs, where it was run."""
    return _modes(frames)[-1] if _modes(frames) else MODE


def _speed(frames: Frames, method: str) -> Estimate | None:
    return yoon2022.method_speed(frames, method, _comparable(frames))


def _ratio(frames: Frames, method: str) -> Estimate | None:
    return yoon2022.step_ratio(frames, method, mode=_comparable(frames))
