"""Items of published facts: what their pages and verdicts say without runs; refused where a table changed."""

from __future__ import annotations

import re

import pytest

from analysis.records.frames import empty_frames
from experiments import figures
from experiments.figures.runs import requested_runs
from tests.conftest import Command, refused
from tests.figures import made_up

ITEMS = [item for item in sorted(figures.repository_items()) if not figures.load(item).needs_runs]


def page(item: str) -> str:
    """Return the page of an item without runs."""
    return made_up.page(item, empty_frames(), figures.PUBLISHED)


def test_each_page_says_that_nothing_was_measured_here_and_names_the_logs() -> None:
    assert {"fig3-logs", "fig4-logs", "speed-logs", "eghlidi-table1-published", "local-costs"} <= set(ITEMS)
    for item in ITEMS:
        text = page(item)
        assert f"![{item}]({item}.png)" in text
        assert "not measured by this project" in text
        assert not re.search(r"\bnan\b", text.lower())
        assert "reproduced" not in {judged.word for judged in figures.load(item).judge(empty_frames())}
        assert ("github.com/kljp/topk_results" in text) == item.endswith("-logs")


def test_runs_are_neither_chosen_nor_queued(here: Command) -> None:
    refused(here("reproduce", "fig4-logs", "profile=laptop"), "fig4-logs", "no runs", "profile=laptop")
    with pytest.raises(ValueError, match="fig4-logs has no runs to queue"):
        requested_runs(["fig4-logs"])
