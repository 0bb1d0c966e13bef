"""A figure's file is refused before anything is measured where it could not be drawn or judged afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from analysis.records.attempts import from_attempts
from analysis.records.frames import empty
from analysis.records.store import Store
from experiments import figures
from experiments.figures import (
    _contract,
    eghlidi2020_eghlidi_table1,
    eghlidi2020_eghlidi_table1_published,
    eghlidi2020_eghlidi_table2,
    papers,
    shi2019_shi_bound,
    shi2019_shi_convergence,
    shi2019_shi_distribution,
    shi2019_shi_scaling,
    shi2019_shi_selection,
    survey_crossover,
    survey_crossover_measured,
    survey_distance,
    survey_internet_loss,
    survey_link_model,
    survey_local_costs,
    survey_local_density,
    survey_local_loss,
    survey_local_why,
    survey_methods,
    survey_time_to_accuracy,
    survey_utilisation,
    yoon2022_fig1,
    yoon2022_fig2,
    yoon2022_fig3,
    yoon2022_fig3_level,
    yoon2022_fig3_logs,
    yoon2022_fig3_slim,
    yoon2022_fig4,
    yoon2022_fig4_fast,
    yoon2022_fig4_logs,
    yoon2022_slow_links,
    yoon2022_speed,
    yoon2022_speed_fast,
    yoon2022_speed_logs,
    yoon2022_speed_protocol,
    yoon2022_straggler,
    yoon2022_why_gap,
    zhang_stable_costs,
    zhang_stable_dgc,
    zhang_stable_heatmap,
    zhang_stable_sweep,
    zhang_stable_throughput,
)
from tests.analysis import synthetic
from tests.conftest import Command, refused

# mypy compares each file with the protocol here.
SHIPPED: list[_contract.Figure] = [
    eghlidi2020_eghlidi_table1, eghlidi2020_eghlidi_table1_published, eghlidi2020_eghlidi_table2,
    shi2019_shi_bound, shi2019_shi_convergence, shi2019_shi_distribution, shi2019_shi_scaling,
    shi2019_shi_selection, survey_crossover, survey_crossover_measured, survey_distance,
    survey_internet_loss, survey_link_model, survey_local_costs,
    survey_local_density, survey_local_loss, survey_local_why,
    survey_methods, survey_time_to_accuracy, survey_utilisation,
    yoon2022_fig1, yoon2022_fig2, yoon2022_fig3, yoon2022_fig3_level, yoon2022_fig3_logs,
    yoon2022_fig3_slim, yoon2022_fig4,
    yoon2022_fig4_fast, yoon2022_fig4_logs, yoon2022_slow_links, yoon2022_speed, yoon2022_speed_fast,
    yoon2022_speed_logs, yoon2022_speed_protocol, yoon2022_straggler, yoon2022_why_gap,
    zhang_stable_costs, zhang_stable_dgc, zhang_stable_heatmap, zhang_stable_sweep,
    zhang_stable_throughput,
]  # fmt: skip
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
    """Puts a file into an empty folder of figures; modules that items share stay where they are."""
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


def test_every_shipped_file_is_checked_by_its_types() -> None:
    assert len(SHIPPED) == len(figures.shipped())


def test_title_runs_and_draw_are_enough(write: Write, tmp_path: Path) -> None:
    write(LEAST)
    figures.check("density")
    assert figures.find("thesis/density") == "density"
    assert figures.tables("density", empty()) == []
    assert figures.judge("density", empty()) == []
    assert figures.bibtex("density") == ""
    frames, _ = from_attempts([synthetic.timed(Store(tmp_path / "runs"), synthetic.config())])
    assert "synthetic CPU" in figures.caption("density", frames, "smoke")
    assert "Nothing here is judged" in figures.page("density", frames, "smoke", "x", [], [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
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
        (LEAST.replace("return [[", "return [").replace("]]", "]"),
         ["line 3", "[['method=topk', 'seed=0']]"]),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_line_before_anything_runs(
    text: str, said: list[str], write: Write, here: Command
) -> None:
    path = write(text)
    refused(here("reproduce", "density", "profile=smoke"), str(path), *said)


def test_claims_that_cannot_be_made_are_refused_before_anything_runs(write: Write, here: Command) -> None:
    path = write(LEAST + "def claims():\n    return [Claim(text='a')]\n")
    refused(here("reproduce", "density", "profile=smoke"), f"{path}, line 9", "claims() raised NameError")
    refused(here("plan", "density", "cluster=generic_slurm"), f"{path}, line 9")


def test_a_broken_file_is_named_and_stops_no_other_figure(
    write: Write, here: Command, tmp_path: Path
) -> None:
    sound = write(LEAST, "own_sound.py")
    broken = write("TITLE = 1 +\n")
    assert set(figures.items()) == {"density", "sound"}
    figures.check("sound")
    done = here("figures")
    assert f"left out density: {broken}, line 1" in done.stderr
    assert str(sound) not in done.stderr


QUESTION = """
from analysis.claims import Claim
from analysis.stats import Value

def claims():
    return [Claim("a", PAPER, "", "", "ordering", 0.0, "", lambda frames: Value(1.0))]
"""


def test_ids_and_answers_are_checked_before_anything_runs(write: Write, here: Command) -> None:
    path = write(LEAST + QUESTION.replace("PAPER", "None").replace(")]", ', answers=("yoon2022.99",))]'))
    refused(here("reproduce", "density", "profile=smoke"), str(path), "yoon2022.99", "no paper states")
    twice = QUESTION.replace("PAPER", "None").replace("return [Claim", "return 2 * [Claim")
    path = write(LEAST + twice, "own_twice.py")
    refused(here("reproduce", "twice", "profile=smoke"), str(path), "two claims have the id twice.a")


def test_a_claim_without_an_id_has_one_that_its_text_gives(write: Write) -> None:
    write(LEAST + QUESTION.replace('"a"', '"Top-k (0.1) ends above"').replace("PAPER", "None"))
    assert [claim.id for claim in figures.claims("density")] == ["density.top-k-0.1-ends-above"]


def test_a_rule_that_leaves_open_what_it_is_about_is_refused_before_anything_runs(
    write: Write, here: Command
) -> None:
    """A paper's number without what was run there, a time over no link or an unknown one, an accuracy whose
    chance level nobody knows, a band around nothing; a question of one's own needs none of them.
    """
    own, published = (QUESTION.replace("PAPER", paper) for paper in ("None", "1.5"))
    emulated, of_text = (
        LEAST.replace('"method=topk"', f'"method=topk", "{word}"')
        for word in ("cluster=netns", "task=berttiny_text64")
    )
    for number, (head, question, words) in enumerate(
        (
            (LEAST, published, ["has a published number", "give SCALE"]),
            (emulated, own.replace(")]", ", timed=True)]"), ["over emulated links", "give link"]),
            (LEAST, own.replace(")]", ", link='ethernet_2h')]"), ["ethernet_2h", "ethernet_2g"]),
            (of_text, own.replace('None, ""', 'None, "points"'), ["berttiny_text64", "what guessing gives"]),
            (LEAST, own.replace('"ordering"', '"ratio"'), ["a band around the paper's number", "take kind"]),
        )
    ):
        path = write(head + question, f"own_item{number}.py")
        refused(here("reproduce", f"item{number}", "profile=smoke"), str(path), "line", *words)
    write(LEAST + own)
    figures.check("density")


def test_every_paper_is_cited_in_one_place() -> None:
    assert figures.bibtex("fig3").startswith("@misc{yoon2022empirical,")
    assert figures.bibtex("fig3") == figures.bibtex("fig4-logs")
    assert figures.bibtex("methods") == ""


def test_a_file_may_cite_its_own_paper(write: Write) -> None:
    write(LEAST + "BIBTEX = '@misc{mine}'\n")
    assert figures.bibtex("density") == "@misc{mine}"


def test_a_contract_is_asked_of_a_file_that_has_more(write: Write) -> None:
    """Functions of its own, imported ones and parameters with defaults are nobody's business."""
    write("from math import sqrt\n" + LEAST.replace("(frames, profile)", "(frames, profile, axes=None)")
          + "def lines(frames): ...\nHEIGHT = 3\n")  # fmt: skip
    figures.check("density")


def test_every_claim_of_the_papers_is_held_against_records_by_an_item() -> None:
    texts = [each.claim.text for item in figures.shipped() for each in figures.judge(item, empty())]
    for paper in papers.names():
        for said in papers.claims(paper).values():
            pattern = re.sub(r"(\\\{)+.*?(\\\})+", ".+", re.escape(said["text"]))
            assert any(re.fullmatch(pattern, text) for text in texts), said["text"]


def test_a_claim_of_the_papers_says_what_differs_between_like_ones() -> None:
    found = papers.claim("shi2019.bound", lambda frames, task: None, "mine", case="mine", label="own model")
    assert (found.id, found.of, found.paper) == ("bound.mine", ("mine",), "(1 - k/d)²")
    assert "own model" in found.text
    with pytest.raises(KeyError, match="label"):
        papers.claim("shi2019.bound", lambda frames, task: None, "mine")


def test_a_claim_that_its_paper_does_not_have_or_not_whole_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no claim of shi2019\.yaml 'bond' \(did you mean 'bound'\?\)"):
        papers.claim("shi2019.bond", lambda frames: None)
    monkeypatch.setattr(papers, "claims", lambda paper: {"half": {"text": "something", "kind": "ordering"}})
    with pytest.raises(
        ValueError, match=r"the claim shi2019\.half lacks unit, source, tolerance, reason: give"
    ):
        papers.claim("shi2019.half", lambda frames: None)
