"""The training speeds of Yoon and Oh 2022 again: fast selection, and overlapped with backpropagation."""

from __future__ import annotations

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.records.frames import Frames
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_speed as speed
from experiments.figures.papers import claim
from experiments.figures.yoon2022_fig4_fast import searched

TITLE = "Training speed with a fast selection"
MODE = "production"
SCALE = yoon2022.TIMING_SCALE
BUCKETED = "topk-buckets-fused"


def runs(profile: str) -> list[Run]:
    variants: dict[str, RunSettings] = {
        "dense": {"method": "dense"}, "topk": yoon2022.TOPK, "topk-fused": yoon2022.FUSED,
    }  # fmt: skip
    if yoon2022.TIMING[profile]["cluster"] != "virtual":  # virtual ranks can't overlap anything
        buckets = {**yoon2022.FUSED, **yoon2022.BUCKETS[profile]}
        variants |= {BUCKETED: buckets, f"{BUCKETED}-overlapped": {**buckets, "overlap": True}}
    return yoon2022.timing_runs(profile, MODE, variants)


def draw(frames: Frames, profile: str) -> plots.Figure:
    return speed.picture(frames, [MODE])


def table(frames: Frames) -> Table:
    """Speed and slowdown per method, with intervals."""
    rows = [speed.row(frames, method, MODE) for method in yoon2022.present(frames, MODE)]
    return Table(f"Training speed{captions.simulated(frames)}", pd.DataFrame(rows), speed.UNITS)


def caption(frames: Frames, profile: str) -> str:
    return (
        "Training speed over all workers (left) and time per iteration relative to dense (right), means over "
        "warm steps with 95 % intervals: Top-k with torch.topk, with the fused selection"
        f"{searched(frames, style.look('topk-fused').label)}, the same in buckets of 8 MB, and with these "
        f"aggregated while backpropagation goes on. {captions.setting(frames)} {captions.timing(frames)}"
    )


def claims() -> list[Claim]:
    overlapped = (BUCKETED, f"{BUCKETED}-overlapped")
    return [
        claim("yoon2022.speed-fast.faster.dense-fused", yoon2022.longer, "topk-fused"),
        claim("yoon2022.speed-fast.faster.fused-torch", yoon2022.longer, "topk", "topk-fused"),
        claim("yoon2022.speed-fast.faster.overlapped", yoon2022.longer, *overlapped),
    ]
