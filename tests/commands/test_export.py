"""Runs as curves for TensorBoard: what it reads back is what they logged."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records.attempts import of_attempt
from experiments.commands.export import Board
from experiments.config.folders import Folders
from tests.analysis import synthetic
from tests.conftest import Command, fine, refused

pytest.importorskip("tensorboard")


def read(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Steps and values of all curves, by the folder of their run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        found[path.name] = {
            tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]
        }
    return found


def test_a_run_has_the_curves_that_it_logged(here: Command, tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results")
    attempt = synthetic.timed(folders.store, synthetic.config("topk"))
    synthetic.timed(folders.store, synthetic.config("dense"))
    told = fine(here("export", "method=topk,dense"))
    assert f"tensorboard --logdir {folders.results / 'tensorboard'}" in told.stderr
    curves = read(folders.results / "tensorboard")
    assert len(curves) == 2
    fine(here("export", "method=topk,dense"))
    assert read(folders.results / "tensorboard") == curves  # each point once
    (name,) = (name for name in curves if name.startswith("topk"))
    assert attempt.key[:8] in name
    frames, _ = of_attempt(attempt)
    steps = frames.steps[frames.steps["rank"] == 0]
    assert [step for step, _ in curves[name]["step/step_s"]] == list(steps["step"])
    assert [value for _, value in curves[name]["step/step_s"]] == pytest.approx(list(steps["step_s"]))


@pytest.mark.parametrize("ghost", ["/etc", "../../../../../etc", "none-here-2w-local-000000000000"])
def test_no_run_is_looked_for_outside_of_the_folder(here: Command, ghost: str, tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results")
    synthetic.timed(folders.store, synthetic.config("topk"))
    fine(here("list"))
    path = folders.records / "listed" / "runs.parquet"
    table = pq.read_table(path)
    forged = table
    for column, text in {"run_id": ghost, "origin": ""}.items():
        at = table.column_names.index(column)
        forged = forged.set_column(at, column, pa.array([text] * len(table), table[column].type))
    pq.write_table(pa.concat_tables([table, forged]), path)
    fine(here("export", "source=own"))
    assert len(read(folders.results / "tensorboard")) == 1


def test_what_takes_turns_has_a_folder_for_each(here: Command, tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results")
    synthetic.alternated(folders.store, ["dense", "topk"], blocks=3, block_steps=2)
    fine(here("export", "source=own", "--out", str(tmp_path / "board")))
    curves = read(tmp_path / "board")
    assert sorted(name.partition(" ")[0] for name in curves) == ["dense", "topk"]
    assert all(len(own["step/step_s"]) > 6 for own in curves.values())


def test_turns_under_way_are_shown_once_they_have_ended(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results")
    attempt = synthetic.alternated(folders.store, ["dense", "topk"], blocks=3, block_steps=2)
    ended = attempt.manifest
    attempt.update(state="running")
    board = Board(tmp_path / "board", folders)
    assert board.show(["source=own"]) == 0
    attempt.update(**ended)
    assert board.show(["source=own"]) == 2
    board.close()
    assert all(own["step/step_s"] for own in read(tmp_path / "board").values())


def test_what_goes_on_is_added_and_nothing_twice(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results")
    attempt = synthetic.timed(folders.store, synthetic.config("topk"))
    log = attempt.rank_path(0)
    whole = log.read_bytes().splitlines(keepends=True)
    attempt.path.joinpath("run.json").unlink()  # it has not ended
    log.write_bytes(b"".join(whole[:5]))
    board = Board(tmp_path / "board", folders)
    for _ in range(2):
        assert board.show(["source=own"]) == 1
    log.write_bytes(b"".join(whole))
    board.show(["source=own"])
    board.close()
    (curves,) = read(tmp_path / "board").values()
    steps = [step for step, _ in curves["step/step_s"]]
    assert steps == sorted(set(steps))
    assert len(steps) > 5


def test_no_run_is_told(here: Command) -> None:
    refused(here("export", "method=none-such"), "no run is meant")
