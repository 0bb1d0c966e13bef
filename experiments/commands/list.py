from __future__ import annotations

from experiments.commands._arguments import Filters
from experiments.commands._messages import say
from experiments.commands._run_table import OTHER_SETTINGS, filter_runs, load_runs, make_run_table
from experiments.commands._terminal import print_table
from experiments.config.folders import ResultFolders

GROUP = "results"
LISTED = 200  # runs that are listed one by one


def list(words: Filters, *, all: bool = False) -> int:
    """Runs: what tells them apart, accuracy, time of a step, bytes, state: list sweep=thesis seed=0

    Args:
        words: which of them: method=topk, seed=0,1, state=failed, sweep=NAME, source=shipped, an item such as
            fig3, or part of a run's name; all of them must fit.
        all: every one of them, not only the newest 200.
    """
    runs = filter_runs(load_runs(ResultFolders()), words)
    if not len(runs):
        say("no run is meant by these words" if words else "nothing was measured yet; `run` makes a run")
        return 0 if not words else 1
    found = make_run_table(runs if all else runs.tail(LISTED))
    print_table(found, OTHER_SETTINGS)
    if len(runs) > len(found.frame):
        say(f"the newest {len(found.frame)} of {len(runs)} runs; --all lists all")
    return 0
