"""The training speeds in the text of Yoon and Oh 2022: samples per second and what sparsification costs."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis import captions, plots, style
from analysis.claims import ANY_GPU, Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.published import rederived
from analysis.published.rederived import JOB
from analysis.stats import Value, slowdown, throughput
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Training speed of dense, Top-k and Random-k SGD"
MODE, PUBLISHED_MODE = "production", "as_published"
WHOLE_EPOCHS = ("alternate.block_steps=49", "alternate.limit_min=60")  # each with one validation
SCALE = yoon2022.TIMING_SCALE
SOURCE = "text of the section on training speed"
ORIGIN = {MODE: "ours", PUBLISHED_MODE: "ours, the published protocol"}
SPEED_UNITS = {"speed": "samples/s", "time per iteration": "dense = 1"}
ONCE = "They ran each configuration once, so its spread is unknown; 10 % is granted."


def runs(profile: str) -> list[list[str]]:
    production = yoon2022.timing_runs(profile, MODE)
    if profile != "paper":  # a turn of 49 steps takes a laptop a minute; speed-protocol has a smaller model
        return production
    return production + yoon2022.timing_runs(profile, PUBLISHED_MODE, yoon2022.TIMED, *WHOLE_EPOCHS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods = yoon2022.present(frames)
    others = [method for method in methods if method != "dense"]
    speeds = {
        method: {
            ORIGIN[mode]: throughput(frames, yoon2022.keys(frames, method, mode)) for mode in _modes(frames)
        }
        for method in methods
    }
    ratios = {
        method: {ORIGIN[mode]: _slowdown(frames, method, mode) for mode in _modes(frames)}
        | _published(method)
        for method in others
    }
    simulated = captions.simulated(frames)
    with plots.canvas(style.two_columns(2.6), 1, 2, width_ratios=(2, 3)) as (figure, (left, right)):
        _groups(left, speeds)
        _groups(right, ratios)
        left.set_ylabel(f"Samples per second{simulated}")
        right.set_ylabel(f"Time per iteration / dense{simulated}")
        right.axhline(1, color="#777777", linewidth=0.6, zorder=0)
        shown = {
            origin for each in (*speeds.values(), *ratios.values()) for origin, value in each.items() if value
        }
        keys = plots.origin_keys(origin for origin in plots.ORIGINS if origin in shown)
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys))
    return figure


def table(frames: Frames) -> Table:
    """Speed and slowdown per method and mode, with intervals."""
    rows = [
        speed_row(frames, method, mode)
        for mode in _modes(frames)
        for method in yoon2022.present(frames, mode)
    ]
    return Table(f"Training speed{captions.simulated(frames)}", pd.DataFrame(rows), SPEED_UNITS)


def speed_row(frames: Frames, method: str, mode: str) -> dict[str, Any]:
    """A method's speed and its time relative to dense."""
    speed = throughput(frames, yoon2022.keys(frames, method, mode))
    assert speed is not None  # `present` lists methods that have runs
    return {
        "method": style.look(method).label,
        "mode": mode,
        "speed": speed,
        "time per iteration": Value(1.0) if method == "dense" else _slowdown(frames, method, mode),
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
    a100, v100 = yoon2022.SPEED, yoon2022.V100_SPEED
    return [
        Claim(
            text="dense trains faster than Top-k: how much longer Top-k's iteration is",
            paper=367,
            unit="%",
            source=f"{SOURCE}; 17387.49 / 3723.61 = 4.67 on 8 A100",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts. How large it is depends on the selection kernel and the link.",
            ours=lambda frames: _longer(frames, "topk"),
            accelerator=ANY_GPU,
            timed=True,
            group=yoon2022.TOPK_SELECTION,
        ),
        Claim(
            text="dense trains faster than Random-k: how much longer Random-k's iteration is",
            paper=11,
            unit="%",
            source=f"{SOURCE}; 17387.49 / 15648.40 = 1.11 on 8 A100",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts.",
            ours=lambda frames: _longer(frames, "randomk"),
            accelerator=ANY_GPU,
            timed=True,
            group=yoon2022.RANDOMK_SELECTION,
        ),
        Claim(
            text="Random-k trains faster than Top-k: how much longer Top-k's iteration is",
            paper=320,
            unit="%",
            source=f"{SOURCE}; 15648.40 / 3723.61 = 4.20 on 8 A100",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts.",
            ours=lambda frames: _longer(frames, "topk", "randomk"),
            accelerator=ANY_GPU,
            timed=True,
            group=yoon2022.RANDOMK_SELECTION,
        ),
        _ratio("topk", 4.67, "Validation inside their timed loop pulls both methods together."),
        _ratio("randomk", 1.11, "Validation inside their timed loop pulls both methods together."),
        _corrected("topk"),
        _corrected("randomk"),
        *[_speed(method) for method in yoon2022.METHODS],
        *[_v100_speed(method) for method in yoon2022.V100_SPEED],
        Claim(
            text="dense over Top-k, 8 V100",
            paper=3.38,
            unit="x",
            source="text of the section on GPU capability",
            kind="ratio",
            tolerance=0.1,
            reason="Needs their 8 V100. Without validation in the timed loop their logs give 4.9.",
            ours=lambda frames: _slowdown(frames, "topk"),
            accelerator="V100",
            timed=True,
        ),
        Claim(
            text="dense, 8 A100 over 8 V100",
            paper=round(a100["dense"] / v100["dense"], 2),
            unit="x",
            source="text of the section on GPU capability",
            kind="ratio",
            tolerance=0.1,
            reason="Needs both machines; one set of records holds one.",
            ours=lambda frames: None,
            accelerator="A100",
            timed=True,
        ),
        Claim(
            text="Top-k on PCIe against NVLink: how much longer its iteration is",
            paper=2,
            unit="%",
            source="text of the section on communication bandwidth; their jobs 129435 and 129439, 4 workers",
            kind="absolute",
            tolerance=2.0,
            reason=(
                "Needs one machine with either link. Their logs: Top-k 2.3 %, dense 6.8 %; FP and BP of 8.9 "
                "and 24.2 ms are those of their V100 jobs."
            ),
            ours=lambda frames: None,
            accelerator="V100",
            link="PCIe",
            timed=True,
        ),
    ]


def _ratio(method: str, paper: float, reason: str) -> Claim:
    return Claim(
        text=f"dense over {style.look(method).label}",
        paper=paper,
        unit="x",
        source=SOURCE,
        kind="ratio",
        tolerance=0.1,
        reason=f"{ONCE} {reason}",
        ours=lambda frames: _slowdown(frames, method),
        accelerator="A100",
        timed=True,
    )


def _corrected(method: str) -> Claim:
    return Claim(
        text=f"dense over {style.look(method).label}, their number without validation in the timed loop",
        paper=round(_without_validation(method).value, 2),
        unit="x",
        source="recomputed from the authors' logs (speed-logs)",
        kind="ratio",
        tolerance=0.1,
        reason=(
            "Rank 0 validated for 1.2 s in every 49 timed iterations while seven ranks waited: 24 to 25 ms "
            f"of each iteration, whatever the method. {ONCE}"
        ),
        ours=lambda frames: _slowdown(frames, method, MODE),
        accelerator="A100",
        timed=True,
    )


def _speed(method: str) -> Claim:
    return Claim(
        text=f"training speed, {style.look(method).label}, 8 A100",
        paper=yoon2022.SPEED[method],
        unit="samples/s",
        source=SOURCE,
        kind="ratio",
        tolerance=0.1,
        reason=(
            f"{ONCE} 8 A100, Horovod, torch 1.8.1, validation inside the timed loop; without it "
            f"{number(rederived.speed(float(rederived.iteration_ms(JOB['A100', method])[0])))}."
        ),
        ours=lambda frames: _throughput(frames, method),
        accelerator="A100",
        timed=True,
    )


def _v100_speed(method: str) -> Claim:
    return Claim(
        text=f"training speed, {style.look(method).label}, 8 V100",
        paper=yoon2022.V100_SPEED[method],
        unit="samples/s",
        source="text of the section on GPU capability",
        kind="ratio",
        tolerance=0.1,
        reason=f"{ONCE} Needs their 8 V100.",
        ours=lambda frames: _throughput(frames, method),
        accelerator="V100",
        timed=True,
    )


def _groups(axes: plots.Axes, groups: dict[str, dict[str, Value | None]]) -> None:
    """A group of bars per method, a bar per origin."""
    width = 0.8 / max(map(len, groups.values()))
    for x, (method, group) in enumerate(groups.items()):
        values = [(origin, value) for origin, value in group.items() if value]
        for i, (origin, value) in enumerate(values):
            place = x + (i - (len(values) - 1) / 2) * width
            plots.bar(axes, place, value, style.look(method), 0.9 * width, origin)
    axes.set_xticks(range(len(groups)), [style.look(method).label.replace(", ", ",\n") for method in groups])
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.12)


def _published(method: str) -> dict[str, Value | None]:
    """The paper's time per iteration relative to dense, and the same without validation in it."""
    if method not in yoon2022.SPEED:
        return {}
    return {
        "published, 8 A100": Value(yoon2022.SPEED["dense"] / yoon2022.SPEED[method]),
        "published, corrected": _without_validation(method),
    }


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


def _throughput(frames: Frames, method: str) -> Value | None:
    return throughput(frames, yoon2022.keys(frames, method, _comparable(frames)))


def _slowdown(frames: Frames, method: str, mode: str = "") -> Value | None:
    mode = mode or _comparable(frames)
    return slowdown(frames, yoon2022.keys(frames, method, mode), yoon2022.keys(frames, "dense", mode))


def _longer(frames: Frames, method: str, baseline: str = "dense") -> Value | None:
    """By how many percent an iteration of `method` is longer, nothing synchronising inside it."""
    ratio = slowdown(frames, yoon2022.keys(frames, method, MODE), yoon2022.keys(frames, baseline, MODE))
    return None if ratio is None else ratio.more_in_percent()
