"""The training speeds of Yoon and Oh 2022 again: fast selection, and overlapped with backpropagation."""

from __future__ import annotations

import pandas as pd

from analysis import captions, plots, style
from analysis.claims import ANY_GPU, Claim
from analysis.frames import Frames
from analysis.stats import Value, slowdown, throughput
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_speed
from experiments.figures.yoon2022_fig4_fast import searched

TITLE = "Training speed with a fast selection"
MODE = "production"
SCALE = yoon2022.TIMING_SCALE
# MB: of VGG-16's 59, the most that leaves several; the small CNN of smoke has 0.13.
BUCKETS = {"smoke": "method.scope=0.05", "laptop": "method.scope=8", "paper": "method.scope=8"}
PAPER = 4.67  # dense over Top-k, 8 A100


def runs(profile: str) -> list[list[str]]:
    fused = [*yoon2022.TOPK, "select=fused"]
    variants = {"dense": ["method=dense"], "topk": yoon2022.TOPK, "topk-fused": fused}
    if "cluster=virtual" not in yoon2022.TIMING[profile]:  # virtual ranks can't overlap anything
        buckets = [*fused, BUCKETS[profile]]
        variants |= {
            "topk-buckets-fused": buckets,
            "topk-buckets-fused-overlapped": [*buckets, "overlap=true"],
        }
    return yoon2022.timing_runs(profile, MODE, variants)


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods = yoon2022.present(frames, MODE)
    simulated = captions.simulated(frames)
    with plots.canvas(style.two_columns(2.6), 1, 2) as (figure, (left, right)):
        for x, method in enumerate(methods):
            if speed := throughput(frames, yoon2022.keys(frames, method, MODE)):
                plots.bar(left, x, speed, style.look(method), 0.7)
        others = [method for method in methods if method != "dense"]
        for x, method in enumerate(others):
            if ratio := _slowdown(frames, method):
                plots.bar(right, x, ratio, style.look(method), 0.7)
        right.axhline(1, color="#777777", linewidth=0.6, zorder=0)
        for axes, shown in ((left, methods), (right, others)):
            labels = [style.look(method).label.replace(", ", ",\n") for method in shown]
            axes.set_xticks(range(len(shown)), labels)
            axes.tick_params(axis="x", length=0)
            axes.margins(y=0.12)
        left.set_ylabel(f"Samples per second{simulated}")
        right.set_ylabel(f"Time per iteration / dense{simulated}")
    return figure


def table(frames: Frames) -> Table:
    """Speed and slowdown per method, with intervals."""
    rows = [yoon2022_speed.speed_row(frames, method, MODE) for method in yoon2022.present(frames, MODE)]
    units = yoon2022_speed.SPEED_UNITS
    return Table(f"Training speed{captions.simulated(frames)}", pd.DataFrame(rows), units)


def caption(frames: Frames, profile: str) -> str:
    return (
        "Training speed over all workers (left) and time per iteration relative to dense (right), means over "
        "warm steps with 95 % intervals: Top-k with torch.topk, with the fused selection"
        f"{searched(frames, style.look('topk-fused').label)}, the same in buckets of 8 MB, and with these "
        f"aggregated while backpropagation goes on. {captions.setting(frames)} {captions.timing(frames)}"
    )


def claims() -> list[Claim]:
    return [
        Claim(
            text="dense trains faster than Top-k, fused: how much longer Top-k's iteration is",
            paper=367,
            unit="%",
            source=f"training speed; dense over Top-k is {PAPER} on 8 A100 with torch.topk of torch 1.8.1",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts. What does not hold here was the cost of their kernel.",
            ours=lambda frames: _longer(frames, "topk-fused", "dense"),
            accelerator=ANY_GPU,
            timed=True,
            group=yoon2022.FUSED_SELECTION,
        ),
        Claim(
            text="Top-k with torch.topk is slower than fused: how much longer its iteration is",
            paper="future work",
            unit="%",
            source="conclusion: a computation-efficient selection is their future work",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts.",
            ours=lambda frames: _longer(frames, "topk", "topk-fused"),
            timed=True,
            group=yoon2022.FUSED_SELECTION,
        ),
        Claim(
            text="without overlap an iteration is longer than with it",
            paper=None,
            unit="%",
            source="ours: buckets of 8 MB, aggregated after backpropagation or while it goes on",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts; it takes a core, or a GPU, that is idle meanwhile.",
            ours=lambda frames: _longer(frames, "topk-buckets-fused", "topk-buckets-fused-overlapped"),
            timed=True,
        ),
    ]


def _slowdown(frames: Frames, method: str) -> Value | None:
    return slowdown(frames, yoon2022.keys(frames, method, MODE), yoon2022.keys(frames, "dense", MODE))


def _longer(frames: Frames, method: str, baseline: str) -> Value | None:
    """By how many percent an iteration of `method` is longer."""
    ratio = slowdown(frames, *(yoon2022.keys(frames, each, MODE) for each in (method, baseline)))
    return None if ratio is None else ratio.more_in_percent()
