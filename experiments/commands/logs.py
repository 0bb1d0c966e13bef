from __future__ import annotations

from experiments.commands._arguments import Runs
from experiments.commands._messages import say
from experiments.commands._named_runs import find_log_files, find_newest_attempt_of_run, read_last_lines
from experiments.config.folders import ResultFolders

GROUP = "cluster"


def logs(words: Runs) -> int:
    """Print the end of each log of a run's newest attempt.

    Args:
        words: part of the run's name.
    """
    folders = ResultFolders()
    attempt = find_newest_attempt_of_run(words, folders)
    paths = find_log_files(attempt, folders)
    if not paths:
        say(f"{attempt.run_id} has no logs: it has not started, or ended well on this machine")
        return 1
    for path in paths:
        lines = read_last_lines(path)
        if lines:
            print(f"{path}:", *lines, sep="\n  ")
    return 0
