"""The ledger: every statement of the papers, and the claims that answer it."""

from __future__ import annotations

import json

import pytest

from analysis.records.frames import empty_frames
from experiments import figures
from experiments.commands import claims as command
from experiments.commands._drawing import PUBLISHED_TABLES, FigureRecords
from experiments.figures import papers

EVERY = list(papers.statements_by_id().values())
CLAIMS = [claim for item in figures.repository_items() for claim in figures.load(item).claims()]
FOR_INFORMATION = ["fig3.topk-overtakes-randomk"]


def test_each_statement_has_answers_or_says_why_not() -> None:
    assert [statement.number for statement in EVERY] == list(range(1, len(EVERY) + 1))
    for statement in EVERY:
        answering = {claim.id.partition(".")[0] for claim in CLAIMS if statement.id in claim.answers}
        assert answering or statement.reason_left_open, statement.id
        assert statement.where, statement.id
        assert set(statement.items_answering_first) <= answering, statement.id


def test_each_claim_has_its_own_id_and_answers_a_statement_or_is_for_information() -> None:
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for item in figures.repository_items():
        figures.load(item).check_claims()  # refuses both before runs
    published = [claim for claim in CLAIMS if claim.paper not in (None, "not measured")]
    assert [claim.id for claim in published if not claim.answers] == FOR_INFORMATION


def test_each_claim_is_printed_with_a_verdict_and_the_last_line_counts_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By published facts alone: what shipped runs decide, test_readme.py compares."""
    published = FigureRecords(empty_frames(), PUBLISHED_TABLES)
    monkeypatch.setattr(
        command,
        "find_figure_records",
        lambda _, profile, *rest: published if profile == figures.PUBLISHED else None,
    )
    assert command.claims() == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert sum(found["verdicts"].values()) == found["rows"]
    undecided = sum(found["verdicts"].get(word, 0) for word in ("not judged", "not run", "not comparable"))
    assert found["measured or re-derived"] == found["rows"] - undecided
