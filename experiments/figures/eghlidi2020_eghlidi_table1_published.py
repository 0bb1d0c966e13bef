"""Table 1 of Eghlidi and Jaggi 2020 as printed, and whether their sentences about it follow from it.

Negar Foroutan Eghlidi and Martin Jaggi, "Sparse Communication for Training Deep Networks", 2020, ResNet-18 on
CIFAR-10, density 1 %, 300 epochs. The sentences quoted are those of section 4.2.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.tables import Table
from experiments.figures import papers
from experiments.figures._published import exact_estimate, no_runs
from experiments.figures.papers import make_claim

TITLE = "Test accuracies of Eghlidi and Jaggi's Table 1, and their statements on them"
SCALE = {
    "task.name": "resnet18_cifar10", "task.batch_size": 128, "train.epochs": 300, "method.density": 0.01,
}  # fmt: skip
TABLE: dict[str, dict[str, dict[int, float]]] = papers.published_value(
    "eghlidi2020.top1"
)  # scheme, scope, workers
SCOPES, WORKERS = ("layer-wise", "global"), (1, 2, 4, 8)
SPARSE = tuple(TABLE)[1:]
LOOKS = {
    name: style.MethodStyle(name, colour, marker, "")
    for name, (colour, marker) in papers.item_settings("eghlidi2020.eghlidi-table1-published")[
        "looks"
    ].items()
}
SHOWN = (  # scope, its title, and the accuracies
    (0, "layer-wise selection", (90, 95)), (1, "global selection", (76, 96)),
    (1, "global, the same axis as left", (90, 95)),
)  # fmt: skip
runs = no_runs


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [
        plots.curves_panel(
            [
                plots.Curve(
                    look,
                    WORKERS,
                    scheme_accuracies(name)[scope],
                    {"linestyle": "--" if "allReduce" in name else "-"},
                )
                for name, look in LOOKS.items()
            ],
            doubling_x_ticks=WORKERS,
            xlabel="Workers",
            title=title,
            ylim=limits,
        )
        for scope, title, limits in SHOWN
    ]
    return plots.compose_figure(panels, 2.9, ylabel="Test accuracy (%)", legend_columns=3)


def scheme_accuracies(name: str) -> np.ndarray:
    """Return the accuracies of a scheme: (scope, workers)."""
    return np.array([[TABLE[name][scope][size] for size in WORKERS] for scope in SCOPES])


def layerwise_margins_over_global() -> np.ndarray:
    """Return layer-wise less global in points: (method, workers) of the sparse methods."""
    return -np.diff([scheme_accuracies(name) for name in SPARSE], axis=1)[:, 0]


def topk_margins_over_best_other() -> np.ndarray:
    """Return Top-k less the best other sparse method in points: (scope, workers)."""
    others = np.array([scheme_accuracies(name) for name in SPARSE if name != "Top-k"])
    margins: np.ndarray = scheme_accuracies("Top-k") - others.max(axis=0)
    return margins


def accuracies_by_row_and_workers() -> np.ndarray:
    """Return the accuracies of each method and scope: (11, workers); standard SGD has no scope."""
    return np.concatenate(
        [scheme_accuracies(name) if name in SPARSE else scheme_accuracies(name)[:1] for name in TABLE]
    )


def count_falling_rows() -> int:
    """Return the number of rows in which every doubling of the workers costs accuracy."""
    return int((np.diff(accuracies_by_row_and_workers()) < 0).all(axis=1).sum())


def table(frames: Frames) -> Table:
    columns = [f"{scope}, W = {workers}" for scope in SCOPES for workers in WORKERS]
    rows = [
        {"method": name, **dict(zip(columns, scheme_accuracies(name).flat, strict=True))} for name in TABLE
    ]
    return Table.from_rows("Test accuracy as published", rows, dict.fromkeys(columns, "%"))


def facts(frames: Frames) -> dict[str, object]:
    over_global = layerwise_margins_over_global()
    over_others = topk_margins_over_best_other()
    return {
        "least": format_number(over_global.min()),
        "pairs": over_global.size,
        "best": (over_others > 0).sum(),
        "columns": over_others.size,
        "worst": format_number(-over_others.min()),
        "falling": count_falling_rows(),
        "rows": len(accuracies_by_row_and_workers()),
    }


def claims() -> list[Claim]:
    """Return claims on the extremes of some printed accuracies, or on how many rows are so."""
    sgd = scheme_accuracies("Standard SGD")
    rows = accuracies_by_row_and_workers()
    element_gather, element_reduce, block_gather, block_reduce = (
        scheme_accuracies(f"{scheme} ({exchange})")
        for scheme in ("Random-k", "Block-random-k")
        for exchange in ("allGather", "allReduce")
    )

    def smallest_claim(name: str, differences: np.ndarray, **words: Any) -> Claim:
        return make_claim(f"eghlidi2020.{name}", exact_estimate, differences.min(), differences.size, **words)

    def largest_claim(name: str, differences: np.ndarray) -> Claim:
        distances = np.abs(differences)
        return make_claim(f"eghlidi2020.{name}", exact_estimate, distances.max(), distances.size)

    return [
        smallest_claim("layerwise-above-global", layerwise_margins_over_global()),
        *(
            smallest_claim("topk-is-best", margins, case=scope, scope=scope)
            for scope, margins in zip(SCOPES, topk_margins_over_best_other(), strict=True)
        ),
        largest_claim("randomk-same", element_gather - element_reduce),
        largest_claim("randomk-comparable", (element_gather - block_gather)[0]),
        smallest_claim("randomk-above-block", (element_gather - block_gather)[1]),
        largest_claim("block-comparable", (sgd - block_gather)[0]),
        *(
            smallest_claim(
                "block-drops", accuracies[:, 0] - accuracies[:, -1], case=exchange.lower(), label=exchange
            )
            for exchange, accuracies in (("allGather", block_gather), ("allReduce", block_reduce))
        ),
        smallest_claim("block-loses", (block_gather - block_reduce)[:, 1:]),
        make_claim("eghlidi2020.every-doubling-costs", exact_estimate, count_falling_rows(), len(rows)),
        make_claim(
            "eghlidi2020.eight-lower-than-one", exact_estimate, (rows[:, -1] < rows[:, 0]).sum(), len(rows)
        ),
    ]  # fmt: skip
