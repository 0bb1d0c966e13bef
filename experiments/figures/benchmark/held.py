"""Records that entries' files hold already, so that nobody makes them twice."""

from __future__ import annotations

from pathlib import Path

from analysis.benchmark.files import ENTRY_SUFFIX, read_entry
from analysis.benchmark.statement import EntryStatement
from analysis.records.files import DamagedFileError
from analysis.records.frames import Frames, empty_frames, merge_frames, select_runs
from experiments.config.folders import ResultFolders
from experiments.figures.benchmark.laws import is_todays_method_code
from experiments.figures.benchmark.rules import rules_digest

ENTRIES = "entries"  # a folder of results/ and of results/shipped/


def shipped_and_own_entry_folders(folders: ResultFolders) -> list[Path]:
    """Return the two folders of entries' files, shipped and this checkout's own; they may be missing."""
    return [folders.shipped / ENTRIES, folders.results / ENTRIES]


def load_held_records(folders: ResultFolders, tier: str) -> Frames:
    """Return the records in a tier's files that are by today's rules and of methods as they are today.

    These are trainings of all files, and times of this checkout's own, as another machine has others.

    Raises:
        ValueError: a file is no entry's, or was changed.
    """
    found = empty_frames()
    for folder in shipped_and_own_entry_folders(folders):
        for path in sorted(folder.glob(f"*{ENTRY_SUFFIX}")):
            try:
                statement, frames, _ = read_entry(path)
            except DamagedFileError as damage:
                raise ValueError(f"{damage}; move it away, and what only it held is made again") from damage
            if (
                statement.tier != tier
                or statement.rules != rules_digest(tier)
                or not is_todays_method_code(statement.method, statement.code)
            ):
                continue
            if folder.is_relative_to(folders.shipped):
                frames = select_runs(frames, training_keys(statement))
            found = merge_frames(found, frames)
    return found


def training_keys(statement: EntryStatement) -> list[str]:
    """Return the keys of an entry's trials and trainings by virtual workers, alike on any machine."""
    tried = [trial.key for task in statement.tasks.values() for trial in task.trials]
    return tried + [
        key for task in statement.tasks.values() for keys in task.trainings.values() for key in keys
    ]
