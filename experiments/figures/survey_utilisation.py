"""Which share of its time a worker computes: every step averaged or every H steps, by bandwidth and delay.

Not a figure of a paper; beside it stands Table 4 of Streaming DiLoCo, which its authors simulated. What steps
take with an exchange and without is measured at one H, and composed for all others; over one of the links
another H is measured as well, which says what that is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import brief, number, with_interval
from analysis.records.frames import Frames, cache_by_frames, find_keys
from analysis.records.steps import LAUNCHES, warm_steps
from analysis.stats import POSITIVE, Mixed, Value, over_units
from analysis.tables import Table
from analysis.times import rounds
from analysis.times.rounds import Taken
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._crossing import ABOVE, BELOW, crossing, mean, outside
from experiments.figures._runs import TIMED, scale
from experiments.figures.papers import claim, words

TITLE = "Share of time computing, by bandwidth, delay and local steps"
SCALE = {"task.name": "a transformer of 1 billion parameters, simulated"}
_DATA = papers.item("survey.utilisation")
LINK: str = _DATA["link"]
TIMED_AS: Mapping[str, RunSettings] = _DATA["timed"]
FRAGMENTS: int = _DATA["fragments"]  # exchanges in a round of streaming
LOOKS: Mapping[str, style.Look] = {name: style.Look(*look) for name, look in _DATA["looks"].items()}
EVERY: list[int] = _DATA["every"]  # H, of those with local steps
CHECKED: Mapping[str, int] = _DATA["checked"]  # by profile the H at which composing is checked
DENSE, DILOCO, SPARSELOCO, STREAMING = "dense", "diloco", "sparseloco", "streaming_diloco"
SHARES = (50, 80, 90, 95, 99)  # % of Table 4
AS_THEIRS = 100  # H of Table 4
TABLE_4 = {DENSE: "parallel", DILOCO: "diloco", STREAMING: "streaming"}
AT = (0.1, 0.05)  # Gbit/s and seconds of what is claimed
MOST = 0.999  # of a share: by noise a step with an exchange may seem the shorter one
BETA, ALPHA = "cluster.link.beta_s_per_byte", "cluster.link.alpha_s"
FOUND = "provenance.machine.link.together_gbit_s"
TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # Gbit/s


def runs(profile: str) -> list[Run]:
    """A group of processes for each link, in which all take turns; and one at the H that is checked."""
    shared = {**TIMED, "profile": profile, "link": LINK, **scale("utilisation", profile)}
    shared["timing.mode"] = "production"
    found = [
        Run({**shared, **_link((gbit_s, delay))}, TIMED_AS)
        for delay in _DATA["delays"][profile]
        for gbit_s in _DATA["gbit_s"][profile]
    ]
    every, at = CHECKED[profile], _link((AT[0], _DATA["delays"][profile][-1]))
    turns: RunSettings = {"timing.warmup_steps": every, "alternate.block_steps": every}  # a round each
    variants = {name: {**TIMED_AS[name], "method.every": every} for name in (DILOCO, SPARSELOCO)}
    return [*found, Run({**shared, **turns, **at}, variants)]


Cell = tuple[float, float]  # Gbit/s asked, seconds of a way
Compared = tuple[str, int | None]  # a method, and its H


def _link(cell: Cell) -> RunSettings:
    return {BETA: 8e-9 / cell[0], ALPHA: cell[1]}


@cache_by_frames
def cells(frames: Frames) -> list[Cell]:
    """The links that were measured, the slowest first."""
    if BETA not in frames.runs:
        return []
    columns = frames.runs[[BETA, ALPHA]].dropna()
    return sorted({(round(8e-9 / beta, 6), float(alpha)) for beta, alpha in columns.astype(float).to_numpy()})


def _here(frames: Frames, cell: Cell) -> pd.DataFrame:
    """The rows of a link's runs."""
    here: pd.DataFrame = frames.runs.iloc[:0]
    if cell in cells(frames):
        is_as_fast = (8e-9 / frames.runs[BETA] - cell[0]).abs() < 1e-6
        here = frames.runs[is_as_fast & (frames.runs[ALPHA] == cell[1])]
    return here


@cache_by_frames
def keys(frames: Frames, name: str, cell: Cell, timed: int | None = None) -> list[str]:
    """The launches of a method over a link.

    Args:
        timed: at another H than that from which all others are composed.
    """
    here, every = set(_here(frames, cell)["key"]), timed or TIMED_AS[name].get("method.every")
    chosen: dict[str, Any] = {"method.name": name, **({"method.every": every} if every else {})}
    return [key for key in find_keys(frames, chosen) if key in here]


@cache_by_frames
def found_gbit_s(frames: Frames, cell: Cell, seed: int | None = None) -> float:
    """The bandwidth while all nodes send, in one launch or the median over them; else as asked."""
    here = _here(frames, cell)
    own = here[here["key"].isin([key for name in TIMED_AS for key in keys(frames, name, cell)])]
    own = own if seed is None else own[own["seed"] == seed]
    found = own[FOUND].astype(float).median() if FOUND in own else np.nan
    return cell[0] if np.isnan(found) else float(found)


@cache_by_frames
def taken(frames: Frames, name: str, cell: Cell, timed: int | None = None) -> dict[int, Taken]:
    """By launch; see `keys`."""
    return rounds.taken(frames, keys(frames, name, cell, timed), FRAGMENTS if name == STREAMING else 1)


@cache_by_frames
def computing(frames: Frames, name: str, cell: Cell) -> dict[int, float]:
    """Seconds of a method's step without an exchange, by launch; of dense, which has none, the mean over the
    other methods.
    """
    own = taken(frames, name, cell)
    if name != DENSE:
        return {seed: each.local_s for seed, each in own.items() if each.local_s}
    others = [computing(frames, other, cell) for other in TIMED_AS if other != DENSE]
    found = {seed: [other[seed] for other in others if seed in other] for seed in own}
    return {seed: float(np.mean(each)) for seed, each in found.items() if each}


@cache_by_frames
def shares(frames: Frames, name: str, every: int | None, cell: Cell) -> dict[int, float]:
    """Share of time computing, by launch."""
    own = taken(frames, name, cell)
    computed = computing(frames, name, cell)
    return {seed: min(MOST, computed[seed] / own[seed].step_s(every)) for seed in computed}


def share(frames: Frames, name: str, every: int | None, cell: Cell) -> Value | None:
    """The same over launches."""
    found = [*shares(frames, name, every, cell).values()]
    return over_units(found, (0.0, 1.0), LAUNCHES) if found else None


@cache_by_frames
def exchanged_bytes(frames: Frames, name: str, cell: Cell) -> float:
    """Bytes that a worker sends in an exchange."""
    sent = [warm_steps(frames, key).steps["wire_bytes"] for key in keys(frames, name, cell)]
    return float(np.mean([own[own > 0].mean() for own in sent])) if sent else 0.0


@cache_by_frames
def arithmetic(frames: Frames, name: str, every: int | None, cell: Cell) -> dict[int, float]:
    """The share by bytes over the bandwidth found alone, as tables are made that nobody measured: no latency,
    no selecting, no packing. By launch, with the seconds of computing that it measured.
    """
    a_round = FRAGMENTS if name == STREAMING else 1
    gbit = a_round * exchanged_bytes(frames, name, cell) * 8e-9 / (every or 1)
    computed = computing(frames, name, cell)
    return {
        seed: min(MOST, s / (s + gbit / found_gbit_s(frames, cell, seed))) for seed, s in computed.items()
    }


def over(here: Mapping[int, float], there: Mapping[int, float]) -> Value | None:
    """One over the other, paired by launch."""
    pairs = [here[seed] / there[seed] for seed in here if seed in there]
    return over_units(pairs, POSITIVE, LAUNCHES) if pairs else None


def ratio(frames: Frames, first: Compared, second: Compared, cell: Cell) -> Value | None:
    """One share over another, by launch."""
    return over(shares(frames, *first, cell), shares(frames, *second, cell))


def too_good(frames: Frames, name: str, every: int | None, cell: Cell) -> Value | None:
    """The share by arithmetic over the measured one."""
    return over(arithmetic(frames, name, every, cell), shares(frames, name, every, cell))


# --- is composing right?


def composed(frames: Frames, name: str, every: int, cell: Cell) -> Value | None:
    """The mean step as composed of those at another H, over that of whole rounds of this H, by launch."""
    return over(*_mean_s(frames, name, every, cell))


def off_by(frames: Frames, name: str, every: int, cell: Cell) -> Value | None:
    """The factor between the two, in each launch whichever is the larger."""
    here, there = _mean_s(frames, name, every, cell)
    return over({seed: max(s, there.get(seed, s) ** 2 / s) for seed, s in here.items()}, there)


def _mean_s(frames: Frames, name: str, every: int, cell: Cell) -> list[dict[int, float]]:
    """Seconds of the mean step, composed and of whole rounds, by launch."""
    both = taken(frames, name, cell), taken(frames, name, cell, every)
    return [{seed: own.step_s(every) for seed, own in each.items()} for each in both]


# --- the bandwidth that a share takes


@cache_by_frames
def crossings(frames: Frames, name: str, percent: int, delay: float) -> dict[int, float]:
    """The bandwidth at which a method with Table 4's H computes for this share of its time, by launch: linear
    between two links in the logarithms of bandwidth and of computing over the rest, as arithmetic has it.
    """
    every = None if name == DENSE else AS_THEIRS
    points: dict[int, list[tuple[float, float]]] = {}
    for cell in (cell for cell in cells(frames) if cell[1] == delay):
        for seed, own in shares(frames, name, every, cell).items():
            points.setdefault(seed, []).append((found_gbit_s(frames, cell, seed), own / (1 - own)))
    wanted = percent / (100 - percent)
    found = {seed: zip(*sorted(own), strict=True) for seed, own in points.items()}
    return {seed: crossing(x, np.array(odds) / wanted) for seed, (x, odds) in found.items()}


def ends(frames: Frames, delay: float, seed: int | None = None) -> tuple[float, float]:
    """The slowest and the fastest link, as found, in one launch or over them."""
    found = [found_gbit_s(frames, cell, seed) for cell in cells(frames) if cell[1] == delay]
    return min(found), max(found)


def bandwidth_for(frames: Frames, name: str, percent: int, delay: float) -> Value | str:
    """The same over launches, or in words that it lies outside the links."""
    if not (found := crossings(frames, name, percent, delay)):
        return "-"
    slow, fast = ends(frames, delay)
    alike = {BELOW: f"below {brief(slow)}", ABOVE: f"above {brief(fast)}"}
    first, *others = {*found.values()}
    return mean(found) or ("" if others else alike[first]) or outside(found, (slow, fast))


def less(frames: Frames, name: str, percent: int, delay: float) -> Value | None:
    """How many times less bandwidth a method needs than averaging every step, paired by launch. Of one that
    lies outside the links the nearest of them counts, which makes less of the ratio.

    Raises:
        Mixed: in some launch both lie outside at the same end.
    """
    dense, own = (crossings(frames, each, percent, delay) for each in (DENSE, name))
    if not dense or not own:
        return None
    if any(dense[seed] == own.get(seed) in (BELOW, ABOVE) for seed in dense):
        lie = [outside(each, ends(frames, delay)) for each in (dense, own)]
        raise Mixed(f"no two bandwidths to compare: {lie[0]}, {lie[1]}")
    return over(*({seed: float(np.clip(at, *ends(frames, delay, seed))) for seed, at in each.items()}
                  for each in (dense, own)))  # fmt: skip


def _less(frames: Frames, name: str, percent: int, delay: float) -> Value | str | None:
    """The same for a table: where something lies outside, at least so many times."""
    try:
        value = less(frames, name, percent, delay)
    except Mixed:
        return "-"
    both = [crossings(frames, each, percent, delay) for each in (DENSE, name)]
    if value is None or all(map(mean, both)):
        return value
    return f"{'at least' if value.value > 1 else 'at most'} {brief(value.value)}"


# --- picture and table


def asked(name: str) -> Sequence[int | None]:
    """H of a method's lines."""
    return [None] if name == DENSE else [every for every in EVERY if name != STREAMING or every >= FRAGMENTS]


def label(name: str, every: int | None) -> str:
    return LOOKS[name].label + (f", H = {every}" if every else "")


def draw(frames: Frames, profile: str) -> plots.Figure:
    delays = sorted({delay for _, delay in cells(frames)})
    if not delays:
        raise ValueError(plots.EMPTY)
    panels = []
    for delay in delays:
        here = [cell for cell in cells(frames) if cell[1] == delay]
        x, lines = [found_gbit_s(frames, cell) for cell in here], list[plots.Curve]()
        for name in TIMED_AS:
            for rank, every in enumerate(asked(name)):
                values = [share(frames, name, every, cell) for cell in here]
                simple = [mean(arithmetic(frames, name, every, cell)) for cell in here]
                alpha = 1 - 0.6 * rank / max(1, len(asked(name)) - 1)
                look = LOOKS[name]._replace(label=label(name, every))
                measured = [v and v.times(100) for v in values]
                alone = [100 * each.value if each else np.nan for each in simple]
                thin = {"linestyle": (0, (4, 2)), "marker": "", "alpha": alpha, "label": None, "linewidth": 1}
                lines += [plots.Curve(look, x, measured, {"alpha": alpha, "ms": 3}),
                          plots.Curve(look, x, alone, thin)]  # fmt: skip
        title = f"one way {number(1e3 * delay)} ms" if delay else "no delay"
        ticks = [tick for tick in TICKS if min(x) / 1.3 <= tick <= 1.3 * max(x)]
        panels.append(plots.curves(lines, sizes=ticks, xlabel="Gbit/s found", title=title, ylim=(0, 105)))
    return plots.picture(panels, 3.6, ylabel="Share of time computing (%)", sharey=True)


def table(frames: Frames) -> list[Table]:
    """Shares in every cell, the bandwidth for Table 4's shares beside theirs, what composing is worth."""
    rows = [
        {
            "asked": cell[0], "found": found_gbit_s(frames, cell), "one way": 1e3 * cell[1],
            "method": label(name, every),
            "computing": (found := share(frames, name, every, cell)) and found.times(100),
            "by arithmetic": (simple := mean(arithmetic(frames, name, every, cell))) and simple.times(100),
            "arithmetic / measured": too_good(frames, name, every, cell),
        }
        for cell in cells(frames)
        for name in TIMED_AS
        for every in asked(name)
    ]  # fmt: skip
    units = {"asked": "Gbit/s", "found": "Gbit/s", "one way": "ms", "computing": "%", "by arithmetic": "%"}
    delays, gbit_s = sorted({delay for _, delay in cells(frames)}), papers.value("douillard2025.gbit")
    needed = [
        {"method": LOOKS[name].label, "one way": 1e3 * delay,
         **{f"{percent} %": bandwidth_for(frames, name, percent, delay) for percent in SHARES}}
        for delay in delays
        for name in TIMED_AS
    ]  # fmt: skip
    times = [
        {"method": LOOKS[name].label, "measured with": f"{number(1e3 * delay)} ms one way",
         **{f"{percent} %": _less(frames, name, percent, delay) for percent in SHARES}}
        for delay in delays
        for name in TIMED_AS
        if name != DENSE
    ] + [
        {"method": LOOKS[name].label, "measured with": "Table 4, simulated",
         **{f"{each} %": gbit_s["parallel"][each] / gbit_s[row][each] for each in SHARES}}
        for name, row in TABLE_4.items()
        if name != DENSE
    ]  # fmt: skip
    theirs = [
        {"method": LOOKS[name].label, **{f"{each} %": number(gbit_s[row][each]) for each in SHARES}}
        for name, row in TABLE_4.items()
    ]  # fmt: skip
    checked = [
        {"method": label(name, every), "found": found_gbit_s(frames, cell), "one way": 1e3 * cell[1],
         "step, composed / measured": composed(frames, name, every, cell)}
        for name, every, cell in checks(frames)
    ]  # fmt: skip
    less_note, at = words("survey.utilisation.less"), f"H = {AS_THEIRS}"
    units_checked = {"found": "Gbit/s", "one way": "ms"}
    return [
        Table.of("Share of time computing, composed but for every step's", rows, units),
        Table.of(f"Gbit/s for a share of time computing, {at}", needed, {"one way": "ms"}),
        Table.of("The same of 1 billion parameters, simulated by the authors of Streaming DiLoCo", theirs,
                 note=words("survey.utilisation.theirs")),
        Table.of(f"Times less bandwidth than every step's, {at}", times, note=less_note),
        *([Table.of("What composing is worth", checked, units_checked)] if checked else []),
    ]  # fmt: skip


def checks(frames: Frames) -> list[tuple[str, int, Cell]]:
    """The methods, H and links for which both were measured."""
    names, every = (DILOCO, SPARSELOCO), sorted({*CHECKED.values()})
    each = [(name, other, cell) for cell in cells(frames) for other in every for name in names]
    return [of for of in each if composed(frames, *of)]


def facts(frames: Frames) -> dict[str, object]:
    found = [f"{with_interval(composed(frames, *of))} for {label(*of[:2])}" for of in checks(frames)]
    told = f"Over one link, the mean step as composed over that of whole rounds: {captions.listed(found)}."
    return {
        "parameters": captions.listed(f"{int(n):,}" for n in captions.values(frames, "parameters")),
        "workers": captions.listed(captions.values(frames, "workers")),
        "measured": captions.listed({each["method.every"]: 0 for each in TIMED_AS.values() if len(each) > 1}),
        "composed": told * bool(found), "launches": len(captions.values(frames, "seed")),
    }  # fmt: skip


def claims() -> list[Claim]:
    named: dict[str, Any] = {"delay": number(1e3 * AT[1]), "link": LINK}
    of: list[Compared] = [(DENSE, None), (DILOCO, 8), (SPARSELOCO, 8)]
    simple = [
        claim("survey.utilisation.too-good", too_good, name, every, AT, case=name, method=label(name, every),
              derived=every is not None, **named)
        for name, every in of
    ]  # fmt: skip
    more = [
        claim("survey.utilisation.more", ratio, first, second, AT, case=case,
              method=label(*first), other=label(*second), **named)
        for case, first, second in (
            ("diloco", (DILOCO, 32), (DENSE, None)), ("sparseloco", (SPARSELOCO, 32), (DILOCO, 32)),
        )
    ]  # fmt: skip
    every, percent = CHECKED["laptop"], SHARES[0]
    right = [
        claim("survey.utilisation.composed", off_by, name, every, AT, case=name, method=label(name, every),
              **named)
        for name in (DILOCO, SPARSELOCO)
    ]  # fmt: skip
    fewer = claim("survey.utilisation.diloco-less", less, DILOCO, percent, 0.0,
                  every=AS_THEIRS, share=percent, link=LINK)  # fmt: skip
    return [*simple, *more, fewer, *right]
