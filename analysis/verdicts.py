"""Verdicts as people and programs read them: the table, its counts, its notes, and the CSV file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import pandas as pd

from analysis.claims import REDUCED, SIMULATED, WORDS, Claim, Verdict, Word, about
from analysis.pictures import captions
from analysis.pictures.numbers import ABSENT, interval, number, with_unit
from analysis.stats import PRINTED
from analysis.tables import Table

NOTHING = "Nothing here is judged: the figure draws what was measured, and the paper gives no number."
COLUMNS = (
    "item", "claim", "paper", "ours", "low", "high", "n", "unit", "verdict", "scale", "reason", "of", "group",
)  # fmt: skip
Row = tuple[str, Verdict]  # an item's name, and one of its verdicts


def as_table(rows: Iterable[Row]) -> Table:
    """The word first, then the claim and both numbers; what is reduced stands once, above."""
    rows = list(rows)
    lines = [
        {
            "verdict": verdict.word,
            "item": item,
            "claim": verdict.claim.text,
            "paper": paper_text(verdict.claim),
            "ours": ours_text(verdict),
            "because": verdict.because,
        }
        for item, verdict in rows
    ]
    frame = pd.DataFrame(lines, columns=["verdict", "item", "claim", "paper", "ours", "because"])
    return Table(scale(rows), frame if len({item for item, _ in rows}) > 1 else frame.drop(columns="item"))


def scale(rows: Iterable[Row]) -> str:
    """The reductions, and the items that have them; empty where nothing is reduced."""
    rows = list(rows)
    scales: dict[str, dict[str, None]] = {}  # what is reduced -> the items, in their order
    for item, verdict in rows:
        if verdict.scale.startswith(REDUCED):
            scales.setdefault(verdict.scale.partition(";")[0], {})[item] = None
    if len({item for item, _ in rows}) == 1:
        return "; ".join(scales).capitalize()
    return "; ".join(f"{captions.listed(items)}: {reduced}" for reduced, items in scales.items())


def counts(rows: Iterable[Row]) -> dict[Word, int]:
    """Number of times that each word was reached; a group counts once, with its least favourable word.

    Experiments of different scale are different evidence, also on one cause.
    """
    causes: dict[tuple[str, ...], list[Word]] = {}
    for item, verdict in rows:
        claim = verdict.claim
        cause = (claim.group, verdict.scale) if claim.group else (item, claim.id or claim.text)
        causes.setdefault(cause, []).append(verdict.word)
    found = Counter(min(words, key=WORDS.index) for words in causes.values())
    return {word: found[word] for word in WORDS if found[word]}


def counts_table(rows: Iterable[Row]) -> Table:
    """`counts`, a column for each word."""
    return Table("", pd.DataFrame([counts(rows)]))


def as_csv(rows: Iterable[Row]) -> str:
    """Every verdict as a line; numbers with six significant digits, and nothing where there is none.

    `n` counts what `of` says, runs or blocks; verdicts of one `group` have one cause.
    """
    lines = []
    for item, verdict in rows:
        claim, ours = verdict.claim, verdict.ours
        numbers = (ours.value, ours.low, ours.high) if ours else (None, None, None)
        n, of = (ours.n, ours.of) if ours else ("", "")
        why = "; ".join(filter(None, (verdict.reason, verdict.flips)))
        lines.append(
            (item, claim.text, claim.paper, *map(_cell, numbers), n, claim.unit, verdict.word, verdict.scale,
             why, of, claim.group)
        )  # fmt: skip
    text: str = pd.DataFrame(lines, columns=COLUMNS, dtype=object).to_csv(index=False, lineterminator="\n")
    return text


def notes(verdicts: Sequence[Verdict]) -> str:
    """A Markdown list of where each number was read, when the claim holds and why."""
    return "".join(f"- {verdict.claim.text}: {note(verdict.claim)}\n" for verdict in verdicts)


def note(claim: Claim) -> str:
    """Where its number was read, when it holds and why."""
    return f"{claim.source}. {rule(claim)} {claim.reason}"


def paper_text(claim: Claim) -> str:
    """The paper's value as it was published, with its unit."""
    if isinstance(claim.paper, int | float):
        return f"{claim.paper:,} {claim.unit}".strip()
    return claim.paper or ABSENT


def ours_text(verdict: Verdict) -> str:
    """Our value, its interval and n; times from virtual ranks are marked."""
    value, unit = verdict.ours, verdict.claim.unit
    if value is None or math.isnan(value.value):
        return ABSENT
    text = with_unit(value.value, unit)
    if value.of != PRINTED:
        text = f"{text} {interval(value)}".strip()
    simulated = ", simulated" if verdict.claim.timed and SIMULATED in verdict.scale else ""
    return f"{text} (n = {value.n} {value.of if value.n != 1 else value.of.removesuffix('s')}{simulated})"


def rule(claim: Claim) -> str:
    """The band in which the claim holds, and for which machine, in words."""
    low, high = claim.band()
    if claim.kind == "ordering":
        band = f"Holds above {with_unit(low, claim.unit)}."
    elif claim.kind == "limit":
        band = f"Holds up to {with_unit(high, claim.unit)}."
    else:
        band = f"Holds from {number(low)} to {with_unit(high, claim.unit)}."
    return f"{band} About {about(claim)} only." if about(claim) else band


def _cell(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"
