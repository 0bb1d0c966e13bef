"""What became of a run that is not whole: its class of failure, a sentence, and what happens next."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from analysis.records.columns import was_bottleneck
from analysis.records.files import read_note
from analysis.records.store import Attempt
from experiments.worker.errors import DISK_FULL, KINDS

RELAY_OVERRUN = (
    "the relay, not the link, was the bottleneck; run it again on a quiet machine, or over a slower link"
)
DISK_FULL_BYTES = 64 * 1024  # with less than that free, a worker can't even leave a note of how it ended


class FailureNote(msgspec.Struct, frozen=True):
    """failure<rank>.json: why a worker ended."""

    rank: int
    kind: str
    why: str


class FailurePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy for a class of failure; failures.yaml explains it."""

    requeue: int = 0
    resumes: bool = False
    stops: bool = False
    advice: str
    slurm: dict[str, str] = {}


AS_OFTEN_AS_ALLOWED = -1
OUT_OF_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGABRT)  # by the kernel; by C++ that was refused some
CANCEL_FILE = "cancel"  # a file in a run's launch folder: a person wants it ended
POLICIES = msgspec.convert(
    yaml.safe_load(Path(__file__).with_name("failures.yaml").read_text()), dict[str, FailurePolicy]
)


def diagnose(folder: Path, codes: Mapping[int, int], size: int) -> tuple[str, str]:
    """The failure's class and a sentence: the first cause, not its consequences on the other workers.

    Args:
        folder: the start's notes.
        codes: exit code by rank of the workers that ended by themselves, negative for a signal.
    """
    if not folder.is_dir():
        return "disturbed", f"{folder} was removed while the run was under way"
    found = [read_note(path, FailureNote) for path in folder.glob("failure*.json")]
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
        hint = " (if nobody did that, memory may have run out)" if number in OUT_OF_MEMORY_SIGNALS else ""
        return "killed", f"worker {rank} was killed by {signal.Signals(number).name}{hint}{others}"
    if silent := sorted(set(range(size)) - set(codes)):
        if shutil.disk_usage(folder).free < DISK_FULL_BYTES:
            return "disk", DISK_FULL
        return "killed", f"the process of worker {silent[0]} ended without a word"
    if notes:
        return notes[0].kind, notes[0].why
    code = next((code for code in codes.values() if code), 0)
    return "error", f"a worker ended with exit code {code} and no explanation"


def diagnose_job_state(state: str | None) -> tuple[str, str]:
    """The same for a job that is gone and left no note, from its state in the accounting; None without."""
    for kind, policy in POLICIES.items():
        if state in policy.slurm:
            return kind, policy.slurm[state]
    return (
        "killed",
        "the job ended without a word: cancelled, killed, or started where the results folder can't be seen",
    )


def contention_warnings(manifest: Mapping[str, Any]) -> list[str]:
    """What is to be said of workers that shared cores, and of a relay that had too little of one."""
    machine = (manifest.get("provenance") or {}).get("machine") or {}
    return [*machine.get("crowded", []), *[RELAY_OVERRUN] * was_bottleneck(manifest.get("relay") or {})]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or another signal ended the command; the message says what is saved."""


class RunFailed(RuntimeError):
    """A run was started and did not end well. `kind` is the failure's class, "bad_input" the user's."""

    def __init__(self, why: str, kind: str, attempt: Attempt) -> None:
        super().__init__(why)
        self.kind, self.attempt = kind, attempt
