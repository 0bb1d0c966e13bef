"""Where a submitted run is, by what SLURM says of its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.schema import JobNote
from experiments.config.folders import Folders
from experiments.launch.status import StatusView, stuck
from slurm.jobs import Report
from tests.analysis import synthetic


@pytest.mark.parametrize(
    ("reason", "said", "is_stuck"),
    [
        ("Priority", "Priority", False),
        ("None", "its turn comes", False),
        ("PartitionTimeLimit", "change cluster.time_min", True),
        ("JobHeldUser", "scontrol release", True),
    ],
)
def test_a_job_that_will_not_begin_by_itself_is_told(
    tmp_path: Path, reason: str, said: str, is_stuck: bool
) -> None:
    folders = Folders(tmp_path)
    attempt = folders.store.begin(synthetic.config())
    attempt.update(state="submitted")
    attempt.note_job(JobNote("7"))
    report = Report("queued", "7", "PENDING", reason)
    run = StatusView(folders, {attempt: report}).of_attempt(attempt)
    assert run.state == "queued"
    assert said in run.why
    assert stuck([run]) == ({run.why} if is_stuck else set())
