"""Status of submitted runs, from what lies on the disk and one question to SLURM; in any later login."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from analysis.records import locks, schema
from analysis.records.files import Damaged, read_note
from analysis.records.schema import DIVERGED
from analysis.records.store import DAMAGED, NEWER, Attempt, NewerRecord
from experiments.config import code_version
from experiments.config.folders import Folders
from experiments.config.plan import other_code, with_other
from experiments.launch import bad_nodes, diagnosis
from experiments.launch.attempt import UNFINISHED_STATES, run_lock
from experiments.launch.bad_nodes import LEDGER_FILE
from slurm import jobs
from slurm.jobs import JobReport, SubmittedJob
from slurm.reasons import NOT_BY_ITSELF, UNTIL_RELEASED, explain_waiting

UNDER_WAY = ("queued", "running", "requeued")
SUSPENDED = "suspended"  # a class of running jobs: their processes are stopped
UNTIL_RESUMED = "until somebody resumes it"
TOLD = (DIVERGED, "cancelled", DAMAGED, NEWER, SUSPENDED)  # classes that say more than the state does
NOBODY = "nobody is seen to write it: its processes may have ended; the same words again go on"
HOW_ON = "if it has ended, `cancel` gives it up, and `submit` makes it again"
ASK_S = 5.0  # between two questions to SLURM
SETTLE_S = 30.0  # that a job's last words may need to become visible on a shared file system


class RunStatus(NamedTuple):
    """The status of one run."""

    state: str  # done, running, queued, requeued (it will go on), stopped (it can go on), failed, unknown
    why: str = ""  # a sentence for a person
    kind: str = ""  # a class of diagnosis.POLICIES, diverged, or suspended
    step: int = 0
    steps: int | None = None

    @property
    def word(self) -> str:
        """The state as every command and page tells it."""
        return self.kind if self.kind in TOLD else self.state

    @property
    def is_under_way(self) -> bool:
        """Tell whether it goes on by itself."""
        return self.state in UNDER_WAY


@dataclass(frozen=True)
class StatusView:
    """SLURM's answers, asked once for the jobs of runs that have not ended as records tell."""

    folders: Folders
    reports: Mapping[Attempt, JobReport] | None  # None: SLURM can't be asked

    @classmethod
    def query(cls, folders: Folders, attempts: Iterable[Attempt]) -> StatusView:
        """The view of these attempts.

        Raises:
            SlurmError: there is no SLURM here, or its controller does not answer.
        """
        open_ = [
            attempt for attempt in attempts if attempt.state in UNFINISHED_STATES and not _is_here(attempt)
        ]
        noted = {attempt: _noted(attempt, folders) for attempt in open_}
        reports = jobs.query_jobs(noted.values())
        return cls(folders, {attempt: reports[job] for attempt, job in noted.items()})

    @classmethod
    def query_settled(
        cls, folders: Folders, attempts: Sequence[Attempt], say: Callable[[str], None]
    ) -> StatusView:
        """The same, as soon as no job of these attempts can be about to come back.

        A job whose node died has ended for a moment, until SLURM starts it again; and the last words of one
        that has just ended may not be visible here yet.
        """
        deadline, told = time.monotonic() + SETTLE_S, False
        while True:
            view = cls.query(folders, attempts)
            if not any(view._may_return(attempt) for attempt in attempts) or time.monotonic() > deadline:
                return view
            if not told:
                say(f"some jobs ended just now; within {SETTLE_S:.0f} s it shows whether SLURM restarts them")
                told = True
            time.sleep(ASK_S)

    def _may_return(self, attempt: Attempt) -> bool:
        report = self.job_report(attempt)
        if report.known != "ended" or attempt.state not in ("submitted", "running"):
            return False
        ago = report.ended_ago_s()
        return ago is None or ago < SETTLE_S

    def job_report(self, attempt: Attempt) -> JobReport:
        """What SLURM says of its job."""
        return (self.reports or {}).get(attempt, JobReport("forgotten"))

    def run_status(self, attempt: Attempt) -> RunStatus:
        """The status of the run that an attempt is for."""
        try:
            manifest = attempt.check()
        except Damaged as damage:
            kind = NEWER if isinstance(damage, NewerRecord) else DAMAGED
            return RunStatus("failed", f"{damage.brief}; it will be measured again", kind)
        state, step = manifest["state"], int(manifest.get("step") or 0)
        if state == "ok":
            other = [with_other(files)] if (files := other_code(attempt)) else []
            notes = [*other, *diagnosis.contention_warnings(manifest)]
            if ended := manifest.get("diverged"):
                return RunStatus("done", "; ".join([ended["why"], *notes]), DIVERGED, ended["step"])
            return RunStatus("done", "; ".join(notes))
        if state == "failed":
            kind = str(manifest.get("failure", "error"))
            return RunStatus("failed", str(manifest.get("why")), kind, step)
        if _is_here(attempt):
            return self._here(attempt, state, step)
        if self.reports is None:
            then = "running" if state == "running" else "queued"
            return RunStatus(then, "when SLURM was last heard of", step=step)
        report = self.job_report(attempt)
        if report.known == "queued":
            return self._queued(attempt, report, step)
        if report.known == "unknown":
            return RunStatus("unknown", f"{report.reason}{self._last_sign(attempt)}; {HOW_ON}", step=step)
        is_by_us = (self.folders.launch(attempt) / diagnosis.CANCEL_FILE).exists()
        kind, why = (
            ("cancelled", "by `cancel`") if is_by_us else diagnosis.diagnose_job_state(report.state or None)
        )
        if state == "preempted" and kind == "cancelled":
            return RunStatus("stopped", f"{why}; saved at step {step}", kind, step)
        if state == "preempted":
            return RunStatus("stopped", f"saved at step {step}; submit again to go on", state, step)
        if is_by_us:
            return RunStatus("failed", why, kind, step)
        if kind == "killed" and state == "submitted" and (lack := self._code_damage(manifest)):
            kind, why = "code", lack
        ledger, job = self.folders.scratch / LEDGER_FILE, attempt.job.id
        if kind == "killed" and job and (lacking := bad_nodes.explain_missing_python(ledger, job)):
            kind, why = "python", lacking  # there nobody could leave a note
        return RunStatus("failed", why, kind, step)

    def _here(self, attempt: Attempt, state: str, step: int) -> RunStatus:
        """The status of a run without a job."""
        if holder := attempt.writer():
            done = self.progress(attempt)
            return RunStatus("running", f"written by {holder}", step=done.step, steps=done.steps)
        if holder := locks.holder(run_lock(self.folders, attempt.run_id).path):
            return RunStatus("queued", f"{holder} prepares it")
        if state == "preempted":
            return RunStatus("stopped", f"saved at step {step}; the same words again go on", state, step)
        return RunStatus("stopped", NOBODY, "killed", attempt.saved_step())

    def _code_damage(self, manifest: Mapping[str, Any]) -> str:
        """What is wrong with a job's code, of which too little may be left to say it; or nothing."""
        is_copy = manifest.get("sweep") and manifest.get("code")
        return code_version.damage(self.folders.code / Path(str(manifest["code"])).name) if is_copy else ""

    def _queued(self, attempt: Attempt, job: JobReport, step: int) -> RunStatus:
        manifest = attempt.manifest
        is_held = job.state in ("SUSPENDED", "STOPPED")
        until = f", {UNTIL_RESUMED}: `scontrol resume {job.id}` does" if is_held else ""
        if job.state != "PENDING" and manifest["state"] == "submitted":
            return RunStatus("queued", f"its job begins on {job.nodes}, or is at another of its runs{until}")
        if job.state != "PENDING":
            done = self.progress(attempt)
            kind = SUSPENDED if is_held else ""
            return RunStatus("running", f"on {job.nodes}{until}", kind, done.step, done.steps)
        why = explain_waiting(job.reason)
        if manifest["state"] == "preempted":
            return RunStatus("requeued", f"saved at step {step}, waits: {why}", "preempted", step)
        if manifest.get("why"):
            return RunStatus("requeued", f"{manifest['why']}; waits: {why}", step=step)
        return RunStatus("queued", why)

    def progress(self, attempt: Attempt) -> schema.Progress:
        """The progress of a run, from the note of its newest start."""
        notes = self._notes(attempt)
        return (read_note(notes[-1], schema.Progress) if notes else None) or schema.Progress()

    def _notes(self, attempt: Attempt) -> list[Path]:
        return sorted(self.folders.launch(attempt).glob("start-*/progress.json"), key=os.path.getmtime)

    def _last_sign(self, attempt: Attempt) -> str:
        if holder := attempt.writer():
            return f" ({holder} is writing its record)"
        if not (notes := self._notes(attempt)):
            return " (it has left no sign that it began)"
        return f" (its last sign of life is {(time.time() - notes[-1].stat().st_mtime) / 60:.0f} min old)"


def _noted(attempt: Attempt, folders: Folders) -> SubmittedJob:
    """Its job as SLURM may know it: by id, or by script where the submitting process died too early."""
    job, manifest = attempt.job, attempt.manifest
    name, _, number = str(manifest.get("array") or "").partition(":")
    script = folders.sweeps / str(manifest.get("sweep")) / name.rpartition("-")[2]
    return SubmittedJob(
        job.id, name or None, script if name else None, int(number or 0), job.cluster, job.user
    )


def _is_here(attempt: Attempt) -> bool:
    """Tell whether its workers were started without a job of SLURM's."""
    return not attempt.job.id and not attempt.manifest.get("sweep")


def stuck_reasons(states: Iterable[RunStatus]) -> set[str]:
    """Reasons of jobs that wait and will not begin, or go on, unless somebody does something."""
    under_way = {run.why for run in states if run.is_under_way}
    return {
        why
        for why in under_way
        if any(sign in why for sign in (NOT_BY_ITSELF, UNTIL_RELEASED, UNTIL_RESUMED))
    }
