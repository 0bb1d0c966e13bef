"""Fig. 3 (and 2) of Yoon and Oh 2022 with a slim VGG-16, at the paper's own density."""

from __future__ import annotations

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.records.frames import Frames
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _convergence as convergence
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import MORE_SEEDS, SEEDS, scale, variants
from experiments.figures.papers import claim

TITLE = "Validation accuracy and loss of a slim VGG-16, at density 0.001 and 0.01"
SCALE = yoon2022.TRAINING_SCALE
published_results = yoon2022.published_results
COLUMN = "val_top1"
METHODS = variants("fig3-slim")
DENSER = METHODS["topk-denser"]["method.density"]
LOOKS = {
    "topk": style.method_style("topk")._replace(label="Top-k, 0.001"),
    "topk-denser": style.MethodStyle("Top-k, 0.01", "#56B4E9", "D", "\\\\"),
    "randomk": style.method_style("randomk")._replace(label="Random-k, 0.001"),
}
facts = convergence.facts


def runs(profile: str) -> list[Run]:
    return planned("fig3-slim", profile, SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return planned("fig3-slim", profile, MORE_SEEDS[profile])


def draw(frames: Frames, profile: str) -> plots.Figure:
    columns = {COLUMN: "Validation top-1 (%)", "val_loss": "Validation loss"}
    return convergence.draw_curves(frames, lines(frames), columns)


def lines(frames: Frames) -> dict[str, convergence.Seeds]:
    """One per method and density."""
    found = {
        name: convergence.Seeds(
            LOOKS.get(name, style.method_style(name)), own, "" if name == "topk-denser" else name
        )
        for name in METHODS
        if (own := keys(frames, name))
    }
    if not found:
        raise ValueError("nothing to draw: there is no run")
    return found


def table(frames: Frames) -> Table:
    return convergence.table_of_ends(frames, lines(frames), {COLUMN: "%", "val_loss": ""})


def claims() -> list[Claim]:
    nearer = claim(
        "yoon2022.fig3-slim.denser-is-nearer", convergence.final_gap, "topk-denser", "topk", COLUMN, keys
    )
    return [*convergence.order_claims(keys, " at density 0.001"), nearer]


def planned(item: str, profile: str, seeds: list[int]) -> list[Run]:
    """The trainings of an item, which is scaled by its name: all methods of a seed before the next seed."""
    shared = yoon2022.recipe_run(profile, scale(item, profile))
    smoke = {"method.density": 0.005} if profile == "smoke" else {}  # of its model 0.001 would be few
    return [
        shared | {**settings, **(smoke if name in ("topk", "randomk") else {}), "seed": seed}
        for seed in seeds
        for name, settings in METHODS.items()
    ]


def keys(frames: Frames, name: str) -> list[str]:
    """The trainings of a method, of Top-k with one of its densities."""
    method = name.partition("-")[0]
    found = yoon2022.method_keys(frames, method)
    if method != "topk" or not found:
        return found
    densities = frames.runs.set_index("key")["method.density"]
    return [key for key in found if (densities[key] == DENSER) == (name == "topk-denser")]
