"""Where a submitted run is, by what SLURM says of its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.files import write_json
from analysis.records.schema import SCHEMA, JobNote
from analysis.records.store import Attempt
from experiments.config.folders import Folders
from experiments.launch.diagnosis import CANCEL
from experiments.launch.progress_bar import ProgressBar
from experiments.launch.status import StatusView, stuck
from experiments.launch.submission import Queue
from slurm import jobs
from slurm.jobs import Report
from tests.analysis import synthetic
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module


def begun(folders: Folders, **changes: object) -> Attempt:
    """Return an attempt of job 7."""
    attempt = folders.store.begin(synthetic.config())
    attempt.update(**changes)
    attempt.note_job(JobNote("7"))
    return attempt


def test_a_job_that_will_not_begin_by_itself_is_told(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    attempt = begun(folders, state="submitted")
    for reason, said, is_stuck in [
        ("Priority", "Priority", False),
        ("None", "its turn comes", False),
        ("PartitionTimeLimit", "change cluster.time_min", True),
        ("JobHeldUser", "scontrol release", True),
    ]:
        report = Report("queued", "7", "PENDING", reason)
        run = StatusView(folders, {attempt: report}).of_attempt(attempt)
        assert run.state == "queued"
        assert said in run.why
        assert stuck([run]) == ({run.why} if is_stuck else set())


RESUME = "`scontrol resume 7`"
# By state in its record, what SLURM knows, its word, was it cancelled by us: the word that is said, and why.
SEEN: list[tuple[str, jobs.Known, str, bool, str, str]] = [
    ("running", "queued", "RUNNING", False, "running", "on n1"),
    ("running", "queued", "SUSPENDED", False, "suspended", RESUME),
    ("submitted", "queued", "SUSPENDED", False, "queued", RESUME),
    ("running", "queued", "STOPPED", False, "suspended", RESUME),
    ("preempted", "ended", "CANCELLED", False, "cancelled", "the job was cancelled; saved at step 5"),
    ("preempted", "ended", "CANCELLED", True, "cancelled", "by `cancel`; saved at step 5"),
    ("preempted", "forgotten", "", True, "cancelled", "by `cancel`; saved at step 5"),
    ("preempted", "ended", "TIMEOUT", False, "stopped", "saved at step 5; submit again to go on"),
    ("running", "ended", "CANCELLED", True, "cancelled", "by `cancel`"),
    ("running", "ended", "CANCELLED", False, "cancelled", "the job was cancelled"),
]


def test_a_run_is_what_somebody_has_done_to_its_job(tmp_path: Path) -> None:
    for number, (state, known, job_state, is_by_us, word, why) in enumerate(SEEN):
        folders = Folders(tmp_path / str(number))
        attempt = begun(folders, state=state, step=5)
        if is_by_us:
            folders.launch(attempt).mkdir(parents=True)
            (folders.launch(attempt) / CANCEL).touch()
        report = Report(known, "7", job_state, nodes="n1")
        run = StatusView(folders, {attempt: report}).of_attempt(attempt)
        assert run.word == word
        assert why in run.why
        assert stuck([run]) == ({run.why} if why == RESUME else set())


@pytest.mark.parametrize(
    "changes", [{"state": "of_tomorrow"}, {"steps": {"made": 8}}, {"started": [1]}], ids=str
)
def test_a_record_of_a_newer_version_is_called_so(tmp_path: Path, changes: dict[str, object]) -> None:
    folders = Folders(tmp_path)
    attempt = begun(folders)
    known = dict(attempt.manifest)
    for state in ("ok", "running", "failed"):
        manifest = {**known, "state": state, "schema": SCHEMA + 1, **changes}
        write_json(attempt.path / "run.json", manifest)
        run = StatusView(folders, {}).of_attempt(attempt)
        assert run.word == "newer"
        assert "update this checkout" in run.why
        assert not attempt.is_valid()


def test_a_controller_that_is_down_for_a_while_ends_no_watching_and_nobody_is_blamed(
    tmp_path: Path, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = Folders(tmp_path)
    attempt = begun(folders, state="submitted")
    heading = "JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND"
    programs.prints("squeue", f"{heading}\n7|PENDING|Priority||N/A|a|/a")
    watched = Queue([], folders, ProgressBar({}), "a", [])
    watched.attempts = [attempt]
    told = []
    for is_up in (True, False, False, True):
        programs.prints("scontrol", "Unable to contact slurm controller", code=0 if is_up else 1)
        jobs._cluster.cache_clear()
        watched._ask()
        assert watched.view.of_attempt(attempt).state == "queued"
        told.append(capsys.readouterr().err)
    assert (told[0], told[2]) == ("", "")
    assert "SLURM is asked again until it answers: scontrol: Unable to contact" in told[1]
    assert "SLURM answers again" in told[3]
