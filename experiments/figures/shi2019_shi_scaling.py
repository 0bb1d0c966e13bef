"""Scaling efficiency with the number of workers on slow links: dense, Top-k, DGC, Gaussian-k.

Shi et al. 2019, "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv:1911.08772, state
that a cheaper selection improves the scaling efficiency of TopK-SGD. Computing and selecting are measured,
the exchange is simulated.
"""

from __future__ import annotations

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.figures import _predicted
from experiments.figures._predicted import DENSITY, LocalWork
from experiments.figures.papers import claim, value

TITLE = "Scaling efficiency on slow links, simulated from measured computing and selecting"
SCALE = value("shi2019.scale.scaling")
LINKS = (1.0, 10.0)  # Gbit/s
WORKERS = (2, 4, 8, 16, 32, 64, 128)
PUBLISHED = ("dense", "topk")  # of which the authors' logs of 8 A100 have times
runs = _predicted.timing_runs


def efficiency(parts: LocalWork, name: str, gbit_s: float) -> np.ndarray:
    """(workers,) % of what so many workers would do if each were as quick as one that is alone."""
    taken = _predicted.step_seconds(parts, name, DENSITY, WORKERS, _predicted.ethernet(gbit_s))
    shares: np.ndarray = 100 * parts.compute_s / taken
    return shares


def _parts(frames: Frames) -> dict[str, dict[str, LocalWork]]:
    """Computing and selecting by method: measured here, and by the published logs."""
    logged = {name: _predicted.published_work(name) for name in PUBLISHED}
    return {"CPUs, measured": _predicted.measured_work_by_method(frames), "8 A100's logs": logged}


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not _predicted.measured_work_by_method(frames):
        raise ValueError(plots.NOTHING_TO_DRAW)
    panels = [
        plots.curves_panel(
            [plots.Curve(style.method_style(name), WORKERS, efficiency(of, name, gbit_s))
             for name, of in parts.items()],
            sizes=WORKERS, xlabel="Workers", ylim=(0, 103), title=f"{format_number(gbit_s)} Gbit/s, {where}",
        )
        for where, parts in _parts(frames).items()
        for gbit_s in LINKS
    ]  # fmt: skip
    return plots.compose_figure(panels, 2.9, ylabel="Scaling efficiency (%), simulated", sharey=True)


def table(frames: Frames) -> Table:
    columns = [f"P = {size}" for size in WORKERS]
    rows = [
        {
            "computing and selecting": where.replace("'s logs", ", published logs"),
            "method": style.method_style(name).label,
            "computing": 1e3 * own.compute_s,
            "selecting": 1e3 * own.select_s,
            "link": f"{format_number(gbit_s)} Gbit/s",
            **dict(zip(columns, efficiency(own, name, gbit_s), strict=True)),
        }
        for where, parts in _parts(frames).items()
        for name, own in parts.items()
        for gbit_s in LINKS
    ]
    units = {"computing": "ms", "selecting": "ms"} | dict.fromkeys(columns, "%")
    return Table.from_rows("Scaling efficiency, simulated", rows, units)


def facts(frames: Frames) -> dict[str, object]:
    return {"density": format_number(DENSITY), "simulated": _predicted.SIMULATED}


def claims() -> list[Claim]:
    margins = {
        "gaussiank-above-topk": ("gaussiank", "topk"), "topk-above-dense": ("topk", "dense"),
        "fused-above-gaussiank": ("topk-fused", "gaussiank"),
    }  # fmt: skip
    return [
        *(
            claim(
                f"shi2019.{name}",
                least_margin,
                *pair,
                gbit_s,
                case=f"{format_number(gbit_s)}g",
                rate=format_number(gbit_s),
            )
            for name, pair in margins.items()
            for gbit_s in LINKS
        ),
        claim("eghlidi2020.gain-grows", least_growth, "topk", LINKS[0]),
    ]


def least_growth(frames: Frames, name: str, gbit_s: float) -> Estimate | None:
    """A method's speed-up over dense with twice as many workers over that with fewer, where it is least."""
    known = _predicted.measured_work_by_method(frames)
    if name not in known:
        return None
    speedups = efficiency(known[name], name, gbit_s) / efficiency(known["dense"], "dense", gbit_s)
    return Estimate(float((speedups[1:] / speedups[:-1]).min()), n=1)


def least_margin(frames: Frames, name: str, other: str, gbit_s: float) -> Estimate | None:
    """Points of efficiency by which one method is ahead, at the number of workers where it is least."""
    known = _predicted.measured_work_by_method(frames)
    if not {name, other} <= set(known):
        return None
    here, there = (efficiency(known[each], each, gbit_s) for each in (name, other))
    return Estimate(float((here - there).min()), n=1)
