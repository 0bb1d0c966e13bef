from __future__ import annotations

from typing import Any

from experiments.commands._make import is_forced, or_exit, say
from experiments.commands._summary import summary
from experiments.commands._words import Settings
from experiments.config import compose
from experiments.config.folders import Folders
from experiments.config.measured import missing
from experiments.config.plan import plan_runs, profile_of
from experiments.launch.dispatch import run_all
from slurm import environment
from slurm.environment import Joined

GROUP = "here"


def run(words: Settings, *, force: bool = False) -> int:
    """One run, recorded: run method=topk method.density=0.001 task=cnn_cifar10 workers=8

    Args:
        words: its settings; those left out have their defaults.
        force: measure again what is already measured (earlier attempts are kept).
    """
    folders = Folders()
    profile = profile_of(words)
    words = [word for word in words if not word.startswith("profile=")] + [f"profile={profile}"]
    config, force = compose.resolve(words), is_forced(force)
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
