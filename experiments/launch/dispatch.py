"""Runs that are missing -> runs that are done: on this machine, or by SLURM, which is watched until it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from experiments.config.folders import Folders
from experiments.config.plan import PlannedRun
from experiments.launch.local import run_here
from experiments.launch.status import watch


def run_all(
    missing: Sequence[PlannedRun],
    folders: Folders,
    name: str,
    words: Sequence[str],
    say: Callable[[str], None],
    force: bool = False,
) -> None:
    """Carry out these runs, wherever their cluster is.

    Raises:
        RunFailed: a run that did not end well; on a cluster only when all the others have ended.
    """
    remote = [run for run in missing if run.config["cluster"]["where"] == "slurm"]
    here = [run for run in missing if run not in remote]
    if remote:
        from experiments.launch.arrays import submit_missing

        sweep = submit_missing(remote, folders, name, words, say, force)
        if sweep is not None:
            say(f"submitted as {sweep.name}; Ctrl-C leaves the jobs alone, the same command goes on watching")
    run_here(here, folders, force)
    if remote:
        watch(remote, folders)
