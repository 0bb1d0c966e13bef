"""Records are used again, and what was made with other code is said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.store import Attempt
from experiments import figures
from experiments.config import code_version, compose
from experiments.config.folders import ResultFolders
from experiments.config.plan import PlannedRun, describe_code_changes, find_unmeasured_runs
from experiments.figures.runs import required_configs
from experiments.launch.attempt import resume_or_create_attempt
from tests.analysis import synthetic
from tests.conftest import Command, fine

WORDS = ("method=topk", "task=cnn_digits", "profile=smoke", "cluster=local", "train.validate=never")
MEASURING = (
    "sparsify/select.py",
    "sparsify/methods/topk.py",
    "sparsify/methods/_parts.py",
    "experiments/tasks/cnn_digits.py",
    "experiments/training/loop.py",
)
OTHERS = (  # of another method, task or data set, or of what is made of records
    "sparsify/methods/comb.py",
    "experiments/tasks/vgg16_cifar10.py",
    "experiments/training/datasets/cifar10.py",
    "experiments/figures/paper_fig4.py",
    "analysis/plots.py",
)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the checkout by a small one; return its folder."""
    for name in MEASURING + OTHERS:
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    monkeypatch.setattr(code_version, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(
        code_version, "digest_by_measuring_file", code_version.digest_by_measuring_file.__wrapped__
    )
    return tmp_path / "checkout"


def test_only_files_that_a_runs_numbers_rest_on_matter(checkout: Path) -> None:
    before = code_version.digest_by_measuring_file()
    chosen = {"topk", "cnn_digits", "digits"}
    for file in MEASURING + OTHERS:
        matters = file in MEASURING
        assert code_version.changed_measuring_files(before, chosen) == []
        (checkout / file).write_text("2\n")
        assert code_version.changed_measuring_files(before, chosen) == [file] * matters
        (checkout / file).unlink()
        assert code_version.changed_measuring_files(before, chosen) == [file] * matters
        (checkout / file).write_text("1\n")
    (checkout / "sparsify" / "new.py").touch()  # what uses it has changed as well
    assert code_version.changed_measuring_files(before, chosen) == []


def test_a_run_rests_on_what_its_method_imports(checkout: Path) -> None:
    methods = checkout / "sparsify" / "methods"
    texts = {
        "mine": "from sparsify.methods.comb import Comb\n",
        "comb": "import torch\nfrom . import teeth\n",
        "teeth": "",
        "other": "",
    }
    for name, text in texts.items():
        (methods / f"{name}.py").write_text(text)
    before = code_version.digest_by_measuring_file()
    for name, text in texts.items():
        (methods / f"{name}.py").write_text(f"{text}# changed\n")
    changed = code_version.changed_measuring_files(before, {"mine"})
    assert changed == [f"sparsify/methods/{name}.py" for name in ("comb", "mine", "teeth")]


def of_other_code(results: Path, *words: str) -> Attempt:
    """Return an attempt that records another version of one of its source files."""
    config, folders = compose.resolve([*WORDS, *words]), ResultFolders(results)
    attempt = synthetic.timed(folders.store, config)
    attempt.update_manifest(
        sources={**code_version.digest_by_measuring_file(), "sparsify/methods/topk.py": "0" * 12}
    )
    return attempt


def test_a_new_attempt_notes_its_code_and_an_older_one_says_nothing(tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path)
    new = resume_or_create_attempt(compose.resolve([*WORDS]), folders.store)
    assert new.manifest["sources"] == code_version.digest_by_measuring_file()
    assert "sparsify/kernels/native.cpp" in new.manifest["sources"]
    assert (
        describe_code_changes([new, synthetic.timed(folders.store, compose.resolve([*WORDS, "seed=1"]))])
        == ""
    )


def test_a_record_of_other_code_is_used_and_told_of(here: Command, tmp_path: Path) -> None:
    attempt = of_other_code(tmp_path / "results")
    done = fine(here("run", *WORDS))
    told = "measured with other code (sparsify/methods/topk.py); --force measures again"
    assert told in done.stderr
    assert "already measured" in done.stderr
    assert told in here("why", attempt.run_id).stdout
    other = of_other_code(tmp_path / "results", "seed=1")
    assert describe_code_changes([attempt, other]).startswith(
        "2 runs: measured with other code (sparsify/methods/topk.py)"
    )


def test_a_figure_says_which_of_its_runs_are_of_other_code(here: Command, tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path / "results")
    for config in required_configs(figures.load("fig1"), "smoke"):
        attempt = synthetic.in_turns(folders.store, config)
    attempt.update_manifest(sources={"sparsify/select.py": "0" * 12})
    done = fine(here("reproduce", "fig1", "profile=smoke"))
    told = f"{attempt.run_id}: measured with other code (sparsify/select.py)"
    assert told in done.stderr
    assert here("figures", "fig1").returncode == 0
    assert told in (folders.figures / "fig1-smoke.md").read_text()


def test_a_damaged_record_is_missing_and_named(tmp_path: Path) -> None:
    folders, said = ResultFolders(tmp_path), list[str]()
    planned = [PlannedRun(compose.resolve([*WORDS, f"seed={seed}"]), None) for seed in range(3)]
    attempts = [synthetic.timed(folders.store, run.config) for run in planned]
    (attempts[1].path / "run.json").write_text("5")
    assert find_unmeasured_runs(planned, folders, said.append) == [planned[1]]
    (note,) = said
    assert note.startswith(f"left out {attempts[1].name}: run.json is not as it was written")
