"""Table 1 of Eghlidi and Jaggi 2020 as printed, and whether their sentences about it follow from it.

Negar Foroutan Eghlidi and Martin Jaggi, "Sparse Communication for Training Deep Networks", 2020, ResNet-18 on
CIFAR-10, density 1 %, 300 epochs. The sentences quoted are those of section 4.2.1.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames
from analysis.stats import PRINTED, Value
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures.papers import claim

TITLE = "Test accuracies of Eghlidi and Jaggi's Table 1, and their statements on them"
WORKERS = (1, 2, 4, 8)
SCOPES = ("layer-wise", "global")
# Test accuracy in %, (scope, W): layer-wise at W = 1, 2, 4, 8, then global. The paper prints standard SGD
# twice.
TABLE = {
    "Standard SGD": (94.50, 94.53, 94.40, 94.30, 94.50, 94.53, 94.40, 94.30),
    "Top-k": (93.63, 93.70, 93.68, 93.41, 91.45, 91.51, 91.75, 91.50),
    "Random-k (allGather)": (93.43, 93.30, 93.12, 92.54, 91.73, 91.76, 91.16, 91.45),
    "Random-k (allReduce)": (93.43, 93.20, 93.15, 92.43, 91.73, 91.66, 91.26, 91.25),
    "Block-random-k (allGather)": (93.16, 93.10, 93.12, 93.10, 91.18, 91.05, 91.11, 90.45),
    "Block-random-k (allReduce)": (93.16, 92.50, 90.80, 90.63, 91.18, 88.20, 79.00, 78.11),
}
SPARSE = tuple(TABLE)[1:]
LOOKS = {
    name: style.Look(name, colour, marker, "")
    for name, colour, marker in (
        ("Standard SGD", "#000000", "o"), ("Top-k", "#0072B2", "s"),
        ("Random-k (allGather)", "#D55E00", "^"), ("Random-k (allReduce)", "#D55E00", "v"),
        ("Block-random-k (allGather)", "#009E73", "D"), ("Block-random-k (allReduce)", "#009E73", "X"),
    )
}  # fmt: skip
SHOWN = (  # scope, its title, and the accuracies
    (0, "layer-wise selection", (90, 95)), (1, "global selection", (76, 96)),
    (1, "global, the same axis as left", (90, 95)),
)  # fmt: skip


def runs(profile: str) -> list[Run]:
    return []


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [
        plots.curves(
            [
                plots.Curve(look, WORKERS, accuracy(name)[scope], {"linestyle": _dash(name)})
                for name, look in LOOKS.items()
            ],
            sizes=WORKERS, xlabel="Workers", title=title, ylim=limits,
        )
        for scope, title, limits in SHOWN
    ]  # fmt: skip
    return plots.picture(panels, 2.9, ylabel="Test accuracy (%)", ncols=3)


def _dash(name: str) -> str:
    return "--" if "allReduce" in name else "-"


def accuracy(name: str) -> np.ndarray:
    """(scope, workers)"""
    return np.array(TABLE[name]).reshape(len(SCOPES), len(WORKERS))


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


def falling_rows() -> list[str]:
    """The rows in which every doubling of the workers costs accuracy, of 12: method and scope."""
    return [
        f"{name}, {scope}"
        for name in TABLE
        for scope, row in zip(SCOPES, accuracy(name), strict=True)
        if (np.diff(row) < 0).all()
    ]


def table(frames: Frames) -> Table:
    columns = [f"{scope}, W = {workers}" for scope in SCOPES for workers in WORKERS]
    rows = [{"method": name, **dict(zip(columns, row, strict=True))} for name, row in TABLE.items()]
    return Table("Test accuracy as published", pd.DataFrame(rows), dict.fromkeys(columns, "%"))


def caption(frames: Frames, profile: str) -> str:
    worst, best = topk_margins().min(), scope_margins().min()
    return (
        "The 48 accuracies of Table 1 as printed: *published numbers, not measured by this project*, one "
        "training each as far as the paper says, so that small differences may be chance. What is judged is "
        f"whether the sentences about the table follow from it. Layer-wise is above global by {number(best)} "
        f"points or more in all {scope_margins().size} pairs. Top-k is the best sparse method in "
        f"{(topk_margins() > 0).sum()} of {topk_margins().size} columns; where it is not, Random-k is ahead "
        f"by up to {number(-worst)} points. Accuracy falls with every doubling of the workers in "
        f"{len(falling_rows())} of {2 * len(TABLE)} rows."
    )


def claims() -> list[Claim]:
    """Each is the extreme of some of the printed accuracies, or how many rows are so."""
    varies, rows = float(np.ptp(accuracy("Standard SGD"))), 2 * len(TABLE)
    blocks, elements = (exchange_differences(scheme) for scheme in ("Block-random-k", "Random-k"))
    ends = [row[-1] < row[0] for name in TABLE for row in accuracy(name)]
    return [
        claim("eghlidi2020.layerwise-above-global", _exact, scope_margins().min(), scope_margins().size),
        *(
            claim("eghlidi2020.topk-is-best", _exact, each.min(), each.size, case=scope, scope=scope)
            for scope, each in zip(SCOPES, topk_margins(), strict=True)
        ),
        claim("eghlidi2020.randomk-same", _exact, varies - np.abs(elements).max(), elements.size),
        claim(
            "eghlidi2020.block-loses", _exact, blocks[:, 1:].min(), blocks[:, 1:].size, tolerance=varies
        ),
        claim("eghlidi2020.every-doubling-costs", _exact, len(falling_rows()), rows),
        claim("eghlidi2020.eight-lower-than-one", _exact, sum(ends), rows),
    ]  # fmt: skip


def _exact(frames: Frames, value: float, count: int) -> Value:
    return Value.exact(value, count, PRINTED)
