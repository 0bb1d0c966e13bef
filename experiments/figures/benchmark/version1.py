"""Entries of version 1, which the pages show until the baseline of version 2 is measured."""

from __future__ import annotations

from msgspec.structs import replace

from analysis.benchmark.files import ENTRY_SUFFIX, EntryFile, read_entry
from experiments.config.folders import ResultFolders
from experiments.figures.benchmark.held import ENTRIES

VERSION = 1
LENGTH = 600  # steps of all trainings
FLOOR_OF_CHARACTERS = 2.2878  # nats: the bigram table's loss on the 64 sequences that version 1 validated on
FLOORS = {"gpt-ptb": FLOOR_OF_CHARACTERS, "lstm-ptb": FLOOR_OF_CHARACTERS, "cnn-cifar10": 2.3026}


def read_version_1_entries(folders: ResultFolders) -> list[EntryFile]:
    """Return the shipped entries of version 1, whose trainings all have the same length."""
    entries = list[EntryFile]()
    for path in sorted((folders.shipped / ENTRIES).glob(f"*-v{VERSION}{ENTRY_SUFFIX}")):
        entry = read_entry(path)
        tasks = {
            name: replace(
                task,
                lengths={
                    workers: dict.fromkeys(keys_by_link, LENGTH)
                    for workers, keys_by_link in task.launches.items()
                },
            )
            for name, task in entry.statement.tasks.items()
        }
        entries.append(entry._replace(statement=replace(entry.statement, tasks=tasks)))
    return entries
