"""Does the alpha-beta model predict what exchanges take on a really limited link? Every exchange, several P
and k, over emulated links.

A prediction uses two kinds of numbers. What a step sent is counted as it was sent (`sparsify.cost`, by gloo's
algorithms): latency terms and bytes of each collective. Alpha and beta of each kind of collective are fitted
to its times at a few sizes that the same workers measured before the run (experiments/worker/link_probe.py).
Once a step comes what they found small messages to take longer where they compute before and after them:
workers that share cores take them from each other. Nothing is fitted to what is predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.remembered import remembered
from analysis.stats import Value
from analysis.steps import warm
from analysis.tables import Table

TITLE = "The alpha-beta model against exchanges over a limited link"
LEAST_BYTES = 64 * 2**10  # sent by a worker in a step: below, latency and the scheduler decide
COMPUTING = "provenance.machine.link.computing_s"  # see experiments/worker/link_probe.py
MEDIAN, MOST = 10.0, 25.0  # % of error that half, and nine tenths, of the predictions may have
RESAMPLES = 1000
# Of n = 1,000,000 elements 100 to 100,000.
DENSITIES = ("0.0001", "0.001", "0.01", "0.1")
EXCHANGES = {
    "topk": ("Top-k: allgather", "method=topk"),
    "gaussiank": ("Gaussian-k: uneven allgather", "method=gaussiank"),
    "blockrandomk": ("Block-random-k: allgather of blocks", "method=blockrandomk"),
    "randomk": (
        "Random-k: allreduce of k",
        "method=randomk method.exchange=allreduce method.shared=true method.sampling=hash",
    ),
    "gtopk": ("gTop-k: tree", "method=gtopk"),
    "scalecom": ("ScaleCom: leader and allreduce", "method=scalecom"),
    "sparcml": ("SparCML: split allgather", "method=sparcml"),
    "oktopk": ("Ok-Topk: split, reduce, balance", "method=oktopk"),
}
OTHERS = {
    "dense": ("dense: allreduce", "method=dense"),
    "qsgd": ("QSGD: allgather of bytes", "method=qsgd"),
    "powersgd": ("PowerSGD: two allreduces", "method=powersgd method.rank=4"),
}
LABELS = {name: label for name, (label, _) in {**OTHERS, **EXCHANGES}.items()}
COLOURS = {2: "#0072B2", 4: "#D55E00", 8: "#009E73"}
MARKERS = {2: "o", 4: "s", 8: "^"}
SHARED = (
    "task=vector", "cluster=netns", "train.validate=never", "timing.mode=serialised", "timing.warmup_steps=2",
    "timing.span_steps=8", "task.tensors=10",
    # Two cores do not carry 1 Gbit/s for eight workers at once: alpha and beta are those that were found.
    "launch.on_mismatch=label",
)  # fmt: skip
_PROFILES: dict[str, tuple[str, ...]] = {
    "smoke": ("task.elements=100000",),
    "laptop": ("task.elements=1000000", "alternate.limit_min=4"),
    "paper": ("task.elements=1000000", "device=cpu", "alternate.limit_min=20"),
}
LINKS = {"smoke": ("ethernet_1g",), "laptop": ("ethernet_1g",), "paper": ("ethernet_1g", "ethernet_10g")}
WORKERS = {"smoke": (2,), "laptop": (2, 4, 8), "paper": (2, 4, 8)}


def runs(profile: str) -> list[list[str]]:
    """One group of processes per link and P, in which all exchanges take turns."""
    densities = DENSITIES if profile != "smoke" else DENSITIES[-2:]
    variants = {name: words for name, (_, words) in OTHERS.items()} | {
        f"{name}-{at}": f"{words} method.density={density}"
        for name, (_, words) in EXCHANGES.items()
        for at, density in enumerate(densities)
    }
    named = ",".join(f"{name}:'{words}'" for name, words in variants.items())
    return [
        [f"profile={profile}", *SHARED, *_PROFILES[profile], f"link={link}", f"workers={size}",
         f"variants={{{named}}}", "seed=0"]
        for link in LINKS[profile] for size in WORKERS[profile]
    ]  # fmt: skip


@remembered
def cases(frames: Frames) -> pd.DataFrame:
    """A row per exchange, k, P and link: what was sent, predicted and measured, and their ratio; `blocks` has
    the measured seconds of each turn.
    """
    rows = []
    for run in frames.runs.to_dict("records"):
        steps = warm(frames, str(run["key"])).steps
        if not steps["predicted_s"].gt(0).any():
            continue
        # The one that sends most is on the critical path.
        each = steps.groupby("step").agg({
            "transfer_s": "max", "wire_bytes": "max", "messages": "max", "predicted_s": "max",
            "block": "first",
        })  # fmt: skip
        predicted = each["predicted_s"].mean() + run[COMPUTING]
        blocks = stretch(frames, str(run["key"])) * each.groupby("block")["transfer_s"].mean().to_numpy()
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
    columns = [
        "exchange",
        "density",
        "link",
        "workers",
        "bytes",
        "messages",
        "predicted",
        "measured",
        "ratio",
    ]
    table: pd.DataFrame = pd.DataFrame(rows, columns=[*columns, "blocks"])
    return table


def stretch(frames: Frames, key: str) -> float:
    """All collectives of a step, each from when the last worker enters it until the last one leaves it, over
    what the slowest worker spends in them: the median over the steps with spans. A worker that only sends is
    done once the kernel has its data, and waits elsewhere for those who receive them.

    The workers are processes of one machine, whose clock they share.
    """
    spans = frames.spans[(frames.spans["key"] == key) & (frames.spans["phase"] == "transfer")]
    spans = spans.sort_values(["step", "rank", "start_s"]).assign(
        end_s=spans["start_s"] + spans["duration_s"]
    )
    spans["at"] = spans.groupby(["step", "rank"]).cumcount()
    whole = spans.groupby(["step", "at"]).agg(begin=("start_s", "max"), end=("end_s", "max"))
    together = (whole["end"] - whole["begin"]).groupby("step").sum()
    slowest = spans.groupby(["step", "rank"])["duration_s"].sum().groupby("step").max()
    return float((together / slowest).median()) if len(spans) else 1.0


def large(found: pd.DataFrame) -> pd.DataFrame:
    """Those that the aims are about."""
    above: pd.DataFrame = found[found["bytes"] > LEAST_BYTES]
    return above


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = cases(frames)
    if not len(found):
        raise ValueError("nothing to draw: no run of this item has a probed link")
    labels = [label for label in LABELS.values() if label in set(found["exchange"])]
    how = {"width_ratios": (1.7, 1)}
    with plots.canvas(style.two_columns(0.9 + 0.2 * len(labels)), 1, 2, **how) as (figure, axes):
        by_exchange, by_bytes = axes
        for each in (by_exchange.axvspan, by_bytes.axhspan):
            each(1 - MOST / 100, 1 + MOST / 100, color="#F0F0F0", zorder=-2)
            each(1 - MEDIAN / 100, 1 + MEDIAN / 100, color="#DDDDDD", zorder=-1)
        for row in found.to_dict("records"):
            size = row["workers"]
            offset = 0.22 * (sorted(set(found["workers"])).index(size) - 1)
            is_large = row["bytes"] > LEAST_BYTES
            look: dict[str, Any] = {
                "marker": MARKERS.get(size, "D"), "mec": COLOURS.get(size, "#555555"), "ms": 3, "mew": 0.7,
                "mfc": COLOURS.get(size, "#555555") if is_large else "white", "linestyle": "",
            }  # fmt: skip
            by_exchange.plot(row["ratio"], labels.index(row["exchange"]) + offset, **look)
            by_bytes.plot(row["bytes"], row["ratio"], **look)
        by_exchange.set_yticks(range(len(labels)), labels)
        by_exchange.set_ylim(len(labels) - 0.5, -0.5)
        by_exchange.tick_params(axis="y", length=0)
        by_exchange.set_xlabel("Predicted / measured")
        plots.factor_ticks(by_exchange)
        by_bytes.set(xscale="log", xlabel="Bytes that a worker sends in a step")
        by_bytes.axvline(LEAST_BYTES, color="#777777", linewidth=0.6)
        plots.log_ticks(by_bytes, [tick for tick in plots.FACTORS if inside(tick, found["ratio"])])
        keys = {
            f"P = {size}": (MARKERS.get(size, "D"), COLOURS.get(size, "#555555"))
            for size in sorted(set(found["workers"]))
        }
        figure.legend(handles=plots.dot_keys(keys), loc="outside lower center", ncols=len(keys))
    return figure


def inside(tick: float, values: pd.Series[float]) -> bool:
    return bool(values.min() / 1.5 <= tick <= values.max() * 1.5)


def table(frames: Frames) -> list[Table]:
    found = cases(frames)
    every = found.drop(columns="blocks").assign(
        predicted=1e3 * found["predicted"], measured=1e3 * found["measured"]
    )
    units = {"bytes": "B", "predicted": "ms", "measured": "ms"}
    return [
        Table("Errors by exchange", summary(found, "exchange"), dict.fromkeys(SUMMARY[2:], "%")),
        Table("Errors by number of workers", summary(found, "workers"), dict.fromkeys(SUMMARY[2:], "%")),
        Table("Every case", every, units),
    ]


SUMMARY = ("cases", "predicted / measured", "median error", "90th percentile", "largest error")


def summary(found: pd.DataFrame, by: str) -> pd.DataFrame:
    """Errors of the predictions that the aims are about."""
    rows = []
    for name, of in large(found).groupby(by, sort=False):
        errors = 100 * (of["ratio"] - 1).abs()
        numbers = (len(of), of["ratio"].median(), errors.median(), errors.quantile(0.9), errors.max())
        rows.append({by: name, **dict(zip(SUMMARY, numbers, strict=True))})
    table: pd.DataFrame = pd.DataFrame(rows, columns=[by, *SUMMARY])
    return table


def claims() -> list[Claim]:
    how = (
        f"Of exchanges in which a worker sends more than {number(LEAST_BYTES // 1024)} KiB in a step; P, k "
        "and the calibration as in the caption."
    )
    aims = (("half", 0.5, MEDIAN), ("nine tenths", 0.9, MOST))
    return [
        Claim(
            text=f"error of {share} of the predictions at most",
            paper=None,
            unit="%",
            source="an aim of this project",
            kind="limit",
            tolerance=limit,
            reason=how,
            ours=_error(quantile),
            timed=True,
        )
        for share, quantile, limit in aims
    ]


def _error(quantile: float) -> Callable[[Frames], Value | None]:
    """This quantile of |predicted / measured - 1|, in percent. Its interval is a bootstrap over turns."""

    def ours(frames: Frames) -> Value | None:
        found = large(cases(frames))
        if not len(found):
            return None
        predicted, blocks = found["predicted"].to_numpy(), list(found["blocks"])
        draws = np.random.default_rng(0)
        medians = [_medians(seconds, draws) for seconds in blocks]
        errors = np.abs(predicted[:, None] / np.array(medians) - 1)
        low, high = np.quantile(np.quantile(errors, quantile, axis=0), (0.025, 0.975))
        value = np.quantile((found["ratio"] - 1).abs(), quantile)
        n = min(map(len, blocks))
        return Value(float(value), float(low), float(high), n, "blocks").times(100)

    return ours


def _medians(seconds: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Of as many resamples of the turns, (RESAMPLES,)."""
    medians: np.ndarray = np.median(draws.choice(seconds, (RESAMPLES, len(seconds))), axis=1)
    return medians


def caption(frames: Frames, profile: str) -> str:
    found = cases(frames)
    links = captions.listed(captions.values(frames, "cluster.link.name"))
    sizes = captions.values(frames, "workers")
    return (
        "Predicted over measured time of all collectives of a step, by exchange (left) and by the bytes that "
        f"a worker sends (right; hollow: at most {number(LEAST_BYTES // 1024)} KiB), for P = "
        f"{captions.listed(sizes)} and densities over three decades, on emulated links ({links}: one network "
        "namespace a worker, a token bucket at each end). Predicted: latency terms x alpha + bytes x beta, "
        "both counted in the same steps for gloo's algorithms; alpha and beta of each kind of collective are "
        "fitted to its times at a few sizes, measured by the same workers before each run. Once a step is "
        "added what small messages took longer where workers computed before and after them, because they "
        f"share cores ({_computing(frames)}). Nothing is fitted to what is predicted. Bands: errors of "
        f"{number(MEDIAN)} % and {number(MOST)} %. Measured: mode serialised, a barrier before each "
        "collective, from the last worker's entry until the last one's end, the median over turns. "
        f"{_where_off(large(found))} {captions.setting(frames)}{captions.turns(frames)}"
    )


def _computing(frames: Frames) -> str:
    """How much longer, for each number of workers."""
    by_size = frames.runs.groupby("workers")[COMPUTING].mean()
    return captions.listed(f"{number(1e3 * longer)} ms at P = {size}" for size, longer in by_size.items())


def _where_off(found: pd.DataFrame) -> str:
    """Where the model is off, and by how much."""
    if not len(found):
        return ""
    by = {
        name: summary(found, name).set_index(name)["predicted / measured"] for name in ("workers", "exchange")
    }
    by_size = captions.listed(f"{number(value)} at P = {size}" for size, value in by["workers"].items())
    far = by["exchange"][(by["exchange"] - 1).abs().sort_values(ascending=False).index][:3]
    by_exchange = captions.listed(f"{number(value)} ({name})" for name, value in far.items())
    return (
        f"The median of predicted / measured is {by_size}; furthest from 1 are {by_exchange}. The model "
        "knows neither the work of adding and copying, nor "
        "messages of several workers that queue at one receiver (incast), nor that gloo hands a collective "
        "over to a thread of its own, nor that its notice of being ready to receive queues behind what the "
        "worker sends on the same connection, so that two who exchange may take turns."
    )
