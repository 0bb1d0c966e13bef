from __future__ import annotations

from analysis import compare
from experiments.commands._find import last_lines, log_files, the_run
from experiments.commands._summary import summary
from experiments.commands._words import RunName, Runs
from experiments.config.folders import Folders
from experiments.config.measured import remark

GROUP = "results"


def why(words: Runs, *, against: RunName | None = None) -> int:
    """What a run did, and why it failed: its steps, its reason, the end of its workers' logs.

    Args:
        words: part of the run's name.
        against: list instead what differed between where this run and that one were measured.
    """
    folders = Folders()
    if against is not None:
        both = [the_run(words, folders), the_run([against], folders)]
        found = compare.compare(*({**run.manifest, "config": run.config} for run in both))
        print(compare.text(found, *(run.run_id for run in both)))
        return 0
    newest = the_run(words, folders)
    for attempt in folders.store.attempts(newest.run_id):
        print(summary(attempt))
        if attempt.is_valid() and (told := remark([attempt])):
            print(f"  {told}")
        for log in log_files(attempt, folders):
            if lines := last_lines(log):
                print(f"  {log.name}:", *lines, sep="\n    ")
    return 0
