"""Fig. 4 of Yoon and Oh 2022 again, with an exact selection that reads the gradient once beside theirs."""

from __future__ import annotations

from analysis.claims import Claim
from analysis.records.frames import Frames
from analysis.stats import Estimate, phase_time_ratio
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig4 as fig4
from experiments.figures._runs import variant_settings
from experiments.figures.papers import claim

TITLE = "Breakdown of an iteration, with a fast selection"
MODE = fig4.MODE
SCALE = yoon2022.TIMING_SCALE
published_results = yoon2022.published_results


def runs(profile: str) -> list[Run]:
    return yoon2022.timing_runs(profile, MODE, variant_settings("fig4-fast"), item="timing-fast")


draw = fig4.draw
table = fig4.table


def claims() -> list[Claim]:
    return [
        claim("yoon2022.fig4-fast.torch-longer-than-fused", selection_ratio, "topk", "topk-fused"),
        claim("yoon2022.fig4-fast.compression-dominates", fig4.compression_dominance, "topk-fused"),
        claim("yoon2022.fig4-fast.fused-is-little", selection_percent, "topk-fused"),
    ]


def selection_ratio(frames: Frames, slow: str, fast: str) -> Estimate | None:
    """Return the time of the slow method's selection over the fast one's."""
    slow_keys, fast_keys = (yoon2022.method_keys(frames, method, MODE) for method in (slow, fast))
    return phase_time_ratio(frames, slow_keys, fast_keys, "select")


def selection_percent(frames: Frames, method: str) -> Estimate | None:
    """Return selection in percent of FP and BP."""
    parts = ("select", "forward", "backward")
    return yoon2022.method_phase_estimate(
        frames, method, parts, lambda select, fp, bp: 100 * select / (fp + bp)
    )
