from __future__ import annotations

from analysis import compare
from analysis.records import Attempt
from experiments.commands._find import labels_of_attempts, last_lines, log_files, the_run
from experiments.commands._summary import summary
from experiments.commands._words import RunName, Runs
from experiments.config.folders import Folders
from experiments.config.measured import remark

GROUP = "results"


def why(words: Runs, *, against: RunName | None = None) -> int:
    """What a run did, and why it failed: its steps, its reason, the end of its workers' logs.

    Args:
        words: part of the run's name.
        against: compare it instead with another run: what both came to, and what differed between them.
    """
    folders = Folders()
    if against is not None:
        print(_compared(the_run(words, folders), the_run([against], folders)))
        return 0
    newest = the_run(words, folders)
    print(*labels_of_attempts([newest]))
    for attempt in folders.store.attempts(newest.run_id):
        print(summary(attempt))
        if attempt.is_valid() and (told := remark([attempt])):
            print(f"  {told}")
        for log in log_files(attempt, folders):
            if lines := last_lines(log):
                print(f"  {log.name}:", *lines, sep="\n    ")
    return 0


def _compared(a: Attempt, b: Attempt) -> str:
    """First what two runs came to, then what differed."""
    found = compare.compare(*({**run.manifest, "config": run.config} for run in (a, b)))
    names = [f"{run.run_id} ({name})" for run, name in zip((a, b), labels_of_attempts([a, b]), strict=True)]
    return "\n\n".join(filter(None, (_outcomes(a, b), compare.text(found, *names))))


def _outcomes(a: Attempt, b: Attempt) -> str:
    """Of each variant that both have, where variants took turns."""
    from analysis.attempts import from_attempts  # pandas comes with it
    from analysis.frames import records

    (of_a, _), (of_b, _) = (from_attempts([run] if run.is_valid() else []) for run in (a, b))
    rows = [{row["variant"]: row for row in records(frames.runs)} for frames in (of_a, of_b)]
    if not all(rows):
        bad = ", ".join(run.run_id for run, of_run in zip((a, b), rows, strict=True) if not of_run)
        return f"what they came to is not known: {bad} has no whole record"
    texts = ((name, compare.outcomes(rows[0][name], rows[1][name])) for name in rows[0] if name in rows[1])
    return "\n\n".join(f"{name}: {text}" if name else text for name, text in texts if text)
