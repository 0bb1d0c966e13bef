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
from analysis.stats import PRINTED, Estimate
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import papers
from experiments.figures.papers import claim

TITLE = "Test accuracies of Eghlidi and Jaggi's Table 1, and their statements on them"
SCALE = {
    "task.name": "resnet18_cifar10", "task.batch_size": 128, "train.epochs": 300, "method.density": 0.01,
}  # fmt: skip
TABLE: dict[str, dict[str, dict[int, float]]] = papers.value("eghlidi2020.top1")  # scheme, scope, workers
SCOPES, WORKERS = ("layer-wise", "global"), (1, 2, 4, 8)
SPARSE = tuple(TABLE)[1:]
LOOKS = {
    name: style.MethodStyle(name, colour, marker, "")
    for name, (colour, marker) in papers.item("eghlidi2020.eghlidi-table1-published")["looks"].items()
}
SHOWN = (  # scope, its title, and the accuracies
    (0, "layer-wise selection", (90, 95)), (1, "global selection", (76, 96)),
    (1, "global, the same axis as left", (90, 95)),
)  # fmt: skip


def runs(profile: str) -> list[Run]:
    return []


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [
        plots.curves_panel(
            [
                plots.Curve(
                    look, WORKERS, accuracy(name)[scope], {"linestyle": "--" if "allReduce" in name else "-"}
                )
                for name, look in LOOKS.items()
            ],
            sizes=WORKERS, xlabel="Workers", title=title, ylim=limits,
        )
        for scope, title, limits in SHOWN
    ]  # fmt: skip
    return plots.compose_figure(panels, 2.9, ylabel="Test accuracy (%)", ncols=3)


def accuracy(name: str) -> np.ndarray:
    """(scope, workers)"""
    return np.array([[TABLE[name][scope][size] for size in WORKERS] for scope in SCOPES])


def scope_margins() -> np.ndarray:
    """Layer-wise less global in points, (method, workers) of the sparse methods."""
    return np.array([accuracy(name)[0] - accuracy(name)[1] for name in SPARSE])


def topk_margins() -> np.ndarray:
    """Top-k less the best other sparse method in points, (scope, workers)."""
    others = np.array([accuracy(name) for name in SPARSE if name != "Top-k"])
    margins: np.ndarray = accuracy("Top-k") - others.max(axis=0)
    return margins


def exchange_differences(scheme: str) -> np.ndarray:
    """allGather less allReduce in points, (scope, workers)."""
    differences: np.ndarray = accuracy(f"{scheme} (allGather)") - accuracy(f"{scheme} (allReduce)")
    return differences


def rows_over_workers() -> np.ndarray:
    """(11, workers): of each method and scope; standard SGD, which selects nothing, has one."""
    return np.concatenate([accuracy(name) if name in SPARSE else accuracy(name)[:1] for name in TABLE])


def falling_rows() -> int:
    """Number of rows in which every doubling of the workers costs accuracy."""
    return int((np.diff(rows_over_workers()) < 0).all(axis=1).sum())


def table(frames: Frames) -> Table:
    columns = [f"{scope}, W = {workers}" for scope in SCOPES for workers in WORKERS]
    rows = [{"method": name, **dict(zip(columns, accuracy(name).flat, strict=True))} for name in TABLE]
    return Table.from_rows("Test accuracy as published", rows, dict.fromkeys(columns, "%"))


def facts(frames: Frames) -> dict[str, object]:
    over_global, over_others = scope_margins(), topk_margins()
    return {
        "least": format_number(over_global.min()), "pairs": over_global.size, "best": (over_others > 0).sum(),
        "columns": over_others.size, "worst": format_number(-over_others.min()), "falling": falling_rows(),
        "rows": len(rows_over_workers()),
    }  # fmt: skip


def claims() -> list[Claim]:
    """Each is the extreme of some of the printed accuracies, or how many rows are so."""
    varies, rows = round(float(np.ptp(accuracy("Standard SGD"))), 2), rows_over_workers()
    within: dict[str, Any] = {"tolerance": varies}
    blocks, elements = (exchange_differences(scheme) for scheme in ("Block-random-k", "Random-k"))
    margins, several = scope_margins(), blocks[:, 1:]
    alike = accuracy("Random-k (allGather)") - accuracy("Block-random-k (allGather)")
    behind = (accuracy("Standard SGD") - accuracy("Block-random-k (allGather)"))[0]
    return [
        claim("eghlidi2020.layerwise-above-global", _exact, margins.min(), margins.size),
        *(
            claim("eghlidi2020.topk-is-best", _exact, each.min(), each.size, case=scope, scope=scope)
            for scope, each in zip(SCOPES, topk_margins(), strict=True)
        ),
        claim("eghlidi2020.randomk-same", _exact, np.abs(elements).max(), elements.size, **within),
        claim("eghlidi2020.randomk-comparable", _exact, np.abs(alike[0]).max(), len(WORKERS), **within),
        claim("eghlidi2020.randomk-above-block", _exact, alike[1].min(), len(WORKERS)),
        claim("eghlidi2020.block-comparable", _exact, np.abs(behind).max(), len(WORKERS), **within),
        *(
            claim(
                "eghlidi2020.block-drops", _exact, lost_by_eight(exchange).min(), len(SCOPES),
                case=exchange.lower(), label=exchange, **within,
            )
            for exchange in ("allGather", "allReduce")
        ),
        claim("eghlidi2020.block-loses", _exact, several.min(), several.size, **within),
        claim("eghlidi2020.every-doubling-costs", _exact, falling_rows(), len(rows)),
        claim("eghlidi2020.eight-lower-than-one", _exact, (rows[:, -1] < rows[:, 0]).sum(), len(rows)),
    ]  # fmt: skip


def lost_by_eight(exchange: str) -> np.ndarray:
    """Points that Block-random-k loses from one worker to eight, (scope,)."""
    by_workers = accuracy(f"Block-random-k ({exchange})")
    lost: np.ndarray = by_workers[:, 0] - by_workers[:, -1]
    return lost


def _exact(frames: Frames, value: float, count: int) -> Estimate:
    return Estimate.exact(value, count, PRINTED)
