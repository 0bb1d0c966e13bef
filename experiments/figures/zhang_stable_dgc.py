"""DGC's speed-up over dense on slow links against the number of workers.

Zhao Zhang, "Stable Top-K", slides: "DGC doesn't help much when interconnect is fast", "High GPU cost in
selecting gradients", beside charts of the speed-up on clusters with 1 and 10 Gbit/s Ethernet, whose values
the slides' text does not give. Computing and selecting are measured, the exchange is simulated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.figures import _predicted
from experiments.figures._predicted import DENSITY, FAST, LINKS, ComputeAndSelectSeconds
from experiments.figures.papers import make_claim, published_value
from sparsify import cost

TITLE = "DGC's speed-up over dense on 1 and 10 Gbit/s, simulated"
SCALE = published_value("zhang.scale.dgc")
WORKERS = (2, 4, 8, 16, 32, 64)
LOOKS = {
    "1 Gbit/s": style.MethodStyle("1 Gbit/s", "#0072B2", "o", ""),
    "10 Gbit/s": style.MethodStyle("10 Gbit/s", "#D55E00", "s", ""),
    FAST: style.MethodStyle(FAST, "#555555", "^", ""),
}
runs = _predicted.predicted_timing_runs


def predicted_speedup_by_workers(work: ComputeAndSelectSeconds, link: cost.Link) -> np.ndarray:
    """Return the time of a dense step over that of DGC's, which computes as long and selects: (workers,)."""
    dense_s = _predicted.predicted_vgg16_step_s(work._replace(select_s=0.0), "dense", 1.0, WORKERS, link)
    ratios: np.ndarray = dense_s / _predicted.predicted_vgg16_step_s(work, "dgc", DENSITY, WORKERS, link)
    return ratios


def dgc_compute_and_select_by_scenario(frames: Frames) -> dict[str, ComputeAndSelectSeconds]:
    """Return computing and selecting of DGC: measured here, and for two assumptions on 8 A100 by their logs.

    The two are a selection that costs nothing, and one as slow as their torch.topk: DGC's own, which
    searches a sample, is in none of their logs.

    Raises:
        ValueError: there is no run of DGC.
    """
    measured = _predicted.measured_compute_and_select_by_method(frames)
    if "dgc" not in measured:
        raise ValueError("nothing to draw: there is no run of DGC")
    slow = _predicted.published_compute_and_select("topk")
    return {
        "CPUs, measured": measured["dgc"],
        "8 A100, selecting free": ComputeAndSelectSeconds(slow.compute_s, 0.0),
        "8 A100, selecting as torch.topk": slow,
    }


def draw(frames: Frames, profile: str) -> plots.Figure:
    measured, free, slow = dgc_compute_and_select_by_scenario(frames).values()
    dashed = {"mfc": "white", "linestyle": "--", "label": None}
    ours = []
    theirs = list[plots.Curve | plots.FilledArea]()
    for name, look in LOOKS.items():
        link = LINKS[name]
        ours.append(plots.Curve(look, WORKERS, predicted_speedup_by_workers(measured, link)))
        theirs += [
            plots.FilledArea(
                look,
                WORKERS,
                predicted_speedup_by_workers(slow, link),
                predicted_speedup_by_workers(free, link),
                0.15,
            ),
            plots.Curve(look, WORKERS, predicted_speedup_by_workers(free, link)),
            plots.Curve(look, WORKERS, predicted_speedup_by_workers(slow, link), dashed),
        ]
    axes: dict[str, Any] = {"reference_y": 1, "doubling_x_ticks": WORKERS, "xlabel": "Workers"}
    axes["ylabel"] = "Speed-up over dense, simulated"
    title = "8 A100, published: selecting free, or as torch.topk"
    ticks = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
    panels = [
        plots.curves_panel(ours, title="CPUs: computing and selecting measured", **axes),
        plots.curves_panel(theirs, title=title, log_y_ticks=ticks, **axes),
    ]
    return plots.compose_figure(panels, 2.9)


def table(frames: Frames) -> Table:
    columns = [f"P = {size}" for size in WORKERS]
    rows = [
        {
            "computing and selecting": place,
            "computing": 1e3 * work.compute_s,
            "selecting": 1e3 * work.select_s,
            "link": name,
            **dict(zip(columns, predicted_speedup_by_workers(work, link), strict=True)),
        }
        for place, work in dgc_compute_and_select_by_scenario(frames).items()
        for name, link in LINKS.items()
    ]
    units = {"computing": "ms", "selecting": "ms"} | dict.fromkeys(columns, "x")
    return Table.from_rows("DGC's speed-up over dense, simulated", rows, units)


def facts(frames: Frames) -> dict[str, object]:
    return {"density": format_number(DENSITY), "simulated": _predicted.SIMULATED}


def claims() -> list[Claim]:
    return [
        make_claim("zhang.faster-on-1g", least_dgc_speedup, "1 Gbit/s"),
        make_claim("zhang.gains-more-on-1g", least_dgc_speedup_ratio_of_links, "1 Gbit/s", "10 Gbit/s"),
        make_claim("zhang.no-help-on-nvlink", greatest_dgc_speedup, FAST),
    ]


def _measured_speedup(frames: Frames, link: str) -> np.ndarray | None:
    work = _predicted.measured_compute_and_select_by_method(frames).get("dgc")
    return None if work is None else predicted_speedup_by_workers(work, LINKS[link])


def least_dgc_speedup(frames: Frames, link: str) -> Estimate | None:
    """Return the speed-up with the number of workers where it is least."""
    speedups = _measured_speedup(frames, link)
    return None if speedups is None else Estimate(float(speedups.min()), n=1)


def greatest_dgc_speedup(frames: Frames, link: str) -> Estimate | None:
    """Return the speed-up with the number of workers where it is greatest."""
    speedups = _measured_speedup(frames, link)
    return None if speedups is None else Estimate(float(speedups.max()), n=1)


def least_dgc_speedup_ratio_of_links(frames: Frames, slow: str, fast: str) -> Estimate | None:
    """Return the speed-up on one link over that on another, with the workers where it is least."""
    above, below = (_measured_speedup(frames, link) for link in (slow, fast))
    return None if above is None or below is None else Estimate(float((above / below).min()), n=1)
