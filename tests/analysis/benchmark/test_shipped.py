"""The entries that the repository ships: by rules that there are, and with the code of today."""

from __future__ import annotations

from analysis.benchmark.cells import BASELINE, DECISIONS
from analysis.benchmark.files import read_newest_entries
from experiments.commands.benchmark import evaluate_entries, find_baseline_entry, read_whole_entries
from experiments.config.folders import ResultFolders
from experiments.figures.benchmark.entering import statement_run_keys
from experiments.figures.benchmark.entries import shipped_entrants_by_name
from experiments.figures.benchmark.held import ENTRIES
from experiments.figures.benchmark.laws import is_todays_method_code
from experiments.figures.benchmark.rules import floors_by_task, rules, rules_digest

TIER = "laptop"


def test_files_of_todays_rules_have_the_code_of_today_and_every_run() -> None:
    entries, notes = read_newest_entries([ResultFolders().shipped / ENTRIES], TIER, rules_digest(TIER))
    assert not notes
    for entry in entries:
        statement = entry.statement
        assert statement.version == rules().version
        assert statement.name in shipped_entrants_by_name()
        assert is_todays_method_code(statement.method, statement.code), statement.name
        assert {*statement_run_keys(statement)} == {*entry.frames.runs["key"]}


def test_decisions_of_shipped_entries_agree_with_their_intervals() -> None:
    entries, _ = read_whole_entries(ResultFolders(), TIER)
    base = find_baseline_entry(entries)
    assert base
    for cell in evaluate_entries(entries, base, floors_by_task(TIER), []):
        for score in cell.levels:
            if cell.entry == BASELINE:
                assert (score.word, score.speedup) == ("baseline", None)
            elif score.word in DECISIONS:
                assert score.speedup is not None
                low, high = score.speedup.interval
                assert low > 1 if score.word == "faster" else high < 1, (cell.place, score)
