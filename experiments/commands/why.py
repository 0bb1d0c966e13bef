from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from analysis import run_differences
from analysis.records import schema
from analysis.records.configs import configs_by_variant
from analysis.records.files import DamagedFileError
from analysis.records.log import read_json_lines_as
from analysis.records.store import Attempt
from experiments.commands._arguments import RunName, Runs
from experiments.commands._named_runs import (
    find_logs,
    find_newest_attempt,
    find_shipped_run,
    label_attempts,
    query_statuses,
    read_last_lines,
)
from experiments.config.folders import ResultFolders
from experiments.launch.status import RunStatus

GROUP = "results"


def why(words: Runs, *, against: RunName | None = None) -> int:
    """What a run did, and why it failed: its steps, its reason, the end of its workers' logs.

    Args:
        words: part of the run's name.
        against: compare it instead with another run: what both came to, and what differed between them.
    """
    folders = ResultFolders()
    if against is not None:
        print(_compared(find_newest_attempt(words, folders), find_newest_attempt([against], folders)))
        return 0
    if len(words) == 1 and _show_shipped(words[0], folders):
        return 0
    newest = find_newest_attempt(words, folders)
    print(*label_attempts([newest]))
    for attempt, status in query_statuses(folders.store.attempts(newest.run_id), folders).items():
        print(summary(attempt, status))
        for log in find_logs(attempt, folders):
            if lines := read_last_lines(log):
                print(f"  {log.name}:", *lines, sep="\n    ")
    return 0


def _show_shipped(word: str, folders: ResultFolders) -> bool:
    """Show the one shipped run that a word is part of, where it is part of no run of this machine."""
    if (name := find_shipped_run(word, folders)) is None:
        return False
    from experiments.commands._run_table import load_runs, make_run_table  # pandas comes with it
    from experiments.commands._terminal import print_table

    runs = load_runs(folders)
    print(name)
    print_table(make_run_table(runs[runs["run_id"] == name]))
    print("shipped with the repository; its logs stayed on the machine that made it")
    return True


def _compared(a: Attempt, b: Attempt) -> str:
    found = run_differences.find_differences(*({**run.manifest, "config": run.config} for run in (a, b)))
    names = [f"{run.run_id} ({name})" for run, name in zip((a, b), label_attempts([a, b]), strict=True)]
    return "\n\n".join(filter(None, (_outcomes(a, b), run_differences.differences_text(found, *names))))


def _outcomes(a: Attempt, b: Attempt) -> str:
    """Outcomes of both, and of each variant that both have where variants took turns."""
    from analysis.records.attempts import load_attempts  # pandas comes with it
    from analysis.records.frames import to_dicts

    (of_a, _), (of_b, _) = (load_attempts([run] if run.is_valid() else []) for run in (a, b))
    rows = [{row["variant"]: row for row in to_dicts(frames.runs)} for frames in (of_a, of_b)]
    if not all(rows):
        bad = ", ".join(run.run_id for run, of_run in zip((a, b), rows, strict=True) if not of_run)
        return f"what they came to is not known: {bad} has no whole record"
    texts = (
        (name, run_differences.outcomes_text(rows[0][name], rows[1][name]))
        for name in rows[0]
        if name in rows[1]
    )
    return "\n\n".join(f"{name}: {text}" if name else text for name, text in texts if text)


def summary(attempt: Attempt, status: RunStatus) -> str:
    """An attempt in a few lines: its state, why it failed, its steps, who selected, and where it is."""
    path, why = attempt.path, "" if status.state == "done" else "why: "
    lines = [f"{attempt.run_id} attempt {attempt.number}: {status.display_state}"]
    lines += [f"  {why}{status.why}"] if status.why else []
    with contextlib.suppress(DamagedFileError):
        lines += _described(attempt)
    where = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return "\n".join([*lines, f"  {where}"])


def _described(attempt: Attempt) -> list[str]:
    manifest, lines = attempt.manifest, _measured(attempt)
    searching = msgspec.convert(manifest.get("searching") or {}, schema.SearchFacts)
    if searching.kernel:
        wrong = f", the guessed bound wrong in {searching.fallbacks} of {searching.steps} searches"
        lines.append(f"  searched by {searching.kernel}" + wrong * (searching.kernel != "torch"))
    return lines


def _measured(attempt: Attempt) -> list[str]:
    ranks = attempt.rank_paths()
    if not ranks:
        return []
    found: list[schema.LogLine]
    found, others = read_json_lines_as(ranks[0], schema.LogLine)
    steps = [line for line in found if isinstance(line, schema.StepLine)]
    epochs = [line for line in found if isinstance(line, schema.EpochLine)]
    broken = f", {others} broken" * bool(others)
    lines = [f"  {len(steps)} steps recorded on each of {len(ranks)} ranks{broken}"]
    if stopped := [step.step for step in steps if step.stops]:
        lines.append(f"  suspended in {len(stopped)} of them, from step {stopped[0]} on: they are left out")
        steps = [step for step in steps if not step.stops]
    if variants := configs_by_variant(attempt.config):
        lines += [_median_of_turns(attempt, name, steps) for name in variants]
        if alternated := attempt.manifest.get("alternated"):
            ended = msgspec.convert(alternated, schema.AlternationEnd)
            width = "unknown" if ended.half_width is None else f"{100 * ended.half_width:.1f} %"
            turns = f"  {ended.blocks} turns each, ended by the {ended.stopped}"
            lines.append(f"{turns}; half-width of the ratios {width}")
    elif steps:
        lines.append(_median_step(attempt, [step.step_s for step in steps]))
    if epochs and epochs[-1].val_top1 is not None:
        lines.append(f"  top-1 {epochs[-1].val_top1:.2f} % after {epochs[-1].step} steps")
    elif epochs and epochs[-1].val_loss is not None:
        lines.append(f"  validation loss {epochs[-1].val_loss:.4g} after {epochs[-1].step} steps")
    return lines


def _median_step(attempt: Attempt, step_s: Sequence[float]) -> str:
    """The median of what remains after the warm-up, as in figures.

    Times of virtual ranks are called what they are.
    """
    from analysis.records.steps import count_cold_steps  # pandas comes with it

    timing = attempt.config.get("timing", {})
    cold = count_cold_steps(step_s, int(timing.get("warmup_steps", 0)))
    simulated = "*simulated*, " * bool(attempt.manifest.get("simulated"))
    return (
        f"  median step {1e3 * statistics.median(step_s[cold:]):.1f} ms on rank 0 ({simulated}"
        f"{timing.get('mode')}, n = {len(step_s) - cold}, {cold} steps of warm-up left out)"
    )


def _median_of_turns(attempt: Attempt, variant: str, steps: Sequence[schema.StepLine]) -> str:
    """The median of one variant's steps after its warm-up, but for the first of each turn."""
    mine = [step for step in steps if step.variant == variant]
    mode = configs_by_variant(attempt.config)[variant]["timing"]["mode"]
    is_single = attempt.config.get("alternate", {}).get("block_steps") == 1
    firsts = {step.block: step.step for step in reversed(mine)}
    counted = [step.step_s for step in mine if step.block and (is_single or step.step != firsts[step.block])]
    simulated = "*simulated*, " * bool(attempt.manifest.get("simulated"))
    median = f"{1e3 * statistics.median(counted):.1f} ms" if counted else "not known"
    return f"  {variant}: median step {median} on rank 0 ({simulated}{mode}, n = {len(counted)})"
