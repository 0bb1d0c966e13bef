from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from analysis.records.configs import run_id
from experiments.commands._arguments import SettingWords
from experiments.commands._messages import exit_on_failed_run, is_forced, say
from experiments.commands._named_runs import query_status_by_attempt
from experiments.commands._recorded_settings import replace_again_word
from experiments.commands._run_table import OTHER_SETTINGS, load_all_runs, make_run_table
from experiments.commands._terminal import print_table
from experiments.commands.why import describe_attempt
from experiments.config import grid
from experiments.config.compose import config_as_yaml
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.plan import (
    find_unmeasured_runs,
    plan_distinct_runs_and_ensure_data,
    requested_or_default_profile,
)
from experiments.launch.backends import execute_runs
from slurm import environment
from slurm.environment import LauncherGroup

GROUP = "here"


def run(
    words: SettingWords, *, force: bool = False, yes: bool = False, cfg: Literal["job"] | None = None
) -> int:
    """Make and record one run, or a grid: `run method=topk,dgc method.density=0.001,0.01 seed=0,1,2`.

    Args:
        words: settings; those left out have their defaults. Several values, as seed=0,1,2 or seed=range(0,5),
            are as many runs; sweep=NAME names them for `list` and `compare`. again=RUN stands for the
            settings of a recorded run; other settings replace that run's own.
        force: measure again what is already measured (earlier attempts are kept).
        yes: accept more than 1,000 runs.
        cfg: job prints every setting of the runs as YAML, as Hydra does, and runs nothing.
    """
    folders = ResultFolders()
    words = replace_again_word(words, folders)
    sweep, settings = grid.split_sweep_name(words)
    settings = [word for word in settings if not word.startswith("profile=")]
    settings.append(f"profile={requested_or_default_profile(words)}")
    configs = grid.resolve_grid(settings, allow_many=yes)
    force = is_forced(force)
    if cfg == "job":
        print("---\n".join(map(config_as_yaml, configs)), end="")
        return 0
    group = environment.find_launcher_group()
    if group is not None:
        return _run_in_group(configs, group, folders, force)
    planned = plan_distinct_runs_and_ensure_data(configs, say)
    configs = [run.config for run in planned]  # of other data, where those asked for are not here
    grid.add_runs_to_sweep(folders, sweep, configs, say)
    todo = planned if force else find_unmeasured_runs(planned, folders, say)
    name = sweep or ("run" if len(planned) == 1 else "runs")
    if not todo:
        all_of_them = f"all {len(planned)} runs are " if len(planned) > 1 else ""
        say(f"{all_of_them}already measured; --force measures again")
    else:
        if len(planned) > 1:
            say(f"{name}: {len(planned)} runs, {len(todo)} to make")
        with exit_on_failed_run():
            execute_runs(todo, folders, name, settings, force)
    attempts = [*filter(None, map(folders.store.find_newest_valid_of_config, configs))]
    if len(attempts) < len(configs):
        say("a record was removed, or damaged, as soon as it was written")
        return 1
    if len(configs) == 1:
        (attempt,) = attempts
        print(describe_attempt(attempt, query_status_by_attempt([attempt], folders)[attempt]))
    else:
        _print_runs(configs, sweep, folders)
    return 0


def _print_runs(configs: Sequence[Config], sweep: str | None, folders: ResultFolders) -> None:
    """Print the runs of a grid as `list` does, in the order of the grid, and the next command."""
    place_by_id = {run_id(config): place for place, config in enumerate(configs)}
    runs = load_all_runs(folders)
    runs = runs[runs["run_id"].isin(place_by_id)]
    order = runs["run_id"].map(place_by_id).argsort(kind="stable")
    print_table(make_run_table(runs.iloc[order], is_sorted=True), OTHER_SETTINGS)
    if sweep:
        say(f"`python -m experiments compare sweep={sweep}` draws them")


def _run_in_group(
    configs: Sequence[Config], group: LauncherGroup, folders: ResultFolders, force: bool
) -> int:
    """Make a run as one of the processes that mpirun, horovodrun, torchrun or srun started."""
    from experiments.launch.external import run_as_worker  # torch comes with it

    if len(configs) > 1:
        raise ValueError(
            f"{group.launcher} started {group.place.size} processes for one run, and these words mean "
            f"{len(configs)}: call `run` without {group.launcher}, or with one value of each"
        )
    attempt = run_as_worker(configs[0], group, folders, say, force)
    if group.place.rank == 0:
        print(describe_attempt(attempt, query_status_by_attempt([attempt], folders)[attempt]))
    return 0
