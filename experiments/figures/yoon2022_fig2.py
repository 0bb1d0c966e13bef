"""Fig. 2 of Yoon and Oh 2022: validation loss of Top-k SGD, Random-k SGD, and baseline."""

from __future__ import annotations

from analysis import plots
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.stats import Value, ahead_for_good, final, final_difference
from analysis.style import look
from analysis.tables import Table
from experiments.figures import _convergence as convergence
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Validation loss of dense, Top-k and Random-k SGD"
COLUMN = "val_loss"
SCALE = yoon2022.TRAINING_SCALE
LOG_TICKS = (0.3, 0.5, 1, 2, 5, 10)


def runs(profile: str) -> list[list[str]]:
    return yoon2022.convergence_runs(profile)


def more_runs(profile: str) -> list[list[str]]:
    return yoon2022.convergence_runs(profile, yoon2022.MORE_SEEDS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    return convergence.draw(frames, convergence.lines(frames), {COLUMN: "Validation loss"}, LOG_TICKS)


def table(frames: Frames) -> Table:
    return convergence.table(frames, convergence.lines(frames), {COLUMN: ""})


def caption(frames: Frames, profile: str) -> str:
    cut = convergence.cut(yoon2022.METHODS, COLUMN, LOG_TICKS)
    return convergence.caption(frames, f"Validation loss on rank 0, logarithmic.{cut}")


def claims() -> list[Claim]:
    return [
        *[_end(method) for method in yoon2022.METHODS],
        Claim(
            text="Top-k ends slightly above dense in validation loss",
            paper=0.058,
            unit="",
            source="text under Fig. 2 ('slightly higher loss'); 0.478 - 0.420 from the authors' logs",
            kind="shape",
            tolerance=yoon2022.gap_spread(COLUMN),
            reason=f"Slightly: as they found it, {yoon2022.GAP_SPREAD}",
            ours=lambda frames: _gap(frames, "topk", "dense"),
            group=yoon2022.TOPK_BEHIND,
        ),
        Claim(
            text="Random-k ends above Top-k in validation loss",
            paper=0.338,
            unit="",
            source="Fig. 2; 0.816 - 0.478 from the authors' logs",
            kind="ordering",
            tolerance=yoon2022.gap_spread(COLUMN),
            reason=f"More than chance: {yoon2022.GAP_SPREAD}",
            ours=lambda frames: _gap(frames, "randomk", "topk"),
            group=yoon2022.RANDOMK_BEHIND,
            flips_at=lambda frames: ahead_for_good(
                frames, yoon2022.keys(frames, "randomk"), yoon2022.keys(frames, "topk"), COLUMN
            ),
        ),
    ]


def _end(method: str) -> Claim:
    return Claim(
        text=f"final validation loss, {look(method).label}",
        paper=yoon2022.VAL_LOSS[method],
        unit="",
        source="end of the curve in Fig. 2, read from the authors' logs at epoch 138",
        kind="absolute",
        tolerance=yoon2022.spread(COLUMN),
        reason=yoon2022.SPREAD,
        ours=lambda frames: final(frames, yoon2022.keys(frames, method), COLUMN),
    )


def _gap(frames: Frames, method: str, other: str) -> Value | None:
    return final_difference(frames, yoon2022.keys(frames, method), yoon2022.keys(frames, other), COLUMN)
