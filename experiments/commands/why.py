from __future__ import annotations

from analysis import compare
from experiments.commands._find import last_lines, log_files, the_run
from experiments.commands._summary import summary
from experiments.config.folders import Folders
from experiments.config.measured import remark


def why(words: list[str], options: set[str]) -> int:
    """What a run did; for a failed one the reason and the end of its workers' logs. `--against RUN` compares
    where two runs were measured."""
    folders = Folders()
    if "--against" in options:
        if len(words) != 2:
            raise ValueError("why RUN --against RUN takes two runs")
        both = [the_run([word], folders) for word in words]
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
