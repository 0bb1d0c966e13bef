from __future__ import annotations

from typing import Any

from experiments.commands._make import is_forced, or_exit, say
from experiments.commands._summary import summary
from experiments.config import compose
from experiments.config.folders import Folders
from experiments.config.measured import missing
from experiments.config.plan import plan_runs, profile_of
from experiments.launch.dispatch import run_all
from slurm import environment
from slurm.environment import Joined


def run(words: list[str], options: set[str]) -> int:
    """One run, recorded; prints where."""
    folders = Folders()
    profile = profile_of(words)
    words = [word for word in words if not word.startswith("profile=")] + [f"profile={profile}"]
    config, force = compose.resolve(words), is_forced(options)
    if (group := environment.joined()) is not None:
        return _run_together(config, group, folders, force)
    planned = plan_runs([config], say)
    if not force and not missing(planned, folders, say):
        say("already measured; --force measures again")
    else:
        or_exit(lambda: run_all(planned, folders, "run", words, say, force))
    attempt = folders.store.valid(planned[0].config)
    if attempt is None:
        say("its record was removed, or damaged, as soon as it was written")
        return 1
    print(summary(attempt))
    return 0


def _run_together(config: dict[str, Any], group: Joined, folders: Folders, force: bool) -> int:
    """As one of the processes that mpirun, horovodrun, torchrun or srun started."""
    from experiments.launch.external import run_as_worker  # torch comes with it

    attempt = run_as_worker(config, group, folders, say, force)
    if group.place.rank == 0:
        print(summary(attempt))
    return 0
