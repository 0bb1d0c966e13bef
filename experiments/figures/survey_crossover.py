"""Where does a method beat dense? Density against bandwidth, for several numbers of workers.

Not a figure of a paper. Selecting is measured at the size of VGG-16; the exchange is the alpha-beta model's.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames
from analysis.stats import Value, phase_ratio
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _predicted
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._predicted import MODEL, SCHEMES, WORD
from experiments.figures._runs import TIMED, scale, with_density
from experiments.figures.papers import claim
from sparsify import cost

TITLE = "Where methods beat dense, by density and bandwidth"
WORKERS = (4, 32, 256)
DENSITY = 0.001  # at which selecting is measured
SPARSE: dict[str, RunSettings] = {
    "topk": {"method": "topk", "select": "torch"},
    "topk-fused": {"method": "topk", "select": "fused"},
    "randomk-hash": {"method": "randomk", "method.sampling": "hash"},
    "oktopk": {"method": "oktopk"},
}
BANDWIDTHS = np.geomspace(0.1, 400, 121)  # Gbit/s
DENSITIES = np.geomspace(1e-4, 0.1, 91)
SHOWN = (0.0001, 0.001, 0.01, 0.1)  # densities in the table


def runs(profile: str) -> list[Run]:
    shared = {**TIMED, "profile": profile, **scale("crossover", profile), "cluster": "local", "workers": 2}
    sparse = with_density(SPARSE, DENSITY if profile != "smoke" else 0.01)
    return [Run(shared, {"dense": {"method": "dense"}, **sparse})]


def selecting(frames: Frames) -> dict[str, float]:
    """Seconds of each method that was measured, at the size of VGG-16.

    Raises:
        ValueError: none was.
    """
    found = {name: _predicted.measured(frames, name, MODEL) for name in SPARSE}
    known = {name: parts.select_s for name, parts in found.items() if parts is not None}
    if not known:
        raise ValueError(plots.EMPTY)
    return known


def break_even(
    name: str, select_s: float, density: float, workers: int, elements: int = MODEL, hidden_s: float = 0.0
) -> float:
    """Gbit/s up to which the method's selecting and exchange take less than dense's exchange; 0: nowhere.

    Args:
        hidden_s: of dense's exchange, behind backward.
    """
    k = max(1, int(density * elements))
    dense, own = (cost.published_cost(SCHEMES[each], elements, k, workers) for each in ("dense", name))
    saved_bits = 8 * WORD * float(dense.most - own.most)
    spent_s = hidden_s + select_s + _predicted.ALPHA_S * (own.messages - dense.messages)
    if spent_s <= 0:
        return np.inf if saved_bits > 0 else 0.0
    return max(0.0, saved_bits / spent_s / 1e9)


def quickest(selects: dict[str, float], workers: int) -> np.ndarray:
    """(bandwidths, densities) of numbers: 0 dense, then the methods in their order."""
    links = [_predicted.ethernet(float(gbit_s)) for gbit_s in BANDWIDTHS]
    exchange_s = partial(_predicted.exchange_s, elements=MODEL, workers=workers)
    dense = [[exchange_s("dense", density=1.0, link=link)] * len(DENSITIES) for link in links]
    others = [
        [[select_s + exchange_s(name, density=float(density), link=link) for density in DENSITIES]
         for link in links]
        for name, select_s in selects.items()
    ]  # fmt: skip
    winners: np.ndarray = np.argmin(np.array([dense, *others]), axis=0)
    return winners


def draw(frames: Frames, profile: str) -> plots.Figure:
    selects = selecting(frames)
    looks = [style.look(name) for name in ("dense", *selects)]
    panels = [
        plots.areas(
            DENSITIES, BANDWIDTHS, quickest(selects, workers), looks,
            [_break_evens(name, select_s, workers) for name, select_s in selects.items()],
            xlabel="Density", title=f"{workers} workers",
        )
        for workers in WORKERS
    ]  # fmt: skip
    keys = marks.area_keys([look._replace(label=f"{look.label} is quickest") for look in looks])
    ylabel = "Bandwidth (Gbit/s), simulated"
    return plots.picture(panels, 3.0, ylabel=ylabel, keys=keys, ncols=4, sharey=True)


def _break_evens(name: str, select_s: float, workers: int) -> plots.Curve:
    """The line below which a method beats dense."""
    gbit_s = [break_even(name, select_s, float(density), workers) for density in DENSITIES]
    look = style.look(name)._replace(marker="")
    shown = np.clip(gbit_s, BANDWIDTHS[0] / 2, None)
    return plots.Curve(look, DENSITIES, shown, {"label": f"{look.label} = dense"})


def table(frames: Frames) -> Table:
    """Break-even bandwidths."""
    columns = {f"density {number(density)}": density for density in SHOWN}
    rows = [
        {
            "method": style.look(name).label,
            "selecting": 1e3 * select_s,
            "workers": size,
            **{column: break_even(name, select_s, density, size) for column, density in columns.items()},
        }
        for name, select_s in selecting(frames).items()
        for size in WORKERS
    ]
    units = {"selecting": "ms"} | dict.fromkeys(columns, "Gbit/s")
    return Table.of("Up to which bandwidth a method beats dense, simulated", rows, units)


def facts(frames: Frames) -> dict[str, object]:
    densities = captions.listed(map(number, captions.values(frames, "method.density")))
    return {"simulated": _predicted.SIMULATED, "densities": densities}


def claims() -> list[Claim]:
    return [claim("survey.fused-on-faster-links", _faster)]


def _faster(frames: Frames) -> Value | None:
    """Ratio of torch.topk's time of selecting to the fused search's."""
    torch, fused = (yoon2022.keys(frames, name) for name in ("topk", "topk-fused"))
    return phase_ratio(frames, torch, fused, "select")
