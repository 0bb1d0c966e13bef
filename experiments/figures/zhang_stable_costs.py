"""Table 1 of Zhang's Stable Top-K slides: what each allreduce sends, by formula and as our exchanges
count it.

Zhao Zhang, "Stable Top-K: Exploiting Temporal Stability of Top-K Gradients", slides, TACC; the table is Li
and Hoefler's (PPoPP 2022). Words are counted on virtual workers, whose exchanges are the real ones; time
follows from the counted words and latency terms by the alpha-beta model, so it is simulated. Two processes
are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.remembered import remembered
from analysis.stats import COUNTED, Value
from analysis.steps import breakdown
from analysis.tables import Table
from sparsify import cost

TITLE = "Words and latency of dense and sparse allreduces, by formula and as counted"
SCALE: dict[str, object] = {}  # the formulas are for any number of elements and workers
# Method -> its row of the slides' table, as `sparsify.cost.published` has it.
SCHEMES = {
    "dense": "dense", "topk": "topka", "sparcml": "topkdsa", "gtopk": "gtopk", "gaussiank": "gaussiank",
    "oktopk": "oktopk",
}  # fmt: skip
EXACT = ("dense", "topk", "gtopk", "gaussiank")  # one number; the others' formulas are ranges
WORD = 4  # bytes
# What the formulas leave out: splitters announce the lengths of pieces, then of what is left, one int64 each.
ANNOUNCED = {
    "sparcml": 2 * cost.LENGTH // WORD,
    "oktopk": 2 * cost.LENGTH // WORD,
}  # words for each other worker
SLACK = 4 / 3  # of k, the most that a re-used threshold selects before it is taken anew (methods/oktopk.py)
PADDED = 1.01  # regions of n/P elements, rounded up
DENSITY = 0.01
MODEL = 14_728_266  # parameters of VGG-16 for CIFAR-10
LINK = "ethernet_10g"


class Scale(NamedTuple):
    """How much of the table is run."""

    elements: int
    workers: tuple[int, ...]  # at DENSITY
    densities: tuple[float, ...]  # on WORKERS, besides DENSITY
    measured: tuple[int, float]  # elements of what two processes exchange, and minutes


WORKERS = 8
SETTLED_UP_TO = 64  # workers
AMOUNTS = {
    "smoke": Scale(10_000, (2, 4), (), (10_000, 0.02)),
    "laptop": Scale(100_000, (2, 4, 8, 16, 64, 256), (0.001, 0.1), (1_000_000, 1.5)),
    "paper": Scale(100_000, (2, 4, 8, 16, 32, 64, 128, 256), (0.001, 0.1), (14_730_000, 10)),
}


def runs(profile: str) -> list[list[str]]:
    if profile not in AMOUNTS:
        raise ValueError(f"no profile {profile!r}; there are: {', '.join(AMOUNTS)}")
    scale = AMOUNTS[profile]
    shared = [
        "recipe=none", f"profile={profile}", "task=vector", "train.validate=never", "timing.mode=serialised",
    ]  # fmt: skip
    counted = [
        *shared, f"task.elements={scale.elements}", "cluster=virtual", f"link={LINK}",
        "alternate.block_steps=2", "alternate.limit_min=0.001",
    ]  # fmt: skip
    cases = [(size, DENSITY) for size in scale.workers] + [(WORKERS, density) for density in scale.densities]
    elements, minutes = scale.measured
    processes = [
        *shared, f"task.elements={elements}", "cluster=local", "workers=2", "timing.warmup_steps=2",
        f"alternate.limit_min={minutes}",
    ]  # fmt: skip
    return [
        *(
            [*counted, f"workers={size}", f"timing.warmup_steps={_settling(size)}", _variants(density)]
            for size, density in cases
        ),
        [*processes, _variants(DENSITY)],
    ]


def _settling(size: int) -> int:
    """Steps before words are counted: residuals grow at first, and with them what Ok-Topk's re-used threshold
    selects. With very many workers a step takes too long for that.
    """
    return 12 if size <= SETTLED_UP_TO else 1


def _variants(density: float) -> str:
    words = {name: "" if name == "dense" else f" method.density={density}" for name in SCHEMES}
    named = ",".join(f"{name}:'method={name}{more}'" for name, more in words.items())
    return f"variants={{{named}}}"


@remembered
def counted(frames: Frames) -> pd.DataFrame:
    """A row for each method, number of workers and k: words and latency terms of the worker that sends most,
    the median over the steps after the first one; the published ones beside them.
    """
    runs = frames.runs[frames.runs["cluster.where"] == "virtual"] if len(frames.runs) else frames.runs
    found = [_row(frames, run) for run in runs.to_dict("records")]
    columns = ["method", "P", "k", "n", "words", "announced", "least", "most", "messages", "expected"]
    table: pd.DataFrame = pd.DataFrame(found, columns=columns).sort_values(["k", "P"], kind="stable")
    return table


def _row(frames: Frames, run: Mapping[Any, Any]) -> list[Any]:
    name, size, n = str(run["variant"]), int(run["workers"]), int(run["task.elements"])
    k = n if name == "dense" else max(1, int(run["method.density"] * n))
    steps = frames.steps[(frames.steps["key"] == run["key"]) & (frames.steps["block"] > 0)]
    most_sent = steps.groupby("step")[["wire_bytes", "messages"]].max().median()
    least, most, messages = cost.published(SCHEMES[name], n, k, size)
    announced = ANNOUNCED.get(name, 0) * (size - 1)
    words = float(most_sent["wire_bytes"]) / WORD
    return [
        name, size, k, n, words, announced, float(least), float(most), float(most_sent["messages"]), messages,
    ]  # fmt: skip


def draw(frames: Frames, profile: str) -> plots.Figure:
    rows = counted(frames)
    if not len(rows):
        raise ValueError("nothing to draw: there is no run")
    link = _link(frames)
    with plots.canvas(style.two_columns(3.0), 1, 2) as (figure, (words, times)):
        for name in SCHEMES:
            of_method, look = _at_density(rows, name), style.look(name)
            if not len(of_method):
                continue
            sizes = of_method["P"].to_numpy()
            _formula(words, sizes, of_method["least"], of_method["most"], look)
            hollow = {"mfc": "none", "ms": 6} if name == "gaussiank" else {}  # where Top-k's marks are
            how = {"color": look.colour, "linestyle": "", "marker": look.marker, "label": look.label}
            words.plot(sizes, of_method["words"], **how, **hollow)
            seconds = [1e3 * _seconds(link, row, MODEL) for row in of_method.to_dict("records")]
            times.plot(sizes, seconds, marker=look.marker, color=look.colour, **hollow)
        for axes, label in (
            (words, "Words sent, of the worker that sends most"),
            (times, "Time for 14.7 million elements (ms), simulated"),
        ):
            axes.set(xlabel="Workers", ylabel=label, yscale="log")
            axes.set_xscale("log", base=2)
            places = sorted(set(rows["P"]))
            axes.set_xticks(places, [str(size) for size in places])
            axes.grid(True)
        words.set_title("lines and bands: the formulas; marks: counted")
        times.set_title("by the counted words, on 10 Gbit/s Ethernet")
        figure.legend(loc="outside lower center", ncols=len(SCHEMES))
    return figure


def _at_density(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """A method's rows over P, at the density that all P have."""
    own = rows[rows["method"] == name]
    k = own["n"] if name == "dense" else (DENSITY * own["n"]).astype(int)
    chosen: pd.DataFrame = own[own["k"] == k].drop_duplicates("P")
    return chosen


def _formula(
    axes: plots.Axes, sizes: np.ndarray, least: pd.Series[float], most: pd.Series[float], look: style.Look
) -> None:
    if np.array_equal(least, most):
        axes.plot(sizes, least, color=look.colour, linewidth=0.9)
    else:
        axes.fill_between(sizes, least, most, color=look.colour, alpha=0.18, linewidth=0)


def _link(frames: Frames) -> cost.Link:
    run = frames.runs[frames.runs["cluster.where"] == "virtual"].iloc[0]
    return cost.Link(float(run["cluster.link.alpha_s"]), float(run["cluster.link.beta_s_per_byte"]))


def _seconds(link: cost.Link, row: Mapping[Any, Any], elements: int) -> float:
    """Of so many elements at this density: words grow with them, announcements do not."""
    words = (row["words"] - row["announced"]) * elements / row["n"] + row["announced"]
    return link.seconds(cost.Cost(round(row["messages"]), round(WORD * words)))


def table(frames: Frames) -> list[Table]:
    rows, link = counted(frames), _link(frames)
    words = [
        {
            "allreduce": f"{SCHEMES[row['method']]} ({style.look(row['method']).label})",
            "P": row["P"],
            "k": row["k"],
            "formula: least": row["least"],
            "most": row["most"],
            "counted": row["words"],
            "of these announcements": row["announced"],
            "latency terms, formula": row["expected"],
            "as counted": row["messages"],
            "VGG-16, simulated": 1e3 * _seconds(link, row, MODEL),
        }
        for row in rows.to_dict("records")
    ]
    units = {"formula: least": "words", "most": "words", "counted": "words", "VGG-16, simulated": "ms"}
    return [Table("Table 1, counted", pd.DataFrame(words), units), _measured(frames)]


def _measured(frames: Frames) -> Table:
    """What two processes took over the loopback interface."""
    cells = []
    local = frames.runs[frames.runs["cluster.where"] == "local"]
    for run in local.to_dict("records"):
        parts = breakdown(frames, [run["key"]])
        cells.append({
            "method": style.look(str(run["variant"])).label,
            "elements": run["task.elements"],
            "transfer": 1e3 * parts.get("transfer", np.nan),
            "packing and merging": 1e3 * parts.get("exchange", 0.0),
            "selection": 1e3 * parts.get("select", 0.0),
        })  # fmt: skip
    columns = ["method", "elements", "transfer", "packing and merging", "selection"]
    frame = pd.DataFrame(cells, columns=columns)
    return Table("Two processes, measured", frame, dict.fromkeys(columns[2:], "ms"))


def caption(frames: Frames, profile: str) -> str:
    rows = counted(frames)
    sizes = captions.listed(number(n) for n in sorted(set(rows["n"])))
    return (
        "Left: words of 4 bytes of the worker that sends most, in a step (median over steps after those in "
        f"which residuals still grow; beyond {SETTLED_UP_TO} workers after the first), counted on virtual "
        "workers, against the formulas of the slides' Table 1; TopkDSA and Ok-Topk have a range. Beside "
        f"the formulas' words, these two announce lengths: {ANNOUNCED['oktopk']} words for each other "
        "worker. The table's TopkA is Top-k here, its TopkDSA is SparCML. Right: *simulated*, by the "
        "alpha-beta model (sparsify/cost.py) from the counted latency terms and words, as many for each of "
        f"VGG-16's {number(MODEL)} parameters as were counted for each of the n = {sizes} elements. Density "
        f"{number(DENSITY)}; gradients of task=vector, heavy-tailed, half of the elements alike on all "
        "workers. The times of two processes in the table are measured, over loopback. "
        f"{captions.setting(frames)}"
    )


SOURCE = "slide 'Current SOTA: Ok-Topk Sparsity', Table 1, after Li and Hoefler 2022"


def claims() -> list[Claim]:
    return [
        *[_exactly(name) for name in EXACT],
        *[_in_range(name) for name in ("sparcml", "oktopk")],
        Claim(
            text="Top-k's words grow with P faster than Ok-Topk's: by how many times, over all P",
            paper="Ok-Topk is scalable",
            unit="x",
            source=f"{SOURCE}, and 'Sparsification overhead scales with number of processes P'",
            kind="ordering",
            tolerance=1.0,
            reason="More than once is faster. From the fewest to the most workers; counts have no error.",
            ours=_growth,
        ),
        *[_latency(name, 0.0, "As many, exactly.") for name in ("dense", "topk", "gtopk")],
        _latency("gaussiank", 0.0, "As many. Ours sends exactly k, so no lengths need to be gathered first."),
        *[
            _latency(name, 1.0, "Up to twice as many: lengths are announced before pieces are sent.")
            for name in ("sparcml", "oktopk")
        ],
    ]


def _exactly(name: str) -> Claim:
    return Claim(
        text=f"words of {SCHEMES[name]}, counted over formula, where they differ most",
        paper=1.0,
        unit="x",
        source=f"{SOURCE}, column bandwidth",
        kind="shape",
        tolerance=0.001,
        reason="Equal but for fractions of a byte. A formula holds at any scale.",
        ours=_worst(name, lambda rows: rows["words"] / rows["most"]),
    )


def _in_range(name: str) -> Claim:
    return Claim(
        text=f"words of {SCHEMES[name]} without announcements, over the upper end of their range, at most",
        paper=None,
        unit="x",
        source=f"{SOURCE}, column bandwidth",
        kind="limit",
        tolerance=SLACK if name == "oktopk" else PADDED,
        reason=(
            "A re-used threshold may select up to 4k/3. While residuals still grow it selects more, and is "
            "taken anew from sums that travel as well."
            if name == "oktopk"
            else "The range is a bound; regions are padded to the longest, by less than 1 %."
        ),
        ours=_worst(name, lambda rows: (rows["words"] - rows["announced"]) / rows["most"], largest=True),
    )


def _latency(name: str, tolerance: float, reason: str) -> Claim:
    return Claim(
        text=f"latency terms of {SCHEMES[name]}, counted over formula, where they differ most",
        paper=1.0,
        unit="x",
        source=f"{SOURCE}, column latency, log P taken as ceil(log2 P)",
        kind="shape",
        tolerance=tolerance,
        reason=reason,
        ours=_worst(name, lambda rows: rows["messages"] / rows["expected"]),
        group=f"latency terms of {SCHEMES[name]}",
    )


def _worst(
    name: str, ratio: Callable[[pd.DataFrame], Any], largest: bool = False
) -> Callable[[Frames], Value | None]:
    """Of a method's rows the ratio farthest from 1, or the largest. Counts have no error."""

    def ours(frames: Frames) -> Value | None:
        rows = counted(frames)
        ratios = np.asarray(ratio(rows[rows["method"] == name]), dtype=float)
        if not len(ratios):
            return None
        at = np.argmax(ratios if largest else np.abs(ratios - 1))
        return _exact(ratios[at], len(ratios))

    return ours


def _growth(frames: Frames) -> Value | None:
    rows = counted(frames)
    grown = [_grown(_at_density(rows, name)["words"].to_list()) for name in ("topk", "oktopk")]
    topk, oktopk = grown
    return None if topk is None or oktopk is None else _exact(topk / oktopk, len(rows))


def _grown(words: Sequence[float]) -> float | None:
    return words[-1] / words[0] if len(words) > 1 else None


def _exact(value: float, count: int) -> Value:
    return Value(float(value), float(value), float(value), count, COUNTED)
