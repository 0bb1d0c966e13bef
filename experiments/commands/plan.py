from __future__ import annotations

from typing import Any

from experiments.commands._find import check_on_slurm
from experiments.commands._make import say
from experiments.commands._words import ItemsAndSettings
from experiments.config.folders import Folders
from experiments.config.grid import name_and_configs
from experiments.config.measured import missing
from experiments.config.plan import PlannedRun, plan_runs
from experiments.launch.arrays import Array, arrays, sbatch_texts

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
    for number, array in enumerate(arrays(todo, block)):
        _print_array(number, array)
    print("`--sbatch` shows what sbatch is given; `submit` with the same words submits")
    return 0


def _print_array(number: int, array: Array) -> None:
    limit = f"{array.cluster['time_min']} min and {array.node_hours:.1f} node-hours at most"
    print(f"  array {number}: {len(array.jobs)} jobs of {array.shape}, {limit}")
    for job in array.jobs[:LISTED]:
        print("    " + ", ".join(_short(run.config) for run in job))
    if len(array.jobs) > LISTED:
        print(f"    ... and {len(array.jobs) - LISTED} more")


def _short(config: dict[str, Any]) -> str:
    if variants := config["variants"]:
        return f"{', '.join(variant['name'] for variant in variants)} in turns seed {config['seed']}"
    density = config["method"].get("density")
    return f"{config['method']['name']}" + (f"@{density}" if density else "") + f" seed {config['seed']}"
