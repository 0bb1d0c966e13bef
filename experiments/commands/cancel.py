from __future__ import annotations

from experiments.commands._find import attempts_of, sweeps_named, view_of
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
    view_of(chosen, folders)  # where SLURM can't be asked, this says so
    attempts = attempts_of(chosen, folders, words)
    view, jobs = StatusView.settled(folders, attempts, say), set[str]()
    for attempt in attempts:
        job = view.job(attempt)
        if job is not None and view.of_attempt(attempt).under_way:
            (folders.launch(attempt) / CANCEL).touch()
            jobs.add(job)
    if not jobs:
        say(f"nothing to cancel: {shown(' '.join(words))} has ended already")
        return 0
    queue.cancel(sorted(jobs))
    print(f"cancelled {len(jobs)} jobs; `submit` with the same words goes on where checkpoints are")
    return 0
