from __future__ import annotations

from collections.abc import Mapping

from analysis.records import run_id
from experiments.commands._expected import Expected, hours
from experiments.commands._find import check_on_slurm
from experiments.commands._listing import every_run
from experiments.commands._make import say
from experiments.commands._words import ItemsAndSettings
from experiments.config.folders import Folders
from experiments.config.grid import name_and_configs
from experiments.config.measured import missing
from experiments.config.plan import PlannedRun, plan_runs
from experiments.launch.arrays import Array, arrays, sbatch_texts
from experiments.launch.progress_bar import labels_of

GROUP = "cluster"
LISTED = 30  # jobs that are described one by one


def plan(words: ItemsAndSettings, *, sbatch: bool = False, all: bool = False) -> int:
    """The runs, arrays and node-hours that `submit` with these words would mean; submits nothing.

    Args:
        words: figures, with settings for their runs; or the settings of one run, or of a grid
            (method=topk,dgc seed=0,1,2).
        sbatch: show what sbatch is given.
        all: of a figure, also the runs that make it firmer, mostly with more seeds.
    """
    name, configs = name_and_configs(words, all)
    try:
        planned = plan_runs(configs, say)
    except ValueError as error:
        say(f"before `submit`: {error}")
        planned = [PlannedRun(config, None) for config in configs]
    folders, block = Folders(), planned[0].config["launch"]["block"]
    found = arrays(check_on_slurm(planned), block)
    if sbatch:
        print("\n".join(sbatch_texts(found, folders, f"{name}-001")))
        return 0
    todo = missing(planned, folders, say)
    where = planned[0].config["cluster"]["name"]
    print(f"{name} on {where}: {len(planned)} runs, {len(todo)} not measured yet")
    names, expected = labels_of(todo), Expected(every_run(folders)) if todo else None
    for number, array in enumerate(arrays(todo, block)):
        _print_array(number, array, names)
        if expected is not None:
            print(f"    {expected.sentence(array)}")
    print("`--sbatch` shows what sbatch is given; `submit` with the same words submits")
    return 0


def _print_array(number: int, array: Array, names: Mapping[str, str]) -> None:
    limit = f"{array.cluster['time_min']} min and {hours(array, array.node_hours)} at most"
    print(f"  array {number}: {len(array.jobs)} jobs of {array.shape}, {limit}")
    for job in array.jobs[:LISTED]:
        print("    " + ", ".join(names[run_id(run.config)] for run in job))
    if len(array.jobs) > LISTED:
        print(f"    ... and {len(array.jobs) - LISTED} more")
