"""Runs as a table: those that the words mean, told apart by what varies, in whatever state they are."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.records.files import write_json
from experiments.commands import _run_table
from experiments.commands._run_table import filter_runs, load_all_runs, make_run_table
from experiments.config.folders import ResultFolders
from tests.analysis import synthetic
from tests.conftest import Command, fine, refused


@pytest.fixture
def folders(tmp_path: Path) -> ResultFolders:
    """Provide two densities, three seeds; one run failed, one is damaged."""
    folders = ResultFolders(tmp_path / "results")
    for density in (0.01, 0.1):
        for seed in range(3):
            synthetic.timed(folders.store, with_density(density, seed))
    folders.store.create_attempt(synthetic.config("dense")).mark_failed_unless_whole("no memory")
    synthetic.timed(folders.store, synthetic.config("randomk")).rank_log_path(0).unlink()
    return folders


def with_density(density: float, seed: int) -> dict[str, object]:
    config = synthetic.config("topk", seed=seed)
    return config | {"method": config["method"] | {"density": density}}


def test_a_table_has_a_column_for_each_leaf_that_varies_and_for_no_other(folders: ResultFolders) -> None:
    found = make_run_table(filter_runs(load_all_runs(folders), ["method=topk"]))
    assert found.header() == ["run", "method", "density", "seed", "step (ms)", "sent (kB/step)", "age"]
    assert {row[2] for row in found.rows()} == {"0.01", "0.1"}


def test_filters_mean_what_they_say_and_all_of_them_count(folders: ResultFolders) -> None:
    runs = load_all_runs(folders)
    for words, count in {
        "": 8, "method=topk": 6, "method.density=1e-2": 3, "seed=0,2 method=topk": 4, "state=failed": 1,
        "state=damaged": 1, "method=topk state=done select=torch": 6, "topk-vgg16": 6, "method=dgc": 0,
    }.items():  # fmt: skip
        assert len(filter_runs(runs, [*words.split(), "source=own"])) == count, words
    with pytest.raises(ValueError, match=r"no filter 'methd' \(did you mean 'method'"):
        filter_runs(runs, ["methd=topk"])
    folders.store.create_attempt(with_density(0.01, 0)).mark_failed_unless_whole(
        "no memory"
    )  # measured again
    for words, count in {"source=own": 6, "state=failed": 1}.items():
        assert len(filter_runs(load_all_runs(folders), ["method=topk", words])) == count, words


def test_a_sweep_and_an_item_are_found_by_the_runs_that_they_note(folders: ResultFolders) -> None:
    runs = folders.store.list_run_ids()[:2]
    for folder, name in ((folders.sweep_index, "thesis"), (folders.index, "fig4-laptop")):
        folder.mkdir(parents=True)
        write_json(folder / f"{name}.json", {"runs": runs})
    for word in ("sweep=thesis", "fig4", "item=fig4"):
        assert sorted(filter_runs(load_all_runs(folders), [word, "source=own"])["run_id"]) == runs


def test_shipped_runs_are_meant_where_no_own_one_is(folders: ResultFolders, tmp_path: Path) -> None:
    for word, source in {"fig3": "shipped", "method=topk": "own"}.items():
        assert set(filter_runs(load_all_runs(folders), [word])["source"]) == {source}
    shipped = load_all_runs(ResultFolders(tmp_path / "empty"))
    assert len(filter_runs(shipped, [])) == len(shipped) > 0


def test_the_command_lists_a_line_per_run(here: Command, folders: ResultFolders) -> None:
    done = fine(here("list", "method=topk", "method.density=0.01", "seed=0,1"))
    assert done.stdout.count("\n| ") == 3  # the line below the header, and two runs
    refused(here("list", "sed=0"), "did you mean 'seed'")
    assert here("list", "method=dgc", "source=own").returncode == 1


def test_what_a_table_calls_a_run_is_a_name_for_every_command(here: Command, folders: ResultFolders) -> None:
    shipped = load_all_runs(folders)
    run = shipped[shipped["variant"].eq("dense")]["run_id"].iloc[0]
    key = run.rpartition("-")[2]
    for word in (f"{key[:8]}/dense", f"{key}-dense"):  # of `list`, and of a page's address
        (found,) = filter_runs(shipped, [word]).to_dict("records")
        assert (found["run_id"], found["variant"]) == (run, "dense")
        assert run in fine(here("why", word)).stdout
        for words in (("logs", word), ("why", word, "--against", word)):
            refused(here(*words), f"{run} is shipped with the repository")
    own = folders.store.list_newest_valid_attempts()[0]
    refused(here("status", own.key[:8]), f"{own.run_id}: made on this machine, not submitted")


def test_cells_are_in_the_largest_unit_or_say_the_loss_and_are_not_obeyed(folders: ResultFolders) -> None:
    runs = load_all_runs(folders)
    runs.loc[0, "state"] = "[red]ok[/red] | \x1b[31m"
    assert "\\|" in make_run_table(runs).to_markdown()
    trained = pd.DataFrame({"val_top1": [71.0, None], "val_loss": [0.9, 1.25], "key": ["a", "b"]})
    outcomes = _run_table.outcome_column_by_heading(trained)
    shown = {title: [None if pd.isna(cell) else cell for cell in cells] for title, cells in outcomes.items()}
    assert shown == {"top-1": [71.0, None], "loss": [None, 1.25]}
