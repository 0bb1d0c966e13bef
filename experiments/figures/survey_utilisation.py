"""Which share of its time a worker computes: every step averaged or every H steps, by bandwidth and delay.

Not a figure of a paper; beside it stands Table 4 of Streaming DiLoCo, which its authors simulated. What steps
take with an exchange and without is measured at one H, and put together for all others: internet-loss holds
that against whole trainings.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames, keys_of, remembered
from analysis.records.steps import LAUNCHES, warm
from analysis.stats import POSITIVE, Value, over_units
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _rounds, papers
from experiments.figures._rounds import Taken
from experiments.figures._runs import TIMED, scale
from experiments.figures.papers import claim, words

TITLE = "Share of time computing, by bandwidth, delay and local steps"
_DATA = papers.item("survey.utilisation")
LINK: str = _DATA["link"]
TIMED_AS: Mapping[str, RunSettings] = _DATA["timed"]
FRAGMENTS: int = _DATA["fragments"]  # exchanges in a round of streaming
LOOKS: Mapping[str, style.Look] = {name: style.Look(*look) for name, look in _DATA["looks"].items()}
EVERY: list[int] = _DATA["every"]  # H, of those with local steps
DENSE, DILOCO, SPARSELOCO, STREAMING = "dense", "diloco", "sparseloco", "streaming_diloco"
SHARES = (50, 80, 90, 95, 99)  # % of Table 4
AS_THEIRS = 100  # H of Table 4
TABLE_4 = {DENSE: "parallel", DILOCO: "diloco", STREAMING: "streaming"}
AT = (0.1, 0.05)  # Gbit/s and seconds of what is claimed


def runs(profile: str) -> list[Run]:
    """One group of processes for each link, in which all methods take turns."""
    shared = {**TIMED, "profile": profile, "link": LINK, **scale("utilisation", profile)}
    shared["timing.mode"] = "production"
    return [
        Run(
            {**shared, "cluster.link.beta_s_per_byte": 8e-9 / gbit_s, "cluster.link.alpha_s": delay}, TIMED_AS
        )
        for delay in _DATA["delays"][profile]
        for gbit_s in _DATA["gbit_s"][profile]
    ]


Cell = tuple[float, float]  # Gbit/s asked, seconds of a way


def cells(frames: Frames) -> list[Cell]:
    """The links that were measured, the slowest first."""
    if "cluster.link.beta_s_per_byte" not in frames.runs:
        return []
    columns = frames.runs[["cluster.link.beta_s_per_byte", "cluster.link.alpha_s"]].dropna()
    return sorted(
        {(round(8e-9 / float(beta), 6), float(alpha)) for beta, alpha in columns.itertuples(index=False)}
    )


def keys(frames: Frames, name: str, cell: Cell) -> list[str]:
    """The launches of a method over a link."""
    if cell not in cells(frames):
        return []
    own = frames.runs[(8e-9 / frames.runs["cluster.link.beta_s_per_byte"] - cell[0]).abs() < 1e-6]
    here = set(own.loc[own["cluster.link.alpha_s"] == cell[1], "key"])
    return [key for key in keys_of(frames, {"method.name": name}) if key in here]


@remembered
def taken(frames: Frames, name: str, cell: Cell) -> dict[int, Taken]:
    """By launch."""
    return _rounds.taken(frames, keys(frames, name, cell), FRAGMENTS if name == STREAMING else 1)


@remembered
def computing(frames: Frames, cell: Cell) -> dict[int, float]:
    """Seconds of a step without an exchange, by launch: the mean over methods that have any."""
    local: dict[int, list[float]] = {}
    for name in TIMED_AS:
        for seed, each in taken(frames, name, cell).items():
            if each.local_s:
                local.setdefault(seed, []).append(each.local_s)
    return {seed: float(np.mean(own)) for seed, own in local.items()}


def shares(frames: Frames, name: str, every: int | None, cell: Cell) -> dict[int, float]:
    """Share of time computing, by launch: of dense, what the others take for a step without an exchange."""
    own, others = taken(frames, name, cell), computing(frames, cell)
    computed = {seed: each.local_s or others.get(seed, 0.0) for seed, each in own.items()}
    return {seed: min(1.0, computed[seed] / own[seed].step_s(every)) for seed in own if computed[seed]}


def share(frames: Frames, name: str, every: int | None, cell: Cell) -> Value | None:
    """The same over launches."""
    found = [*shares(frames, name, every, cell).values()]
    return over_units(found, (0.0, 1.0), LAUNCHES) if found else None


@remembered
def exchanged_bytes(frames: Frames, name: str, cell: Cell) -> float:
    """Bytes that a worker sends in an exchange."""
    found = [warm(frames, key).steps["wire_bytes"] for key in keys(frames, name, cell)]
    return float(np.mean([own[own > 0].mean() for own in found])) if found else 0.0


def arithmetic(frames: Frames, name: str, every: int | None, cell: Cell) -> float | None:
    """The share by bytes over bandwidth alone, as tables are made that nobody measured."""
    computed = [*computing(frames, cell).values()]
    if not computed:
        return None
    a_round = FRAGMENTS if name == STREAMING else 1
    exchange_s = a_round * exchanged_bytes(frames, name, cell) * 8e-9 / cell[0]
    step_s = float(np.mean(computed))
    return step_s / (step_s + exchange_s / (every or 1))


def ratio(
    frames: Frames, first: tuple[str, int | None], second: tuple[str, int | None], cell: Cell
) -> Value | None:
    """One share over another, by launch."""
    here, there = shares(frames, *first, cell), shares(frames, *second, cell)
    pairs = [here[seed] / there[seed] for seed in here if seed in there]
    return over_units(pairs, POSITIVE, LAUNCHES) if pairs else None


def too_good(frames: Frames, name: str, every: int, cell: Cell) -> Value | None:
    """The share by arithmetic over the measured one."""
    expected, found = arithmetic(frames, name, every, cell), shares(frames, name, every, cell)
    return (
        over_units([expected / each for each in found.values()], POSITIVE, LAUNCHES)
        if expected and found
        else None
    )


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
        x, lines = [cell[0] for cell in here], list[plots.Curve]()
        for name in TIMED_AS:
            for rank, every in enumerate(asked(name)):
                values = [share(frames, name, every, cell) for cell in here]
                simple = [arithmetic(frames, name, every, cell) for cell in here]
                alpha = 1 - 0.6 * rank / max(1, len(asked(name)) - 1)
                look = LOOKS[name]._replace(label=label(name, every))
                lines.append(
                    plots.Curve(look, x, [v and v.times(100) for v in values], {"alpha": alpha, "ms": 3})
                )
                thin = {"linestyle": ":", "marker": "", "alpha": alpha, "label": None, "linewidth": 1}
                lines.append(plots.Curve(look, x, [100 * each if each else np.nan for each in simple], thin))
        title = f"one way {number(1e3 * delay)} ms" if delay else "no delay"
        panels.append(plots.curves(lines, xlabel="Gbit/s asked", xscale="log", title=title, ylim=(0, 105)))
    return plots.picture(panels, 3.6, ylabel="Share of time computing (%)", sharey=True)


def table(frames: Frames) -> list[Table]:
    """Shares in every cell, measured and by arithmetic; and the bandwidth for Table 4's shares beside it."""
    rows = [
        {
            "Gbit/s": cell[0], "one way": 1e3 * cell[1], "method": label(name, every),
            "computing": (found := share(frames, name, every, cell)) and found.times(100),
            "by arithmetic": (simple := arithmetic(frames, name, every, cell)) and 100 * simple,
        }
        for cell in cells(frames)
        for name in TIMED_AS
        for every in asked(name)
    ]  # fmt: skip
    units = {"one way": "ms", "computing": "%", "by arithmetic": "%"}
    needed = [
        {"method": LOOKS[name].label, "one way": 1e3 * delay,
         **{f"{percent} %": bandwidth_for(frames, name, percent / 100, delay) for percent in SHARES}}
        for delay in sorted({delay for _, delay in cells(frames)})
        for name in TIMED_AS
    ]  # fmt: skip
    published = papers.value("douillard2025.gbit")
    theirs = [
        {
            "method": LOOKS[name].label,
            **{f"{percent} %": number(published[row][percent]) for percent in SHARES},
        }
        for name, row in TABLE_4.items()
    ]
    return [
        Table.of("Share of time computing", rows, units),
        Table.of(f"Gbit/s for a share of time computing, H = {AS_THEIRS}", needed, {"one way": "ms"}),
        Table.of("The same of 1 billion parameters, simulated by the authors of Streaming DiLoCo", theirs,
                 note=words("survey.utilisation.theirs")),
    ]  # fmt: skip


def bandwidth_for(frames: Frames, name: str, wanted: float, delay: float) -> str:
    """The bandwidth at which a share is reached, linear in the logarithm between two links, in words."""
    here = [cell for cell in cells(frames) if cell[1] == delay]
    every = None if name == DENSE else AS_THEIRS
    found = [share(frames, name, every, cell) for cell in here]
    known = [(cell[0], each.value) for cell, each in zip(here, found, strict=True) if each]
    if not known:
        return "-"
    if known[0][1] >= wanted:
        return f"below {number(known[0][0])}"
    for (slow, less), (fast, more) in itertools.pairwise(known):
        if more >= wanted:
            part = (wanted - less) / (more - less)
            return number(float(np.exp(np.log(slow) + part * np.log(fast / slow))))
    return f"above {number(known[-1][0])}"


def facts(frames: Frames) -> dict[str, object]:
    return {
        "parameters": captions.listed(f"{int(n):,}" for n in captions.values(frames, "parameters")),
        "workers": captions.listed(captions.values(frames, "workers")),
        "measured": captions.listed(captions.values(frames, "method.every")),
        "launches": len(captions.values(frames, "seed")),
    }  # fmt: skip


def claims() -> list[Claim]:
    named: dict[str, Any] = {"delay": number(1e3 * AT[1]), "link": LINK}
    of: list[tuple[str, int]] = [(DILOCO, 8), (SPARSELOCO, 8)]
    simple = [
        claim(
            "survey.utilisation.too-good",
            too_good,
            name,
            every,
            AT,
            case=name,
            method=label(name, every),
            **named,
        )
        for name, every in of
    ]
    more = [
        claim("survey.utilisation.more", ratio, first, second, AT, case=case,
              method=label(*first), other=label(*second), **named)
        for case, first, second in (
            ("diloco", (DILOCO, 32), (DENSE, None)), ("sparseloco", (SPARSELOCO, 32), (DILOCO, 32)),
        )
    ]  # fmt: skip
    return [*simple, *more]
