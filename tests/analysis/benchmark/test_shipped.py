"""The entries that the repository ships: by rules that there are, and with the code of today."""

from __future__ import annotations

from analysis.benchmark.files import read_newest_entries
from experiments.commands.benchmark import evaluate_entries, find_baseline_entry
from experiments.config.folders import ResultFolders
from experiments.figures.benchmark.entering import statement_run_keys
from experiments.figures.benchmark.entries import shipped_entrants_by_name
from experiments.figures.benchmark.held import ENTRIES
from experiments.figures.benchmark.laws import is_todays_method_code
from experiments.figures.benchmark.rules import rules, rules_digest
from experiments.figures.benchmark.version1 import FLOORS, read_version_1_entries

TIER = "laptop"


def test_files_of_todays_rules_have_the_code_of_today_and_every_run() -> None:
    entries, notes = read_newest_entries([ResultFolders().shipped / ENTRIES], TIER, rules_digest(TIER))
    assert all("by rules of version 1" in note for note in notes)
    for entry in entries:
        statement = entry.statement
        assert statement.version == rules().version
        assert statement.name in shipped_entrants_by_name()
        assert is_todays_method_code(statement.method, statement.code), statement.name
        assert {*statement_run_keys(statement)} == {*entry.frames.runs["key"]}


def test_cells_of_version_1_have_decisions_at_some_levels() -> None:
    entries = read_version_1_entries(ResultFolders())
    base = find_baseline_entry(entries)
    assert base
    levels = [
        score for cell in evaluate_entries([base, *entries[-2:]], base, FLOORS, []) for score in cell.levels
    ]
    words = {score.word for score in levels}
    assert {(score.word, score.word_alone) for score in levels if not score.speedup} == {2 * ("baseline",)}
    assert {"baseline", "faster", "slower (censored)", "inconclusive", "not reached"} <= words
