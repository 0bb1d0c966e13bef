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
from experiments.figures._predicted import DENSITY, ComputeAndSelectSeconds
from experiments.figures.papers import make_claim, published_value

TITLE = "Scaling efficiency on slow links, simulated from measured computing and selecting"
SCALE = published_value("shi2019.scale.scaling")
LINKS = (1.0, 10.0)  # Gbit/s
WORKERS = (2, 4, 8, 16, 32, 64, 128)
PUBLISHED = ("dense", "topk")  # of which the authors' logs of 8 A100 have times
runs = _predicted.predicted_timing_runs


def predicted_efficiency_percent(work: ComputeAndSelectSeconds, method: str, gbit_s: float) -> np.ndarray:
    """Return the percent of what workers would do if each were as quick as one that is alone: (workers,)."""
    step_s = _predicted.predicted_vgg16_step_s(
        work, method, DENSITY, WORKERS, _predicted.ethernet_link(gbit_s)
    )
    shares: np.ndarray = 100 * work.compute_s / step_s
    return shares


def _works_by_place(frames: Frames) -> dict[str, dict[str, ComputeAndSelectSeconds]]:
    """Return computing and selecting by method: measured here, and by the published logs."""
    logged = {method: _predicted.published_compute_and_select(method) for method in PUBLISHED}
    return {
        "CPUs, measured": _predicted.measured_compute_and_select_by_method(frames),
        "8 A100's logs": logged,
    }


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not _predicted.measured_compute_and_select_by_method(frames):
        raise ValueError(plots.NOTHING_TO_DRAW)
    panels = []
    for place, works in _works_by_place(frames).items():
        for gbit_s in LINKS:
            lines = [
                plots.Curve(
                    style.method_style(method), WORKERS, predicted_efficiency_percent(work, method, gbit_s)
                )
                for method, work in works.items()
            ]
            title = f"{format_number(gbit_s)} Gbit/s, {place}"
            panels.append(
                plots.curves_panel(
                    lines, doubling_x_ticks=WORKERS, xlabel="Workers", ylim=(0, 103), title=title
                )
            )
    return plots.compose_figure(panels, 2.9, ylabel="Scaling efficiency (%), simulated", sharey=True)


def table(frames: Frames) -> Table:
    columns = [f"P = {size}" for size in WORKERS]
    rows = [
        {
            "computing and selecting": place.replace("'s logs", ", published logs"),
            "method": style.method_style(method).label,
            "computing": 1e3 * work.compute_s,
            "selecting": 1e3 * work.select_s,
            "link": f"{format_number(gbit_s)} Gbit/s",
            **dict(zip(columns, predicted_efficiency_percent(work, method, gbit_s), strict=True)),
        }
        for place, works in _works_by_place(frames).items()
        for method, work in works.items()
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
    listed = []
    for name, pair in margins.items():
        for gbit_s in LINKS:
            rate = format_number(gbit_s)
            listed.append(
                make_claim(
                    f"shi2019.{name}", least_efficiency_margin, *pair, gbit_s, case=f"{rate}g", rate=rate
                )
            )
    return [
        *listed,
        make_claim("eghlidi2020.gain-grows", least_speedup_growth_per_doubling, "topk", LINKS[0]),
    ]


def _measured_efficiency(frames: Frames, method: str, gbit_s: float) -> np.ndarray | None:
    work = _predicted.measured_compute_and_select_by_method(frames).get(method)
    return None if work is None else predicted_efficiency_percent(work, method, gbit_s)


def least_speedup_growth_per_doubling(frames: Frames, method: str, gbit_s: float) -> Estimate | None:
    """Return a method's speed-up over dense with twice as many workers over that with fewer, at the least."""
    efficiencies, dense = (_measured_efficiency(frames, name, gbit_s) for name in (method, "dense"))
    if efficiencies is None or dense is None:
        return None
    speedups = efficiencies / dense
    return Estimate(float((speedups[1:] / speedups[:-1]).min()), n=1)


def least_efficiency_margin(frames: Frames, method: str, other: str, gbit_s: float) -> Estimate | None:
    """Return the points of efficiency by which one method is ahead, with the workers where it is least."""
    ahead, behind = (_measured_efficiency(frames, name, gbit_s) for name in (method, other))
    return None if ahead is None or behind is None else Estimate(float((ahead - behind).min()), n=1)
