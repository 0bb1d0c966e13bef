"""The end of a SLURM job, as its batch script judges it, and why its run failed."""

from __future__ import annotations

import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.records.files import write_json
from analysis.records.store import Store
from experiments.config import code_version
from experiments.launch import job_hooks
from experiments.launch.diagnosis import (
    AS_OFTEN_AS_ALLOWED,
    RELAY_OVERRUN,
    contention_warnings,
    diagnose_failed_start,
)
from experiments.worker.orders import RunOrders
from slurm.worker_process import ORDERS_FILE, JobSpec, WorkerCommand
from tests.analysis import synthetic


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the folder of a run of job 7, whose worker found its log held by another process."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    attempt = Store(tmp_path / "runs").create_attempt(synthetic.config("topk"))
    attempt.mark_running(0, "n1")
    folder = tmp_path / "launch"
    (folder / "start-7-0").mkdir(parents=True)
    write_json(folder / "start-7-0" / "failure0.json", {"rank": 0, "kind": "held", "why": "by another"})
    RunOrders({}, str(attempt.path)).write(folder / ORDERS_FILE)
    return str(folder)


def test_an_attempt_that_another_process_writes_is_left_to_it(run: str, tmp_path: Path) -> None:
    (manifest,) = tmp_path.glob("runs/*/*/run.json")
    before = manifest.read_text()
    assert job_hooks._judge_run(run, 1) == AS_OFTEN_AS_ALLOWED
    assert manifest.read_text() == before


def spec_of(run: str, code: Path) -> JobSpec:
    return JobSpec(
        [run], WorkerCommand(["python"], str(code), 1, None, [], False), num_tasks=1, max_requeues=2
    )


def test_a_job_runs_no_code_but_what_was_submitted(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    copy = code_version.ensure_code_copy(tmp_path / "code")
    (copy / "yaml.py").write_text("raise SystemExit('owned')")
    assert job_hooks.prepare_job_or_requeue(spec_of(run, copy))
    assert not (copy / "yaml.py").exists()
    assert "it is no part of the code: yaml.py" in capsys.readouterr().err

    ran = tmp_path / "ran"
    harm = copy / "yaml.py"
    harm.write_text(f"open({str(ran)!r}, 'w')")
    bytecode = copy / "experiments" / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(
        str(harm), str(bytecode), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    begin = ["sh", "experiments/launch/begin.sh", sys.executable, str(tmp_path / "no spec"), "/dev/null"]
    subprocess.run(begin, cwd=copy, capture_output=True)
    assert not ran.exists()
    assert not harm.exists()

    (tmp_path / "7").mkdir()
    assert not job_hooks.prepare_job_or_requeue(spec_of(run, tmp_path / "7"))
    attempt = job_hooks._read_attempt(run)
    assert (attempt.state, attempt.manifest["failure"]) == ("failed", "code")
    assert f"{tmp_path / '7'} is no whole copy of the code" in attempt.manifest["why"]


@pytest.mark.parametrize(("restarts", "wants", "state"), [("", 1, "submitted"), ("1", 0, "failed")])
def test_a_job_whose_workers_do_not_even_begin_is_started_once_more_and_not_for_ever(
    run: str, monkeypatch: pytest.MonkeyPatch, restarts: str, wants: int, state: str
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    shutil.rmtree(Path(run, "start-7-0"))
    assert job_hooks._judge_run(run, 1, has_begun=False) == wants
    attempt = job_hooks._read_attempt(run)
    assert attempt.state == state
    assert "no worker has begun" in attempt.manifest["why"]
    # Another run of its block had its turn.
    assert job_hooks._judge_run(run, 1, has_begun=True) == AS_OFTEN_AS_ALLOWED


def test_orders_that_were_removed_are_missed_in_a_sentence(run: str, tmp_path: Path) -> None:
    Path(run, ORDERS_FILE).unlink()
    spec_of(run, Path()).write(tmp_path / "task0.json")
    with pytest.raises(SystemExit, match="was removed or damaged while its job was under way"):
        job_hooks.run_hook("end", str(tmp_path / "task0.json"))


LOST = "worker 0 of 2 lost the others during all_gather"


CAUSES: list[tuple[dict[str, str], dict[int, int], str]] = [
    ({"lost": LOST}, {0: 1, 1: -9}, "killed: worker 1 was killed by SIGKILL"),
    # The end of the one that was left aborted as well: that is no cause.
    ({"lost": LOST}, {0: -6, 1: -9}, "killed: worker 1 was killed by SIGKILL"),
    ({"lost": LOST, "memory": "out of memory"}, {0: 1, 1: -6}, "memory: out of memory"),
    ({"lost": LOST}, {0: 1}, "killed: the process of worker 1 ended without a word"),
    ({"lost": LOST}, {0: 1, 1: 1}, f"lost: {LOST}"),
    ({}, {0: 0, 1: 3}, "error: a worker ended with exit code 3 and no explanation"),
]


@pytest.mark.parametrize(("notes", "codes", "expected"), CAUSES)
def test_the_first_cause_is_told_and_not_its_consequences(
    notes: dict[str, str], codes: dict[int, int], expected: str, tmp_path: Path
) -> None:
    for rank, (kind, why) in enumerate(notes.items()):
        write_json(tmp_path / f"failure{rank}.json", {"rank": rank, "kind": kind, "why": why})
    assert ": ".join(diagnose_failed_start(tmp_path, codes, 2)).startswith(expected)


@pytest.mark.parametrize(("late", "is_told"), [(9, False), (11, True)])
def test_a_run_whose_relay_was_the_bottleneck_says_so(late: int, is_told: bool) -> None:
    relay = {"cpu_s": 1.0, "seconds": 60.0, "packets": 100, "late": late}
    assert contention_warnings({"relay": relay}) == [RELAY_OVERRUN] * is_told
