"""The entries that the repository ships: whole, and by today's rules."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from analysis.benchmark.cells import BASELINE
from analysis.benchmark.files import EntryFile, read_newest_entries
from experiments.commands.benchmark import evaluate_entries
from experiments.config.folders import ResultFolders
from experiments.figures.benchmark.entries import shipped_entrants_by_name
from experiments.figures.benchmark.held import ENTRIES
from experiments.figures.benchmark.laws import is_todays_method_code
from experiments.figures.benchmark.rules import rules, rules_digest

TIER = "laptop"


@pytest.fixture(scope="module")
def entered() -> list[EntryFile]:
    found, notes = read_newest_entries([ResultFolders().shipped / ENTRIES], TIER, rules_digest(TIER))
    assert not notes
    return found


def test_all_are_there_with_the_code_of_today_and_every_launch(entered: Sequence[EntryFile]) -> None:
    assert {each.statement.name for each in entered} == {*shipped_entrants_by_name()}
    for each in entered:
        said, runs = each.statement, set(each.frames.runs["key"])
        assert is_todays_method_code(said.method, said.code), said.name
        for own in said.tasks.values():
            for of_links in (*own.launches.values(), *own.baseline.values()):
                assert {*of_links} == {*rules().parse_tier(TIER).links}
                assert {len(keys) for keys in of_links.values()} == {len(rules().launches)}
                assert {key for keys in of_links.values() for key in keys} <= runs


def test_cells_have_decisions_at_some_levels(entered: list[EntryFile]) -> None:
    base, *others = sorted(entered, key=lambda each: each.statement.name != BASELINE)
    levels = [score for cell in evaluate_entries([base, *others[-2:]], base, []) for score in cell.levels]
    words = {score.word for score in levels}
    assert {(score.word, score.word_alone) for score in levels if not score.speedup} == {2 * ("baseline",)}
    assert {"baseline", "faster", "slower (censored)", "inconclusive", "not reached"} <= words
