"""What the measuring protocol of Yoon and Oh 2022 does to numbers: each artefact by itself, measured here and
re-derived from the authors' logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd

from analysis import captions, plots, published, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.published import rederived
from analysis.published.rederived import JOB, estimate
from analysis.stats import POSITIVE, Value, over_units
from analysis.steps import units, warm
from analysis.tables import Table
from experiments.figures import _published as printed
from experiments.figures import _yoon2022 as yoon2022

TITLE = "What the published protocol does to the numbers"
SCALE = yoon2022.TIMING_SCALE
# A turn is whole epochs of 49 steps, as theirs, each with one validation; so the model is small.
SCALES = {
    "smoke": [
        "task=cnn_digits", "cluster=local", "workers=2", "task.batch_size=16", "timing.warmup_steps=2",
        "train.epoch_steps=4", "alternate.block_steps=4",
    ],
    "laptop": [
        "task=cnn_cifar10", "cluster=local", "workers=2", "task.batch_size=32", "timing.warmup_steps=2",
        "train.epoch_steps=49", "alternate.block_steps=49",
    ],
    "paper": ["cluster=local", "alternate.block_steps=49", "alternate.limit_min=60"],
}  # fmt: skip
PROTOCOLS = {
    "plain": "timing.mode=production",
    "serialised": "timing.mode=serialised",
    "unvalidated": "timing.mode=as_published",
    "published": "timing.mode=as_published train.validate=epoch",
}
# Their filters of the communication, in seconds: above and below.
DENSE_FILTER, SPARSE_FILTER = (1e-4, 1.0), (0.0, 1.01)
A100 = {method: JOB["A100", method] for method in yoon2022.METHODS}
OURS, THEIRS = "measured here", "from the authors' logs, 8 A100"
MARKERS = {OURS: ("o", "#0072B2"), THEIRS: ("s", "#D55E00")}


def runs(profile: str) -> list[list[str]]:
    variants = {
        f"{method}-{protocol}": _words(method, profile, protocol)
        for method, protocols in {
            "dense": ("serialised", "unvalidated", "published"),
            "topk": ("serialised", "unvalidated", "published"),
            "randomk": ("serialised", "unvalidated", "plain"),
            "randomk-hash": ("plain",),
        }.items()
        for protocol in protocols
    }
    return yoon2022.timing_runs(profile, "production", variants, scales=SCALES)


class Row(NamedTuple):
    """By what factor an artefact changes a number."""

    artefact: str
    number: str
    ours: Callable[[Frames], Value | None]
    theirs: Callable[[], Value | None]


def rows() -> list[Row]:
    validation, filters = "validation inside the timed loop", "a filter that differs by method"
    unsynchronised, drawing = "no synchronisation between phases", "torch.randperm for Random-k"
    return [
        Row(validation, "time per iteration, dense", _validated("dense"), _longer("dense")),
        Row(validation, "time per iteration, Top-k", _validated("topk"), _longer("topk")),
        Row(
            validation,
            "Top-k / dense",
            _validated_ratio,
            lambda: estimate(_stalls("topk") / _stalls("dense")),
        ),
        Row(validation, "mean of the final wait, dense", _validated("dense", "synchronize"), _unfiltered),
        Row(filters, "communication, dense", _filtered, lambda: _filters("dense")),
        Row(unsynchronised, "BP, Top-k", _published("topk", "backward"), _backward_leak),
        Row(unsynchronised, "compression, Top-k", _published("topk", "select"), _compression_leak),
        Row(unsynchronised, "compression, Random-k", _published("randomk", "select"), _launches_only),
        Row(drawing, "time per iteration, Random-k", _permuted, lambda: None),
    ]


def draw(frames: Frames, profile: str) -> plots.Figure:
    yoon2022.present(frames)  # else there is nothing to draw
    found = [(row, {OURS: row.ours(frames), THEIRS: row.theirs()}) for row in rows()]
    with plots.canvas(style.two_columns(3.6)) as (figure, axes):
        for y, (_, values) in enumerate(found):
            for offset, (origin, value) in zip((-0.16, 0.16), values.items(), strict=True):
                if value is not None:
                    marker, colour = MARKERS[origin]
                    plots.dot(axes, y + offset, value, marker, colour)
        axes.axvline(1, color="#777777", linewidth=0.6, zorder=0)
        axes.set_yticks(range(len(found)), [row.number for row, _ in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        for y, (row, _) in enumerate(found):
            if y == 0 or row.artefact != found[y - 1][0].artefact:
                axes.axhline(y - 0.5, color="#E6E6E6", linewidth=0.8, zorder=0)
                axes.annotate(
                    row.artefact, (1.01, y - 0.42), xycoords=("axes fraction", "data"), fontsize=6.5, va="top"
                )
        plots.factor_ticks(axes)
        simulated = captions.simulated(frames)
        axes.set_xlabel(f"With the artefact / without it{simulated}")
        figure.legend(handles=plots.dot_keys(MARKERS), loc="outside lower center", ncols=2)
    return figure


def table(frames: Frames) -> Table:
    """The factors, with intervals."""
    cells = [
        {
            "artefact": row.artefact,
            "number": row.number,
            "here": row.ours(frames),
            "from their logs": row.theirs(),
        }
        for row in rows()
    ]
    return Table("With the artefact / without it", pd.DataFrame(cells))


def caption(frames: Frames, profile: str) -> str:
    return (
        "By what factor each artefact of the published protocol changes a number: with it over without it, "
        "95 % intervals. Rank 0 validates in every 49th timed step while the others wait; dense and sparse "
        "logs were filtered differently (their factor is a lower bound); nothing synchronises between "
        "phases, so on a GPU what one phase has queued is counted in the next, while a CPU queues nothing; "
        "Random-k was drawn by torch.randperm. What TF32 does is not here: their A100s used it, their V100s "
        "have none, and no two of their logs differ in that alone. "
        f"{captions.setting(frames)} {captions.timing(frames)} Squares: {printed.FROM_LOGS}"
    )


def claims() -> list[Claim]:
    """None: the paper says nothing of its protocol."""
    return []


def _words(method: str, profile: str, protocol: str) -> Sequence[str]:
    sparse = yoon2022.SMALL_MODEL_DENSITY if method != "dense" and profile != "paper" else []
    return [*yoon2022.TIMED[method], *sparse, PROTOCOLS[protocol]]


# --- measured here
# ----------------------------------------------------------------------------------------


def _seconds(frames: Frames, variant: str, phase: str) -> pd.Series[float] | None:
    """Of a phase, by block; None where the variant was not run."""
    keys = yoon2022.keys(frames, variant)
    means = units(frames, keys).means if keys else pd.DataFrame()
    seconds: pd.Series[float] | None = means.get(phase)
    return seconds


def _ratio(above: pd.Series[float] | None, below: pd.Series[float] | None) -> Value | None:
    """Paired by block."""
    if above is None or below is None:
        return None
    ratios = (above / below).dropna().sort_index()
    return over_units(ratios.to_numpy(), POSITIVE, "blocks")


def _validated(method: str, phase: str = "slowest") -> Callable[[Frames], Value | None]:
    return lambda frames: _ratio(
        _seconds(frames, f"{method}-published", phase), _seconds(frames, f"{method}-unvalidated", phase)
    )


def _validated_ratio(frames: Frames) -> Value | None:
    found = {
        (method, protocol): _seconds(frames, f"{method}-{protocol}", "slowest")
        for method in ("dense", "topk")
        for protocol in ("published", "unvalidated")
    }
    with_, without = (
        None if topk is None or dense is None else topk / dense
        for topk, dense in (
            (found["topk", protocol], found["dense", protocol]) for protocol in ("published", "unvalidated")
        )
    )
    return _ratio(with_, without)


def _filtered(frames: Frames) -> Value | None:
    keys = yoon2022.keys(frames, "dense-published")
    if not keys:
        return None
    steps = pd.concat([warm(frames, key).steps for key in keys])
    dense, sparse = (_mean_within(steps, limits) for limits in (DENSE_FILTER, SPARSE_FILTER))
    return _ratio(dense, sparse)


def _mean_within(steps: pd.DataFrame, limits: tuple[float, float]) -> pd.Series[float]:
    """Of the final waits between these limits, by block."""
    waits = steps[steps["synchronize_s"].gt(limits[0]) & steps["synchronize_s"].lt(limits[1])]
    means: pd.Series[float] = waits.groupby(["key", "block"])["synchronize_s"].mean()
    return means


def _published(method: str, phase: str) -> Callable[[Frames], Value | None]:
    return lambda frames: _ratio(
        _seconds(frames, f"{method}-unvalidated", phase), _seconds(frames, f"{method}-serialised", phase)
    )


def _permuted(frames: Frames) -> Value | None:
    return _ratio(*(_seconds(frames, f"{method}-plain", "slowest") for method in ("randomk", "randomk-hash")))


# --- from the authors' logs
# -------------------------------------------------------------------------------


def _stalls(method: str) -> rederived.Draws:
    """Time of an iteration with validation over that without."""
    job = A100[method]
    return rederived.published_iteration_ms(job) / rederived.iteration_ms(job)


def _longer(method: str) -> Callable[[], Value | None]:
    return lambda: estimate(_stalls(method))


def _unfiltered() -> Value | None:
    table = published.iterations()
    mean = table.loc[table["job"] == A100["dense"], "comm_mean_ms"].mean()
    return estimate(mean / rederived.communication_ms(A100["dense"]))


def _filters(method: str) -> Value:
    communication = rederived.filtered_communication_ms(A100[method])
    return Value(communication.dense / communication.sparse)


def _backward_leak() -> Value:
    """What is left of BP beside dense's, whose end waits for the GPU."""
    topk, dense = (yoon2022.ITERATIONS[method].backward for method in ("topk", "dense"))
    return Value(topk / dense)


def _compression_leak() -> Value:
    """Compression as timed over what remains without the part of BP that ran in it."""
    topk, dense = (yoon2022.ITERATIONS[method] for method in ("topk", "dense"))
    return Value(topk.select / (topk.select - (dense.backward - topk.backward)))


def _launches_only() -> Value:
    """The time to launch torch.randperm over that plus what BP, which waits for it, took beyond dense's."""
    randomk, dense = (yoon2022.ITERATIONS[method] for method in ("randomk", "dense"))
    return Value(randomk.select / (randomk.select + randomk.backward - dense.backward))
