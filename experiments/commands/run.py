from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.records import run_id
from experiments.commands._listing import every_run, table
from experiments.commands._make import is_forced, or_exit, say
from experiments.commands._summary import summary
from experiments.commands._terminal import show
from experiments.commands._words import Settings
from experiments.config import grid, sweeps
from experiments.config.folders import Folders
from experiments.config.measured import missing
from experiments.config.plan import plan_runs, profile_of
from experiments.launch.dispatch import run_all
from slurm import environment
from slurm.environment import Joined

GROUP = "here"


def run(words: Settings, *, force: bool = False, yes: bool = False) -> int:
    """One run, or a grid of them, recorded: run method=topk,dgc method.density=0.001,0.01 seed=0,1,2

    Args:
        words: its settings; those left out have their defaults. Several values, as seed=0,1,2 or
            seed=range(0,5), are as many runs; sweep=NAME names them for `list` and `compare`.
        force: measure again what is already measured (earlier attempts are kept).
        yes: also more than 1,000 runs.
    """
    folders = Folders()
    sweep, settings = sweeps.named(words)
    settings = [word for word in settings if not word.startswith("profile=")]
    settings.append(f"profile={profile_of(words)}")
    configs, force = grid.configs(settings, yes), is_forced(force)
    if (group := environment.joined()) is not None:
        return _run_together(configs, group, folders, force)
    planned = plan_runs(configs, say)
    configs = [run.config for run in planned]  # of other data, where those asked for are not here
    sweeps.note(folders, sweep, configs)
    todo = planned if force else missing(planned, folders, say)
    name = sweep or ("run" if len(planned) == 1 else "runs")
    if not todo:
        all_of_them = f"all {len(planned)} runs are " if len(planned) > 1 else ""
        say(f"{all_of_them}already measured; --force measures again")
    else:
        if len(planned) > 1:
            say(f"{name}: {len(planned)} runs, {len(todo)} to make")
        or_exit(lambda: run_all(todo, folders, name, settings, say, force))
    attempts = [folders.store.valid(config) for config in configs]
    if None in attempts:
        say("a record was removed, or damaged, as soon as it was written")
        return 1
    if len(configs) == 1:
        print(summary(*filter(None, attempts)))
    else:
        _show(configs, sweep, folders)
    return 0


def _show(configs: Sequence[dict[str, Any]], sweep: str | None, folders: Folders) -> None:
    """The runs of a grid as `list` has them, in its order, and what to do with them."""
    place = {run_id(config): number for number, config in enumerate(configs)}
    runs = every_run(folders)
    runs = runs[runs["run_id"].isin(place)]
    show(table(runs.iloc[runs["run_id"].map(place).argsort(kind="stable")], in_order=True))
    if sweep:
        say(f"`python -m experiments compare sweep={sweep}` draws them")


def _run_together(configs: Sequence[dict[str, Any]], group: Joined, folders: Folders, force: bool) -> int:
    """As one of the processes that mpirun, horovodrun, torchrun or srun started."""
    from experiments.launch.external import run_as_worker  # torch comes with it

    if len(configs) > 1:
        raise ValueError(
            f"{group.starter} started {group.place.size} processes for one run, and these words mean "
            f"{len(configs)}: call `run` without {group.starter}, or with one value of each"
        )
    attempt = run_as_worker(configs[0], group, folders, say, force)
    if group.place.rank == 0:
        print(summary(attempt))
    return 0
