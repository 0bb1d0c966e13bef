"""The training speeds in the text of Yoon and Oh 2022: samples per second and what sparsification costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import number
from analysis.published import rederived
from analysis.published.rederived import JOB
from analysis.records.frames import Frames
from analysis.stats import Value
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim, value

TITLE = "Training speed of dense, Top-k and Random-k SGD"
MODE, PUBLISHED_MODE = "production", "as_published"
WHOLE_EPOCHS = {"alternate.block_steps": 49, "alternate.limit_min": 60}  # each with one validation
SCALE = yoon2022.TIMING_SCALE
ORIGIN = {MODE: "ours", PUBLISHED_MODE: "ours, the published protocol"}
UNITS = {"speed": "samples/s", "time per iteration": "dense = 1"}
SPARSE = ("topk", "randomk")


def runs(profile: str) -> list[Run]:
    production = yoon2022.timing_runs(profile, MODE)
    if profile != "paper":  # a turn of 49 steps takes a laptop a minute; speed-protocol has a smaller model
        return production
    return production + yoon2022.timing_runs(profile, PUBLISHED_MODE, yoon2022.TIMED, WHOLE_EPOCHS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    theirs: dict[str, dict[str, Value | None]] = {
        method: {
            "published, 8 A100": Value(value("yoon2022.speed-a100")["dense"] / speed),
            "published, corrected": _without_validation(method),
        }
        for method, speed in value("yoon2022.speed-a100").items()
    }
    return picture(frames, _modes(frames), theirs)


def picture(
    frames: Frames, modes: Sequence[str], theirs: dict[str, dict[str, Value | None]] | None = None
) -> plots.Figure:
    """Samples per second of every method, and time per iteration relative to dense beside the paper's."""
    methods, simulated = yoon2022.present(frames), captions.simulated(frames)
    speeds = {
        method: {ORIGIN[mode]: yoon2022.speed(frames, method, mode) for mode in modes} for method in methods
    }
    ratios = {
        method: {ORIGIN[mode]: yoon2022.ratio(frames, method, mode=mode) for mode in modes}
        | (theirs or {}).get(method, {})
        for method in methods
        if method != "dense"
    }
    left, right = (
        {
            style.look(method).label: [
                (style.look(method), origin, each) for origin, each in found.items() if each
            ]
            for method, found in groups.items()
        }
        for groups in (speeds, ratios)
    )
    shown = {origin for groups in (left, right) for group in groups.values() for _, origin, _ in group}
    keys = [] if theirs is None else marks.origin_keys(origin for origin in marks.ORIGINS if origin in shown)
    return plots.picture(
        [
            plots.ratio_bars(left, ylabel=f"Samples per second{simulated}"),
            plots.ratio_bars(right, ylabel=f"Time per iteration / dense{simulated}", level=1),
        ],
        2.6,
        keys=keys,
        width_ratios=(1, 1) if theirs is None else (2, 3),
    )


def table(frames: Frames) -> Table:
    """Speed and slowdown per method and mode, with intervals."""
    rows = [row(frames, method, mode) for mode in _modes(frames) for method in yoon2022.present(frames, mode)]
    return Table(f"Training speed{captions.simulated(frames)}", pd.DataFrame(rows), UNITS)


def row(frames: Frames, method: str, mode: str) -> dict[str, Any]:
    """A method's speed and its time relative to dense."""
    speed = yoon2022.speed(frames, method, mode)
    assert speed is not None  # `present` lists methods that have runs
    return {
        "method": style.look(method).label,
        "mode": mode,
        "speed": speed,
        "time per iteration": Value(1.0) if method == "dense" else yoon2022.ratio(frames, method, mode=mode),
        "n": f"{speed.n} {speed.of}",
    }


def caption(frames: Frames, profile: str) -> str:
    return (
        "Training speed over all workers (left) and time per iteration relative to dense (right), means "
        "over warm steps with 95 % intervals. Published: the paper's ratios; corrected: "
        "recomputed from the authors' logs with rank 0's validation taken out of the timed loop. "
        f"{captions.setting(frames)} {captions.timing(frames)}"
    )


def claims() -> list[Claim]:
    def of(name: str, ours: Callable[..., Value | None], *methods: str, **own: Any) -> Claim:
        return claim(f"yoon2022.speed.{name}", ours, *methods, **own)

    def named(method: str) -> dict[str, Any]:
        return {"method": method, "label": style.look(method).label}

    def free(method: str) -> str:
        return number(rederived.speed(float(rederived.iteration_ms(JOB["A100", method])[0])))

    return [
        of("faster.dense-topk", yoon2022.longer, "topk", "dense"),
        of("faster.dense-randomk", yoon2022.longer, "randomk", "dense"),
        of("faster.randomk-topk", yoon2022.longer, "topk", "randomk"),
        *(of("ratio", _ratio, each, case=each, **named(each)) for each in SPARSE),
        *(
            of("corrected", yoon2022.ratio, each, case=each, **named(each),
               paper=round(_without_validation(each).value, 2))
            for each in SPARSE
        ),
        *(
            of("speed.a100", _speed, each, case=each, **named(each), free=free(each))
            for each in yoon2022.METHODS
        ),
        *(of(f"speed.v100.{each}", _speed, each, **named(each)) for each in ("dense", "topk")),
        of("ratio.topk.v100", _ratio, "topk"),
        of("a100-over-v100", _nowhere),
        of("pcie-longer", _nowhere),
    ]  # fmt: skip


def _without_validation(method: str) -> Value:
    """Time per iteration relative to dense, from the logs of their 8 A100."""
    job, dense = JOB["A100", method], JOB["A100", "dense"]
    return rederived.estimate(rederived.iteration_ms(job) / rederived.iteration_ms(dense))


def _modes(frames: Frames) -> list[str]:
    found = set(frames.runs["timing.mode"]) if len(frames.runs) else set()
    return [mode for mode in (MODE, PUBLISHED_MODE) if mode in found]


def _comparable(frames: Frames) -> str:
    """The mode to hold beside the published numbers: theirs, where it was run."""
    return _modes(frames)[-1] if _modes(frames) else MODE


def _speed(frames: Frames, method: str) -> Value | None:
    return yoon2022.speed(frames, method, _comparable(frames))


def _ratio(frames: Frames, method: str) -> Value | None:
    return yoon2022.ratio(frames, method, mode=_comparable(frames))


def _nowhere(frames: Frames) -> None:
    """Nothing: one set of records holds one machine."""
