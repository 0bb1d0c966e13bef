"""One line of words becomes a table, a picture and its files; words that mean nothing are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.files import write_json
from analysis.records import Store
from tests import synthetic
from tests.conftest import Command, refused


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """The results of a sweep: two densities of Top-k and dense, three seeds each."""
    store, runs = Store(tmp_path / "results" / "runs"), list[str]()
    for seed in range(3):
        for density in (None, 0.001, 0.01):
            config = synthetic.learning_config("topk" if density else "dense", seed, epochs=2)
            if density:
                config["method"] = config["method"] | {"density": density}
            runs.append(synthetic.learned(store, config).run_id)
    index = tmp_path / "results" / "records" / "sweeps"
    index.mkdir(parents=True)
    write_json(index / "thesis.json", {"runs": runs})
    return tmp_path / "results"


def test_a_sweep_becomes_a_table_and_a_picture_in_all_forms(thesis: Path, here: Command) -> None:
    done = here("compare", "sweep=thesis", "x=method.density", "y=val_top1", "ref=dense")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| topk |") == 2
    assert "less dense (%)" in done.stdout
    written = {
        path.suffix for path in (thesis / "figures").glob("compare-sweep-thesis-val_top1-over-density.*")
    }
    assert {".png", ".pdf", ".csv", ".tex", ".md"} <= written
    page = (thesis / "figures" / "compare-sweep-thesis-val_top1-over-density.md").read_text()
    assert "3 per point" in page
    assert "torch 0.0.0" in page


def test_what_varies_is_the_axis_where_none_is_given(thesis: Path, here: Command) -> None:
    assert "| method | density |" in here("compare", "sweep=thesis").stdout
    refused(here("compare", "sweep=thesis", "seed=0", "method=dense"), "compare over what?", "say x=")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sweep=these"], "no whole run"),
        (["sweep=thesis", "y=val_tp1"], "did you mean val_top1"),
        (["sweep=thesis", "x=method.densty"], "did you mean method.density"),
        (["sweep=thesis", "ref=tpok"], "there are: dense, topk"),
        (["swep=thesis"], "did you mean 'sweep'"),
        (["sweep=thesis", "x=task.name"], "differ in method.density"),
    ],
)
def test_words_that_mean_nothing_are_refused(
    thesis: Path, here: Command, words: list[str], told: str
) -> None:
    refused(here("compare", *words), told)
    assert not (thesis / "figures").exists()
