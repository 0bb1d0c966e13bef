"""The training speeds in the text of Yoon and Oh 2022: samples per second and what sparsification costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.published import rederived
from analysis.published.rederived import JOB_BY_GPU_AND_METHOD
from analysis.published.validation_free import validation_free_step_ms
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._published import validation_free_step_ratio
from experiments.figures.papers import make_claim, make_claims_by_method, published_value

TITLE = "Training speed of dense, Top-k and Random-k SGD"
MODE, PUBLISHED_MODE = "production", "as_published"
WHOLE_EPOCHS = {"alternate.block_steps": 49, "alternate.limit_min": 60}  # each with one validation
SCALE = yoon2022.TIMING_SCALE
published_results = yoon2022.published_results_by_method
ORIGIN = {MODE: "ours", PUBLISHED_MODE: "ours, the published protocol"}
SPARSE = ("topk", "randomk")


def runs(profile: str) -> list[Run]:
    production = yoon2022.timing_runs(profile, MODE)
    if profile != "paper":  # a turn of 49 steps takes a laptop a minute; speed-protocol has a smaller model
        return production
    return production + yoon2022.timing_runs(profile, PUBLISHED_MODE, overrides=WHOLE_EPOCHS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    published = {
        method: {
            "published, 8 A100": Estimate(published_value("yoon2022.speed-a100")["dense"] / speed),
            "published, corrected": _validation_free_ratio_to_dense(method),
        }
        for method, speed in published_value("yoon2022.speed-a100").items()
    }
    return draw_speeds_and_step_ratios(frames, _measured_timing_modes(frames), published)


def draw_speeds_and_step_ratios(
    frames: Frames, modes: Sequence[str], published: Mapping[str, Mapping[str, Estimate]] = {}
) -> plots.Figure:
    """Draw samples per second, and time per iteration relative to dense beside the paper's."""
    speeds = {}
    ratios = {}
    for method in yoon2022.measured_methods(frames):
        look = style.method_style(method)
        speed_by_origin = {
            ORIGIN[mode]: yoon2022.method_samples_per_s(frames, method, mode) for mode in modes
        }
        speeds[look.label] = _bars(look, speed_by_origin)
        if method != "dense":
            ratio_by_origin = {
                ORIGIN[mode]: yoon2022.step_time_ratio_to_baseline(frames, method, timing_mode=mode)
                for mode in modes
            }
            ratios[look.label] = _bars(look, {**ratio_by_origin, **published.get(method, {})})
    origins = {origin for group in (*speeds.values(), *ratios.values()) for _, origin, _ in group}
    simulated = captions.simulated_suffix(frames)
    return plots.compose_figure(
        [
            plots.grouped_bars_panel(speeds, ylabel=f"Samples per second{simulated}"),
            plots.grouped_bars_panel(ratios, ylabel=f"Time per iteration / dense{simulated}", reference_y=1),
        ],
        2.6,
        first_legend_entries=marks.origin_legend_handles(
            origin for origin in marks.FILL_BY_ORIGIN if published and origin in origins
        ),
        width_ratios=(2, 3) if published else (1, 1),
    )


def _bars(
    look: style.MethodStyle, by_origin: Mapping[str, Estimate | None]
) -> list[tuple[style.MethodStyle, str, Estimate]]:
    return [(look, origin, estimate) for origin, estimate in by_origin.items() if estimate]


def table(frames: Frames) -> Table:
    """Return speed and slowdown per method and mode, with intervals."""
    return speed_table(frames, _measured_timing_modes(frames))


def speed_table(frames: Frames, modes: Sequence[str]) -> Table:
    """Return samples per second and time per iteration relative to dense, a row per mode and method."""
    rows = []
    for mode in modes:
        for method in yoon2022.measured_methods(frames, mode):
            speed = yoon2022.method_samples_per_s(frames, method, mode)
            assert speed is not None  # `present` lists methods that have runs
            ratio = (
                Estimate(1.0)
                if method == "dense"
                else yoon2022.step_time_ratio_to_baseline(frames, method, timing_mode=mode)
            )
            label = style.method_style(method).label
            n = f"{speed.n} {speed.sample_kind}"
            rows.append({"method": label, "mode": mode, "speed": speed, "time per iteration": ratio, "n": n})
    units = {"speed": "samples/s", "time per iteration": "dense = 1"}
    return Table.from_rows(f"Training speed{captions.simulated_suffix(frames)}", rows, units)


def claims() -> list[Claim]:
    listed = [
        make_claim("yoon2022.speed.faster.dense-topk", yoon2022.step_percent_longer, "topk"),
        make_claim("yoon2022.speed.faster.dense-randomk", yoon2022.step_percent_longer, "randomk"),
        make_claim("yoon2022.speed.faster.randomk-topk", yoon2022.step_percent_longer, "topk", "randomk"),
        *make_claims_by_method("yoon2022.speed.ratio", _comparable_step_ratio, SPARSE),
    ]
    for method in SPARSE:
        corrected = round(_validation_free_ratio_to_dense(method).value, 2)
        listed += make_claims_by_method(
            "yoon2022.speed.corrected", yoon2022.step_time_ratio_to_baseline, [method], paper=corrected
        )
    for method in yoon2022.METHODS:
        free = format_number(
            rederived.samples_per_s_of_8_workers(
                validation_free_step_ms(JOB_BY_GPU_AND_METHOD["A100", method]).value
            )
        )
        listed += make_claims_by_method(
            "yoon2022.speed.speed.a100", _comparable_samples_per_s, [method], free=free
        )
    return [
        *listed,
        make_claim("yoon2022.speed.speed.v100.dense", _comparable_samples_per_s, "dense"),
        make_claim("yoon2022.speed.speed.v100.topk", _comparable_samples_per_s, "topk"),
        make_claim("yoon2022.speed.ratio.topk.v100", _comparable_step_ratio, "topk"),
    ]


def _validation_free_ratio_to_dense(method: str) -> Estimate:
    """Return the time per iteration relative to dense, from the logs of their 8 A100."""
    return validation_free_step_ratio(("A100", method), ("A100", "dense"))


def _measured_timing_modes(frames: Frames) -> list[str]:
    modes = captions.distinct_values(frames, "timing.mode")
    return [mode for mode in ORIGIN if mode in modes]


def _comparable_timing_mode(frames: Frames) -> str:
    """Return the mode to hold beside the published numbers: theirs, where it was run."""
    return [MODE, *_measured_timing_modes(frames)][-1]


def _comparable_samples_per_s(frames: Frames, method: str) -> Estimate | None:
    return yoon2022.method_samples_per_s(frames, method, _comparable_timing_mode(frames))


def _comparable_step_ratio(frames: Frames, method: str) -> Estimate | None:
    return yoon2022.step_time_ratio_to_baseline(frames, method, timing_mode=_comparable_timing_mode(frames))
