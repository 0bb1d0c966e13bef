"""Where does a method beat dense? Density against bandwidth, for several numbers of workers.

Not a figure of a paper. Selecting is measured at the size of VGG-16; the exchange is the alpha-beta model's.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.stats import phase_ratio
from analysis.tables import Table
from experiments.figures import _predicted
from experiments.figures._predicted import MODEL, SCHEMES, WORD, Parts
from sparsify import cost

TITLE = "Where methods beat dense, by density and bandwidth"
WORKERS = (4, 32, 256)
DENSITY = 0.001  # at which selecting is measured
SPARSE = {
    "topk": "method=topk select=torch", "topk-fused": "method=topk select=fused",
    "randomk-hash": "method=randomk method.sampling=hash", "oktopk": "method=oktopk",
}  # fmt: skip
ELEMENTS = {"smoke": 10_000, "laptop": 14_730_000, "paper": 14_730_000}
MINUTES = {"smoke": 0.02, "laptop": 4, "paper": 10}
BANDWIDTHS = np.geomspace(0.1, 400, 121)  # Gbit/s
DENSITIES = np.geomspace(1e-4, 0.1, 91)
SHOWN = (0.0001, 0.001, 0.01, 0.1)  # densities in the table


def runs(profile: str) -> list[list[str]]:
    if profile not in ELEMENTS:
        raise ValueError(f"no profile {profile!r}; there are: {', '.join(ELEMENTS)}")
    variants = {"dense": "method=dense"} | {
        name: f"{words} method.density={DENSITY if profile != 'smoke' else 0.01}"
        for name, words in SPARSE.items()
    }
    named = ",".join(f"{name}:'{words}'" for name, words in variants.items())
    return [[
        "recipe=none", f"profile={profile}", "task=vector", f"task.elements={ELEMENTS[profile]}",
        "cluster=local", "workers=2", "train.validate=never", "timing.mode=serialised",
            "timing.warmup_steps=2",
        f"alternate.limit_min={MINUTES[profile]}", f"variants={{{named}}}",
    ]]  # fmt: skip


def selecting(frames: Frames) -> dict[str, float]:
    """Seconds of each method that was measured, at the size of VGG-16.

    Raises:
        ValueError: none was.
    """
    found = {name: _predicted.measured(frames, name, MODEL) for name in SPARSE} if len(frames.runs) else {}
    known = {name: parts.select_s for name, parts in found.items() if isinstance(parts, Parts)}
    if not known:
        raise ValueError("nothing to draw: there is no run")
    return known


def break_even(name: str, select_s: float, density: float, workers: int) -> float:
    """Gbit/s up to which the method's selecting and exchange take less than dense's exchange; 0: nowhere."""
    k = max(1, int(density * MODEL))
    dense, own = (cost.published(SCHEMES[each], MODEL, k, workers) for each in ("dense", name))
    saved_bits = 8 * WORD * float(dense.most - own.most)
    spent_s = select_s + _predicted.ALPHA_S * (own.messages - dense.messages)
    if spent_s <= 0:
        return np.inf if saved_bits > 0 else 0.0
    return max(0.0, saved_bits / spent_s / 1e9)


def quickest(selects: dict[str, float], workers: int) -> np.ndarray:
    """(bandwidths, densities) of numbers: 0 dense, then the methods in their order."""
    times = [np.empty((len(BANDWIDTHS), len(DENSITIES))) for _ in range(1 + len(selects))]
    for row, gbit_s in enumerate(BANDWIDTHS):
        link = _predicted.ethernet(float(gbit_s))
        times[0][row] = _predicted.exchange_s("dense", MODEL, 1.0, workers, link)
        for place, (name, select_s) in enumerate(selects.items(), 1):
            times[place][row] = [
                select_s + _predicted.exchange_s(name, MODEL, float(density), workers, link)
                for density in DENSITIES
            ]
    winners: np.ndarray = np.argmin(np.stack(times), axis=0)
    return winners


def draw(frames: Frames, profile: str) -> plots.Figure:
    selects = selecting(frames)
    looks = [style.look("dense"), *map(style.look, selects)]
    with plots.canvas(style.two_columns(3.0), 1, len(WORKERS), sharey=True) as (figure, panels):
        for axes, workers in zip(panels, WORKERS, strict=True):
            plots.areas(axes, DENSITIES, BANDWIDTHS, quickest(selects, workers), looks)
            for name, select_s in selects.items():
                line = [break_even(name, select_s, float(density), workers) for density in DENSITIES]
                look = style.look(name)
                axes.plot(
                    DENSITIES, np.clip(line, BANDWIDTHS[0] / 2, None), color=look.colour, label=look.label
                )
            axes.set(xscale="log", yscale="log", xlabel="Density", title=f"{workers} workers")
            axes.set(xlim=(DENSITIES[0], DENSITIES[-1]), ylim=(BANDWIDTHS[0], BANDWIDTHS[-1]))
        panels[0].set_ylabel("Bandwidth (Gbit/s), simulated")
        handles = [*plots.area_keys(looks), *panels[0].get_legend_handles_labels()[0]]
        labels = [f"{look.label} is quickest" for look in looks]
        labels += [f"{style.look(name).label} = dense" for name in selects]
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def table(frames: Frames) -> Table:
    """Break-even bandwidths."""
    rows = [
        {
            "method": style.look(name).label,
            "selecting": 1e3 * select_s,
            "workers": workers,
            **{
                f"density {number(density)}": break_even(name, select_s, density, workers)
                for density in SHOWN
            },
        }
        for name, select_s in selecting(frames).items()
        for workers in WORKERS
    ]
    units = {"selecting": "ms"} | {f"density {number(density)}": "Gbit/s" for density in SHOWN}
    return Table("Up to which bandwidth a method beats dense, simulated", pd.DataFrame(rows), units)


def caption(frames: Frames, profile: str) -> str:
    densities = captions.listed(number(each) for each in captions.values(frames, "method.density"))
    return (
        "Areas: the method whose selecting and exchange take the least time at this density and bandwidth; "
        "lines: below its line a method beats dense. VGG-16's size, everything in one bucket. "
        f"{_predicted.SIMULATED} Words by the published formulas, of Ok-Topk the upper end. Selecting "
        f"(searching, packing, merging) is measured on CPUs, by two processes at density {densities}, and "
        "taken for every density and number of workers; on a GPU it is much shorter, which lifts the lines "
        f"in proportion. {captions.setting(frames)} {captions.timing(frames)}"
    )


def claims() -> list[Claim]:
    return [
        Claim(
            text="the fused search lets Top-k beat dense on links so many times as fast as with torch.topk",
            paper=None,
            unit="x",
            source="no published number: the break-even bandwidth is inverse to the time of selecting",
            kind="ordering",
            tolerance=1.0,
            reason="More than once is faster. Of searching alone, as measured.",
            ours=lambda frames: phase_ratio(
                frames, _keys(frames, "topk"), _keys(frames, "topk-fused"), "select"
            ),
            timed=True,
        )
    ]


def _keys(frames: Frames, name: str) -> list[str]:
    if not len(frames.runs):
        return []
    return [str(run["key"]) for run in frames.runs.to_dict("records") if style.method_id(run) == name]
