"""Verdicts as people and programs read them: the table, its counts, its notes, and the CSV file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from string import ascii_lowercase

import pandas as pd

from analysis.claims import (
    DECISIVE,
    DERIVED,
    SIMULATED,
    UNDECIDED,
    VERDICT_WORDS,
    Claim,
    Verdict,
    VerdictWord,
    describe_required_hardware,
)
from analysis.pictures.numbers import ABSENT, format_count, format_with_interval
from analysis.tables import Table

FIELD_BY_COLUMN = {"ours": "value", "low": "low", "high": "high"}
REGISTRATION_WORDS = {True: "before", False: "post hoc", None: ""}  # when the rule was there
NO_VERDICTS_NOTE = (
    "Nothing here is judged: the figure draws what was measured, and the paper gives no number."
)
COLUMNS = (
    "item", "id", "claim", "paper", "ours", "low", "high", "n", "of", "unit", "verdict", "alone",
    "p_value", "scale", "reason", "process_groups", "occasions", "link_asked_gbit_s", "link_farthest_gbit_s",
    "link_median_gbit_s", "rule", "registered", "chance", "group",
)  # fmt: skip
ItemVerdict = tuple[str, Verdict]  # an item's name, and one of its verdicts


def verdicts_table(rows: Iterable[ItemVerdict]) -> Table:
    """Return a table of verdicts: the word, the claim, both numbers.

    The scale is a letter, which the title explains, or `scale_letters_table` where there are several items.
    """
    rows = list(rows)
    letters = _letter_by_scale(rows)
    lines = [
        {
            "verdict": verdict.word,
            "item": item,
            "claim": verdict.claim.text,
            "paper": paper_value_text(verdict.claim),
            "ours": our_value_text(verdict),
            "because": verdict.explanation,
            "scale": letters.get(verdict.scale, ""),
        }
        for item, verdict in rows
    ]
    are_several = len({item for item, _ in rows}) > 1
    is_shown = {"item": are_several, "scale": bool(letters)}
    columns = ("verdict", "item", "claim", "paper", "ours", "because", "scale")
    shown_columns = [name for name in columns if is_shown.get(name, True)]
    title = ". ".join(f"{letter}: {scale}" for scale, letter in letters.items())
    return Table("" if are_several else title, pd.DataFrame(lines, columns=shown_columns))


def scale_letters_table(rows: Iterable[ItemVerdict]) -> Table:
    """Return a table that explains the letters of scales in `verdicts_table`."""
    lines = [{"scale": letter, "what is": scale} for scale, letter in _letter_by_scale(rows).items()]
    return Table("", pd.DataFrame(lines, columns=["scale", "what is"]))


def _letter_by_scale(rows: Iterable[ItemVerdict]) -> dict[str, str]:
    """Return scale -> a, b, ..., z, a2, ..."""
    scales = dict.fromkeys(verdict.scale for _, verdict in rows if verdict.scale)
    letters = {}
    for place, scale in enumerate(scales):
        round_, letter = divmod(place, len(ascii_lowercase))
        letters[scale] = f"{ascii_lowercase[letter]}{round_ + 1 if round_ else ''}"
    return letters


def count_causes_by_worst_word(rows: Iterable[ItemVerdict]) -> dict[VerdictWord, int]:
    """Return how many causes have each word as their least favourable one; a group of claims is one cause.

    Experiments of different scale are different evidence, also on one cause.
    """
    words_by_cause: dict[tuple[str, ...], list[VerdictWord]] = {}
    for item, verdict in rows:
        claim = verdict.claim
        cause = (claim.group, verdict.scale) if claim.group else (item, claim.id or claim.text)
        words_by_cause.setdefault(cause, []).append(verdict.word)
    counts = Counter(min(words, key=VERDICT_WORDS.index) for words in words_by_cause.values())
    return {word: counts[word] for word in VERDICT_WORDS if counts[word]}


def causes_by_word_table(rows: Iterable[ItemVerdict]) -> Table:
    """Return a table of `count_causes_by_worst_word`, with a column for each word."""
    return Table("", pd.DataFrame([count_causes_by_worst_word(rows)]))


def verdicts_page_markdown(rows: Sequence[ItemVerdict]) -> str:
    """Return the page of all verdicts in Markdown: counts of each word, judged claims, then the others."""
    judged = [(item, verdict) for item, verdict in rows if verdict.word not in UNDECIDED]
    undecided = [(item, verdict) for item, verdict in rows if verdict.word in UNDECIDED]
    return (
        "# What became of the papers' claims\n\n"
        "On the records that this repository ships; claims of one cause are counted once. Each item's page, "
        "in [figures](figures), says machine, data and how each number was read; "
        "[verdicts.csv](verdicts.csv) has the same as data. Each word is what is left when all claims are "
        "tested together (Holm's correction).\n\n"
        f"{causes_by_word_table(rows).to_markdown()}\n## Judged\n\n"
        f"{verdicts_table(judged).to_markdown()}\n"
        f"### Their scales\n\n{scale_letters_table(judged).to_markdown()}\n"
        f"## Not comparable, or not run\n\n{verdicts_table(undecided).to_markdown()}\n"
        f"### The scales of these\n\n{scale_letters_table(undecided).to_markdown()}"
    )


def verdicts_csv(rows: Iterable[ItemVerdict]) -> str:
    """Return a line for every verdict; numbers with six significant digits, and nothing where there is none.

    `n` counts what the column `of` says: runs, launches, blocks; `process_groups` were started in all.
    `alone` is the word if no other claim were tested. Of the links of an
    emulated cluster, `link_farthest_gbit_s` is the one farthest from what was asked, `link_median_gbit_s` the
    median. Verdicts of one `group` have one cause.
    """
    rows = list(rows)
    lines = []
    for item, verdict in rows:
        claim, ours = verdict.claim, verdict.ours
        numbers = {column: getattr(ours, field, None) for column, field in FIELD_BY_COLUMN.items()}
        lines.append(
            {
                "item": item,
                "id": claim.id,
                "claim": claim.text,
                "paper": claim.stated or claim.paper,
                "unit": claim.unit,
                **{column: _number_cell(number) for column, number in numbers.items()},
                "n": ours.n if ours else "",
                "of": ours.sample_kind if ours else "",
                "verdict": verdict.word,
                "alone": verdict.word_alone,
                "p_value": f"{verdict.p_value_or_one:.2g}" if verdict.word_alone in DECISIVE else "",
                "scale": verdict.scale,
                "reason": "; ".join(filter(None, (verdict.reason, verdict.horizon))),
                "process_groups": verdict.num_launches,
                "occasions": verdict.num_occasions,
                "link_asked_gbit_s": _number_cell(verdict.link_asked_gbit_s),
                "link_farthest_gbit_s": _number_cell(verdict.link_farthest_gbit_s),
                "link_median_gbit_s": _number_cell(verdict.link_median_gbit_s),
                "rule": verdict.rule_digest,
                "registered": REGISTRATION_WORDS[verdict.is_rule_registered],
                "chance": _number_cell(verdict.chance_percent),
                "group": claim.group,
            }
        )
    frame = pd.DataFrame(lines, columns=list(COLUMNS), dtype=object)
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text


def claim_notes_markdown(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown list of where each number was read, when the claim holds and why."""
    return "".join(f"- {verdict.claim.text}: {claim_note(verdict.claim)}\n" for verdict in verdicts)


def claim_note(claim: Claim) -> str:
    """Return where a claim's number was read, when the claim holds and why."""
    revised = f" Revised {claim.revised}." if claim.revised else ""
    return f"{claim.source}. {claim_band_text(claim)} {claim.reason}{revised}"


def paper_value_text(claim: Claim) -> str:
    """Return the paper's value as it was published, with its unit."""
    if claim.stated:
        return claim.stated
    if isinstance(claim.paper, int | float):
        return f"{claim.paper:,} {claim.unit}".strip()
    return claim.paper or ABSENT


def our_value_text(verdict: Verdict) -> str:
    """Return our value, its interval and n; what was simulated or put together is marked."""
    ours = verdict.ours
    if ours is None or math.isnan(ours.value):
        return ABSENT
    claim = verdict.claim
    limits = [] if verdict.word in UNDECIDED else [*claim.band()[:2], *claim.partly_band()[:2]]
    text = format_with_interval(ours, claim.unit, limits)
    marks = {SIMULATED: ", simulated", DERIVED: ", derived"}
    kinds = "".join(mark for kind, mark in marks.items() if kind in verdict.scale)
    return f"{text} (n = {format_count(ours.n, ours.sample_kind)}{kinds})"


def claim_band_text(claim: Claim) -> str:
    """Return the band in which the claim holds, and for which machine, in words."""
    band = claim.band().range_sentence(claim.unit)
    hardware = describe_required_hardware(claim)
    return f"{band} About {hardware} only." if hardware else band


def _number_cell(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"
