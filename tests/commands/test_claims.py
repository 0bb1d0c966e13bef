"""The ledger: every statement of the papers, and the claims that answer it."""

from __future__ import annotations

import json

import pytest

from analysis.records.frames import empty
from experiments import figures
from experiments.commands import claims as command
from experiments.commands._draw import TABLES, Stored
from experiments.figures import papers

EVERY = list(papers.statements().values())
CLAIMS = [claim for item in figures.shipped() for claim in figures.claims(item)]
FOR_INFORMATION = ["fig3.topk-overtakes-randomk"]


def test_the_statements_are_numbered_through() -> None:
    assert [statement.number for statement in EVERY] == list(range(1, 103))


@pytest.mark.parametrize("statement", EVERY, ids=lambda statement: statement.id)
def test_a_statement_has_answers_or_says_why_not(statement: papers.Statement) -> None:
    answering = {claim.id.partition(".")[0] for claim in CLAIMS if statement.id in claim.answers}
    assert answering or statement.why
    assert statement.where
    assert set(statement.first) <= answering


def test_every_id_is_one_claim_and_every_answer_a_statement() -> None:
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for item in figures.shipped():
        figures.check(item)  # which refuses both before runs


def test_every_claim_with_a_published_side_answers_a_statement() -> None:
    """Or it is there for information."""
    missing = [
        claim.id for claim in CLAIMS if claim.paper not in (None, "not measured") and not claim.answers
    ]
    assert missing == FOR_INFORMATION


def test_each_is_printed_with_a_verdict_and_the_last_line_counts_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By published facts alone: what shipped runs decide, test_readme.py compares."""
    published = Stored(empty(), TABLES)
    monkeypatch.setattr(
        command, "stored", lambda _, profile, *rest: published if profile == figures.PUBLISHED else None
    )
    assert command.claims() == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert found["statements"] == 102
    assert sum(found["verdicts"].values()) == found["rows"]
    undecided = sum(found["verdicts"].get(word, 0) for word in ("not judged", "not run", "not comparable"))
    assert undecided > 0
    assert found["measured or re-derived"] == found["rows"] - undecided
