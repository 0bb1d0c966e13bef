"""The list of columns says what is written, all of it, and nothing else."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import analysis
from analysis.records import columns
from analysis.records.files import write_json
from analysis.records.frames import Frames
from slurm.emulated import switch
from tests.conftest import Command, fine
from tests.slurm.emulated.links import may_have_networks

# Of each kind of run one that takes a second: with held-out data, in the published protocol, alone; on nodes.
RUNS = (
    ["method=topk", "train.held_out=100", "train.validate_on=50", "train.epochs=1", "train.steps=null",
     "train.epoch_steps=2", "train.lr_decay_epochs=1"],
    ["method=randomk", "timing.mode=as_published", "cluster=local", "train.steps=null", "train.epochs=2",
     "train.epoch_steps=1"],
    ["method=topk", "inside=pcie", "late.draw=uniform", "late.s=0.01", "late.rank=1", "train.look_every=5"],
    ["method=dense", "task.lr=1e15", "task.lr_warmup_epochs=0", "timing.mode=production",
     "train.validate=epoch"],
)  # fmt: skip


OVER_A_RELAY = [
    "method=dense", "cluster=netns", "cluster.by=relay", "link=wifi", "cluster.link.down_s_per_byte=4e-8",
    "workers=2", "train.steps=2", "train.validate=never", "launch.on_mismatch=label",
]  # fmt: skip
HAS_RELAYS = may_have_networks() and os.access(switch.TUN, os.R_OK | os.W_OK)


@pytest.fixture
def everything(tmp_path: Path, here: Command) -> Frames:
    """Return the frames of RUNS, made here, and of the runs that the repository ships."""
    text = tmp_path / "data" / "text"
    text.mkdir(parents=True)
    for name in ("train.txt", "test.txt"):
        (text / name).write_text("a few words that come again\n" * 100)
    local = ["task=gpt_text", "task.width=16", "task.batch_size=2", "method=localsgd", "method.every=2"]
    for words in (*RUNS, [*local, f"data.root={tmp_path / 'data'}"], *[OVER_A_RELAY] * HAS_RELAYS):
        fine(here("run", "task=cnn_digits", "profile=smoke", *words))
    results = tmp_path / "results"
    (results / "records" / "sweeps").mkdir(parents=True)
    runs = [path.name for path in (results / "runs").iterdir()]
    write_json(results / "records" / "sweeps" / "thesis.json", {"runs": runs})
    return analysis.load(results)


def check_described(frames: Frames) -> None:
    """Check that each column is described and not empty."""
    for frame, table in zip(Frames._fields, frames, strict=True):
        names = [str(name) for name in table]
        assert [name for name in names if columns.find_column_description(frame, name) is None] == []
        assert not table.isna().all().any() or not len(table)


def test_every_column_that_is_shipped_is_described(tmp_path: Path) -> None:
    check_described(analysis.load(tmp_path))


@pytest.mark.extended
@pytest.mark.own_processes
def test_every_column_that_is_written_is_described_and_every_description_is_of_one(
    everything: Frames,
) -> None:
    check_described(everything)
    for frame, table in zip(Frames._fields, everything, strict=True):
        idle = [
            one for one in columns.COLUMNS[frame] if not any(fnmatchcase(str(name), one) for name in table)
        ]
        assert (idle == []) >= HAS_RELAYS, (frame, idle)


def test_a_column_is_described_once_and_its_unit_is_the_one_in_its_name() -> None:
    for listed in columns.COLUMNS.values():
        assert {field.unit for name, field in listed.items() if name.endswith("_s")} <= {"s", "1/s"}
    assert columns.unit_of_run_column("wire_bytes") == "B"
    assert columns.find_column_description("steps", "nothing_s") is None


def test_the_page_is_up_to_date() -> None:
    assert columns.RECORDS_PAGE.read_text() == columns.render_records_page(), (
        "run `python -m analysis.records.columns`"
    )
