"""Status of submitted runs, from what lies on the disk and one question to SLURM; in any later login."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from analysis.records import schema
from analysis.records.files import read_note
from analysis.records.store import DAMAGED, Attempt
from experiments.config import code_version
from experiments.config.folders import Folders
from experiments.config.plan import other_code, with_other
from experiments.launch import diagnosis
from slurm import queue
from slurm.queue import EndedJob, QueuedJob
from slurm.reasons import NOT_BY_ITSELF, UNTIL_RELEASED, why_waiting

UNDER_WAY = ("queued", "running", "requeued")
ASK_S = 5.0  # between two questions to SLURM
SETTLE_S = 30.0  # that a job's last words may need to become visible on a shared file system


class RunStatus(NamedTuple):
    """The status of one run."""

    state: str  # done, running, queued, requeued (it will go on), stopped (it can go on), failed
    why: str = ""  # a sentence for a person
    kind: str = ""  # a class of diagnosis.POLICIES
    step: int = 0
    steps: int | None = None

    @property
    def under_way(self) -> bool:
        """Tell whether it goes on by itself."""
        return self.state in UNDER_WAY


@dataclass
class StatusView:
    """SLURM's answers, asked once for all runs."""

    folders: Folders
    queued: Mapping[str, QueuedJob] | None  # None: SLURM can't be asked
    by_name: Mapping[str, str] = field(default_factory=dict)  # "<array's name>:<task>" -> job id
    ended: Mapping[str, EndedJob] = field(default_factory=dict)

    @classmethod
    def of(cls, folders: Folders, queued: Mapping[str, QueuedJob]) -> StatusView:
        """The view of what is queued."""
        by_name = {f"{job.name}:{name.partition('_')[2] or 0}": name for name, job in queued.items()}
        return cls(folders, queued, by_name)

    @classmethod
    def settled(cls, folders: Folders, attempts: Sequence[Attempt], say: Callable[[str], None]) -> StatusView:
        """The same, as soon as no job of these attempts can be about to come back.

        A job whose node died is in no queue for a moment, until SLURM starts it again; and the last words of
        one that has just ended may not be visible here yet.
        """
        deadline, told = time.monotonic() + SETTLE_S, False
        while True:
            view = cls.of(folders, queue.queue())
            view.ask_accounts(attempts)
            if not any(view._may_return(attempt) for attempt in attempts) or time.monotonic() > deadline:
                return view
            if not told:
                say(f"some jobs ended just now; within {SETTLE_S:.0f} s it shows whether SLURM restarts them")
                told = True
            time.sleep(ASK_S)

    def _may_return(self, attempt: Attempt) -> bool:
        if not self._is_silent(attempt) or (job := self.job(attempt)) is None:
            return False
        ended = self.ended.get(job)
        ago = ended.seconds_ago() if ended else None
        return ago is None or ago < SETTLE_S

    def ask_accounts(self, attempts: Sequence[Attempt]) -> None:
        """Ask how those jobs ended that left no note: one question to SLURM, none where all left one."""
        silent = [job for attempt in attempts if (job := self.job(attempt)) and self._is_silent(attempt)]
        self.ended = queue.accounts(silent)

    def job(self, attempt: Attempt) -> str | None:
        """The id of its job; known to SLURM by the array's name where the submitting process died
        too early.
        """
        if attempt.job is not None or attempt.state == DAMAGED:
            return attempt.job
        return self.by_name.get(str(attempt.manifest.get("array")))

    def of_attempt(self, attempt: Attempt) -> RunStatus:
        """The status of the run that an attempt is for."""
        if fault := attempt.fault():
            return RunStatus("failed", f"{fault}; it will be measured again", DAMAGED)
        manifest = attempt.manifest
        state, step = manifest["state"], int(manifest.get("step") or 0)
        if state == "ok":
            return RunStatus("done", with_other(files) if (files := other_code(attempt)) else "")
        if state == "failed":
            kind = str(manifest.get("failure", "error"))
            return RunStatus("failed", str(manifest.get("why")), kind, step)
        job = self.job(attempt)
        if self.queued is None:
            then = "running" if state == "running" else "queued"
            return RunStatus(then, "when SLURM was last heard of", step=step)
        if job is not None and job in self.queued:
            return self._queued(attempt, self.queued[job], step)
        if state == "preempted":
            return RunStatus("stopped", f"saved at step {step}; submit again to go on", "preempted", step)
        if (self.folders.launch(attempt) / diagnosis.CANCEL).exists():
            return RunStatus("failed", "cancelled", "cancelled", step)
        ended = self.ended.get(job) if job is not None else None
        kind, why = diagnosis.of_job(ended.state if ended else None)
        if kind == "killed" and state == "submitted" and (lack := self._code_damage(manifest)):
            kind, why = "code", lack
        return RunStatus("failed", why, kind, step)

    def _code_damage(self, manifest: Mapping[str, Any]) -> str:
        """What is wrong with a job's code, of which too little may be left to say it; or nothing."""
        is_copy = manifest.get("sweep") and manifest.get("code")
        return code_version.damage(self.folders.code / Path(str(manifest["code"])).name) if is_copy else ""

    def _queued(self, attempt: Attempt, job: QueuedJob, step: int) -> RunStatus:
        manifest = attempt.manifest
        if job.state != "PENDING" and manifest["state"] == "submitted":
            return RunStatus("queued", f"its job begins on {job.nodes}, or is at another of its runs")
        if job.state != "PENDING":
            done = self.progress(attempt)
            return RunStatus("running", f"on {job.nodes}", step=done.step, steps=done.steps)
        why = why_waiting(job.reason)
        if manifest["state"] == "preempted":
            return RunStatus("requeued", f"saved at step {step}, waits: {why}", "preempted", step)
        if manifest.get("why"):
            return RunStatus("requeued", f"{manifest['why']}; waits: {why}", step=step)
        return RunStatus("queued", why)

    def progress(self, attempt: Attempt) -> schema.Progress:
        """The progress of a run, from the note of its newest start."""
        notes = sorted(self.folders.launch(attempt).glob("start-*/progress.json"), key=os.path.getmtime)
        return (read_note(notes[-1], schema.Progress) if notes else None) or schema.Progress()

    def _is_silent(self, attempt: Attempt) -> bool:
        return attempt.state in ("submitted", "running") and self.job(attempt) not in (self.queued or ())


def stuck(states: Iterable[RunStatus]) -> set[str]:
    """Reasons of jobs that wait and will not begin unless somebody does something."""
    waiting = (run.why for run in states if run.state in ("queued", "requeued"))
    return {why for why in waiting if NOT_BY_ITSELF in why or UNTIL_RELEASED in why}
