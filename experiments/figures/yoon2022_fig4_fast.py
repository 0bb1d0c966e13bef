"""Fig. 4 of Yoon and Oh 2022 again, with an exact selection that reads the gradient once beside theirs."""

from __future__ import annotations

from analysis.claims import Claim
from analysis.records.frames import Frames
from analysis.stats import Estimate, phase_time_ratio
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig4 as fig4
from experiments.figures._runs import settings_by_variant
from experiments.figures.papers import make_claim

TITLE = "Breakdown of an iteration, with a fast selection"
MODE = fig4.MODE
SCALE = yoon2022.TIMING_SCALE
published_results = yoon2022.published_results_by_method


def runs(profile: str) -> list[Run]:
    return yoon2022.timing_runs(profile, MODE, settings_by_variant("fig4-fast"), scale_item="timing-fast")


draw = fig4.draw
table = fig4.table


def claims() -> list[Claim]:
    return [
        make_claim("yoon2022.fig4-fast.torch-longer-than-fused", selection_time_ratio, "topk", "topk-fused"),
        make_claim(
            "yoon2022.fig4-fast.compression-dominates", fig4.compression_dominance_percent, "topk-fused"
        ),
        make_claim("yoon2022.fig4-fast.fused-is-little", selection_percent_of_passes, "topk-fused"),
    ]


def selection_time_ratio(frames: Frames, slow: str, fast: str) -> Estimate | None:
    """Return the time of the slow method's selection over the fast one's."""
    slow_keys, fast_keys = (yoon2022.method_run_keys(frames, method, MODE) for method in (slow, fast))
    return phase_time_ratio(frames, slow_keys, fast_keys, "select")


def selection_percent_of_passes(frames: Frames, method: str) -> Estimate | None:
    """Return selection in percent of FP and BP."""
    parts = ("select", "forward", "backward")
    return yoon2022.estimate_phase_statistic(
        frames, method, parts, lambda select, fp, bp: 100 * select / (fp + bp)
    )
