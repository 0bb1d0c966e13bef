"""Fig. 4 of Yoon and Oh 2022 again, with an exact selection that reads the gradient once beside theirs."""

from __future__ import annotations

from analysis import captions, plots, style
from analysis.claims import ANY_GPU, Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.stats import POSITIVE, Value, of_phases, phase_ratio
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig4

TITLE = "Breakdown of an iteration, with a fast selection"
MODE = yoon2022_fig4.MODE
SCALE = yoon2022.TIMING_SCALE
LITTLE = 3.0  # % of FP + BP that compression is to take on a GPU


def runs(profile: str) -> list[list[str]]:
    fused = {"topk-fused": [*yoon2022.TOPK, "select=fused"]}
    return yoon2022.timing_runs(profile, MODE, {"dense": ["method=dense"], "topk": yoon2022.TOPK, **fused})


def draw(frames: Frames, profile: str) -> plots.Figure:
    return yoon2022_fig4.draw(frames, profile)


def table(frames: Frames) -> list[Table]:
    return yoon2022_fig4.table(frames)


def caption(frames: Frames, profile: str) -> str:
    fast = searched(frames, style.look("topk-fused").label)
    return (
        "Mean time of an iteration by phase (left) and as shares beside the paper's (right, light): dense, "
        f"Top-k with torch.topk, and the same Top-k whose selection is fused with error feedback{fast}; all "
        f"in turns, in the same repetitions. {captions.setting(frames)} {captions.timing(frames)}"
    )


def searched(frames: Frames, label: str) -> str:
    """By which kernel the fused runs searched, and how often its guess was wrong; empty where none ran."""
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
        Claim(
            text="compression with torch.topk takes longer than fused: how many times",
            paper="future work",
            unit="x",
            source="conclusion: a computation-efficient selection is their future work",
            kind="ordering",
            tolerance=1.0,
            reason="Both exact, the same k elements; more than once is longer.",
            ours=_gain,
            timed=True,
            group=yoon2022.FUSED_SELECTION,
        ),
        Claim(
            text="compression dominates Top-k's iteration with the fused selection (its margin over FP + BP)",
            paper=70.9,
            unit="% of the iteration",
            source="text under Fig. 4, with torch.topk of torch 1.8.1",
            kind="ordering",
            tolerance=0.0,
            reason="As in fig4; what does not hold here was the cost of the kernel that the paper measured.",
            ours=_dominance,
            accelerator=ANY_GPU,
            timed=True,
            group=yoon2022.FUSED_SELECTION,
        ),
        Claim(
            text="fused compression in % of FP + BP",
            paper=None,
            unit="%",
            source=f"no published number; the aim is at most {number(LITTLE)} % on a GPU",
            kind="limit",
            tolerance=LITTLE,
            reason="Meant for 8 virtual workers of VGG-16 on one GPU; on CPUs FP + BP are slower, too.",
            ours=_share,
            accelerator=ANY_GPU,
            timed=True,
            group=yoon2022.FUSED_SELECTION,
        ),
    ]


def _gain(frames: Frames) -> Value | None:
    plain, fused = (yoon2022.keys(frames, method, MODE) for method in ("topk", "topk-fused"))
    return phase_ratio(frames, plain, fused, "select")


def _dominance(frames: Frames) -> Value | None:
    return yoon2022_fig4.dominance(frames, "topk-fused")


def _share(frames: Frames) -> Value | None:
    return of_phases(
        frames,
        yoon2022.keys(frames, "topk-fused", MODE),
        ("select", "forward", "backward"),
        lambda select, fp, bp: 100 * select / (fp + bp),
        POSITIVE,
    )
