"""Does the alpha-beta model predict what exchanges take on a really limited link? Every exchange, several P
and k, over emulated links.

A prediction uses two kinds of numbers. What a step sent is counted as it was sent (`sparsify.cost`, by gloo's
algorithms): latency terms and bytes of each collective. Alpha and beta of each kind of collective are fitted
to its times at a few sizes that the same workers measured before the run (experiments/worker/link_probe.py).
Once a step comes what they found small messages to take longer where they compute before and after them:
workers that share cores take them from each other. Nothing is fitted to what is predicted.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style, timeline
from analysis.pictures.numbers import number
from analysis.records.frames import Frames, cache_by_frames
from analysis.records.steps import warm_steps
from analysis.stats import Value
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import papers
from experiments.figures.papers import claim

TITLE = "The alpha-beta model against exchanges over a limited link"
LEAST_BYTES = 64 * 2**10  # sent by a worker in a step: below, latency and the scheduler decide
COMPUTING = "provenance.machine.link.computing_s"  # see experiments/worker/link_probe.py
MEDIAN, MOST = 10.0, 25.0  # % of error that half, and nine tenths, of the predictions may have
DENSITIES = (0.0001, 0.001, 0.01, 0.1)  # of n = 1,000,000 elements 100 to 100,000
_DATA = papers.item("survey.link-model")
DENSE, SPARSE = _DATA["dense"], _DATA["sparse"]  # of each exchange its label, and its settings
LABELS: dict[str, str] = {name: own["label"] for name, own in (DENSE | SPARSE).items()}
LOOKS = {2: ("#0072B2", "o"), 4: ("#D55E00", "s"), 8: ("#009E73", "^")}  # by number of workers


def runs(profile: str) -> list[Run]:
    """One group of processes per link and P, in which all exchanges take turns."""
    densities = DENSITIES if profile != "smoke" else DENSITIES[-2:]
    variants = {name: own["settings"] for name, own in DENSE.items()} | {
        f"{name}-{at}": {**own["settings"], "method.density": density}
        for name, own in SPARSE.items()
        for at, density in enumerate(densities)
    }
    return [
        Run({**_DATA["runs"][profile], "profile": profile, "link": link, "workers": size}, variants)
        for link in _DATA["links"][profile]
        for size in _DATA["workers"][profile]
    ]


COLUMNS = [
    "exchange", "density", "link", "workers", "bytes", "messages", "predicted", "measured", "ratio", "blocks",
]  # fmt: skip


@cache_by_frames
def cases(frames: Frames) -> pd.DataFrame:
    """A row per exchange, k, P and link: what was sent, predicted and measured, and their ratio; `blocks` has
    the measured seconds of each turn.
    """
    rows = []
    for run in frames.runs.to_dict("records"):
        key = str(run["key"])
        steps = warm_steps(frames, key).steps
        if not steps["predicted_s"].gt(0).any():
            continue
        # The one that sends most is on the critical path.
        each = steps.groupby("step").agg({
            "transfer_s": "max", "wire_bytes": "max", "messages": "max", "predicted_s": "max",
            "block": "first",
        })  # fmt: skip
        predicted = each["predicted_s"].mean() + run[COMPUTING]
        blocks = timeline.stretch(frames, key) * each.groupby("block")["transfer_s"].mean().to_numpy()
        measured = float(np.median(blocks))
        rows.append({
            "exchange": LABELS.get(str(run["method.name"]), str(run["method.name"])),
            "density": run.get("method.density"),
            "link": run["cluster.link.name"],
            "workers": int(run["workers"]),
            "bytes": round(each["wire_bytes"].mean()),
            "messages": each["messages"].mean(),
            "predicted": predicted,
            "measured": measured,
            "ratio": predicted / measured,
            "blocks": blocks,
        })  # fmt: skip
    table: pd.DataFrame = pd.DataFrame(rows, columns=COLUMNS)
    return table


def large(found: pd.DataFrame) -> pd.DataFrame:
    """The cases that the aims are about."""
    above: pd.DataFrame = found[found["bytes"] > LEAST_BYTES]
    return above


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = cases(frames)
    if not len(found):
        raise ValueError("nothing to draw: no run of this item has a probed link")
    labels = [label for label in LABELS.values() if label in set(found["exchange"])]
    sizes = sorted(set(found["workers"]))
    by_exchange, by_bytes = [], []
    for row in found.to_dict("records"):
        look = _look(row["workers"])
        filled = look.colour if row["bytes"] > LEAST_BYTES else "white"
        how = {"mec": look.colour, "ms": 3, "mew": 0.7, "mfc": filled, "label": None}
        aside = 0.22 * (sizes.index(row["workers"]) - 1)
        by_exchange.append(plots.Curve(look, row["ratio"], labels.index(row["exchange"]) + aside, how))
        by_bytes.append(plots.Curve(look, row["bytes"], row["ratio"], how))
    least, most = found["ratio"].min() / 1.5, found["ratio"].max() * 1.5
    ticks = [tick for tick in marks.FACTORS if least <= tick <= most]
    sent: dict[str, Any] = {"xscale": "log", "xlabel": "Bytes that a worker sends in a step"}
    ratios = plots.dots(by_exchange, rows=labels, factors=True, xlabel="Predicted / measured")
    panels = [
        plots.layered(*_errors("x"), ratios),
        plots.layered(*_errors("y"), plots.upright(LEAST_BYTES), plots.dots(by_bytes, log=ticks, **sent)),
    ]
    keys = marks.dot_keys({look.label: (look.marker, look.colour) for look in map(_look, sizes)})
    return plots.picture(panels, 0.9 + 0.2 * len(labels), keys=keys, width_ratios=(1.7, 1))


def _look(size: int) -> style.Look:
    return style.Look(f"P = {size}", *LOOKS.get(size, ("#555555", "D")), "")


def _errors(along: Literal["x", "y"]) -> list[plots.Panel]:
    """Areas of the errors that the aims allow."""
    edges = ((MOST / 100, "#F0F0F0"), (MEDIAN / 100, "#DDDDDD"))
    return [plots.shade(along, 1 - error, 1 + error, colour) for error, colour in edges]


def table(frames: Frames) -> list[Table]:
    found = cases(frames)
    every = found.drop(columns="blocks").assign(
        predicted=1e3 * found["predicted"], measured=1e3 * found["measured"]
    )
    units = {"bytes": "B", "predicted": "ms", "measured": "ms"}
    return [
        Table("Errors by exchange", summary(found, "exchange"), ERRORS),
        Table("Errors by number of workers", summary(found, "workers"), ERRORS),
        Table("Every case", every, units),
    ]


# Column -> of what and how it is taken, over the cases of a group.
SUMMARY: dict[str, tuple[str, Any]] = {
    "cases": ("ratio", "size"), "predicted / measured": ("ratio", "median"),
    "median error": ("error", "median"), "90th percentile": ("error", partial(pd.Series.quantile, q=0.9)),
    "largest error": ("error", "max"),
}  # fmt: skip
ERRORS = dict.fromkeys(list(SUMMARY)[2:], "%")


def summary(found: pd.DataFrame, by: str) -> pd.DataFrame:
    """Errors of the predictions that the aims are about."""
    above = large(found)
    errors = above.assign(error=100 * (above["ratio"] - 1).abs())
    table: pd.DataFrame = errors.groupby(by, sort=False).agg(**SUMMARY).reset_index()
    return table


def claims() -> list[Claim]:
    aims = (("half", 0.5, MEDIAN), ("nine tenths", 0.9, MOST))
    return [
        claim("survey.error", error, quantile, case=share, share=share, tolerance=limit)
        for share, quantile, limit in aims
    ]


def error(frames: Frames, quantile: float) -> Value | None:
    """This quantile of |predicted / measured - 1|, in percent. Its interval is a bootstrap over turns."""
    found = large(cases(frames))
    if not len(found):
        return None
    blocks = list(found["blocks"])
    errors = np.abs(found["predicted"].to_numpy()[:, None] / _resampled_medians(blocks) - 1)
    low, high = np.quantile(np.quantile(errors, quantile, axis=0), (0.025, 0.975))
    value = np.quantile((found["ratio"] - 1).abs(), quantile)
    return Value(float(value), float(low), float(high), min(map(len, blocks)), "blocks").times(100)


def facts(frames: Frames) -> dict[str, object]:
    return {
        "kib": number(LEAST_BYTES // 1024),
        "median": number(MEDIAN),
        "most": number(MOST),
        "sizes": captions.listed(captions.values(frames, "workers")),
        "links": captions.listed(captions.values(frames, "cluster.link.name")),
        "computing": _computing(frames),
        "off": _where_off(large(cases(frames))),
    }


def _computing(frames: Frames) -> str:
    """The time that small messages took longer, for each number of workers."""
    by_size = frames.runs.groupby("workers")[COMPUTING].mean()
    return captions.listed(f"{number(1e3 * longer)} ms at P = {size}" for size, longer in by_size.items())


def _where_off(found: pd.DataFrame) -> str:
    """A sentence on where the model is off, and by how much."""
    if not len(found):
        return ""
    by = {
        name: summary(found, name).set_index(name)["predicted / measured"] for name in ("workers", "exchange")
    }
    far = by["exchange"][(by["exchange"] - 1).abs().sort_values(ascending=False).index][:3]
    return papers.words("survey.link-model.where-off").format(
        by_size=captions.listed(f"{number(value)} at P = {size}" for size, value in by["workers"].items()),
        by_exchange=captions.listed(f"{number(value)} ({name})" for name, value in far.items()),
    )


def _resampled_medians(samples: list[np.ndarray], draws: int = 1000) -> np.ndarray:
    """(samples, draws) medians of each sample's resamples, the same ones whenever it is called."""
    at_random = np.random.default_rng(0)
    return np.array([np.median(at_random.choice(each, (draws, len(each))), axis=1) for each in samples])
