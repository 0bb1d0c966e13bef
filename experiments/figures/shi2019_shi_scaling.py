"""Scaling efficiency with the number of workers on slow links: dense, Top-k, DGC, Gaussian-k.

Shi et al. 2019, "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv:1911.08772, state
that a cheaper selection improves the scaling efficiency of TopK-SGD. Computing and selecting are measured,
the exchange is simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.stats import Value
from analysis.tables import Table
from experiments.figures import _predicted
from experiments.figures._predicted import DENSITY, Parts

TITLE = "Scaling efficiency on slow links, simulated from measured computing and selecting"
LINKS = (1.0, 10.0)  # Gbit/s
WORKERS = (2, 4, 8, 16, 32, 64, 128)
JUDGED = (16, 1.0)  # workers and Gbit/s at which the statements are looked at
PUBLISHED = ("dense", "topk")  # of which the authors' logs of 8 A100 have times


def runs(profile: str) -> list[list[str]]:
    return _predicted.timing_runs(profile)


def efficiency(parts: Parts, name: str, gbit_s: float) -> np.ndarray:
    """(workers,) % of what so many workers would do if each were as quick as one that is alone."""
    taken = _predicted.over_workers(parts, name, DENSITY, WORKERS, _predicted.ethernet(gbit_s))
    shares: np.ndarray = 100 * parts.compute_s / taken
    return shares


def draw(frames: Frames, profile: str) -> plots.Figure:
    measured = _predicted.all_measured(frames)
    published = {name: _predicted.published(name) for name in PUBLISHED}
    with plots.canvas(style.two_columns(2.9), 1, 2 * len(LINKS), sharey=True) as (figure, panels):
        for place, (where, parts) in enumerate((("CPUs, measured", measured), ("8 A100's logs", published))):
            for axes, gbit_s in zip(panels[2 * place :], LINKS, strict=False):
                for name, own in parts.items():
                    look = style.look(name)
                    axes.plot(WORKERS, efficiency(own, name, gbit_s), color=look.colour, marker=look.marker,
                              label=look.label)  # fmt: skip
                axes.set_xscale("log", base=2)
                axes.set_xticks(WORKERS, [str(size) for size in WORKERS])
                axes.set(xlabel="Workers", ylim=(0, 103), title=f"{number(gbit_s)} Gbit/s, {where}")
                axes.grid(True)
        panels[0].set_ylabel("Scaling efficiency (%), simulated")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def table(frames: Frames) -> Table:
    rows = []
    for where, parts in (
        ("CPUs, measured", _predicted.all_measured(frames)),
        ("8 A100, published logs", {name: _predicted.published(name) for name in PUBLISHED}),
    ):
        for name, gbit_s in product(parts, LINKS):
            own, columns = parts[name], [f"P = {size}" for size in WORKERS]
            rows.append({
                "computing and selecting": where,
                "method": style.look(name).label,
                "computing": 1e3 * own.compute_s,
                "selecting": 1e3 * own.select_s,
                "link": f"{number(gbit_s)} Gbit/s",
                **dict(zip(columns, efficiency(own, name, gbit_s), strict=True)),
            })  # fmt: skip
    units = {"computing": "ms", "selecting": "ms"} | {f"P = {size}": "%" for size in WORKERS}
    return Table("Scaling efficiency, simulated", pd.DataFrame(rows), units)


def caption(frames: Frames, profile: str) -> str:
    return (
        "Scaling efficiency: the time of computing over that of a whole step with so many workers, for a "
        f"model of VGG-16's size, density {number(DENSITY)}, one bucket. {_predicted.SIMULATED} Words by the "
        "published formulas. Left pair: computing and selecting measured here, on CPUs, where computing is "
        "slow and hides the link; right pair: both from the logs of Yoon and Oh 2022 (8 A100, batch 128, "
        "validation taken out; torch.topk of torch 1.8.1), which have no DGC and no Gaussian-k. "
        f"{captions.setting(frames)} {captions.timing(frames)}"
    )


SOURCE = "abstract: a cheap approximate selection is to improve the scaling efficiency of TopK-SGD"


def claims() -> list[Claim]:
    size, gbit_s = JUDGED
    where = f"{size} workers, {number(gbit_s)} Gbit/s, simulated"
    return [
        Claim(
            text=f"Gaussian-k scales better than Top-k with torch.topk: points of efficiency, {where}",
            paper="improves the scaling efficiency",
            unit="points",
            source=SOURCE,
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts. On CPUs; the paper speaks of GPUs.",
            ours=_margin("gaussiank", "topk"),
            accelerator="GPU",
            timed=True,
        ),
        Claim(
            text=f"Top-k with torch.topk scales better than dense: points of efficiency, {where}",
            paper="communication is the bottleneck",
            unit="points",
            source="abstract and introduction",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts. On CPUs, whose computing is slow.",
            ours=_margin("topk", "dense"),
            timed=True,
        ),
        Claim(
            text=f"the fused exact search scales better than Gaussian-k: points of efficiency, {where}",
            paper=None,
            unit="points",
            source="no published number; the exact search that reads the gradient once",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts.",
            ours=_margin("topk-fused", "gaussiank"),
            timed=True,
        ),
    ]


def _margin(name: str, other: str) -> Callable[[Frames], Value | None]:
    """By how many points of efficiency one method is ahead; over blocks, by both methods' selecting."""

    def ours(frames: Frames) -> Value | None:
        try:
            known = _predicted.all_measured(frames)
        except ValueError:
            return None
        if not {name, other} <= set(known):
            return None
        size, gbit_s = JUDGED
        at = WORKERS.index(size)
        margin = efficiency(known[name], name, gbit_s)[at] - efficiency(known[other], other, gbit_s)[at]
        return Value(float(margin), n=1)

    return ours
