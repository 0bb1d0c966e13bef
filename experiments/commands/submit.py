from __future__ import annotations

from experiments.commands._find import check_on_slurm
from experiments.commands._make import is_all, say
from experiments.config.folders import Folders
from experiments.config.grid import name_and_configs
from experiments.config.plan import plan_runs
from experiments.launch import arrays


def submit(words: list[str], options: set[str]) -> int:
    """Queue what is neither measured nor queued already; returns at once. `status` shows how it goes."""
    name, configs = name_and_configs(words, is_all(options))
    planned = check_on_slurm(plan_runs(configs, say))
    sweep = arrays.submit_missing(planned, Folders(), name, words, say, "--force" in options)
    if sweep is None:
        say(f"nothing to submit: all {len(planned)} runs are measured or under way")
        return 0
    print(sweep.name)
    return 0
