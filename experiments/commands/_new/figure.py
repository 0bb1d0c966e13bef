"""EXAMPLE: a quantity over a setting, a line for each method."""

from __future__ import annotations

from analysis import plots
from analysis.claims import Claim
from analysis.comparison import Comparison
from analysis.frames import Frames
from analysis.outcomes import with_outcomes
from analysis.stats import Value, final_difference
from analysis.tables import Table

TITLE = "Validation accuracy of two methods"
# y, a column of docs/records.md, over x, a setting, a line for each value of by.
COMPARED = Comparison(x="method.density", y="val_top1", by="method.name")
# The settings of each run, as one would type them behind `run`.
RUNS = [
    [
        "task=cnn_digits", "cluster=virtual", "train.epochs=2", "train.steps=null", "timing.mode=production",
        f"method={method}", f"method.density={density}", f"seed={seed}",
    ]
    for seed in (0, 1, 2)
    for density in (0.01, 0.1)
    for method in ("topk", "randomk")
]  # fmt: skip


def runs(profile: str) -> list[list[str]]:
    """Which runs it needs; those of one seed where it is only tried out (profile=smoke)."""
    seed = {word for word in RUNS[0] if word.startswith("seed=")}
    few = [run for run in RUNS if seed <= set(run)]
    return [[f"profile={profile}", *run] for run in (few if profile == "smoke" else RUNS)]


def draw(frames: Frames, profile: str) -> plots.Figure:
    """The picture. What you change here is yours: `analysis.plots` has what the other figures draw with."""
    return COMPARED.picture(with_outcomes(frames))


def table(frames: Frames) -> Table:
    """The numbers behind the picture: they become .csv, .tex and .md beside it. May be left out."""
    return COMPARED.table(with_outcomes(frames))


def caption(frames: Frames, profile: str) -> str:
    """What is drawn and where it was measured. May be left out."""
    return COMPARED.caption(with_outcomes(frames))


def claims() -> list[Claim]:
    """What is said of the picture, and how our value for it is computed. May be left out."""
    return [
        Claim(
            text="Top-k ends above Random-k",
            paper=None,  # the published number, where there is one
            unit="points of top-1",
            source="our own question",  # where the statement is from
            kind="ordering",  # above `tolerance`; analysis/claims.py has the others
            tolerance=0.0,
            reason="Any margin counts.",
            ours=_gap,
        )
    ]


def _gap(frames: Frames) -> Value | None:
    """Final top-1 of Top-k less that of Random-k at the highest density, paired by seed."""
    if not len(frames.runs):
        return None
    dense_most = frames.runs[frames.runs["method.density"] == frames.runs["method.density"].max()]
    keys = {name: list(dense_most["key"][dense_most["method.name"] == name]) for name in ("topk", "randomk")}
    return final_difference(frames, keys["topk"], keys["randomk"], "val_top1")
