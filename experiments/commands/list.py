from __future__ import annotations

from experiments.commands._arguments import Filters
from experiments.commands._messages import say
from experiments.commands._run_table import OTHER_SETTINGS, filter_runs, load_all_runs, make_run_table
from experiments.commands._terminal import print_table
from experiments.config.folders import ResultFolders

GROUP = "results"
MAX_LISTED = 200  # runs that are listed one by one


def list(words: Filters, *, all: bool = False) -> int:
    """List runs with settings, accuracy, time of a step, bytes and state: `list sweep=thesis seed=0`.

    Args:
        words: filters, all of which must fit: method=topk, seed=0,1, state=failed, sweep=NAME,
            source=shipped, an item such as fig3, or part of a run's name.
        all: list every run, not only the newest 200.
    """
    runs = filter_runs(load_all_runs(ResultFolders()), words)
    if not len(runs):
        say("no run is meant by these words" if words else "nothing was measured yet; `run` makes a run")
        return 1 if words else 0
    table = make_run_table(runs if all else runs.tail(MAX_LISTED))
    print_table(table, OTHER_SETTINGS)
    if len(runs) > len(table.frame):
        say(f"the newest {len(table.frame)} of {len(runs)} runs; --all lists all")
    return 0
