"""A sweep's name is noted beside the runs, never in them."""

from __future__ import annotations

from pathlib import Path

from analysis.records.configs import run_id
from analysis.records.files import try_read_json_object
from experiments.config import compose, grid
from experiments.config.folders import ResultFolders
from experiments.figures.runs import requested_runs
from tests.config.refusals import check_refusals
from tests.conftest import Command, refused

WORDS = ["task=cnn_digits", "profile=smoke", "method=topk", "method.density=0.01,0.1", "seed=0,1"]


def test_the_name_is_no_part_of_a_run() -> None:
    name, configs = requested_runs([*WORDS, "sweep=thesis"])
    assert name == "thesis"
    assert configs == requested_runs(WORDS)[1]
    assert len(configs) == 4


def test_a_sweep_grows_and_lists_each_run_once(tmp_path: Path) -> None:
    folders, (first, second) = ResultFolders(tmp_path), (compose.resolve({"seed": seed}) for seed in range(2))
    grid.add_runs_to_sweep(folders, "thesis", [first], print)
    grid.add_runs_to_sweep(folders, "thesis", [second, first], print)
    grid.add_runs_to_sweep(folders, None, [second], print)
    assert try_read_json_object(folders.sweep_index / "thesis.json") == {
        "runs": [run_id(first), run_id(second)]
    }


def test_a_sweep_has_one_name_that_a_file_can_have() -> None:
    names = ("sweep=", "sweep=a/b", "sweep=../x", ("sweep=a", "sweep=b"))
    check_refusals(dict.fromkeys(names, "one name"), act=grid.split_sweep_name)


def test_more_than_a_thousand_runs_are_made_on_request_only(here: Command) -> None:
    assert len(grid.resolve_grid([*WORDS[:-2], "seed=range(0,1001)"], allow_many=True)) == 1001
    words = ["task=cnn_digits", "profile=smoke", "cluster=generic_slurm", "seed=range(0,1001)"]
    refused(here("submit", *words), "1,001 runs", "--yes")
