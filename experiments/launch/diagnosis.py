"""What became of a run that is not whole: its class of failure, a sentence, and what happens next."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from analysis.records import schema
from analysis.records.files import read_note
from analysis.records.store import Attempt
from experiments.worker.errors import DISK_FULL, KINDS

DISK_FULL_BYTES = 64 * 1024  # with less than that free, a worker can't even leave a note of how it ended


class Policy(NamedTuple):
    """The policy for a class of failure: what is done without being asked, and what a person can do."""

    requeue: int  # how often the same job goes on by itself; -1: as often as the cluster's `requeues` allows
    advice: str


AS_OFTEN_AS_ALLOWED = -1
OF_NO_MEMORY = (signal.SIGKILL, signal.SIGABRT)  # by the kernel; by C++ that was refused some
CANCEL = "cancel"  # a file in a run's launch folder: a person wants it ended
POLICIES = {
    "preempted": Policy(AS_OFTEN_AS_ALLOWED, "it goes on from its checkpoint"),
    "node": Policy(AS_OFTEN_AS_ALLOWED, "SLURM starts it again; a node that failed twice is avoided"),
    "killed": Policy(1, "submit again: it goes on from its last checkpoint; for memory, see cluster.mem_gb"),
    "lost": Policy(1, "submit again: it goes on from its last checkpoint"),
    "time_limit": Policy(0, "submit again: it goes on from its last checkpoint; or set cluster.time_min"),
    "cancelled": Policy(0, "submit again to go on from its last checkpoint"),
    "interrupted": Policy(0, "run it again"),
    "memory": Policy(0, "a smaller task.batch_size, fewer workers a node, or a larger cluster.mem_gb"),
    "disk": Policy(0, "free some space and submit again: finished runs are kept"),
    "held": Policy(AS_OFTEN_AS_ALLOWED, "wait for the end of the process that writes it, or end it"),
    "disturbed": Policy(0, "leave a run's folder alone while it is measured, and run it again"),
    "environment": Policy(0, "`make .venv/.train` installs what runs need"),
    "machine": Policy(0, "another partition, or say what the machine is; or launch.on_mismatch=label"),
    "non_finite": Policy(0, "a lower task.lr"),
    "bad_input": Policy(0, "change the words"),
    "error": Policy(0, "`why` shows the log"),
}
# After these a run goes on from its last checkpoint when it is asked for again.
RESUMABLE = (
    "preempted", "node", "killed", "lost", "time_limit", "cancelled", "interrupted", "memory", "disk",
)  # fmt: skip
# How SLURM's accounting words map to ours, for jobs that ended without a note.
STATES = {
    "CANCELLED": ("cancelled", "the job was cancelled"),
    "NODE_FAIL": ("node", "its node died"),
    "BOOT_FAIL": ("node", "its node did not boot"),
    "OUT_OF_MEMORY": ("memory", "the job used more memory than it had"),
    "TIMEOUT": ("time_limit", "the job ran into its time limit before it could save"),
    "DEADLINE": ("time_limit", "the job ran into its deadline"),
    "PREEMPTED": ("killed", "the job was preempted before it could save"),
}


def diagnose(folder: Path, codes: Mapping[int, int], size: int) -> tuple[str, str]:
    """The failure's class and a sentence: the first cause, not its consequences on the other workers.

    Args:
        folder: the start's notes.
        codes: exit code by rank of the workers that ended by themselves, negative for a signal.
    """
    if not folder.is_dir():
        return "disturbed", f"{folder} was removed while the run was under way"
    found = [read_note(path, schema.Failure) for path in folder.glob("failure*.json")]
    notes = [note for note in found if note and note.kind in KINDS]
    causes = [note for note in notes if note.kind != "lost"]
    if causes:
        first = min(causes, key=lambda note: (KINDS.index(note.kind), note.rank))
        return first.kind, first.why
    # Who left a note was not killed, even if its end was untidy: what is left of a lost group may abort it.
    told = {note.rank for note in notes}
    if killed := {rank: -code for rank, code in codes.items() if code < 0 and rank not in told}:
        rank, number = min(killed.items())
        others = "; the other workers were stopped" if size > 1 else ""
        hint = " (if nobody did that, memory may have run out)" if number in OF_NO_MEMORY else ""
        return "killed", f"worker {rank} was killed by {signal.Signals(number).name}{hint}{others}"
    if silent := sorted(set(range(size)) - set(codes)):
        if shutil.disk_usage(folder).free < DISK_FULL_BYTES:
            return "disk", DISK_FULL
        return "killed", f"the process of worker {silent[0]} ended without a word"
    if notes:
        return notes[0].kind, notes[0].why
    code = next((code for code in codes.values() if code), 0)
    return "error", f"a worker ended with exit code {code} and no explanation"


def of_job(state: str | None) -> tuple[str, str]:
    """The same for a job that is gone and left no note, from its state in the accounting; None without."""
    if state in STATES:
        return STATES[state]
    return (
        "killed",
        "the job ended without a word: cancelled, killed, or started where the results folder can't be seen",
    )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or another signal ended the command; the message says what is saved."""


class RunFailed(RuntimeError):
    """A run was started and did not end well. `kind` is the failure's class, `kind == "bad_input"` the
    user's.
    """

    def __init__(self, why: str, kind: str, attempt: Attempt) -> None:
        super().__init__(why)
        self.kind, self.attempt = kind, attempt
