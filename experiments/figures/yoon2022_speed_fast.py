"""The training speeds of Yoon and Oh 2022 again: fast selection, and overlapped with backpropagation."""

from __future__ import annotations

from analysis import plots
from analysis.claims import Claim
from analysis.records.frames import Frames
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_speed as speed
from experiments.figures._runs import profile_settings, settings_by_variant
from experiments.figures.papers import make_claim

TITLE = "Training speed with a fast selection"
MODE = "production"
SCALE = yoon2022.TIMING_SCALE
published_results = yoon2022.published_results_by_method
BUCKETED = "topk-buckets-fused"


def runs(profile: str) -> list[Run]:
    # Virtual ranks can't overlap anything.
    is_virtual = profile_settings("timing-fast", profile)["cluster"] == "virtual"
    variants = (
        settings_by_variant("fig4-fast")
        if is_virtual
        else yoon2022.bucketed_settings_by_variant("speed-fast", profile)
    )
    return yoon2022.timing_runs(profile, MODE, variants, scale_item="timing-fast")


def draw(frames: Frames, profile: str) -> plots.Figure:
    return speed.draw_speeds_and_step_ratios(frames, [MODE])


def table(frames: Frames) -> Table:
    """Return speed and slowdown per method, with intervals."""
    return speed.speed_table(frames, [MODE])


def claims() -> list[Claim]:
    overlapped = (BUCKETED, f"{BUCKETED}-overlapped")
    return [
        make_claim("yoon2022.speed-fast.faster.dense-fused", yoon2022.step_percent_longer, "topk-fused"),
        make_claim(
            "yoon2022.speed-fast.faster.fused-torch", yoon2022.step_percent_longer, "topk", "topk-fused"
        ),
        make_claim("yoon2022.speed-fast.faster.overlapped", yoon2022.step_percent_longer, *overlapped),
        make_claim(
            "yoon2022.speed-fast.fused-over-dense", yoon2022.step_time_ratio_to_baseline, "topk-fused"
        ),
        make_claim("yoon2022.speed-fast.torch-over-dense", yoon2022.step_time_ratio_to_baseline, "topk"),
    ]
