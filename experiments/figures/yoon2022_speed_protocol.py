"""Effects of the measuring protocol of Yoon and Oh 2022 on numbers, each artefact by itself.

Measured here and re-derived from the authors' logs. Nothing is claimed: the paper says nothing of its
protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from analysis import plots, published
from analysis.pictures import captions, marks
from analysis.published import rederived
from analysis.published.block_intervals import combine_independent_estimates, jackknife_estimate
from analysis.published.rederived import JOB_BY_GPU_AND_METHOD
from analysis.published.validation_free import validation_free_step_ms
from analysis.records.frames import Frames
from analysis.records.steps import replication_units, warm_steps
from analysis.stats import POSITIVE, Estimate, estimate_mean
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import published_value

TITLE = "What the published protocol does to the numbers"
SCALE = yoon2022.TIMING_SCALE
# Their filters of the communication, in seconds: above and below.
DENSE_FILTER, SPARSE_FILTER = (1e-4, 1.0), (0.0, 1.01)
JOBS = {method: JOB_BY_GPU_AND_METHOD["A100", method] for method in yoon2022.METHODS}
OURS, THEIRS = "measured here", "from the authors' logs, 8 A100"
MARKERS = {OURS: ("o", "#0072B2"), THEIRS: ("s", "#D55E00")}


def runs(profile: str) -> list[Run]:
    variants = yoon2022.small_model_settings_by_variant("speed-protocol", profile)
    return yoon2022.timing_runs(profile, "production", variants, scale_item="speed-protocol")


class ArtefactEffect(NamedTuple):
    """Factor by which an artefact of the protocol changes a quantity: as measured and as published."""

    artefact: str
    quantity: str
    measure_factor: Callable[[Frames], Estimate | None]
    published_factor: Estimate | None


def artefact_effects() -> list[ArtefactEffect]:
    """Return the effects of all artefacts, those of one artefact below each other."""
    validation = "validation inside the timed loop"
    unsynced = "no synchronisation between phases"
    whole = {method: rederived.published_iteration_ms(job) for method, job in JOBS.items()}
    steps = {method: validation_free_step_ms(job) for method, job in JOBS.items()}
    dense, topk, randomk = (published_value(f"yoon2022.iteration.{method}") for method in yoon2022.METHODS)
    logged = published.iteration_table()
    waits = rederived.filtered_communication_ms(JOBS["dense"])
    unfiltered = logged.loc[logged["job"] == JOBS["dense"], "comm_mean_ms"].mean()
    # What is left of BP beside dense's, whose end waits for the GPU.
    backward = topk["backward"] / dense["backward"]
    # Compression as timed over what remains without the part of BP that ran in it.
    compression = topk["select"] / (topk["select"] - (dense["backward"] - topk["backward"]))
    # The time to launch torch.randperm over that plus what BP, which waits for it, took beyond dense's.
    launches = randomk["select"] / (randomk["select"] + randomk["backward"] - dense["backward"])
    return [
        ArtefactEffect(
            validation,
            "time per iteration, dense",
            _phase_factor("dense-published", "dense-unvalidated"),
            combine_independent_estimates(lambda step: whole["dense"] / step, steps["dense"]),
        ),
        ArtefactEffect(
            validation,
            "time per iteration, Top-k",
            _phase_factor("topk-published", "topk-unvalidated"),
            combine_independent_estimates(lambda step: whole["topk"] / step, steps["topk"]),
        ),
        ArtefactEffect(
            validation,
            "Top-k / dense",
            _validation_in_ratio,
            combine_independent_estimates(
                lambda short, long: whole["topk"] / whole["dense"] / (long / short),
                steps["dense"],
                steps["topk"],
            ),
        ),
        ArtefactEffect(
            validation,
            "mean of the final wait, dense",
            _phase_factor("dense-published", "dense-unvalidated", "synchronize"),
            jackknife_estimate(unfiltered / rederived.mean_communication_ms(JOBS["dense"])),
        ),
        ArtefactEffect(
            "a filter that differs by method",
            "communication, dense",
            _filter_factor,
            Estimate(waits.dense_filter_ms / waits.sparse_filter_ms),
        ),
        ArtefactEffect(
            unsynced,
            "BP, Top-k",
            _phase_factor("topk-unvalidated", "topk-serialised", "backward"),
            Estimate(backward),
        ),
        ArtefactEffect(
            unsynced,
            "compression, Top-k",
            _phase_factor("topk-unvalidated", "topk-serialised", "select"),
            Estimate(compression),
        ),
        ArtefactEffect(
            unsynced,
            "compression, Random-k",
            _phase_factor("randomk-unvalidated", "randomk-serialised", "select"),
            Estimate(launches),
        ),
        ArtefactEffect(
            "torch.randperm for Random-k",
            "time per iteration, Random-k",
            _phase_factor("randomk-plain", "randomk-hash-plain"),
            None,
        ),
    ]


def draw(frames: Frames, profile: str) -> plots.Figure:
    yoon2022.measured_methods(frames)  # else there is nothing to draw
    effects = artefact_effects()

    def panel(axes: plots.Axes) -> None:
        for y, effect in enumerate(effects):
            values = {OURS: effect.measure_factor(frames), THEIRS: effect.published_factor}
            for offset, (origin, factor) in zip((-0.16, 0.16), values.items(), strict=True):
                if factor is not None:
                    marks.draw_dot_with_interval(
                        axes, y + offset, factor, *MARKERS[origin], shows_interval=True
                    )
            if y == 0 or effect.artefact != effects[y - 1].artefact:
                axes.axhline(y - 0.5, color="#E6E6E6", linewidth=0.8, zorder=0)
                place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "fontsize": 6.5, "va": "top"}
                axes.annotate(effect.artefact, (1.01, y - 0.42), **place)
        axes.axvline(1, **plots.REFERENCE_LINE)
        plots.set_y_row_labels(axes, [effect.quantity for effect in effects])
        marks.set_log_factor_x_axis(axes)
        axes.set_xlim(right=4 * axes.get_xlim()[1])  # room for an interval in words
        axes.set_xlabel(f"With the artefact / without it{captions.simulated_suffix(frames)}")

    return plots.compose_figure([panel], 3.6, first_legend_entries=marks.dot_legend_handles(MARKERS))


def table(frames: Frames) -> Table:
    """Return the factors, with intervals."""
    rows = [
        (effect.artefact, effect.quantity, effect.measure_factor(frames), effect.published_factor)
        for effect in artefact_effects()
    ]
    frame = pd.DataFrame(rows, columns=["artefact", "number", "here", "from their logs"])
    return Table("With the artefact / without it", frame)


def _phase_seconds(frames: Frames, variant: str, phase: str) -> pd.Series[float]:
    """Return seconds of a phase by block; none where the variant was not run, or had no such phase."""
    keys = yoon2022.method_run_keys(frames, variant)
    means = replication_units(frames, keys).means_by_unit if keys else pd.DataFrame()
    seconds: pd.Series[float] = means.get(phase, pd.Series(dtype=float))
    return seconds


def _paired_ratio(above: pd.Series[float], below: pd.Series[float]) -> Estimate | None:
    """Return the ratio of two times, paired by block."""
    ratios = (above / below).dropna().sort_index()
    return estimate_mean(ratios.to_numpy(), POSITIVE, "blocks") if len(ratios) else None


def _phase_factor(above: str, below: str, phase: str = "slowest") -> Callable[[Frames], Estimate | None]:
    """Return a function that gives a phase of one variant over that of another."""
    return lambda frames: _paired_ratio(
        _phase_seconds(frames, above, phase), _phase_seconds(frames, below, phase)
    )


def _validation_in_ratio(frames: Frames) -> Estimate | None:
    """Return Top-k over dense with validation in the timed loop, over the ratio without."""
    with_it, without = (
        _phase_seconds(frames, f"topk-{protocol}", "slowest")
        / _phase_seconds(frames, f"dense-{protocol}", "slowest")
        for protocol in ("published", "unvalidated")
    )
    return _paired_ratio(with_it, without)


def _filter_factor(frames: Frames) -> Estimate | None:
    """Return the mean of dense's final waits by the filter of dense logs over that of sparse logs."""
    keys = yoon2022.method_run_keys(frames, "dense-published")
    if not keys:
        return None
    steps = pd.concat([warm_steps(frames, key).steps for key in keys])

    def mean_waits_between(low: float, high: float) -> pd.Series[float]:
        waits = steps[steps["synchronize_s"].gt(low) & steps["synchronize_s"].lt(high)]
        means: pd.Series[float] = waits.groupby(["key", "block"])["synchronize_s"].mean()
        return means

    return _paired_ratio(mean_waits_between(*DENSE_FILTER), mean_waits_between(*SPARSE_FILTER))
