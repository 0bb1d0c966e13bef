"""Fig. 4 of Yoon and Oh 2022 again, with an exact selection that reads the gradient once beside theirs."""

from __future__ import annotations

from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.records.frames import Frames
from analysis.stats import Value, phase_ratio
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig4 as fig4
from experiments.figures.papers import claim

TITLE = "Breakdown of an iteration, with a fast selection"
MODE = fig4.MODE
SCALE = yoon2022.TIMING_SCALE


def runs(profile: str) -> list[Run]:
    variants: dict[str, RunSettings] = {
        "dense": {"method": "dense"}, "topk": yoon2022.TOPK, "topk-fused": yoon2022.FUSED,
    }  # fmt: skip
    return yoon2022.timing_runs(profile, MODE, variants)


draw, table = fig4.draw, fig4.table


def caption(frames: Frames, profile: str) -> str:
    fast = searched(frames, style.look("topk-fused").label)
    return (
        "Mean time of an iteration by phase (left) and as shares beside the paper's (right, light): dense, "
        f"Top-k with torch.topk, and the same Top-k whose selection is fused with error feedback{fast}; all "
        f"in turns, in the same repetitions. {captions.setting(frames)} {captions.timing(frames)}"
    )


def searched(frames: Frames, label: str) -> str:
    """The kernel by which fused runs searched, and how often its guess was wrong; empty where none ran."""
    if "searching.kernel" not in frames.runs or "select" not in frames.runs:
        return ""
    fused = frames.runs[frames.runs["select"] == "fused"]
    if not len(fused):
        return ""
    kernels = captions.listed(sorted(set(fused["searching.kernel"])))
    wrong, searches = (int(fused[f"searching.{name}"].sum()) for name in ("fallbacks", "steps"))
    return f" ({label}: kernel {kernels}; the guessed bound was wrong in {wrong} of {searches} searches)"


def claims() -> list[Claim]:
    return [
        claim("yoon2022.fig4-fast.torch-longer-than-fused", _gain, "topk", "topk-fused"),
        claim("yoon2022.fig4-fast.compression-dominates", fig4.dominance, "topk-fused"),
        claim("yoon2022.fig4-fast.fused-is-little", _share, "topk-fused"),
    ]


def _gain(frames: Frames, slow: str, fast: str) -> Value | None:
    """Time of one's selection over the other's."""
    here, there = (yoon2022.keys(frames, method, MODE) for method in (slow, fast))
    return phase_ratio(frames, here, there, "select")


def _share(frames: Frames, method: str) -> Value | None:
    """Selection in % of FP and BP."""
    parts = ("select", "forward", "backward")
    return yoon2022.phases(frames, method, parts, lambda select, fp, bp: 100 * select / (fp + bp))
