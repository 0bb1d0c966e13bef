"""DGC's speed-up over dense on slow links against the number of workers.

Zhao Zhang, "Stable Top-K", slides: "DGC doesn't help much when interconnect is fast", "High GPU cost in
selecting gradients", beside charts of the speed-up on clusters with 1 and 10 Gbit/s Ethernet, whose values
the slides' text does not give. Computing and selecting are measured, the exchange is simulated.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.stats import Value
from analysis.tables import Table
from experiments.figures import _predicted
from experiments.figures._predicted import DENSITY, FAST, LINKS, Parts
from sparsify import cost

TITLE = "DGC's speed-up over dense on 1 and 10 Gbit/s, simulated"
WORKERS = (2, 4, 8, 16, 32, 64)
JUDGED = 8
COLOURS = {"1 Gbit/s": "#0072B2", "10 Gbit/s": "#D55E00", FAST: "#555555"}
MARKERS = {"1 Gbit/s": "o", "10 Gbit/s": "s", FAST: "^"}


def runs(profile: str) -> list[list[str]]:
    return _predicted.timing_runs(profile)


def speedup(parts: Parts, link: cost.Link) -> np.ndarray:
    """(workers,) time of a dense step over that of DGC's, which computes as long and selects besides."""
    dense = _predicted.over_workers(parts._replace(select_s=0.0), "dense", 1.0, WORKERS, link)
    ratios: np.ndarray = dense / _predicted.over_workers(parts, "dgc", DENSITY, WORKERS, link)
    return ratios


def on_a100() -> tuple[Parts, Parts]:
    """Computing of 8 A100 by the published logs, with a selection that costs nothing, and with one as slow as
    their torch.topk: DGC's own, which searches a sample, is in none of their logs.
    """
    slow = _predicted.published("topk")
    return Parts(slow.compute_s, 0.0), slow


def draw(frames: Frames, profile: str) -> plots.Figure:
    measured = _measured(frames)
    free, slow = on_a100()
    with plots.canvas(style.two_columns(2.9), 1, 2) as (figure, (here, theirs)):
        for name, link in LINKS.items():
            look = style.Look(name, COLOURS[name], MARKERS[name], "")
            here.plot(
                WORKERS, speedup(measured, link), color=look.colour, marker=look.marker, label=look.label
            )
            best, worst = speedup(free, link), speedup(slow, link)
            theirs.fill_between(WORKERS, worst, best, color=look.colour, alpha=0.15, linewidth=0)
            theirs.plot(WORKERS, best, color=look.colour, marker=look.marker)
            theirs.plot(WORKERS, worst, color=look.colour, marker=look.marker, mfc="white", linestyle="--")
        for axes, title in (
            (here, "CPUs: computing and selecting measured"),
            (theirs, "8 A100, published: selecting free, or as torch.topk"),
        ):
            axes.axhline(1, color="#777777", linewidth=0.6, zorder=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(WORKERS, [str(size) for size in WORKERS])
            axes.set(xlabel="Workers", ylabel="Speed-up over dense, simulated", title=title)
            axes.grid(True)
        plots.log_ticks(theirs, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20))
        figure.legend(*here.get_legend_handles_labels(), loc="outside lower center", ncols=len(LINKS))
    return figure


def _measured(frames: Frames) -> Parts:
    found = _predicted.all_measured(frames)
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
    return Table("DGC's speed-up over dense, simulated", pd.DataFrame(rows), units)


def caption(frames: Frames, profile: str) -> str:
    return (
        f"Time of a dense step over that of a step with DGC at density {number(DENSITY)}, for a model of "
        f"VGG-16's size. {_predicted.SIMULATED} Left: computing and DGC's selecting (its sampled threshold "
        "over the whole model) measured here, on CPUs. Right: computing as in the logs of Yoon and Oh 2022 "
        "(8 A100, batch 128, validation taken out), filled marks with a selection that costs nothing, open "
        "ones with one that costs what torch.topk did there; DGC's own is in none of their logs and lies "
        f"between. NVLink 3: 240 GB/s, 3.4 us a message. {captions.setting(frames)} {captions.timing(frames)}"
    )


SOURCE = "slide 'Previous SOTA: Deep Gradient Compression'; its charts have no values in the text"


def claims() -> list[Claim]:
    return [
        Claim(
            text=f"DGC is faster than dense on 1 Gbit/s, {JUDGED} workers: how many times, simulated",
            paper="a chart of speed-ups",
            unit="x",
            source=SOURCE,
            kind="ordering",
            tolerance=1.0,
            reason="More than once is faster. A shape only.",
            ours=lambda frames: _at(frames, "1 Gbit/s"),
            timed=True,
        ),
        Claim(
            text=f"DGC gains more on 1 than on 10 Gbit/s, {JUDGED} workers: how many times, simulated",
            paper="doesn't help much when interconnect is fast",
            unit="x",
            source=SOURCE,
            kind="ordering",
            tolerance=1.0,
            reason="More than once is more. A shape only.",
            ours=lambda frames: _ratio(frames, "1 Gbit/s", "10 Gbit/s"),
            timed=True,
        ),
        Claim(
            text=f"DGC does not help on NVLink 3, {JUDGED} workers: time of dense over its own, simulated",
            paper=None,
            unit="x",
            source="no published number; the slides say that it does not help much",
            kind="limit",
            tolerance=1.0,
            reason="At most once: no help. With selecting as measured on CPUs.",
            ours=lambda frames: _at(frames, FAST),
            timed=True,
        ),
    ]


def _at(frames: Frames, link: str) -> Value | None:
    try:
        parts = _measured(frames)
    except ValueError:
        return None
    return Value(float(speedup(parts, LINKS[link])[WORKERS.index(JUDGED)]), n=1)


def _ratio(frames: Frames, slow: str, fast: str) -> Value | None:
    above, below = _at(frames, slow), _at(frames, fast)
    return None if above is None or below is None else Value(above.value / below.value, n=1)
