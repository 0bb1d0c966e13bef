"""Verdicts as people and programs read them: the table, its counts, its notes, and the CSV file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from string import ascii_lowercase
from typing import Protocol

import pandas as pd

from analysis.claims import (
    DECISIVE,
    DERIVED,
    SIMULATED,
    VERDICT_WORDS,
    Claim,
    Verdict,
    VerdictWord,
    describe_required_hardware,
)
from analysis.pictures.numbers import ABSENT, format_count, format_interval, format_number, format_with_unit
from analysis.stats import CONFIDENCE, PRINTED
from analysis.tables import Table

FIELD_BY_COLUMN = {"ours": "value", "low": "low", "high": "high"}
REGISTRATION_WORDS = {True: "before", False: "post hoc", None: ""}  # when the rule was there
NO_VERDICTS_NOTE = (
    "Nothing here is judged: the figure draws what was measured, and the paper gives no number."
)
COLUMNS = (
    "item", "id", "claim", "paper", "ours", "low", "high", "n", "of", "unit", "verdict", "adjusted",
    "p_value", "scale", "reason", "launches", "occasions", "link_asked_gbit_s", "link_found_gbit_s", "rule",
    "registered", "chance", "group",
)  # fmt: skip
ItemVerdict = tuple[str, Verdict]  # an item's name, and one of its verdicts


def verdicts_table(rows: Iterable[ItemVerdict], together: bool = False) -> Table:
    """The word first, then the claim and both numbers; the scale by a letter, which the title explains, or of
    several items `scales_table`.

    Args:
        together: also tell which word is left of those that fall when these are tested together.
    """
    rows = list(rows)
    letters = _letter_by_scale(rows)
    lines = [
        {
            "verdict": verdict.word,
            "all together": left if left != verdict.word else "",
            "item": item,
            "claim": verdict.claim.text,
            "paper": published_text(verdict.claim),
            "ours": measured_text(verdict),
            "because": verdict.because,
            "scale": letters.get(verdict.scale, ""),
        }
        for (item, verdict), left in zip(rows, holm_adjusted_words(rows), strict=True)
    ]
    are_several = len({item for item, _ in rows}) > 1
    shown = {
        "verdict": True, "all together": together, "item": are_several, "claim": True,
        "paper": True, "ours": True, "because": True, "scale": bool(letters),
    }  # fmt: skip
    title = ". ".join(f"{letter}: {scale}" for scale, letter in letters.items())
    columns = [name for name, is_shown in shown.items() if is_shown]
    return Table("" if are_several else title, pd.DataFrame(lines, columns=columns))


def scales_table(rows: Iterable[ItemVerdict]) -> Table:
    """What tells these numbers from a measurement at the papers' scale, by the letters of `verdicts_table`."""
    lines = [{"scale": letter, "what is": scale} for scale, letter in _letter_by_scale(rows).items()]
    return Table("", pd.DataFrame(lines, columns=["scale", "what is"]))


def _letter_by_scale(rows: Iterable[ItemVerdict]) -> dict[str, str]:
    """Scale -> a, b, ..., z, a2, ..."""
    found = dict.fromkeys(verdict.scale for _, verdict in rows if verdict.scale)
    return {
        scale: f"{ascii_lowercase[at % 26]}{at // 26 + 1 if at >= 26 else ''}"
        for at, scale in enumerate(found)
    }


class TestedWord(Protocol):
    """A word, and how probable what it rests on is, if a limit of its band is the truth."""

    @property
    def word(self) -> VerdictWord: ...

    @property
    def p_value(self) -> float: ...


def holm_adjusted_words(rows: Iterable[tuple[str, TestedWord]]) -> list[VerdictWord]:
    """The word of each that remains when all are tested together (Holm 1979): of several that are decided,
    one in twenty would else be wrong. What does not remain is inconclusive.
    """
    verdicts = [verdict for _, verdict in rows]
    tests = sorted((verdict.p_value, at) for at, verdict in enumerate(verdicts) if verdict.word in DECISIVE)
    words = [verdict.word for verdict in verdicts]
    survives = True
    for rank, (p_value, at) in enumerate(tests):
        survives = survives and p_value * (len(tests) - rank) <= 1 - CONFIDENCE
        if not survives:
            words[at] = "inconclusive"
    return words


def count_words(rows: Iterable[ItemVerdict]) -> dict[VerdictWord, int]:
    """Number of times that each word was reached; a group counts once, with its least favourable word.

    Experiments of different scale are different evidence, also on one cause.
    """
    causes: dict[tuple[str, ...], list[VerdictWord]] = {}
    for item, verdict in rows:
        claim = verdict.claim
        cause = (claim.group, verdict.scale) if claim.group else (item, claim.id or claim.text)
        causes.setdefault(cause, []).append(verdict.word)
    found = Counter(min(words, key=VERDICT_WORDS.index) for words in causes.values())
    return {word: found[word] for word in VERDICT_WORDS if found[word]}


def counts_table(rows: Iterable[ItemVerdict]) -> Table:
    """`count_words`, a column for each word."""
    return Table("", pd.DataFrame([count_words(rows)]))


def verdicts_csv(rows: Iterable[ItemVerdict]) -> str:
    """Every verdict as a line; numbers with six significant digits, and nothing where there is none.

    `n` counts what `of` says: runs, launches,
    blocks; `holm_adjusted_words` is the word that remains when all claims are
    tested together; verdicts of one `group` have one cause.
    """
    rows = list(rows)
    lines = []
    for (item, verdict), adjusted_word in zip(rows, holm_adjusted_words(rows), strict=True):
        claim, ours = verdict.claim, verdict.ours
        is_decided = verdict.word in DECISIVE
        lines.append({
            "item": item, "id": claim.id, "claim": claim.text, "paper": claim.stated or claim.paper,
            "unit": claim.unit,
            **{name: _number_cell(getattr(ours, field, None)) for name, field in FIELD_BY_COLUMN.items()},
            "n": ours.n if ours else "", "of": ours.of if ours else "",
            "verdict": verdict.word, "adjusted": adjusted_word,
            "p_value": f"{verdict.p_value:.2g}" if is_decided else "", "scale": verdict.scale,
            "reason": "; ".join(filter(None, (verdict.reason, verdict.flips))),
            "launches": _count_cell(verdict.launches), "occasions": _count_cell(verdict.occasions),
            "link_asked_gbit_s": _number_cell(verdict.link_asked),
            "link_found_gbit_s": _number_cell(verdict.link_found),
            "rule": verdict.rule, "registered": REGISTRATION_WORDS[verdict.registered],
            "chance": _number_cell(verdict.chance), "group": claim.group,
        })  # fmt: skip
    frame = pd.DataFrame(lines, columns=list(COLUMNS), dtype=object)
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text


def notes_markdown(verdicts: Sequence[Verdict]) -> str:
    """A Markdown list of where each number was read, when the claim holds and why."""
    return "".join(f"- {verdict.claim.text}: {claim_note(verdict.claim)}\n" for verdict in verdicts)


def claim_note(claim: Claim) -> str:
    """Where its number was read, when it holds and why."""
    revised = f" Revised {claim.revised}." if claim.revised else ""
    return f"{claim.source}. {band_text(claim)} {claim.reason}{revised}"


def published_text(claim: Claim) -> str:
    """The paper's value as it was published, with its unit."""
    if claim.stated:
        return claim.stated
    if isinstance(claim.paper, int | float):
        return f"{claim.paper:,} {claim.unit}".strip()
    return claim.paper or ABSENT


def measured_text(verdict: Verdict) -> str:
    """Our value, its interval and n; what was simulated or put together is marked."""
    value, unit = verdict.ours, verdict.claim.unit
    if value is None or math.isnan(value.value):
        return ABSENT
    text = format_with_unit(value.value, unit)
    if value.of != PRINTED:
        text = f"{text} {format_interval(value)}".strip()
    marks = {SIMULATED: ", simulated", DERIVED: ", derived"}
    kinds = "".join(mark for kind, mark in marks.items() if kind in verdict.scale)
    return f"{text} (n = {format_count(value.n, value.of)}{kinds})"


def band_text(claim: Claim) -> str:
    """The band in which the claim holds, and for which machine, in words."""
    low, high = claim.band()
    if claim.kind == "ordering":
        band = f"Holds above {format_with_unit(low, claim.unit)}."
    elif claim.kind == "limit":
        band = f"Holds up to {format_with_unit(high, claim.unit)}."
    else:
        band = f"Holds from {format_number(low)} to {format_with_unit(high, claim.unit)}."
    return (
        f"{band} About {describe_required_hardware(claim)} only."
        if describe_required_hardware(claim)
        else band
    )


def _count_cell(number: int | None) -> str:
    return "" if number is None else str(number)


def _number_cell(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"
