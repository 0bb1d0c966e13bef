"""The ledger: every statement of the papers, and the claims that answer it."""

from __future__ import annotations

import json

import pytest

from experiments import figures
from experiments.commands import claims as command
from experiments.figures import _ledger

EVERY = [statement for of_paper in _ledger.statements().values() for statement in of_paper]


def test_the_fifty_statements_are_numbered_through() -> None:
    assert [statement.number for statement in EVERY] == list(range(1, 51))


@pytest.mark.parametrize("statement", EVERY, ids=lambda statement: str(statement.number))
def test_a_statement_has_answers_that_there_are_or_says_why_not(statement: _ledger.Statement) -> None:
    assert statement.answers or statement.why
    assert statement.where
    for item, begins in statement.answers.items():
        texts = [claim.text for claim in figures.load(item).claims()]
        for begin in begins:
            assert any(text.startswith(begin) for text in texts), f"{item} has no claim {begin!r}"


def test_every_claim_with_a_published_side_answers_a_statement() -> None:
    """Or it is there for information."""
    answered = {
        (item, begin) for statement in EVERY for item, begins in statement.answers.items() for begin in begins
    }
    missing = [
        (item, claim.text)
        for item in figures.shipped()
        if hasattr(figures.load(item), "claims")
        for claim in figures.load(item).claims()
        if claim.paper not in (None, "not measured")
        and not any(of == item and claim.text.startswith(begin) for of, begin in answered)
    ]
    assert [text for _, text in missing] == [
        "step from which Top-k stays ahead of Random-k in top-1 (for information)"
    ]


def test_each_is_printed_with_a_verdict_and_the_last_line_counts_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.claims() == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert found["statements"] == 50
    assert sum(found["verdicts"].values()) == found["rows"]
    assert found["measured or re-derived"] >= 45
