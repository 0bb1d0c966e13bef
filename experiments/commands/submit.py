from __future__ import annotations

from experiments.commands._arguments import ItemsAndSettings
from experiments.commands._messages import say
from experiments.commands._named_runs import check_runs_are_for_slurm
from experiments.config import grid
from experiments.config.folders import ResultFolders
from experiments.config.plan import plan_distinct_runs_and_ensure_data
from experiments.figures.runs import attach_claim_rules, requested_runs
from experiments.launch import submission

GROUP = "cluster"


def submit(words: ItemsAndSettings, *, all: bool = False, force: bool = False, yes: bool = False) -> int:
    """Queue runs that are neither measured nor queued: `submit method=topk,dgc cluster=NAME`.

    The command does not wait for them.

    Args:
        words: figures, with settings for their runs; or the settings of one run, or of a grid. sweep=NAME
            names them for `list` and `compare`.
        all: also make the runs that make a figure firmer, mostly with more seeds.
        force: measure again what is already measured (earlier attempts are kept).
        yes: accept a grid of more than 1,000 runs.
    """
    name, configs = requested_runs(words, include_additional=all, allow_many=yes)
    planned = attach_claim_rules(plan_distinct_runs_and_ensure_data(configs, say), words)
    check_runs_are_for_slurm(planned)
    folders = ResultFolders()
    grid.add_runs_to_sweep(folders, grid.split_sweep_name(words)[0], configs, say)
    sweep = submission.submit_missing_runs(planned, folders, name, words, say, force)
    if sweep is None:
        say(f"nothing to submit: all {len(planned)} runs are measured, under way or left alone")
        return 0
    print(sweep.name)
    return 0
