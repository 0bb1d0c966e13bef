"""The training speeds of Yoon and Oh 2022 again: fast selection, and overlapped with backpropagation."""

from __future__ import annotations

from analysis import plots
from analysis.claims import Claim
from analysis.records.frames import Frames
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_speed as speed
from experiments.figures._runs import profile_settings, variant_settings
from experiments.figures.papers import claim

TITLE = "Training speed with a fast selection"
MODE = "production"
SCALE = yoon2022.TIMING_SCALE
published_results = yoon2022.published_results
BUCKETED = "topk-buckets-fused"


def runs(profile: str) -> list[Run]:
    # Virtual ranks can't overlap anything.
    is_virtual = profile_settings("timing-fast", profile)["cluster"] == "virtual"
    chosen = (
        variant_settings("fig4-fast") if is_virtual else yoon2022.bucketed_variants("speed-fast", profile)
    )
    return yoon2022.timing_runs(profile, MODE, chosen, item="timing-fast")


def draw(frames: Frames, profile: str) -> plots.Figure:
    return speed.draw_speeds(frames, [MODE])


def table(frames: Frames) -> Table:
    """Return speed and slowdown per method, with intervals."""
    return speed.speed_table(frames, [MODE])


def claims() -> list[Claim]:
    overlapped = (BUCKETED, f"{BUCKETED}-overlapped")
    return [
        claim("yoon2022.speed-fast.faster.dense-fused", yoon2022.percent_longer, "topk-fused"),
        claim("yoon2022.speed-fast.faster.fused-torch", yoon2022.percent_longer, "topk", "topk-fused"),
        claim("yoon2022.speed-fast.faster.overlapped", yoon2022.percent_longer, *overlapped),
        claim("yoon2022.speed-fast.fused-over-dense", yoon2022.step_ratio, "topk-fused"),
        claim("yoon2022.speed-fast.torch-over-dense", yoon2022.step_ratio, "topk"),
    ]
