"""The entries that the repository ships: whole, by today's rules, and what the README tells of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from analysis.benchmark.cells import BASELINE, cells
from analysis.benchmark.files import Entered, read_all
from experiments.config.folders import ROOT, Folders
from experiments.figures.benchmark.entering import targets_of
from experiments.figures.benchmark.entries import shipped
from experiments.figures.benchmark.held import ENTRIES
from experiments.figures.benchmark.laws import code_of
from experiments.figures.benchmark.rules import digest, rules

TIER = "laptop"
FAR, NEAR = "internet_100m_50ms", "ethernet_10g"


@pytest.fixture(scope="module")
def entered() -> list[Entered]:
    found, notes = read_all([Folders().shipped / ENTRIES], TIER, digest(TIER))
    assert not notes
    return found


def test_all_are_there_with_the_code_of_today_and_every_launch(entered: Sequence[Entered]) -> None:
    assert {each.statement.name for each in entered} == {*shipped()}
    for each in entered:
        said, runs = each.statement, set(each.frames.runs["key"])
        assert said.code == code_of(said.method), said.name
        for own in said.tasks.values():
            for of_links in (*own.launches.values(), *own.baseline.values()):
                assert {*of_links} == {*rules().tier(TIER).links}
                assert {len(keys) for keys in of_links.values()} == {len(rules().launches)}
                assert {key for keys in of_links.values() for key in keys} <= runs


@pytest.mark.extended
def test_the_readme_tells_what_the_entries_come_to(entered: Sequence[Entered]) -> None:
    (base,) = [each for each in entered if each.statement.name == BASELINE]
    aims = targets_of(TIER, base)
    found = [cell for each in entered if each is not base for cell in cells(each, base, aims)]
    far = [cell for cell in found if cell.link == FAR]
    reached = [cell for cell in far if cell.reached == cell.seeds]
    assert {cell.word for cell in reached} == {"faster"}
    assert "faster" not in {cell.word for cell in found if cell.link == NEAR}
    sooner = [cell.sooner.value for cell in reached if cell.sooner]
    text = " ".join((ROOT / "README.md").read_text().split())
    for sentence in (
        f"tunes and times {len(entered)} exchanges alike, on three tasks, by 4 and 8 workers",
        f"Over 100 Mbit/s and 50 ms, {len(sooner)} of {len(far)} cells are at dense's loss in all five "
        f"seeds, {min(sooner):.1f} to {max(sooner):.1f} times as soon; over 10 Gbit/s none is sooner",
    ):
        assert sentence in text
