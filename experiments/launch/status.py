"""The status of submitted runs, from their records and one query to SLURM; in any later login."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from analysis.records import locks, schema
from analysis.records.files import DamagedFileError, try_read_struct
from analysis.records.schema import DIVERGED
from analysis.records.store import DAMAGED, NEWER, Attempt, NewerVersionError
from experiments.config import code_version
from experiments.config.folders import ResultFolders
from experiments.config.plan import changed_code_files, explain_changed_files
from experiments.launch import diagnosis
from experiments.launch.attempt import UNFINISHED_STATES, run_lock
from experiments.launch.bad_nodes import LEDGER_FILE, explain_missing_python
from experiments.launch.diagnosis import Diagnosis
from slurm import jobs
from slurm.jobs import JobOrigin, JobReport, SubmittedJob
from slurm.reasons import NOT_BY_ITSELF, UNTIL_RELEASED, explain_pending_reason

UNDER_WAY = ("queued", "running", "requeued")
SUSPENDED = "suspended"  # a class of running jobs: their processes are stopped
UNTIL_RESUMED = "until somebody resumes it"
SHOWN_KINDS = (DIVERGED, "cancelled", DAMAGED, NEWER, SUSPENDED)  # they say more than the state does
NO_WRITER = "nobody is seen to write it: its processes may have ended; the same words again go on"
UNKNOWN_ADVICE = "if it has ended, `cancel` gives it up, and `submit` makes it again"
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
    def display_state(self) -> str:
        """The state as every command and page shows it."""
        return self.kind if self.kind in SHOWN_KINDS else self.state

    @property
    def is_under_way(self) -> bool:
        """True for a run that goes on by itself."""
        return self.state in UNDER_WAY


@dataclass(frozen=True)
class StatusSnapshot:
    """A snapshot of SLURM's answers on the jobs of attempts, from which the runs' statuses follow."""

    folders: ResultFolders
    reports: Mapping[Attempt, JobReport] | None  # None: SLURM can't be asked

    @classmethod
    def query(cls, folders: ResultFolders, attempts: Iterable[Attempt]) -> StatusSnapshot:
        """Ask SLURM, once, about the jobs of the attempts that have not ended by their records.

        Raises:
            SlurmError: there is no SLURM here, or its controller does not answer.
        """
        job_by_attempt = {
            attempt: _submitted_job(attempt, folders)
            for attempt in attempts
            if attempt.state in UNFINISHED_STATES and not _is_without_job(attempt)
        }
        reports = jobs.query_jobs(job_by_attempt.values())
        return cls(folders, {attempt: reports[job] for attempt, job in job_by_attempt.items()})

    @classmethod
    def query_until_settled(
        cls, folders: ResultFolders, attempts: Sequence[Attempt], say: Callable[[str], None]
    ) -> StatusSnapshot:
        """Ask SLURM until no job of these attempts can be about to come back.

        A job whose node died has ended for a moment, until SLURM starts it again; and the last words of one
        that has just ended may not be visible here yet.
        """
        deadline = time.monotonic() + SETTLE_S
        say_once = cache(say)
        while True:
            snapshot = cls.query(folders, attempts)
            if not any(snapshot._may_return(attempt) for attempt in attempts) or time.monotonic() > deadline:
                return snapshot
            say_once(
                f"some jobs ended just now; within {SETTLE_S:.0f} s it shows whether SLURM restarts them"
            )
            time.sleep(ASK_S)

    def _may_return(self, attempt: Attempt) -> bool:
        report = self.job_report(attempt)
        if report.status != "ended" or attempt.state not in ("submitted", "running"):
            return False
        elapsed_s = report.seconds_since_end()
        return elapsed_s is None or elapsed_s < SETTLE_S

    def job_report(self, attempt: Attempt) -> JobReport:
        """Return SLURM's report on the job of an attempt."""
        return (self.reports or {}).get(attempt, JobReport("forgotten"))

    def run_status(self, attempt: Attempt) -> RunStatus:
        """Return the status of the run that an attempt is for."""
        try:
            manifest = attempt.read_checked_manifest()
        except DamagedFileError as damage:
            kind = NEWER if isinstance(damage, NewerVersionError) else DAMAGED
            return RunStatus("failed", f"{damage.message_without_folder}; it will be measured again", kind)
        state = manifest["state"]
        step = int(manifest.get("step") or 0)
        if state == "ok":
            return self._done_status(attempt, manifest)
        if state == "failed":
            kind = str(manifest.get("failure", "error"))
            return RunStatus("failed", str(manifest.get("why")), kind, step)
        if _is_without_job(attempt):
            return self._jobless_status(attempt, state, step)
        if self.reports is None:
            last_state = "running" if state == "running" else "queued"
            return RunStatus(last_state, "when SLURM was last heard of", step=step)
        report = self.job_report(attempt)
        if report.status == "queued":
            return self._queued_status(attempt, report, step)
        if report.status == "unknown":
            why = f"{report.reason}{self._describe_last_sign(attempt)}; {UNKNOWN_ADVICE}"
            return RunStatus("unknown", why, step=step)
        kind, why = self._diagnose_ended_job(attempt, report)
        if state == "preempted" and kind == "cancelled":
            return RunStatus("stopped", f"{why}; saved at step {step}", kind, step)
        if state == "preempted":
            return RunStatus("stopped", f"saved at step {step}; submit again to go on", state, step)
        return RunStatus("failed", why, kind, step)

    def _done_status(self, attempt: Attempt, manifest: Mapping[str, Any]) -> RunStatus:
        warnings = diagnosis.contention_warnings(manifest)
        files = changed_code_files(attempt)
        if files:
            warnings.insert(0, explain_changed_files(files))
        divergence = manifest.get("diverged")
        if divergence:
            why = "; ".join([divergence["why"], *warnings])
            return RunStatus("done", why, DIVERGED, divergence["step"])
        return RunStatus("done", "; ".join(warnings))

    def _jobless_status(self, attempt: Attempt, state: str, step: int) -> RunStatus:
        """Return the status of a run without a job."""
        writer = attempt.describe_writer()
        if writer:
            progress = self.read_progress(attempt)
            return RunStatus("running", f"written by {writer}", step=progress.step, steps=progress.steps)
        holder = locks.describe_lock_holder(run_lock(self.folders, attempt.run_id).path)
        if holder:
            return RunStatus("queued", f"{holder} prepares it")
        if state == "preempted":
            return RunStatus("stopped", f"saved at step {step}; the same words again go on", state, step)
        return RunStatus("stopped", NO_WRITER, "killed", attempt.newest_whole_checkpoint_step_or_zero())

    def _diagnose_ended_job(self, attempt: Attempt, report: JobReport) -> Diagnosis:
        """Return why a job ended without a note on its end."""
        if (self.folders.launch_folder(attempt) / diagnosis.CANCEL_FILE).exists():
            return Diagnosis("cancelled", "by `cancel`")
        result = diagnosis.diagnose_job_state(report.state)
        manifest = attempt.manifest
        if result.kind != "killed" or manifest["state"] == "preempted":
            return result
        # Of damaged code too little may be left to say so, and nobody can leave a note without a Python.
        if manifest["state"] == "submitted" and manifest.get("sweep") and manifest.get("code"):
            damage = code_version.describe_copy_damage(self.folders.code / Path(str(manifest["code"])).name)
            if damage:
                result = Diagnosis("code", damage)
        ledger = self.folders.scratch / LEDGER_FILE
        missing = explain_missing_python(ledger, attempt.slurm_job.id) if attempt.slurm_job.id else None
        return Diagnosis("python", missing) if missing and result.kind == "killed" else result

    def _queued_status(self, attempt: Attempt, job: JobReport, step: int) -> RunStatus:
        manifest = attempt.manifest
        is_held = job.state in ("SUSPENDED", "STOPPED")
        until = f", {UNTIL_RESUMED}: `scontrol resume {job.id}` does" if is_held else ""
        if job.state != "PENDING" and manifest["state"] == "submitted":
            return RunStatus("queued", f"its job begins on {job.nodes}, or is at another of its runs{until}")
        if job.state != "PENDING":
            progress = self.read_progress(attempt)
            kind = SUSPENDED if is_held else ""
            return RunStatus("running", f"on {job.nodes}{until}", kind, progress.step, progress.steps)
        why = explain_pending_reason(job.reason)
        if manifest["state"] == "preempted":
            return RunStatus("requeued", f"saved at step {step}, waits: {why}", "preempted", step)
        if manifest.get("why"):
            return RunStatus("requeued", f"{manifest['why']}; waits: {why}", step=step)
        return RunStatus("queued", why)

    def read_progress(self, attempt: Attempt) -> schema.Progress:
        """Return the progress of a run, from the note of its newest start."""
        notes = self._progress_notes(attempt)
        return (try_read_struct(notes[-1], schema.Progress) if notes else None) or schema.Progress()

    def _progress_notes(self, attempt: Attempt) -> list[Path]:
        return sorted(self.folders.launch_folder(attempt).glob("start-*/progress.json"), key=os.path.getmtime)

    def _describe_last_sign(self, attempt: Attempt) -> str:
        writer = attempt.describe_writer()
        if writer:
            return f" ({writer} is writing its record)"
        notes = self._progress_notes(attempt)
        if not notes:
            return " (it has left no sign that it began)"
        return f" (its last sign of life is {(time.time() - notes[-1].stat().st_mtime) / 60:.0f} min old)"


def _submitted_job(attempt: Attempt, folders: ResultFolders) -> SubmittedJob:
    """Return the job of an attempt: by id, or by script where the submitting process died too early."""
    job = attempt.slurm_job
    manifest = attempt.manifest
    name, _, number = str(manifest.get("array") or "").partition(":")
    script_folder = folders.sweeps / str(manifest.get("sweep")) / name.rpartition("-")[2]
    origin = JobOrigin(script_folder, int(number or 0))
    return SubmittedJob(job.id, name or None, origin if name else None, job.cluster, job.user)


def _is_without_job(attempt: Attempt) -> bool:
    """Tell whether the workers of an attempt were started without a job of SLURM's."""
    return not attempt.slurm_job.id and not attempt.manifest.get("sweep")


def stuck_reasons(statuses: Iterable[RunStatus]) -> set[str]:
    """Return the reasons of jobs that will not begin, or go on, unless somebody does something."""
    signs = (NOT_BY_ITSELF, UNTIL_RELEASED, UNTIL_RESUMED)
    return {run.why for run in statuses if run.is_under_way and any(sign in run.why for sign in signs)}
