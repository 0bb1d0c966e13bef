"""Fig. 3 (and 2) of Yoon and Oh 2022 with a slim VGG-16, at the paper's own density."""

from __future__ import annotations

from analysis import plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.stats import Value, ahead_for_good, final_difference
from analysis.tables import Table
from experiments.figures import _convergence as convergence
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Validation accuracy and loss of a slim VGG-16, at density 0.001 and 0.01"
SCALE = yoon2022.TRAINING_SCALE
COLUMN = "val_top1"
LOG_TICKS = (0.3, 0.5, 1, 2, 5, 10)
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2], "paper": [1, 2]}
DENSER = 0.01
# Each training takes half an hour of a core or more, so all methods of a seed come before the next seed.
TRAININGS = {
    "smoke": yoon2022.CONVERGENCE["smoke"],
    "laptop": [
        "task=slimvgg_cifar10", "cluster=virtual", "task.batch_size=8", "train.epoch_steps=49",
        "train.validate_every=6", "timing.mode=production", "select=auto",
    ],
}  # fmt: skip
TRAININGS["paper"] = TRAININGS["laptop"]
# Random-k's indices by hash: torch.randperm of 924,186 numbers, eight times a step, would be a fifth of it.
METHODS = {
    "dense": ["method=dense"],
    "topk": ["method=topk"],
    "topk-denser": ["method=topk", f"method.density={DENSER}"],
    "randomk": ["method=randomk", "method.sampling=hash"],
}
LOOKS = {
    "topk": style.look("topk")._replace(label="Top-k, 0.001"),
    "topk-denser": style.Look("Top-k, 0.01", "#56B4E9", "D", "\\\\"),
    "randomk": style.look("randomk")._replace(label="Random-k, 0.001"),
}


def runs(profile: str) -> list[list[str]]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[list[str]]:
    return _trainings(profile, MORE_SEEDS[profile])


def draw(frames: Frames, profile: str) -> plots.Figure:
    columns = {COLUMN: "Validation top-1 (%)", "val_loss": "Validation loss"}
    return convergence.draw(frames, lines(frames), columns, LOG_TICKS)


def lines(frames: Frames) -> dict[str, convergence.Line]:
    """One per method and density."""
    found = {}
    for name in METHODS:
        if keys := _keys(frames, name):
            method = name.partition("-")[0]
            found[name] = convergence.Line(LOOKS.get(name, style.look(name)), keys, method)
    if not found:
        raise ValueError("nothing to draw: there is no run")
    return found


def table(frames: Frames) -> Table:
    return convergence.table(frames, lines(frames), {COLUMN: "%", "val_loss": ""})


def caption(frames: Frames, profile: str) -> str:
    cut = convergence.cut(yoon2022.METHODS, "val_loss", LOG_TICKS)
    return convergence.caption(frames, f"Validation top-1 accuracy and loss (logarithmic) on rank 0.{cut}")


def claims() -> list[Claim]:
    return [
        *convergence.orders(_gap, _overtakes, " at density 0.001"),
        Claim(
            text="ten times the density brings Top-k nearer to dense: by how much",
            paper="not measured",
            unit="points",
            source="ours: Top-k at 0.01 less Top-k at 0.001",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts.",
            ours=lambda frames: _gap(frames, "topk-denser", "topk"),
        ),
    ]


def _trainings(profile: str, seeds: list[int]) -> list[list[str]]:
    shared = ["recipe=yoon2022", f"profile={profile}", *TRAININGS[profile]]
    smoke = ["method.density=0.005"] if profile == "smoke" else []  # of its model 0.001 would be few
    return [
        [*shared, *words, *(smoke if name in ("topk", "randomk") else []), f"seed={seed}"]
        for seed in seeds
        for name, words in METHODS.items()
    ]


def _keys(frames: Frames, name: str) -> list[str]:
    method = name.partition("-")[0]
    keys = yoon2022.keys(frames, method)
    if method != "topk" or not keys:
        return keys
    densities = frames.runs.set_index("key")["method.density"]
    return [key for key in keys if (densities[key] == DENSER) == (name == "topk-denser")]


def _gap(frames: Frames, above: str, below: str) -> Value | None:
    return final_difference(frames, _keys(frames, above), _keys(frames, below), COLUMN)


def _overtakes(frames: Frames, above: str, below: str) -> Value | None:
    return ahead_for_good(frames, _keys(frames, above), _keys(frames, below), COLUMN)
