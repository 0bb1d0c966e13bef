"""Fig. 3 (and 2) of Yoon and Oh 2022 with a slim VGG-16, at the paper's own density."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.records.frames import Frames, value_of_run
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _convergence as convergence
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import MORE_SEEDS, SEEDS, profile_settings, settings_by_variant
from experiments.figures.papers import make_claim

TITLE = "Validation accuracy and loss of a slim VGG-16, at density 0.001 and 0.01"
SCALE = yoon2022.TRAINING_SCALE
published_results = yoon2022.published_results_by_method
COLUMN = "val_top1"
METHODS = settings_by_variant("fig3-slim")
DENSER = METHODS["topk-denser"]["method.density"]
LOOKS = {
    "topk": style.method_style("topk")._replace(label="Top-k, 0.001"),
    "topk-denser": style.MethodStyle("Top-k, 0.01", "#56B4E9", "D", "\\\\"),
    "randomk": style.method_style("randomk")._replace(label="Random-k, 0.001"),
}
facts = convergence.convergence_facts


def training_runs_of_item(
    profile: str, seeds_by_profile: Mapping[str, list[int]] = SEEDS, item: str = "fig3-slim"
) -> list[Run]:
    """Return the trainings of an item, all methods of a seed before the next seed.

    Args:
        item: whose entry in scales.yaml says how profiles scale it.
    """
    shared = yoon2022.recipe_run(profile, profile_settings(item, profile))
    smoke = {"method.density": 0.005} if profile == "smoke" else {}  # of its model 0.001 would be few
    return [
        shared | {**settings, **(smoke if name in ("topk", "randomk") else {}), "seed": seed}
        for seed in seeds_by_profile[profile]
        for name, settings in METHODS.items()
    ]


runs = training_runs_of_item
more_runs = partial(runs, seeds_by_profile=MORE_SEEDS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    columns = {COLUMN: "Validation top-1 (%)", "val_loss": "Validation loss"}
    return convergence.draw_curves_and_ends(frames, replicates_by_training(frames), columns)


def replicates_by_training(frames: Frames) -> dict[str, convergence.SeedReplicates]:
    """Return the runs of each method and density that has any.

    Raises:
        ValueError: none has.
    """
    replicates = {}
    for name in METHODS:
        keys = training_run_keys(frames, name)
        if keys:
            look = LOOKS.get(name, style.method_style(name))
            replicates[name] = convergence.SeedReplicates(look, keys, "" if name == "topk-denser" else name)
    if not replicates:
        raise ValueError(plots.NOTHING_TO_DRAW)
    return replicates


def table(frames: Frames) -> Table:
    return convergence.final_values_table(
        frames, replicates_by_training(frames), {COLUMN: "%", "val_loss": ""}
    )


def claims() -> list[Claim]:
    nearer = make_claim(
        "yoon2022.fig3-slim.denser-is-nearer", convergence.final_value_gap, "topk-denser", "topk", COLUMN,
        training_run_keys,
    )  # fmt: skip
    return [*convergence.fig3_order_claims(training_run_keys, " at density 0.001"), nearer]


def training_run_keys(frames: Frames, name: str) -> list[str]:
    """Return the trainings of a method, of Top-k with one of its densities."""
    method = name.partition("-")[0]
    keys = yoon2022.method_run_keys(frames, method)
    if method != "topk":
        return keys
    return [
        key
        for key in keys
        if (value_of_run(frames, key, "method.density") == DENSER) == (name == "topk-denser")
    ]
