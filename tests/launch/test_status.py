"""Where runs are, by what SLURM says of their jobs; how far they are, and how long they will take."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from analysis.records.files import write_json
from analysis.records.schema import SCHEMA, Progress, SlurmJobRecord
from analysis.records.store import Attempt
from experiments.config.folders import ResultFolders
from experiments.launch.diagnosis import CANCEL_FILE
from experiments.launch.progress_bar import LINE_S, ProgressBar, RunProgress, format_duration
from experiments.launch.status import StatusSnapshot, stuck_reasons
from experiments.launch.submission import SlurmBackend
from slurm import jobs
from slurm.jobs import JobReport
from tests.analysis import synthetic
from tests.conftest import ROOT
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module


def begun(folders: ResultFolders, **changes: object) -> Attempt:
    """Return an attempt of job 7."""
    attempt = folders.store.create_attempt(synthetic.config())
    attempt.update_manifest(**changes)
    attempt.store_slurm_job(SlurmJobRecord("7"))
    return attempt


def test_a_job_that_will_not_begin_by_itself_is_told(tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path)
    attempt = begun(folders, state="submitted")
    for reason, said, is_stuck in [
        ("Priority", "Priority", False),
        ("None", "its turn comes", False),
        ("PartitionTimeLimit", "change cluster.time_min", True),
        ("JobHeldUser", "scontrol release", True),
    ]:
        report = JobReport("queued", "7", "PENDING", reason)
        run = StatusSnapshot(folders, {attempt: report}).run_status(attempt)
        assert run.state == "queued"
        assert said in run.why
        assert stuck_reasons([run]) == ({run.why} if is_stuck else set())


RESUME = "`scontrol resume 7`"
# By state in its record, what SLURM knows, its word, was it cancelled by us: the word that is said, and why.
SEEN: list[tuple[str, jobs.JobStatus, str, bool, str, str]] = [
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
        folders = ResultFolders(tmp_path / str(number))
        attempt = begun(folders, state=state, step=5)
        if is_by_us:
            folders.launch_folder(attempt).mkdir(parents=True)
            (folders.launch_folder(attempt) / CANCEL_FILE).touch()
        report = JobReport(known, "7", job_state, nodes="n1")
        run = StatusSnapshot(folders, {attempt: report}).run_status(attempt)
        assert run.display_state == word
        assert why in run.why
        assert stuck_reasons([run]) == ({run.why} if why == RESUME else set())


def test_a_record_of_a_newer_version_is_called_so(tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path)
    attempt = begun(folders)
    known = {**attempt.manifest, "schema": SCHEMA + 1}
    for changes in ({"state": "of_tomorrow"}, {"state": "ok", "steps": {"made": 8}}, {"started": [1]}):
        write_json(attempt.path / "run.json", known | changes)
        run = StatusSnapshot(folders, {}).run_status(attempt)
        assert run.display_state == "newer"
        assert "update this checkout" in run.why
        assert not attempt.is_valid()


def test_a_controller_that_is_down_for_a_while_ends_no_watching_and_nobody_is_blamed(
    tmp_path: Path, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ResultFolders(tmp_path)
    attempt = begun(folders, state="submitted")
    heading = "JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND"
    programs.prints("squeue", f"{heading}\n7|PENDING|Priority||N/A|a|/a")
    watched = SlurmBackend([], folders, ProgressBar({}), "a", [])
    watched.attempts = [attempt]
    told = []
    for is_up in (True, False, False, True):
        programs.prints("scontrol", "Unable to contact slurm controller", code=0 if is_up else 1)
        jobs._cluster_settings.cache_clear()
        watched._ask_slurm()
        assert watched.snapshot.run_status(attempt).state == "queued"
        told.append(capsys.readouterr().err)
    assert (told[0], told[2]) == ("", "")
    assert "SLURM is asked again until it answers: scontrol: Unable to contact" in told[1]
    assert "SLURM answers again" in told[3]


LABELS = {f"run{number}": f"topk density={0.01 / number:g} seed={number}" for number in (1, 2, 3)}
STEPS = 10_000_000


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(showing: list[list[RunProgress]], every_s: float = LINE_S + 1) -> list[str]:
    """Return what a stream that is no terminal gets, with so much time between two looks."""
    clock = Clock()
    stream = io.StringIO()
    bar = ProgressBar(LABELS, stream, clock)
    for running in showing:
        bar.update(running, 2)
        clock.now += every_s
    bar.close()
    return stream.getvalue().splitlines()


def test_elsewhere_than_on_a_terminal_there_is_a_line_now_and_then() -> None:
    said = lines_of([[RunProgress("run1", Progress(step, 1000, loss=2.345))] for step in range(1, 400)], 1.0)
    assert len(said) == 399 // (LINE_S + 1)
    begins = "topk density=0.01 seed=1: 32/1,000 steps, loss 2.35; 0 of 3 done, 2 waiting"
    assert said[0] == f"{begins}, about 49 min left"


def test_accuracy_is_said_where_it_is_known_and_no_time_where_nothing_was_measured() -> None:
    looks = [Progress(0), Progress(0), Progress(9, 10, 1.0, 71.26)]
    said = lines_of([[RunProgress("run2", look)] for look in looks])
    begins = "topk density=0.005 seed=2: "
    assert said[0] == f"{begins}starting; 0 of 3 done, 2 waiting"
    assert said[1] == f"{begins}9/10 steps, top-1 71.3 %; 0 of 3 done, 2 waiting"


def test_variants_that_take_turns_go_on_beyond_their_least_number_of_rounds() -> None:
    said = lines_of([[RunProgress(run, Progress(steps, 90)) for run in LABELS] for steps in (50, 80, 110)])
    assert "until the ratios are known" in said[-1]
    assert "-" not in said[-1].partition(";")[2]


def speed_after(clock: Clock, bar: ProgressBar, looks: Iterable[int], every_s: float) -> float:
    """Return the steps a second that the progress bar has measured after these looks at one run."""
    for step in looks:
        clock.now += every_s
        bar.update([RunProgress("run1", Progress(step, STEPS))], 0)
    assert bar.total.speed is not None
    return bar.total.speed


def test_the_speed_is_right_where_steps_take_alike_however_they_are_seen() -> None:
    """Many steps between two looks, or many looks between two steps."""
    for step_s, look_s in [(0.01, 0.1), (1.0, 0.1), (20.0, 0.1), (0.01, 15.0)]:
        clock = Clock()
        looks = (7 + int(look * look_s / step_s) for look in range(1000))
        speed = speed_after(clock, ProgressBar(LABELS, io.StringIO(), clock), looks, look_s)
        assert speed == pytest.approx(1 / step_s, rel=0.02)


def test_the_speed_forgets_what_was_long_ago_and_never_counts_what_resuming_took() -> None:
    clock = Clock()
    bar = ProgressBar(LABELS, io.StringIO(), clock)
    assert speed_after(clock, bar, range(5100, 5200), 1.0) == pytest.approx(1)
    assert speed_after(clock, bar, range(5200, 9200, 10), 1.0) == pytest.approx(10)


def test_times_are_as_coarse_as_they_are_known() -> None:
    told = {0: "0 s", 3: "5 s", 88: "90 s", 91: "2 min", 5000: "83 min", 6000: "1.7 h"}
    assert {seconds: format_duration(seconds) for seconds in told} == told


SHOW = """
import sys, time
from analysis.records.schema import Progress
from experiments.launch.progress_bar import *
bar = ProgressBar({f"run{at}": f"a_method_of_a_long_name density=0.01 seed={at}" for at in range(12)})
for step in range(0, 8000, 2000):
    bar.update([RunProgress(f"run{at}", Progress(step, 100_000, 1.5, 71.25)) for at in range(10)], 2)
    print("said beside", file=sys.stderr)
    time.sleep(0.3)
bar.report_run_done("run1")
bar.close()
"""


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_of_80_columns_shows_a_line_for_each_run(colour: bool) -> None:
    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"} | ({} if colour else {"NO_COLOR": "1"})
    process = subprocess.Popen([sys.executable, "-c", SHOW], cwd=ROOT, env=env, stdin=side, stderr=side)
    os.close(side)
    shown = b"".join(iter(partial(read, main), b"")).decode()
    os.close(main)
    assert process.wait() == 0
    assert ("\x1b[38" in shown or "\x1b[9" in shown) == colour
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    assert max(map(len, lines)) <= 80
    assert re.search(r"(?m)^a_method_of_a_.* 6,000/100,000 top-1 71.2 % +\d+ s", "\n".join(lines))
    assert any(line.startswith("and 2 more running; 0 of 12 done, 2 waiting, about") for line in lines)
    assert lines.count("said beside") == 4
    assert "[1/12] run1: a_method_of_a_long_name density=0.01 seed=1" in lines


def read(main: int) -> bytes:
    try:
        return os.read(main, 65536)
    except OSError:  # the other side is closed
        return b""
