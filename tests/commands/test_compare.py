"""A line of words becomes a table, a picture and its files; words that mean nothing are refused."""

from __future__ import annotations

import runpy
from pathlib import Path

import pandas as pd
import pytest

from analysis.records.attempts import load_attempt
from analysis.records.configs import measured_config, run_key
from analysis.records.files import write_json
from analysis.records.store import Store
from experiments.commands import compare, new
from experiments.config import compose
from tests.analysis import synthetic
from tests.conftest import Command, fine, refused


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """Provide the results of a sweep: two densities of Top-k and dense, three seeds each."""
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
    done = fine(here("compare", "sweep=thesis", "x=method.density", "y=val_top1", "ref=dense"))
    assert done.stdout.count("| topk |") == 2
    assert "minus dense (points)" in done.stdout
    stem = thesis / "figures" / "compare-sweep-thesis-val_top1-over-density"
    for kind in ("png", "pdf", "svg", "csv", "tex"):
        assert stem.with_suffix(f".{kind}").exists()
    page = stem.with_suffix(".md").read_text()
    assert "3 per point" in page
    assert "torch 0.0.0" in page


def test_words_that_mean_nothing_are_refused_and_what_varies_is_the_axis_without_any(
    thesis: Path, here: Command
) -> None:
    for words, *answers in (
        ("sweep=these", "no whole run"),
        ("sweep=thesis y=val_tp1", "did you mean val_top1"),
        ("sweep=thesis x=method.densty", "did you mean method.density"),
        ("sweep=thesis ref=tpok", "there are: dense, topk"),
        ("swep=thesis", "did you mean 'sweep'"),
        ("sweep=thesis x=task.name", "differ in method.density"),
        ("sweep=thesis seed=0 method=dense", "compare over what?", "x=method.name", "`why RUN --against"),
        ("learned other", "`why 'learned' --against 'other'`"),
    ):
        refused(here("compare", *words.split()), *answers)
        assert not (thesis / "figures").exists()
    assert "| method | density |" in here("compare", "sweep=thesis").stdout


def test_trainings_without_an_accuracy_are_compared_by_their_loss() -> None:
    without = pd.DataFrame({"val_top1": [None, None], "val_loss": [0.5, None]})
    assert compare._quality_column(without) == "val_loss"
    assert compare._quality_column(without.assign(val_top1=[None, 71.0])) == "val_top1"
    assert compare._quality_column(without[["val_top1"]]) == "val_top1"


def test_a_comparison_that_is_saved_is_a_figure_whose_runs_are_these(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(new.FOLDERS, "figure", tmp_path)
    monkeypatch.setattr(new, "next_commands", lambda kind, name: ("", f"reproduce {name}"))
    store = Store(tmp_path / "results" / "runs")
    words = ["method=topk", "task=cnn_digits", "profile=smoke"]
    configs = [measured_config(compose.resolve([*words, f"method.density={x}"])) for x in (0.01, 0.1)]
    attempt, _ = (synthetic.learned(store, config) for config in configs)
    fine(here("compare", "source=own", "x=method.density", "--save", "thesis_density"))
    figure = runpy.run_path(str(tmp_path / "thesis_density.py"))
    for profile in ("laptop", "paper"):
        found = [compose.resolve(words) for words in figure["runs"](profile)]
        assert sorted(map(run_key, found)) == sorted(map(run_key, configs))
    frames = load_attempt(attempt)[0]
    assert figure["table"](frames).header() == ["method", "density", "validation accuracy (%)", "runs"]
    refused(here("compare", "source=own", "x=method.density", "--save", "../density"), "can't be a name")
