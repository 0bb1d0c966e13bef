"""Table 1 of Zhang's Stable Top-K slides: what each allreduce sends, by formula and as counted.

Zhao Zhang, "Stable Top-K: Exploiting Temporal Stability of Top-K Gradients", slides, TACC; the table is Li
and Hoefler's (PPoPP 2022). Words are counted on virtual workers, whose exchanges are the real ones; time
follows from the counted words and latency terms by the alpha-beta model, so it is simulated. Two processes
are measured. Nothing is judged: that exchanges send what formulas say is a law (tests/sparsify/test_cost.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, find_run_keys, select_runs
from analysis.records.steps import mean_phase_seconds
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._predicted import VGG16_PARAMETERS, WORD_BYTES
from experiments.figures._runs import TIMED, profile_entry, with_density_except_dense
from sparsify import cost

TITLE = "Words and latency of dense and sparse allreduces, by formula and as counted"
_DATA = papers.item_settings("zhang.stable-costs")
SCHEMES: dict[str, str] = _DATA["schemes"]
# What the formulas leave out: splitters announce the lengths of pieces, then of what is left, one int64 each.
ANNOUNCED = dict.fromkeys(
    ("sparcml", "oktopk"), 2 * cost.LENGTH_BYTES // WORD_BYTES
)  # words for each other worker
DENSITY = 0.01
LINK = "ethernet_10g"
FORMULA = {"linewidth": 0.9, "marker": "", "label": None}


WORKERS = 8
MAX_SETTLED_WORKERS = 64  # workers


def runs(profile: str) -> list[Run]:
    """Return virtual workers, whose words are counted, and two processes, which are measured."""
    scale = profile_entry(_DATA["scales"], profile)
    shared = {**TIMED, "profile": profile, "task": "vector"}
    counted = {
        **shared, "task.elements": scale["elements"], "cluster": "virtual", "link": LINK,
        "alternate.block_steps": 2, "alternate.limit_min": 0.001, "seed": 0,  # counts are exact
    }  # fmt: skip
    measured = {
        **shared, "task.elements": scale["measured"], "cluster": "local", "workers": 2,
        "alternate.limit_min": scale["minutes"],
    }  # fmt: skip
    cases = [(size, DENSITY) for size in scale["workers"]]
    cases += [(WORKERS, density) for density in scale["densities"]]
    counted_runs = [
        Run({**counted, "workers": size, "timing.warmup_steps": _settling_steps(size)}, _variants(density))
        for size, density in cases
    ]
    return [*counted_runs, Run(measured, _variants(DENSITY))]


def _settling_steps(size: int) -> int:
    """Return the steps before words are counted.

    Residuals grow at first, and with them what Ok-Topk's re-used threshold selects. With very many workers a
    step takes too long for that.
    """
    return 12 if size <= MAX_SETTLED_WORKERS else 1


def _variants(density: float) -> dict[str, RunSettings]:
    return with_density_except_dense({name: {"method": name} for name in SCHEMES}, density)


@cache_by_frames
def counted_words_table(frames: Frames) -> pd.DataFrame:
    """Return words and latency terms for each method, number of workers and k, beside the published ones.

    Of the worker that sends most, the median over the steps after the first one.
    """
    virtual = select_runs(frames, find_run_keys(frames, {"cluster.where": "virtual"})).runs
    rows = [_count_row(frames, run) for run in virtual.to_dict("records")]
    table: pd.DataFrame = pd.DataFrame(rows, columns=COLUMNS).sort_values(["k", "P"], kind="stable")
    return table


COLUMNS = ["method", "P", "k", "n", "words", "announced", "least", "most", "messages", "expected", "vgg16_ms"]


def _count_row(frames: Frames, run: Mapping[Any, Any]) -> dict[str, Any]:
    name = str(run["variant"])
    size = int(run["workers"])
    n = int(run["task.elements"])
    k = n if name == "dense" else max(1, int(run["method.density"] * n))
    steps = frames.steps[(frames.steps["key"] == run["key"]) & (frames.steps["block"] > 0)]
    sent_bytes, messages = steps.groupby("step")[["wire_bytes", "messages"]].max().median()
    least, most, expected = cost.published_cost(SCHEMES[name], n, k, size)
    words = float(sent_bytes) / WORD_BYTES
    announced = ANNOUNCED.get(name, 0) * (size - 1)
    # Words grow with the elements, announcements do not.
    vgg16_words = (words - announced) * VGG16_PARAMETERS / n + announced
    link = cost.Link(float(run["cluster.link.alpha_s"]), float(run["cluster.link.beta_s_per_byte"]))
    exchange = cost.CollectiveCost(round(messages), round(WORD_BYTES * vgg16_words))
    return {
        "method": name, "P": size, "k": k, "n": n, "words": words, "announced": announced,
        "least": float(least), "most": float(most), "messages": float(messages), "expected": expected,
        "vgg16_ms": 1e3 * link.transfer_seconds(exchange),
    }  # fmt: skip


def draw(frames: Frames, profile: str) -> plots.Figure:
    rows = counted_words_table(frames)
    if not len(rows):
        raise ValueError(plots.NOTHING_TO_DRAW)
    words = list[plots.Curve | plots.FilledArea]()
    times = []
    for name in SCHEMES:
        cases = _select_density(rows, name)
        look = style.method_style(name)
        sizes = cases["P"]
        if cases["least"].equals(cases["most"]):
            words.append(plots.Curve(look, sizes, cases["most"], FORMULA))
        else:
            words.append(plots.FilledArea(look, sizes, cases["least"], cases["most"]))
        hollow = {"mfc": "none", "ms": 6} if name == "gaussiank" else {}  # where Top-k's marks are
        words.append(plots.Curve(look, sizes, cases["words"], {"linestyle": ""} | hollow))
        times.append(plots.Curve(look, sizes, cases["vgg16_ms"], hollow))
    axes: dict[str, Any] = {"doubling_x_ticks": sorted(set(rows["P"])), "xlabel": "Workers", "yscale": "log"}
    panels = [
        plots.curves_panel(
            words, title="lines and bands: the formulas; marks: counted",
            ylabel="Words sent, of the worker that sends most", **axes,
        ),
        plots.curves_panel(
            times, title="by the counted words, on 10 Gbit/s Ethernet",
            ylabel="Time for 14.7 million elements (ms), simulated", **axes,
        ),
    ]  # fmt: skip
    return plots.compose_figure(panels, 3.0)


def _select_density(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return a method's rows over P, at the density that all P have."""
    of_method = rows[rows["method"] == name]
    k = of_method["n"] if name == "dense" else (DENSITY * of_method["n"]).astype(int)
    cases: pd.DataFrame = of_method[of_method["k"] == k].drop_duplicates("P")
    return cases


def table(frames: Frames) -> list[Table]:
    names = {
        "allreduce": "allreduce", "P": "P", "k": "k", "least": "formula: least", "most": "most",
        "words": "counted", "announced": "of these announcements", "expected": "latency terms, formula",
        "messages": "as counted", "vgg16_ms": "VGG-16, simulated",
    }  # fmt: skip
    rows = counted_words_table(frames)
    labels = [f"{SCHEMES[name]} ({style.method_style(name).label})" for name in rows["method"]]
    frame = rows.assign(allreduce=labels)[[*names]].rename(columns=names)
    units = {"formula: least": "words", "most": "words", "counted": "words", "VGG-16, simulated": "ms"}
    return [Table("Table 1, counted", frame, units), _measured_table(frames)]


def _measured_table(frames: Frames) -> Table:
    """Return the times of two processes over the loopback interface."""
    names = {"transfer": "transfer", "exchange": "packing and merging", "select": "selection"}
    none = {"transfer": np.nan}  # where nothing was sent
    cells = []
    for run in frames.runs[frames.runs["cluster.where"] == "local"].to_dict("records"):
        parts = mean_phase_seconds(frames, [run["key"]])
        cells.append({
            "method": style.method_style(str(run["variant"])).label,
            "elements": run["task.elements"],
            **{name: 1e3 * parts.get(phase, none.get(phase, 0.0)) for phase, name in names.items()},
        })  # fmt: skip
    frame = pd.DataFrame(cells, columns=["method", "elements", *names.values()])
    return Table("Two processes, measured", frame, dict.fromkeys(names.values(), "ms"))


def facts(frames: Frames) -> dict[str, object]:
    sizes = captions.join_with_and(map(format_number, sorted(set(counted_words_table(frames)["n"]))))
    return {
        "settled": MAX_SETTLED_WORKERS, "announced": ANNOUNCED["oktopk"],
        "model": format_number(VGG16_PARAMETERS), "density": format_number(DENSITY), "sizes": sizes,
    }  # fmt: skip
