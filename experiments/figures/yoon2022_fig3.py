"""Fig. 3 of Yoon and Oh 2022: validation top-1 accuracy of Top-k SGD, Random-k SGD, and baseline."""

from __future__ import annotations

from analysis import plots
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.stats import Value, ahead_for_good, final, final_difference
from analysis.style import look
from analysis.tables import Table
from experiments.figures import _convergence as convergence
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Validation top-1 accuracy of dense, Top-k and Random-k SGD"
COLUMN = "val_top1"
SCALE = yoon2022.TRAINING_SCALE
LAST_BEHIND = 4  # the last logged epoch at which their Top-k was behind their Random-k


def runs(profile: str) -> list[list[str]]:
    return yoon2022.convergence_runs(profile)


def more_runs(profile: str) -> list[list[str]]:
    return yoon2022.convergence_runs(profile, yoon2022.MORE_SEEDS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    return convergence.draw(frames, convergence.lines(frames), {COLUMN: "Validation top-1 (%)"})


def table(frames: Frames) -> Table:
    return convergence.table(frames, convergence.lines(frames), {COLUMN: "%"})


def caption(frames: Frames, profile: str) -> str:
    return convergence.caption(frames, "Validation top-1 accuracy on rank 0.")


def claims() -> list[Claim]:
    return [
        *[_end(method) for method in yoon2022.METHODS],
        *convergence.orders(_gap, _overtakes),
        Claim(
            text="step from which Top-k stays ahead of Random-k in top-1 (for information)",
            paper=(LAST_BEHIND + 1) * yoon2022.STEPS_PER_EPOCH,
            unit="steps",
            source="the authors' logs: behind at epochs 1, 3 and 4 of 138, ahead from 5 on, 49 steps each",
            kind="absolute",
            tolerance=3 * yoon2022.STEPS_PER_EPOCH,
            reason="Granted: three validations. A training that ends earlier would prefer Random-k.",
            ours=lambda frames: _overtakes(frames, "topk", "randomk"),
        ),
    ]


def _end(method: str) -> Claim:
    return Claim(
        text=f"final top-1, {look(method).label}",
        paper=yoon2022.TOP1[method],
        unit="%",
        source="end of the curve in Fig. 3, read from the authors' logs at epoch 138",
        kind="absolute",
        tolerance=yoon2022.spread(COLUMN),
        reason=yoon2022.SPREAD,
        ours=lambda frames: final(frames, yoon2022.keys(frames, method), COLUMN),
    )


def _gap(frames: Frames, method: str, other: str) -> Value | None:
    return final_difference(frames, yoon2022.keys(frames, method), yoon2022.keys(frames, other), COLUMN)


def _overtakes(frames: Frames, method: str, other: str) -> Value | None:
    return ahead_for_good(frames, yoon2022.keys(frames, method), yoon2022.keys(frames, other), COLUMN)
