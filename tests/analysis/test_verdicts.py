"""Verdicts as text: what stands in the table, in the counts and in the CSV file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import verdicts
from analysis.claims import Claim, Verdict, VerdictWord
from analysis.significance import (
    holm_significance_level,
    read_significance_level_or_default,
    word_together,
    write_significance_level,
)
from analysis.stats import Estimate

THREE = Estimate(91.0, 90.0, 92.0, 3)
TINY = "reduced scale: task tiny instead of large"


def verdict(
    word: VerdictWord = "reproduced",
    ours: Estimate | None = THREE,
    scale: str = "",
    group: str = "",
    **more: object,
) -> Verdict:
    claim = Claim("text", 92.99, "ms", "source", "shape", 0.6, "reason.", lambda frames: ours, group=group)
    return Verdict(replace(claim, **more), ours, word, scale, "why")  # type: ignore[arg-type]  # of any field


def test_the_word_comes_first_and_the_scale_stands_once_above() -> None:
    table = verdicts.verdicts_table([("fig3", verdict("not reproduced", scale=TINY))])
    assert table.title == f"a: {TINY}"
    assert table.header() == ["verdict", "claim", "paper", "ours", "because", "scale"]
    assert table.cell_texts() == [
        ["not reproduced", "text", "92.99 ms", "91.0 ms [90.0, 92.0] (n = 3 runs)", "", "a"]
    ]
    assert verdicts.our_value_text(verdict(ours=Estimate(91.0))) == "91 ms (n = 1 run)"


def test_of_several_items_the_table_says_which_line_and_which_scale_is_whose() -> None:
    tiny, other = verdict("not reproduced", scale=TINY), verdict(scale="emulated link")
    rows = [("fig3", tiny), ("fig2", tiny), ("fig1", verdict()), ("fig4", other)]
    table = verdicts.verdicts_table(rows)
    assert table.title == ""
    shown = [" | ".join((*row[:2], row[-1])) for row in table.cell_texts()]
    assert shown == [
        "not reproduced | fig3 | a",
        "not reproduced | fig2 | a",
        "reproduced | fig1 | ",
        "reproduced | fig4 | b",
    ]
    assert verdicts.scale_letters_table(rows).cell_texts() == [["a", TINY], ["b", "emulated link"]]


def test_claims_with_one_cause_count_once_with_their_least_favourable_word() -> None:
    """Across items, of experiments of one scale; others count each."""
    rows = [
        ("a", verdict("reproduced", group="cause")),
        ("b", verdict("not reproduced", group="cause")),
        ("b", verdict("not run", group="cause")),
        ("c", verdict("reproduced", group="cause", scale=TINY)),
        ("a", verdict("reproduced")),
        ("b", verdict("reproduced")),
        ("c", verdict("holds")),
    ]
    assert verdicts.count_causes_by_worst_word(rows) == {"not reproduced": 1, "reproduced": 3, "holds": 1}
    table = verdicts.causes_by_word_table(rows)
    assert (table.header(), table.cell_texts()) == (
        ["not reproduced", "reproduced", "holds"],
        [["1", "3", "1"]],
    )
    # What was measured comes before what was not.
    two = [("a", verdict("not comparable", group="cause")), ("b", verdict("holds", group="cause"))]
    assert verdicts.count_causes_by_worst_word(two) == {"holds": 1}


def test_the_csv_has_a_line_for_every_verdict_with_all_that_the_table_says() -> None:
    judged = replace(
        verdict(scale=TINY, group="cause", tolerance=4.0), horizon="so from step 5 of 9 on",
        num_launches=6, num_occasions=2, link_asked_gbit_s=1.0, link_farthest_gbit_s=0.86,
        link_median_gbit_s=0.9, is_rule_registered=True, chance_percent=10.0, rule_digest="a1b2",
    )  # fmt: skip
    rows = [("fig3", judged), ("fig4", verdict("not run", None))]
    assert verdicts.verdicts_csv(rows).splitlines() == [
        "item,id,claim,paper,ours,low,high,n,of,unit,verdict,alone,p_value,scale,reason,process_groups,"
        "occasions,link_asked_gbit_s,link_farthest_gbit_s,link_median_gbit_s,rule,registered,chance,group",
        f"fig3,,text,92.99,91,90,92,3,runs,ms,reproduced,reproduced,0.013,{TINY},why; so from step 5 of 9 on,"
        "6,2,1,0.86,0.9,a1b2,before,10,cause",
        "fig4,,text,92.99,,,,,,ms,not run,not run,,,why,,,,,,,,,",
    ]


def test_no_table_shows_nan() -> None:
    rows = [("a", verdict("inconclusive", Estimate(math.nan, n=n))) for n in (1, 2, 3)]
    assert "nan" not in (verdicts.verdicts_table(rows).to_markdown() + verdicts.verdicts_csv(rows)).lower()


def ordering(half: float, word: VerdictWord = "holds") -> tuple[str, Verdict]:
    """Return a difference of 1 from a limit of 0, whose interval over three runs is so wide."""
    ours = Estimate(1.0, 1.0 - half, 1.0 + half, 3)
    return "item", verdict(word, ours, kind="ordering", paper=None, tolerance=0.0)


def words_together(*rows: tuple[str, Verdict]) -> list[VerdictWord]:
    judged = [verdict for _, verdict in rows]
    level = holm_significance_level(judged)
    return [word_together(verdict, level).word for verdict in judged]


def test_what_holds_by_a_hair_does_not_remain_when_all_are_tested_together(tmp_path: Path) -> None:
    """Holm: the smallest of m p-values counts m times, the next m - 1 times."""
    sure, near, open_one = ordering(0.05), ordering(0.99), ordering(5.0, "inconclusive")
    assert sure[1].p_value_or_one < 0.01
    assert 0.04 < near[1].p_value_or_one < 0.05
    assert words_together(near) == ["holds"]
    assert words_together(near, sure) == ["holds", "holds"]
    assert words_together(near, sure, open_one) == ["inconclusive", "holds", "inconclusive"]
    assert words_together(near, sure, ("item", verdict("not run", None))) == ["holds", "holds", "not run"]
    assert words_together(near, near) == ["inconclusive", "inconclusive"]
    exact = replace(sure[1], ours=Estimate.exact(1.0, 1, "counts"))
    assert exact.p_value_or_one == 0
    assert words_together(*[("a", exact)] * 50) == ["holds"] * 50
    level = holm_significance_level([near[1], open_one[1]])
    fallen = word_together(near[1], level)
    assert (fallen.word, fallen.word_alone, fallen.p_value_or_one) == (
        "inconclusive",
        "holds",
        near[1].p_value_or_one,
    )
    assert fallen.explanation == "holds if tested alone, not with 2 claims tested together"
    assert word_together(fallen, level) == fallen
    assert read_significance_level_or_default(tmp_path).level == pytest.approx(0.05)
    write_significance_level(tmp_path, level)
    assert read_significance_level_or_default(tmp_path) == level


def test_a_note_says_where_a_number_was_read_when_the_claim_holds_and_why() -> None:
    for more, note in (
        ({}, "Holds from 92.39 to 93.59 ms. reason."),
        ({"kind": "ordering", "accelerator": "A100"}, "Holds above 0.6 ms. About A100 only. reason."),
        ({"kind": "limit", "paper": None, "revised": "2026"}, "Holds up to 0.6 ms. reason. Revised 2026."),
    ):
        assert verdicts.claim_note(replace(verdict().claim, **more)) == f"source. {note}"


def test_scales_have_letters_and_numbers_where_those_run_out() -> None:
    rows = [("item", verdict(scale=str(at))) for at in range(27)]
    assert [letter for letter, _ in verdicts.scale_letters_table(rows).cell_texts()[25:]] == ["z", "a2"]
