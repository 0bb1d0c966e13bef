"""Fig. 2 of Yoon and Oh 2022: validation loss of Top-k SGD, Random-k SGD, and baseline."""

from __future__ import annotations

from analysis import plots
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.stats import Value, final, final_difference
from analysis.style import look
from experiments.figures import _convergence as convergence
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Validation loss of dense, Top-k and Random-k SGD"
COLUMN = "val_loss"
LOG_TICKS = (0.3, 0.5, 1, 2, 5, 10)


def runs(profile: str) -> list[list[str]]:
    return yoon2022.convergence_runs(profile)


def draw(frames: Frames, profile: str) -> plots.Figure:
    return convergence.draw(frames, COLUMN, "Validation loss", yoon2022.VAL_LOSS, LOG_TICKS)


def caption(frames: Frames, profile: str) -> str:
    return convergence.caption(frames, "Validation loss on rank 0, logarithmic.")


def claims() -> list[Claim]:
    return [
        *[_end(method) for method in yoon2022.METHODS],
        Claim(
            text="Top-k ends slightly above dense in validation loss",
            paper=0.058,
            unit="",
            source="text under Fig. 2 ('slightly higher loss'); 0.478 - 0.420 from the authors' logs",
            kind="shape",
            tolerance=0.15,
            reason="Slightly: two and a half times their gap, and less than half of Random-k's (0.396).",
            ours=lambda frames: _gap(frames, "topk", "dense"),
        ),
        Claim(
            text="Random-k ends above Top-k in validation loss",
            paper=0.338,
            unit="",
            source="Fig. 2; 0.816 - 0.478 from the authors' logs",
            kind="ordering",
            tolerance=0.05,
            reason="Their Top-k runs on A100 and V100 differ by 0.013, their dense runs by 0.020.",
            ours=lambda frames: _gap(frames, "randomk", "topk"),
        ),
    ]


def _end(method: str) -> Claim:
    return Claim(
        text=f"final validation loss, {look(method).label}",
        paper=yoon2022.VAL_LOSS[method][-1],
        unit="",
        source="end of the curve in Fig. 2, read from the authors' logs at epoch 138",
        kind="absolute",
        tolerance=0.03,
        reason="Same configuration on two machines of theirs: dense 0.420 and 0.440, Top-k 0.478 and 0.465.",
        ours=lambda frames: final(frames, yoon2022.keys(frames, method), COLUMN),
        needs="paper scale",
    )


def _gap(frames: Frames, method: str, other: str) -> Value | None:
    return final_difference(frames, yoon2022.keys(frames, method), yoon2022.keys(frames, other), COLUMN)
