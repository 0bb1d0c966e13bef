"""The significance level that is left to each claim when all claims are tested together (Holm 1979).

Of a hundred claims that are tested alone at 5 %, chance decides a few. Holm's procedure goes through the
p-values from the smallest on: the i-th of m is significant while p <= 0.05 / (m - i). Where it stops, one
level is left that tells all significant ones from the others, so that each verdict can be worded by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from analysis.claims import DECISIVE, Verdict
from analysis.records.files import read_struct_if_there, write_json
from analysis.stats import CONFIDENCE

FILE_NAME = "significance.json"
ALPHA = 1 - CONFIDENCE


class SignificanceLevel(msgspec.Struct, frozen=True):
    """The largest p-value of a verdict that is decided, when as many claims are tested together."""

    level: float
    num_tested: int


def holm_significance_level(verdicts: Iterable[Verdict]) -> SignificanceLevel:
    """Return the level that Holm's procedure leaves to these verdicts.

    Tested is what records could have decided: what they did decide, and what is inconclusive or post hoc.
    """
    tested = [
        verdict for verdict in verdicts if verdict.word_alone in (*DECISIVE, "inconclusive", "post hoc")
    ]
    return SignificanceLevel(holm_level([verdict.p_value_or_one for verdict in tested]), len(tested))


def holm_level(p_values: Collection[float]) -> float:
    """Return the level that Holm's procedure leaves to these p-values."""
    level = ALPHA
    for rank, p_value in enumerate(sorted(p_values)):
        level = ALPHA / (len(p_values) - rank)
        if p_value > level:
            break
    return level


def word_together(verdict: Verdict, significance: SignificanceLevel) -> Verdict:
    """Return the verdict with the word that is left when it is tested together with the others."""
    if verdict.word not in DECISIVE or verdict.p_value_or_one <= significance.level:
        return verdict
    reason = f"{verdict.word} if tested alone, not with {significance.num_tested} claims tested together"
    return replace(verdict, word="inconclusive", reason=reason, overruled_word=verdict.word)


def read_significance_level_or_default(folder: Path) -> SignificanceLevel:
    """Return the level that is stored in a folder; that of a claim that is tested alone where none is.

    Raises:
        DamagedFileError: the file is damaged.
    """
    stored = read_struct_if_there(folder / FILE_NAME, SignificanceLevel)
    return stored or SignificanceLevel(ALPHA, 1)


def write_significance_level(folder: Path, significance: SignificanceLevel) -> None:
    write_json(folder / FILE_NAME, msgspec.structs.asdict(significance))
