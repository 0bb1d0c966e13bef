"""Which runs have a record already, and what a user should know before it is used again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from analysis.records import Attempt, run_id, variant_configs
from experiments.config import code_version
from experiments.config.data_root import dataset_of
from experiments.config.folders import Folders
from experiments.config.plan import PlannedRun

NAMED = 3  # files in a sentence


def missing(planned: Sequence[PlannedRun], folders: Folders, say: Callable[[str], None]) -> list[PlannedRun]:
    """The runs without a valid attempt. Says which attempts are damaged, and which are of other code."""
    by_id = {run_id(run.config): run for run in planned}
    for name in by_id:
        for fault in folders.store.faults(name):
            say(fault)
    found = {name: folders.store.newest_valid(name) for name in by_id}
    if told := remark(filter(None, found.values())):
        say(told)
    return [run for run in planned if found[run_id(run.config)] is None]


def remark(attempts: Iterable[Attempt]) -> str:
    """A sentence on those that were made with other code than this; empty where none was."""
    differing = {attempt: files for attempt in attempts if (files := other_code(attempt))}
    if not differing:
        return ""
    files = sorted({file for changed in differing.values() for file in changed})
    who = next(iter(differing)).run_id if len(differing) == 1 else f"{len(differing)} runs"
    return f"{who}: {with_other(files)}"


def with_other(files: Sequence[str]) -> str:
    listed = ", ".join(files[:NAMED]) + (f" and {len(files) - NAMED} more" if len(files) > NAMED else "")
    return f"measured with other code ({listed}); --force measures again"


def other_code(attempt: Attempt) -> list[str]:
    """The files that its numbers rest on and that have changed since; older records do not say."""
    config = attempt.config
    methods = {each["method"]["name"] for each in (config, *variant_configs(config).values())}
    task = config["task"]["name"]
    # A data set that is not found is replaced by the digits.
    return code_version.changed(
        attempt.manifest.get("sources", {}), {*methods, task, dataset_of(task), "digits"}
    )
