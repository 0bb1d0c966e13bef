"""The class of a run's failure, a sentence on it, and what happens next."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from analysis.records.columns import is_relay_bottleneck
from analysis.records.files import try_read_struct
from analysis.records.store import Attempt
from experiments.worker.errors import DISK_FULL, KINDS

RELAY_OVERRUN = (
    "the relay, not the link, was the bottleneck; run it again on a quiet machine, or over a slower link"
)
DISK_FULL_BYTES = 64 * 1024  # with less than that free, a worker can't even leave a note of how it ended


class FailureNote(msgspec.Struct, frozen=True):
    """The note failure<rank>.json on why a worker ended."""

    rank: int
    kind: str
    why: str


class FailurePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy for a class of failure; failures.yaml explains the fields."""

    max_requeues: int = 0
    can_resume: bool = False
    stops_waiting_runs: bool = False
    advice: str
    why_by_job_state: dict[str, str] = {}


AS_OFTEN_AS_ALLOWED = -1
OUT_OF_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGABRT)  # by the kernel; by C++ that was refused some
CANCEL_FILE = "cancel"  # in a run's launch folder: a person wants the run ended
POLICIES = msgspec.convert(
    yaml.safe_load(Path(__file__).with_name("failures.yaml").read_text()), dict[str, FailurePolicy]
)


class Diagnosis(NamedTuple):
    """The class of a run's failure, and a sentence on it."""

    kind: str  # of POLICIES
    why: str  # a sentence for people


def diagnose_failed_start(start_folder: Path, code_by_rank: Mapping[int, int], size: int) -> Diagnosis:
    """Return the first cause of a failure, not its consequences on the other workers.

    Args:
        start_folder: folder of the start, with its notes.
        code_by_rank: exit codes of the workers that ended by themselves, negative for a signal.
        size: number of workers.
    """
    if not start_folder.is_dir():
        return Diagnosis("disturbed", f"{start_folder} was removed while the run was under way")
    all_notes = (try_read_struct(path, FailureNote) for path in start_folder.glob("failure*.json"))
    notes = [note for note in all_notes if note and note.kind in KINDS]
    causes = [note for note in notes if note.kind != "lost"]
    if causes:
        cause = min(causes, key=lambda note: (KINDS.index(note.kind), note.rank))
        return Diagnosis(cause.kind, cause.why)
    # Who left a note was not killed, even if its end was untidy: what is left of a lost group may abort it.
    killed = {rank for rank, code in code_by_rank.items() if code < 0} - {note.rank for note in notes}
    if killed:
        rank = min(killed)
        number = -code_by_rank[rank]
        others = "; the other workers were stopped" if size > 1 else ""
        hint = " (if nobody did that, memory may have run out)" if number in OUT_OF_MEMORY_SIGNALS else ""
        return Diagnosis("killed", f"worker {rank} was killed by {signal.Signals(number).name}{hint}{others}")
    silent = {*range(size)} - {*code_by_rank}
    if silent:
        if shutil.disk_usage(start_folder).free < DISK_FULL_BYTES:
            return Diagnosis("disk", DISK_FULL)
        return Diagnosis("killed", f"the process of worker {min(silent)} ended without a word")
    if notes:
        return Diagnosis(notes[0].kind, notes[0].why)
    code = next((code for code in code_by_rank.values() if code), 0)
    return Diagnosis("error", f"a worker ended with exit code {code} and no explanation")


def diagnose_job_state(state: str) -> Diagnosis:
    """Return the cause of a job's end from its state in SLURM's accounting, for a job that left no note."""
    for kind, policy in POLICIES.items():
        if state in policy.why_by_job_state:
            return Diagnosis(kind, policy.why_by_job_state[state])
    return Diagnosis(
        "killed",
        "the job ended without a word: cancelled, killed, or started where the results folder can't be seen",
    )


def contention_warnings(manifest: Mapping[str, Any]) -> list[str]:
    """Return sentences on workers that shared cores, and on a relay that had too little of one."""
    machine = (manifest.get("provenance") or {}).get("machine") or {}
    warnings = [*machine.get("crowded", [])]
    if is_relay_bottleneck(manifest.get("relay") or {}):
        warnings.append(RELAY_OVERRUN)
    return warnings


class CommandInterrupted(KeyboardInterrupt):
    """Ctrl-C or another signal ended the command; the message says what is saved."""


class RunFailed(RuntimeError):
    """A run was started and did not end well. `kind` is the class of the failure, one of POLICIES."""

    def __init__(self, why: str, kind: str, attempt: Attempt) -> None:
        super().__init__(why)
        self.kind = kind
        self.attempt = attempt
