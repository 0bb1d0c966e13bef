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
from experiments.figures._predicted import DENSITY, FAST, LINKS, LocalWork
from experiments.figures.papers import claim, value
from sparsify import cost

TITLE = "DGC's speed-up over dense on 1 and 10 Gbit/s, simulated"
SCALE = value("zhang.scale.dgc")
WORKERS = (2, 4, 8, 16, 32, 64)
LOOKS = {
    "1 Gbit/s": style.MethodStyle("1 Gbit/s", "#0072B2", "o", ""),
    "10 Gbit/s": style.MethodStyle("10 Gbit/s", "#D55E00", "s", ""),
    FAST: style.MethodStyle(FAST, "#555555", "^", ""),
}
runs = _predicted.timing_runs


def speedup(parts: LocalWork, link: cost.Link) -> np.ndarray:
    """(workers,) time of a dense step over that of DGC's, which computes as long and selects besides."""
    dense = _predicted.step_seconds(parts._replace(select_s=0.0), "dense", 1.0, WORKERS, link)
    ratios: np.ndarray = dense / _predicted.step_seconds(parts, "dgc", DENSITY, WORKERS, link)
    return ratios


def on_a100() -> tuple[LocalWork, LocalWork]:
    """Computing of 8 A100 by the published logs, with a selection that costs nothing, and with one as slow as
    their torch.topk: DGC's own, which searches a sample, is in none of their logs.
    """
    slow = _predicted.published_work("topk")
    return LocalWork(slow.compute_s, 0.0), slow


def draw(frames: Frames, profile: str) -> plots.Figure:
    here, free, slow = (
        {name: speedup(parts, link) for name, link in LINKS.items()}
        for parts in (_measured(frames), *on_a100())
    )
    dashed = {"mfc": "white", "linestyle": "--", "label": None}
    measured = [plots.Curve(LOOKS[name], WORKERS, here[name]) for name in LINKS]
    published = [
        line
        for name, look in LOOKS.items()
        for line in (
            plots.FilledArea(look, WORKERS, slow[name], free[name], 0.15),
            plots.Curve(look, WORKERS, free[name]),
            plots.Curve(look, WORKERS, slow[name], dashed),
        )
    ]
    words: dict[str, Any] = {"level": 1, "sizes": WORKERS, "xlabel": "Workers"}
    words["ylabel"] = "Speed-up over dense, simulated"
    title, ticks = "8 A100, published: selecting free, or as torch.topk", (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
    panels = [
        plots.curves_panel(measured, title="CPUs: computing and selecting measured", **words),
        plots.curves_panel(published, title=title, log=ticks, **words),
    ]
    return plots.compose_figure(panels, 2.9)


def _measured(frames: Frames) -> LocalWork:
    found = _predicted.measured_work_by_method(frames)
    if "dgc" not in found:
        raise ValueError("nothing to draw: there is no run of DGC")
    return found["dgc"]


def table(frames: Frames) -> Table:
    free, slow = on_a100()
    rows = [
        {
            "computing and selecting": where,
            "computing": 1e3 * parts.compute_s,
            "selecting": 1e3 * parts.select_s,
            "link": name,
            **dict(zip((f"P = {size}" for size in WORKERS), speedup(parts, link), strict=True)),
        }
        for where, parts in (
            ("CPUs, measured", _measured(frames)),
            ("8 A100, selecting free", free),
            ("8 A100, selecting as torch.topk", slow),
        )
        for name, link in LINKS.items()
    ]
    units = {"computing": "ms", "selecting": "ms"} | {f"P = {size}": "x" for size in WORKERS}
    return Table.from_rows("DGC's speed-up over dense, simulated", rows, units)


def facts(frames: Frames) -> dict[str, object]:
    return {"density": format_number(DENSITY), "simulated": _predicted.SIMULATED}


def claims() -> list[Claim]:
    return [
        claim("zhang.faster-on-1g", least, "1 Gbit/s"),
        claim("zhang.gains-more-on-1g", least_ratio, "1 Gbit/s", "10 Gbit/s"),
        claim("zhang.no-help-on-nvlink", most, FAST),
    ]


def least(frames: Frames, link: str) -> Estimate | None:
    """The speed-up with the number of workers where it is least."""
    parts = _predicted.measured_work_by_method(frames).get("dgc")
    return parts and Estimate(float(speedup(parts, LINKS[link]).min()), n=1)


def most(frames: Frames, link: str) -> Estimate | None:
    """The speed-up with the number of workers where it is greatest."""
    parts = _predicted.measured_work_by_method(frames).get("dgc")
    return parts and Estimate(float(speedup(parts, LINKS[link]).max()), n=1)


def least_ratio(frames: Frames, slow: str, fast: str) -> Estimate | None:
    """The speed-up on one link over that on another, with the number of workers where it is least."""
    parts = _predicted.measured_work_by_method(frames).get("dgc")
    if parts is None:
        return None
    above, below = (speedup(parts, LINKS[link]) for link in (slow, fast))
    return Estimate(float((above / below).min()), n=1)
