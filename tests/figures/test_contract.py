"""A figure's file is refused before anything is measured where it could not be drawn or judged afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.records.frames import empty_frames
from experiments import figures
from experiments.figures import papers
from tests.conftest import Command, refused
from tests.figures.made_up import page

LEAST = """\
TITLE = "Density"

def runs(profile):
    return [["method=topk", f"profile={profile}"]]

def draw(frames, profile):
    raise ValueError("nothing to draw")
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that puts a file into an empty folder of figures.

    Modules that items share stay where they are.
    """
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "__path__", [str(tmp_path), *figures.__path__])
    before = set(sys.modules)

    def put(text: str, name: str = "thesis_density.py") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    yield put
    for name in set(sys.modules) - before:
        if name.startswith(("experiments.figures.thesis_", "experiments.figures.own_")):
            del sys.modules[name]
    for name in list(vars(figures)):
        if name.startswith(("thesis_", "own_")):
            delattr(figures, name)


def test_title_runs_and_draw_are_enough(write: Write) -> None:
    """Functions of its own, imported ones and parameters with defaults are nobody's business."""
    write(LEAST)
    figures.load("density").check_claims()
    assert figures.find_item("thesis/density") == "density"
    assert figures.load("density").tables(empty_frames()) == []
    assert figures.load("density").judge(empty_frames()) == []
    assert figures.load("density").bibtex == ""
    assert "Nothing here is judged" in page("density", empty_frames())
    more = "def lines(frames): ...\nHEIGHT = 3\nBIBTEX = '@misc{mine}'\n"
    text = LEAST.replace("(frames, profile)", "(frames, profile, axes=None)") + more
    write("from math import sqrt\n" + text, "own_more.py")
    figures.load("more").check_claims()
    assert figures.load("more").bibtex == "@misc{mine}"
    write(LEAST + QUESTION.replace('"a"', '"Top-k (0.1) ends above"'), "own_claim.py")
    assert [claim.id for claim in figures.load("claim").claims()] == ["claim.top-k-0.1-ends-above"]


QUESTION = """
from analysis.claims import Claim
from analysis.stats import Estimate

def claims():
    return [Claim("a", None, "", "", "ordering", 0.0, "", lambda frames: Estimate(1.0))]
"""
TWICE = QUESTION.replace("return [Claim", "return 2 * [Claim")
EMULATED = LEAST.replace('"method=topk"', '"method=topk", "cluster=netns"')
OF_TEXT = LEAST.replace('"method=topk"', '"method=topk", "task=berttiny_text64"')
MISTAKES = [
    (LEAST.replace("def runs", "def rnus"), ["has no runs"]),
    (LEAST.replace("TITLE", "TITEL"), ["has no TITLE"]),
    (LEAST.replace("draw(frames, profile)", "draw(frame, profile)"),
     ["line 6", "draw(frame, profile) is called as draw(frames, profile)"]),
    (LEAST + "def table(frames, profile): ...\n",
     ["line 8", "table(frames, profile) is called as table(frames)"]),
    (LEAST + "table = 5\n", ["table is no function; write def table(frames)"]),
    (LEAST + "def cliams(): ...\n", ["line 8", "nothing asks a figure for cliams; did you mean claims?"]),
    (LEAST + "SCALES = {}\n", ["SCALES; did you mean SCALE?"]),
    (LEAST + "SCALE = {'wrokers': 8}\n", ["SCALE has 'wrokers'", "workers"]),
    (LEAST.replace("return [[", "return {'laptpo': 1}[profile] and [["),
     ["line 4", "runs('smoke') raised KeyError: 'smoke'"]),
    (LEAST.replace("return [[", "return [").replace("]]", "]"), ["line 3", "[['method=topk', 'seed=0']]"]),
    # Claims that cannot be made, ids and answers:
    (LEAST + "def claims():\n    return [Claim(text='a')]\n", ["line 9", "claims() raised NameError"]),
    (LEAST + QUESTION.replace(")]", ', answers=("yoon2022.99",))]'), ["yoon2022.99", "no paper states"]),
    (LEAST + TWICE, ["two claims have the id item12.a"]),
    # Rules that leave open what they are about: a paper's number without what was run there, a time over no
    # link or an unknown one, an accuracy whose chance level nobody knows, a band around nothing.
    (LEAST + QUESTION.replace("None", "1.5"), ["line", "has a published number", "give SCALE"]),
    (EMULATED + QUESTION.replace(")]", ", timed=True)]"), ["line", "over emulated links", "give link"]),
    (LEAST + QUESTION.replace(")]", ", link='ethernet_2h')]"), ["line", "ethernet_2h", "ethernet_2g"]),
    (OF_TEXT + QUESTION.replace('None, ""', 'None, "points"'),
     ["line", "berttiny_text64", "what guessing gives"]),
    (LEAST + QUESTION.replace('"ordering"', '"ratio"'),
     ["line", "a band around the paper's number", "take kind"]),
]  # fmt: skip


def test_a_mistake_is_refused_with_its_line_before_anything_runs(write: Write, here: Command) -> None:
    for number, (text, complaints) in enumerate(MISTAKES):
        path = write(text, f"own_item{number}.py")
        refused(here("reproduce", f"item{number}", "profile=smoke"), str(path), *complaints)
        path.unlink()
    path = write(MISTAKES[10][0])
    refused(here("plan", "density", "cluster=generic_slurm"), f"{path}, line 9")


def test_every_claim_of_the_papers_is_held_against_records_by_an_item() -> None:
    texts = [
        verdict.claim.text
        for item in figures.repository_items()
        for verdict in figures.load(item).judge(empty_frames())
    ]
    for paper in papers.paper_names():
        for fields in papers.claim_fields_by_name(paper).values():
            pattern = re.sub(r"(\\\{)+.*?(\\\})+", ".+", re.escape(fields["text"]))
            assert any(re.fullmatch(pattern, text) for text in texts), fields["text"]


def renamed(part: Any) -> Any:
    """Replace the functions in a part of a claim by others."""
    if isinstance(part, list | tuple):
        return tuple(renamed(item) for item in part)
    if isinstance(part, Mapping):
        return {key: renamed(value) for key, value in part.items()}
    return (lambda *_: None) if callable(part) else part


def test_functions_of_claims_may_be_renamed_without_another_rule() -> None:
    for item in figures.repository_items():
        for claim in figures.load(item).claims():
            other = replace(claim, compute=renamed(claim.compute), arguments=renamed(claim.arguments))
            assert other.rule_digest({}) == claim.rule_digest({}), f"{claim.id} lacks a quantity"


def test_a_claim_that_its_paper_does_not_have_or_not_whole_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no claim of shi2019\.yaml 'bond' \(did you mean 'bound'\?\)"):
        papers.make_claim("shi2019.bond", lambda frames: None)
    monkeypatch.setattr(
        papers, "claim_fields_by_name", lambda paper: {"half": {"text": "something", "kind": "ordering"}}
    )
    lacking = r"the claim shi2019\.half lacks unit, source, tolerance, reason: give"
    with pytest.raises(ValueError, match=lacking):
        papers.make_claim("shi2019.half", lambda frames: None)
