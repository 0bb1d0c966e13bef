"""Runs as curves for TensorBoard: what it reads back is what they logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.attempts import load_attempt
from experiments.commands.export import TensorBoardExporter
from experiments.config.folders import ResultFolders
from tests.analysis import synthetic
from tests.conftest import Command, fine, refused

pytest.importorskip("tensorboard")


Curves = dict[str, dict[str, list[tuple[int, float]]]]


def read(folder: Path) -> Curves:
    """Return steps and values of all curves, by the folder of their run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves: Curves = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            points = [(point.step, point.value) for point in events.Scalars(tag)]
            curves.setdefault(path.name, {})[tag] = points
    return curves


@pytest.fixture
def folders(tmp_path: Path) -> ResultFolders:
    return ResultFolders(tmp_path / "results")


def test_a_run_has_the_curves_that_it_logged(here: Command, folders: ResultFolders) -> None:
    board = folders.results / "tensorboard"
    refused(here("export", "method=none-such"), "no run is meant")
    attempt = synthetic.timed(folders.store, synthetic.config("topk"))
    synthetic.timed(folders.store, synthetic.config("dense"))
    assert f"tensorboard --logdir {board}" in fine(here("export", "method=topk,dense")).stderr
    curves = read(board)
    fine(here("export", "method=topk,dense"))
    assert read(board) == curves  # each point once
    (name,) = (name for name in curves if attempt.key[:8] in name)
    steps = load_attempt(attempt)[0].steps
    logged = steps.loc[steps["rank"] == 0, ["step", "step_s"]]
    points = [number for point in curves[name]["step/step_s"] for number in point]
    assert points == pytest.approx(logged.to_numpy().ravel())


def test_what_takes_turns_has_a_folder_for_each_once_it_has_ended(
    folders: ResultFolders, tmp_path: Path
) -> None:
    attempt = synthetic.alternated(folders.store, ["dense", "topk"], blocks=3, block_steps=2)
    ended = attempt.manifest
    attempt.update_manifest(state="running")
    board = TensorBoardExporter(tmp_path / "board", folders)
    assert board.export_new_points_and_count_runs(["source=own"]) == 0
    attempt.update_manifest(**ended)
    assert board.export_new_points_and_count_runs(["source=own"]) == 2
    board.close()
    curves = read(tmp_path / "board")
    assert sorted(name.partition(" ")[0] for name in curves) == ["dense", "topk"]


def test_what_goes_on_is_added_and_nothing_twice(folders: ResultFolders, tmp_path: Path) -> None:
    attempt = synthetic.timed(folders.store, synthetic.config("topk"))
    log = attempt.rank_log_path(0)
    whole = log.read_bytes().splitlines(keepends=True)
    (attempt.path / "run.json").unlink()  # it has not ended
    board = TensorBoardExporter(tmp_path / "board", folders)
    for lines in (whole[:5], whole[:5], whole):
        log.write_bytes(b"".join(lines))
        assert board.export_new_points_and_count_runs(["source=own"]) == 1
    board.close()
    (curves,) = read(tmp_path / "board").values()
    steps = [step for step, _ in curves["step/step_s"]]
    assert steps == sorted(set(steps))
    assert len(steps) > 5
