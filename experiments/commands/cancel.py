from __future__ import annotations

from collections.abc import Sequence

from analysis.records.store import Attempt
from experiments.commands._find import attempts_of, by_cluster, speaking_to, sweeps_named
from experiments.commands._make import say
from experiments.commands._words import SweepsAndRuns
from experiments.config.folders import Folders
from experiments.launch import submission
from experiments.launch.diagnosis import CANCEL
from experiments.launch.status import StatusView
from slurm import queue
from sparsify.ranges import quoted, shown

GROUP = "cluster"


def cancel(words: SweepsAndRuns) -> int:
    """End jobs; what is finished or saved is kept.

    Args:
        words: parts of the names of sweeps and runs whose jobs end.
    """
    folders = Folders()
    if not words:
        names = ", ".join(sweep.name for sweep in submission.sweeps(folders, say))
        raise ValueError(f"cancel what? Sweeps: {names or 'none'}; or a run's name")
    chosen = sweeps_named(words, folders)
    if not chosen:
        raise ValueError(f"no sweep or run {quoted(words[0])} was submitted; `status` lists them")
    jobs = 0
    for conf, sweeps in by_cluster(chosen).items():
        with speaking_to(conf):
            jobs += _cancel(attempts_of(sweeps, folders, words), folders)
    if not jobs:
        say(f"nothing to cancel: {shown(' '.join(words))} has ended already")
        return 0
    print(f"cancelled {jobs} jobs; `submit` with the same words goes on where checkpoints are")
    return 0


def _cancel(attempts: Sequence[Attempt], folders: Folders) -> int:
    """Cancel the jobs of these attempts that are under way on one cluster; returns how many they are."""
    view, jobs = StatusView.settled(folders, attempts, say), set[str]()
    for attempt in attempts:
        job = view.job(attempt)
        if job is not None and view.of_attempt(attempt).under_way:
            (folders.launch(attempt) / CANCEL).touch()
            jobs.add(job)
    queue.cancel(sorted(jobs))
    return len(jobs)
