"""Scaling efficiency with the number of workers on slow links: dense, Top-k, DGC, Gaussian-k.

Shi et al. 2019, "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv:1911.08772, state
that a cheaper selection improves the scaling efficiency of TopK-SGD. Computing and selecting are measured,
the exchange is simulated.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames
from analysis.stats import Value
from analysis.tables import Table
from experiments.figures import _predicted
from experiments.figures._predicted import DENSITY, Work
from experiments.figures.papers import claim

TITLE = "Scaling efficiency on slow links, simulated from measured computing and selecting"
LINKS = (1.0, 10.0)  # Gbit/s
WORKERS = (2, 4, 8, 16, 32, 64, 128)
JUDGED = (16, 1.0)  # workers and Gbit/s at which the statements are looked at
PUBLISHED = ("dense", "topk")  # of which the authors' logs of 8 A100 have times
runs = _predicted.timing_runs


def efficiency(parts: Work, name: str, gbit_s: float) -> np.ndarray:
    """(workers,) % of what so many workers would do if each were as quick as one that is alone."""
    taken = _predicted.over_workers(parts, name, DENSITY, WORKERS, _predicted.ethernet(gbit_s))
    shares: np.ndarray = 100 * parts.compute_s / taken
    return shares


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not (measured := _predicted.all_measured(frames)):
        raise ValueError(plots.EMPTY)
    published = {name: _predicted.published(name) for name in PUBLISHED}
    panels = [
        plots.curves(
            [plots.Curve(style.look(name), WORKERS, efficiency(of, name, gbit_s))
             for name, of in parts.items()],
            sizes=WORKERS, xlabel="Workers", ylim=(0, 103), title=f"{number(gbit_s)} Gbit/s, {where}",
        )
        for where, parts in (("CPUs, measured", measured), ("8 A100's logs", published))
        for gbit_s in LINKS
    ]  # fmt: skip
    return plots.picture(panels, 2.9, ylabel="Scaling efficiency (%), simulated", sharey=True)


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


def claims() -> list[Claim]:
    size, gbit_s = JUDGED
    where = f"{size} workers, {number(gbit_s)} Gbit/s"
    return [
        claim("shi2019.gaussiank-above-topk", _margin, "gaussiank", "topk", where=where),
        claim("shi2019.topk-above-dense", _margin, "topk", "dense", where=where),
        claim("shi2019.fused-above-gaussiank", _margin, "topk-fused", "gaussiank", where=where),
    ]


def _margin(frames: Frames, name: str, other: str) -> Value | None:
    """Points of efficiency by which one method is ahead; over blocks, by both methods' selecting."""
    known = _predicted.all_measured(frames)
    if not {name, other} <= set(known):
        return None
    size, gbit_s = JUDGED
    at = WORKERS.index(size)
    margin = efficiency(known[name], name, gbit_s)[at] - efficiency(known[other], other, gbit_s)[at]
    return Value(float(margin), n=1)
