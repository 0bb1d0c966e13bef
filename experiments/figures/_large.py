"""Models as large as those of Zhang's slides: what a method adds to a step's computing, which is left open.

Selecting is measured on a vector and scaled, the exchange is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from analysis import plots
from analysis.pictures import style
from analysis.records.frames import Frames, cache_by_frames, find_keys, select_runs
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _predicted, papers
from experiments.figures._predicted import LocalWork
from experiments.figures._runs import TIMED, with_density
from sparsify import cost

_DATA = papers.item("zhang.stable-throughput")


class Family(NamedTuple):
    """A model of the slides, and the small one that stands for it."""

    small: str
    large: str  # the slides'
    elements: int  # of the large one

    @property
    def hours(self) -> Mapping[str, float]:
        """Hours of its training, as published, by method."""
        found: Mapping[str, float] = papers.value(f"zhang.hours.{self.large}")
        return found


FAMILIES = {task: Family(**own) for task, own in _DATA["families"].items()}
LOOKS = {name: style.method_style(name) for name in ("dense", "topk", "oktopk")}
LOOKS["stable_topk"] = style.MethodStyle("Stable Top-K", "#E69F00", "D", "xx")
UNNAMED = {name: look._replace(label="") for name, look in LOOKS.items()}
LARGE_DENSITY = 0.01
EVERY = 10  # N, steps between two choices; B is that of the sweep, and of models as large as theirs their own
SMALL_BLOCK, BLOCK = 100, 10_000
WORKERS = 16  # that exchange in the prediction
LINKS = {"10 Gbit/s": _predicted.ethernet(10), "100 Gbit/s": _predicted.ethernet(100)}
DASHES = dict(zip(LINKS, ("-", "--"), strict=True))
COMPUTING = np.geomspace(0.03, 30, 61)  # seconds of a step


def methods(density: float, block: int) -> dict[str, RunSettings]:
    """The settings of each method."""
    own: dict[str, RunSettings] = {name: {"method": name} for name in LOOKS}
    own["stable_topk"] = {**own["stable_topk"], "method.block": block, "method.every": EVERY}
    return with_density(own, density)


def run(profile: str) -> Run:
    """The run in which all methods select from a vector in turns."""
    variants = methods(LARGE_DENSITY, BLOCK if profile != "smoke" else SMALL_BLOCK)
    return Run(
        {**TIMED, "profile": profile, "task": "vector", "workers": 2, **_DATA["selecting"][profile]}, variants
    )


@cache_by_frames
def added(frames: Frames, elements: int) -> dict[str, LocalWork]:
    """The work of each method, measured without a network, selecting scaled to so many elements."""
    found = select_runs(frames, find_keys(frames, {"task.name": "vector"}))
    parts = {method: _predicted.measured_work(found, method, elements) for method in LOOKS}
    return {method: own for method, own in parts.items() if own is not None}


def added_s(parts: Mapping[str, LocalWork], method: str, elements: int, link: cost.Link) -> float:
    """Seconds that a method adds to computing: selecting and exchanging."""
    exchange = _predicted.exchange_s(method, elements, LARGE_DENSITY, WORKERS, link)
    return parts[method].select_s + exchange


def speedup(
    parts: Mapping[str, LocalWork], method: str, elements: int, link: cost.Link, compute_s: np.ndarray
) -> np.ndarray:
    """(computing,) a dense step over one of this method, by the time that both compute."""
    dense, own = (added_s(parts, each, elements, link) for each in ("dense", method))
    ratios: np.ndarray = (compute_s + dense) / (compute_s + own)
    return ratios


def computing_for(ratio: float, dense_s: float, own_s: float) -> float | None:
    """Seconds of computing at which the speed-up is this ratio; None where no computing gives it."""
    seconds = (dense_s - ratio * own_s) / (ratio - 1)
    return seconds if seconds > 0 else None


def published(family: Family, method: str) -> float | None:
    """Hours of dense training over those of the method."""
    own = family.hours.get(method)
    return family.hours["dense"] / own if own and method != "dense" else None


def ratio(frames: Frames, family: Family) -> Estimate | None:
    """Ratio of what Ok-Topk adds to computing to what Stable Top-K does."""
    parts, link = added(frames, family.elements), LINKS["10 Gbit/s"]
    if not {"oktopk", "stable_topk"} <= set(parts):
        return None
    other, own = (added_s(parts, method, family.elements, link) for method in ("oktopk", "stable_topk"))
    return Estimate(other / own)


def panel(frames: Frames) -> plots.Panel:
    """Speed-ups over dense by the time of computing, of the first family."""
    family = next(iter(FAMILIES.values()))
    parts, lines = added(frames, family.elements), list[plots.Curve]()
    for method in (each for each in parts if each != "dense"):
        for link, joined in LINKS.items():
            ratios = speedup(parts, method, family.elements, joined, COMPUTING)
            how = {"linestyle": DASHES[link], "marker": ""}
            lines.append(plots.Curve(UNNAMED[method], COMPUTING, ratios, how))
        if hours := published(family, method):
            lines.append(plots.Curve(UNNAMED[method], None, Estimate(hours), plots.PUBLISHED_LINE))
    return plots.curves_panel(
        lines, log=(0.2, 0.5, 1, 2, 5, 10, 20, 50), xscale="log", xlabel="Computing in a step (s)",
        ylabel="Dense's step / own, simulated",
        title=f"{family.large}'s size\n{', dashed '.join(LINKS).replace(' Gbit/s', '', 1)}",
    )  # fmt: skip


def table(frames: Frames) -> Table:
    rows = []
    for family in FAMILIES.values():
        parts = added(frames, family.elements)
        for method in parts:
            hours = published(family, method)
            for link, joined in LINKS.items():
                dense, own = (added_s(parts, each, family.elements, joined) for each in ("dense", method))
                rows.append({
                    "model": family.large,
                    "method": LOOKS[method].label,
                    "link": link,
                    "selecting": 1e3 * parts[method].select_s,
                    "adds to computing": 1e3 * own,
                    "published hours, dense / own": hours,
                    "computing that gives this": computing_for(hours, dense, own) if hours else None,
                })  # fmt: skip
    units = {"selecting": "ms", "adds to computing": "ms", "computing that gives this": "s"}
    return Table.from_rows(
        "Models as large as theirs, simulated",
        rows,
        units,
        papers.words("zhang.stable-throughput.note"),
    )
