"""Models as large as those of Zhang's slides: what a method adds to a step's computing, which is left open.

Selecting is measured on a vector and scaled, the exchange is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from analysis import plots
from analysis.pictures import style
from analysis.records.frames import Frames, cache_by_frames, find_run_keys, select_runs
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _predicted, papers
from experiments.figures._runs import TIMED, with_density_except_dense
from sparsify import cost

_DATA = papers.item_settings("zhang.stable-throughput")


class ModelFamily(NamedTuple):
    """A model of the slides, and the small one that stands for it."""

    small_label: str
    large_label: str  # the slides'
    large_elements: int

    @property
    def published_hours_by_method(self) -> Mapping[str, float]:
        """Published hours of the large model's training."""
        hours: Mapping[str, float] = papers.published_value(f"zhang.hours.{self.large_label}")
        return hours

    def published_speedup_over_dense(self, method: str) -> float | None:
        """Return the hours of dense training over those of the method; None without any, and for dense."""
        hours = self.published_hours_by_method.get(method)
        return self.published_hours_by_method["dense"] / hours if hours and method != "dense" else None


FAMILIES = {task: ModelFamily(**entry) for task, entry in _DATA["families"].items()}
LOOKS = {name: style.method_style(name) for name in ("dense", "topk", "oktopk")}
LOOKS["stable_topk"] = style.MethodStyle("Stable Top-K", "#E69F00", "D", "xx")
UNNAMED = {name: look._replace(label="") for name, look in LOOKS.items()}
LARGE_DENSITY = 0.01
EVERY = 10  # N, steps between two choices; B is that of the sweep, and of models as large as theirs their own
SMALL_BLOCK, BLOCK = 100, 10_000
WORKERS = 16  # that exchange in the prediction
LINKS = {"10 Gbit/s": _predicted.ethernet_link(10), "100 Gbit/s": _predicted.ethernet_link(100)}
DASHES = dict(zip(LINKS, ("-", "--"), strict=True))
COMPUTING_S = np.geomspace(0.03, 30, 61)  # seconds of a step


def settings_by_method(density: float, block: int) -> dict[str, RunSettings]:
    """Return the settings of each method at this density, of Stable Top-K with this block."""
    settings: dict[str, RunSettings] = {name: {"method": name} for name in LOOKS}
    settings["stable_topk"] = {"method": "stable_topk", "method.block": block, "method.every": EVERY}
    return with_density_except_dense(settings, density)


def selection_timing_run(profile: str) -> Run:
    """Return the run in which all methods select from a vector in turns."""
    variants = settings_by_method(LARGE_DENSITY, BLOCK if profile != "smoke" else SMALL_BLOCK)
    return Run(
        {**TIMED, "profile": profile, "task": "vector", "workers": 2, **_DATA["selecting"][profile]}, variants
    )


@cache_by_frames
def selection_s_by_method(frames: Frames, elements: int) -> dict[str, float]:
    """Return the seconds of selecting by method, measured on a vector and scaled to `elements`."""
    vector = select_runs(frames, find_run_keys(frames, {"task.name": "vector"}))
    works = {method: _predicted.measured_compute_and_select(vector, method, elements) for method in LOOKS}
    return {method: work.select_s for method, work in works.items() if work is not None}


def selection_and_exchange_s(frames: Frames, method: str, elements: int, link: cost.Link) -> float:
    """Return the seconds that a method adds to computing: selecting and exchanging."""
    exchange_s = _predicted.predicted_exchange_s(method, elements, LARGE_DENSITY, WORKERS, link)
    return selection_s_by_method(frames, elements)[method] + exchange_s


def computing_s_for_speedup(speedup: float, dense_added_s: float, method_added_s: float) -> float | None:
    """Return the seconds of computing at which a method has this speed-up over dense; None without any."""
    seconds = (dense_added_s - speedup * method_added_s) / (speedup - 1)
    return seconds if seconds > 0 else None


def oktopk_to_stable_added_time_ratio(frames: Frames, family: ModelFamily) -> Estimate | None:
    """Return the seconds that Ok-Topk adds to computing over those that Stable Top-K adds, at 10 Gbit/s."""
    if not {"oktopk", "stable_topk"} <= set(selection_s_by_method(frames, family.large_elements)):
        return None
    oktopk_s, stable_s = (
        selection_and_exchange_s(frames, method, family.large_elements, LINKS["10 Gbit/s"])
        for method in ("oktopk", "stable_topk")
    )
    return Estimate(oktopk_s / stable_s)


def first_family_speedups_panel(frames: Frames) -> plots.Panel:
    """Return speed-ups over dense by the time of computing, of the first family."""
    family = next(iter(FAMILIES.values()))
    lines = []
    for method in selection_s_by_method(frames, family.large_elements):
        if method == "dense":
            continue
        for name, link in LINKS.items():
            dense_s, method_s = (
                selection_and_exchange_s(frames, other, family.large_elements, link)
                for other in ("dense", method)
            )
            ratios = (COMPUTING_S + dense_s) / (COMPUTING_S + method_s)
            line_style = {"linestyle": DASHES[name], "marker": ""}
            lines.append(plots.Curve(UNNAMED[method], COMPUTING_S, ratios, line_style))
        published = family.published_speedup_over_dense(method)
        if published:
            lines.append(plots.Curve(UNNAMED[method], None, Estimate(published), plots.PUBLISHED_LINE))
    return plots.curves_panel(
        lines, log_y_ticks=(0.2, 0.5, 1, 2, 5, 10, 20, 50), xscale="log", xlabel="Computing in a step (s)",
        ylabel="Dense's step / own, simulated",
        title=f"{family.large_label}'s size\n{', dashed '.join(LINKS).replace(' Gbit/s', '', 1)}",
    )  # fmt: skip


def large_models_table(frames: Frames) -> Table:
    """Return what each method adds to computing, and the computing at which hours are as published."""
    rows = []
    for family in FAMILIES.values():
        for method, seconds in selection_s_by_method(frames, family.large_elements).items():
            ratio = family.published_speedup_over_dense(method)
            for name, link in LINKS.items():
                dense_s, method_s = (
                    selection_and_exchange_s(frames, other, family.large_elements, link)
                    for other in ("dense", method)
                )
                rows.append({
                    "model": family.large_label,
                    "method": LOOKS[method].label,
                    "link": name,
                    "selecting": 1e3 * seconds,
                    "adds to computing": 1e3 * method_s,
                    "published hours, dense / own": ratio,
                    "computing that gives this":
                        computing_s_for_speedup(ratio, dense_s, method_s) if ratio else None,
                })  # fmt: skip
    units = {"selecting": "ms", "adds to computing": "ms", "computing that gives this": "s"}
    note = papers.text_template_or_empty("zhang.stable-throughput.note")
    return Table.from_rows("Models as large as theirs, simulated", rows, units, note)
