"""Runs that are missing -> runs that are done, wherever their cluster is: the one loop that watches them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from experiments.config.folders import Folders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun
from experiments.launch.local import LocalBackend
from experiments.launch.progress_bar import ProgressBar, labels_by_run
from experiments.launch.submission import SlurmBackend

POLL_S = 0.1


def execute_runs(
    missing: Sequence[PlannedRun],
    folders: Folders,
    name: str,
    words: Sequence[str],
    force: bool = False,
    after: Callable[[], None] | None = None,
) -> None:
    """Carry out these runs, here and by SLURM, and show their progress.

    Args:
        after: called when more runs are done, while others go on.

    Raises:
        RunFailed: a run that did not end well, when all the others have ended; at once where what ended it
            would end those that wait on this machine as well.
        Interrupted: by a signal; jobs of a cluster are left alone.
    """
    there = [run for run in missing if isinstance(run.config.cluster, SlurmCluster)]
    here = [run for run in missing if not isinstance(run.config.cluster, SlurmCluster)]
    progress, backends, told = ProgressBar(labels_by_run(missing)), list[LocalBackend | SlurmBackend](), 0
    with contextlib.ExitStack() as attended:
        attended.callback(progress.close)
        if (
            there
        ):  # first: what waits for SLURM ends on any signal, which `LocalBackend` only passes to its workers
            backends.append(SlurmBackend(there, folders, progress, name, words, force))
        if here:
            backends.append(LocalBackend(here, folders, progress, force))
        for backend in backends:
            attended.enter_context(backend.attended())
        while looks := [look for backend in backends if (look := backend.look())]:
            running = [run for look in looks for run in look.running]
            progress.show(running, sum(look.num_waiting for look in looks))
            if after and progress.num_done > told:
                told = progress.num_done
                after()
            time.sleep(POLL_S)
