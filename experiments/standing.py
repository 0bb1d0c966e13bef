"""Where submitted runs stand, from what lies on the disk and one question to SLURM; in any later login."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from analysis.records import Attempt, read_json
from experiments import diagnosis
from experiments.planning import Folders
from slurm import queue
from slurm.queue import Ended, Queued

UNDER_WAY = ("queued", "running", "requeued")


class Standing(NamedTuple):
    """Of one run."""

    state: str  # done, running, queued, requeued (it will go on), stopped (it can go on), failed
    why: str = ""  # a sentence for a person
    kind: str = ""  # a class of diagnosis.POLICIES
    step: int = 0
    steps: int | None = None

    @property
    def under_way(self) -> bool:
        return self.state in UNDER_WAY


@dataclass
class View:
    """SLURM's answers, asked once for all runs."""

    folders: Folders
    queued: Mapping[str, Queued] | None  # None: SLURM can't be asked
    by_name: Mapping[str, str] = field(default_factory=dict)  # "<array's name>:<task>" -> job id
    ended: Mapping[str, Ended] = field(default_factory=dict)

    @classmethod
    def of(cls, folders: Folders, queued: Mapping[str, Queued]) -> View:
        by_name = {f"{job.name}:{name.partition('_')[2] or 0}": name for name, job in queued.items()}
        return cls(folders, queued, by_name)

    def ask_accounts(self, attempts: list[Attempt]) -> None:
        """How the jobs ended that left no word; one question, and none if all did."""
        silent = [job for one in attempts if (job := self.job(one)) and self._is_silent(one)]
        self.ended = queue.accounts(silent)

    def job(self, attempt: Attempt) -> str | None:
        """Its job's id; known to SLURM by the array's name where the submitting process died too early."""
        return attempt.job or self.by_name.get(str(attempt.manifest.get("array")))

    def of_attempt(self, attempt: Attempt) -> Standing:
        manifest = attempt.manifest
        state, step = manifest["state"], int(manifest.get("step") or 0)
        if state == "ok":
            return Standing("done") if attempt.is_valid() else _broken()
        if state == "failed":
            kind = str(manifest.get("failure", "error"))
            return Standing("failed", str(manifest.get("why")), kind, step)
        job = self.job(attempt)
        if self.queued is None:
            then = "running" if state == "running" else "queued"
            return Standing(then, "when SLURM was last heard of", step=step)
        if job in self.queued:
            return self._queued(attempt, self.queued[job], step)
        if state == "preempted":
            return Standing("stopped", f"saved at step {step}; submit again to go on", "preempted", step)
        if (self.folder(attempt) / diagnosis.CANCEL).exists():
            return Standing("failed", "cancelled", "cancelled", step)
        kind, why = diagnosis.of_job(self.ended[job].state if job in self.ended else None)
        return Standing("failed", why, kind, step)

    def _queued(self, attempt: Attempt, job: Queued, step: int) -> Standing:
        manifest = attempt.manifest
        if job.state != "PENDING" and manifest["state"] == "submitted":
            return Standing("queued", f"its job begins on {job.nodes}, or is at another of its runs")
        if job.state != "PENDING":
            done, steps = self.progress(attempt)
            return Standing("running", f"on {job.nodes}", step=done, steps=steps)
        why = f"{job.reason}" if job.reason not in ("None", "") else "its turn comes"
        if manifest["state"] == "preempted":
            return Standing("requeued", f"saved at step {step}, waits: {why}", "preempted", step)
        if manifest.get("why"):
            return Standing("requeued", f"{manifest['why']}; waits: {why}", step=step)
        return Standing("queued", why)

    def folder(self, attempt: Attempt) -> Path:
        """Of its starts."""
        return self.folders.launch(attempt)

    def progress(self, attempt: Attempt) -> tuple[int, int | None]:
        """Steps done and steps in all, from the note of the newest start."""
        notes = sorted(self.folder(attempt).glob("start-*/progress.json"), key=_age)
        note = (read_json(notes[-1]) if notes else None) or {}
        return int(note.get("step", 0)), note.get("steps")

    def _is_silent(self, attempt: Attempt) -> bool:
        return attempt.state in ("submitted", "running") and self.job(attempt) not in (self.queued or ())


def _broken() -> Standing:
    return Standing("failed", "its files are not as the record says; it will be measured again", "error")


def _age(path: Path) -> float:
    return path.stat().st_mtime
