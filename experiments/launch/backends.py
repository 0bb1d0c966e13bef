"""The loop that carries out missing runs, on this machine and by SLURM, until all have ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun
from experiments.launch.local import LocalBackend
from experiments.launch.progress_bar import ProgressBar, label_by_run_id
from experiments.launch.submission import SlurmBackend

POLL_S = 0.1


def execute_runs(
    planned: Sequence[PlannedRun],
    folders: ResultFolders,
    sweep_name: str,
    words: Sequence[str],
    force: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> None:
    """Carry out runs, on this machine and by SLURM, and show their progress.

    Args:
        on_progress: called when more runs are done, while others go on.

    Raises:
        RunFailed: a run did not end well; raised when all the others have ended, or at once where what ended
            it would end those that wait on this machine as well.
        CommandInterrupted: a signal came; jobs of a cluster are left alone.
    """
    on_slurm = [run for run in planned if isinstance(run.config.cluster, SlurmCluster)]
    on_this_machine = [run for run in planned if not isinstance(run.config.cluster, SlurmCluster)]
    progress = ProgressBar(label_by_run_id(planned))
    backends: list[LocalBackend | SlurmBackend] = []
    with contextlib.ExitStack() as sessions:
        sessions.callback(progress.close)
        # SLURM first: what waits for it ends on any signal, which `LocalBackend` only passes to its workers.
        if on_slurm:
            backends.append(SlurmBackend(on_slurm, folders, progress, sweep_name, words, force))
        if on_this_machine:
            backends.append(LocalBackend(on_this_machine, folders, progress, force))
        for backend in backends:
            sessions.enter_context(backend.session())
        num_reported = 0
        while True:
            unfinished = list(filter(None, [backend.poll_unfinished_runs() for backend in backends]))
            if not unfinished:
                break
            running = [run for runs in unfinished for run in runs.running]
            progress.update(running, sum(runs.num_waiting for runs in unfinished))
            if on_progress and progress.num_done > num_reported:
                num_reported = progress.num_done
                on_progress()
            time.sleep(POLL_S)
