"""The list of columns says what is written, all of it, and nothing else."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import analysis
from analysis.records import columns
from analysis.records.files import write_json
from analysis.records.frames import Frames
from tests.conftest import Command, fine

# Of each kind of run one that takes a second: with held-out data, in the published protocol, alone; on nodes.
RUNS = (
    ["method=topk", "train.held_out=100", "train.epochs=1", "train.steps=null", "train.epoch_steps=2"],
    ["method=randomk", "timing.mode=as_published", "cluster=local", "train.steps=null", "train.epochs=2",
     "train.epoch_steps=1"],
    ["method=topk", "inside=pcie", "late.draw=uniform", "late.s=0.01", "late.rank=1", "train.look_every=5"],
    ["method=dense", "task.lr=1e15", "task.lr_warmup_epochs=0", "timing.mode=production",
     "train.validate=epoch"],
)  # fmt: skip


@pytest.fixture
def everything(tmp_path: Path, here: Command) -> Frames:
    """These runs, and those that the repository ships."""
    for words in RUNS:
        fine(here("run", "task=cnn_digits", "profile=smoke", *words))
    (tmp_path / "data" / "text").mkdir(parents=True)
    for name in ("train.txt", "test.txt"):
        (tmp_path / "data" / "text" / name).write_text("a few words that come again\n" * 100)
    data = f"data.root={tmp_path / 'data'}"
    fine(
        here(
            "run",
            "task=gpt_text",
            "task.width=16",
            "task.batch_size=2",
            "method=localsgd",
            "method.every=2",
            "profile=smoke",
            data,
        )
    )
    runs = [path.name for path in (tmp_path / "results" / "runs").iterdir()]
    (tmp_path / "results" / "records" / "sweeps").mkdir(parents=True)
    write_json(tmp_path / "results" / "records" / "sweeps" / "thesis.json", {"runs": runs})
    return analysis.load(tmp_path / "results")


def test_every_column_that_is_written_is_described_and_every_description_is_of_one(
    everything: Frames,
) -> None:
    for frame, table in zip(Frames._fields, everything, strict=True):
        names = [str(name) for name in table]
        assert [name for name in names if columns.describe(frame, name) is None] == []
        listed = columns.COLUMNS[frame]
        idle = [one for one in listed if not any(fnmatchcase(name, one) for name in names)]
        assert idle == [], frame
        assert [name for name in names if table[name].isna().all()] == []


def test_a_column_is_described_once_and_its_unit_is_the_one_in_its_name() -> None:
    for listed in columns.COLUMNS.values():
        assert all(field.meaning for field in listed.values())
        assert {field.unit for name, field in listed.items() if name.endswith("_s")} <= {"s", "1/s"}
    assert columns.describe("runs", "task.batch_size") != columns.describe("runs", "task.lr")
    assert columns.unit("wire_bytes") == "B"
    assert columns.describe("steps", "nothing_s") is None


def test_the_page_is_up_to_date() -> None:
    assert columns.PAGE.read_text() == columns.page(), "run `python -m analysis.records.columns`"
