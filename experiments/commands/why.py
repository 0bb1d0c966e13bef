from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from analysis import run_differences
from analysis.pictures.numbers import format_number
from analysis.records import schema
from analysis.records.configs import configs_by_variant
from analysis.records.files import DamagedFileError
from analysis.records.log import read_json_lines
from analysis.records.store import Attempt
from experiments.commands._arguments import RunName, Runs
from experiments.commands._named_runs import (
    find_log_files,
    find_newest_attempt_of_run,
    find_shipped_run,
    label_attempts,
    query_status_by_attempt,
    read_last_lines,
)
from experiments.config.folders import ResultFolders
from experiments.launch.status import RunStatus
from sparsify.ranges import quote

GROUP = "results"


def why(words: Runs, *, against: RunName | None = None) -> int:
    """Show the steps of a run, the reason why it failed, and the end of its workers' logs.

    Args:
        words: part of the run's name.
        against: another run, to compare the run with: outcomes of both, and all that differs between them.
    """
    folders = ResultFolders()
    if len(words) == 2 and against is None:
        raise ValueError(f"which run? To compare two: `why {quote(words[0])} --against {quote(words[1])}`")
    if against is not None:
        first = find_newest_attempt_of_run(words, folders)
        print(describe_attempt_differences(first, find_newest_attempt_of_run([against], folders)))
        return 0
    shipped = find_shipped_run(words[0], folders) if len(words) == 1 else None
    if shipped is not None:
        _print_shipped_run(shipped, folders)
        return 0
    newest = find_newest_attempt_of_run(words, folders)
    print(*label_attempts([newest]))
    for attempt, status in query_status_by_attempt(
        folders.store.list_attempts(newest.run_id), folders
    ).items():
        print(describe_attempt(attempt, status))
        for log in find_log_files(attempt, folders):
            lines = read_last_lines(log)
            if lines:
                print(f"  {log.name}:", *lines, sep="\n    ")
    return 0


def _print_shipped_run(name: str, folders: ResultFolders) -> None:
    from experiments.commands._run_table import load_all_runs, make_run_table  # pandas comes with it
    from experiments.commands._terminal import print_table

    runs = load_all_runs(folders)
    print(name)
    print_table(make_run_table(runs[runs["run_id"] == name]))
    print("shipped with the repository; its logs stayed on the machine that made it")


def describe_attempt_differences(a: Attempt, b: Attempt) -> str:
    """Return the outcomes of two attempts, and all that differs between them."""
    manifests = ({**attempt.manifest, "config": attempt.config} for attempt in (a, b))
    differences = run_differences.find_run_differences(*manifests)
    labels = zip((a, b), label_attempts([a, b]), strict=True)
    names = [f"{attempt.run_id} ({label})" for attempt, label in labels]
    texts = (_compare_outcomes(a, b), run_differences.differences_text(differences, *names))
    return "\n\n".join(filter(None, texts))


def _compare_outcomes(a: Attempt, b: Attempt) -> str:
    """Return the outcomes of two attempts, or of each variant that takes turns in both."""
    from analysis.records.attempts import load_valid_attempts  # pandas comes with it
    from analysis.records.frames import rows_as_dicts

    rows_by_attempt = dict[Attempt, dict[str, Any]]()
    for attempt in (a, b):
        frames = load_valid_attempts([attempt] if attempt.is_valid() else []).frames
        rows_by_attempt[attempt] = {row["variant"]: row for row in rows_as_dicts(frames.runs)}
    incomplete = [attempt.run_id for attempt, rows in rows_by_attempt.items() if not rows]
    if incomplete:
        return f"what they came to is not known: {', '.join(incomplete)} has no whole record"
    texts = list[str]()
    for variant, row in rows_by_attempt[a].items():
        if variant in rows_by_attempt[b]:
            text = run_differences.shared_outcomes_text(row, rows_by_attempt[b][variant])
            texts.append(f"{variant}: {text}" if variant and text else text)
    return "\n\n".join(filter(None, texts))


def describe_attempt(attempt: Attempt, status: RunStatus) -> str:
    """Return an attempt in a few lines: its state, why it failed, its steps, its kernel, and its folder."""
    lines = [f"{attempt.run_id} attempt {attempt.number}: {status.display_state}"]
    if status.why:
        lines.append(f"  {'' if status.state == 'done' else 'why: '}{status.why}")
    with contextlib.suppress(DamagedFileError):
        lines += [f"  {line}" for line in (*_describe_steps(attempt), *_describe_kernel(attempt))]
    if attempt.manifest.get("agreed") is False:
        lines.append("  workers ended with different averages or weights: these numbers are of rank 0's")
    cwd = Path.cwd()
    path = attempt.path
    return "\n".join([*lines, f"  {path.relative_to(cwd) if path.is_relative_to(cwd) else path}"])


def _describe_kernel(attempt: Attempt) -> Iterator[str]:
    searching = msgspec.convert(attempt.manifest.get("searching") or {}, schema.SelectionKernelFacts)
    if searching.kernel:
        wrong = f", the guessed bound wrong in {searching.fallbacks} of {searching.steps} searches"
        yield f"searched by {searching.kernel}" + wrong * (searching.kernel != "torch")


def _describe_steps(attempt: Attempt) -> Iterator[str]:
    """Yield lines on the steps and epochs in the log of rank 0."""
    paths = attempt.find_rank_logs()
    if not paths:
        return
    log_lines, num_broken = read_json_lines(paths[0], schema.LogLine)
    steps = [line for line in log_lines if isinstance(line, schema.StepLine)]
    epochs = [line for line in log_lines if isinstance(line, schema.EpochLine)]
    broken = f", {num_broken} broken" if num_broken else ""
    yield f"{len(steps)} steps recorded on each of {len(paths)} ranks{broken}"
    suspended = [step.step for step in steps if step.stops]
    if suspended:
        yield f"suspended in {len(suspended)} of them, from step {suspended[0]} on: they are left out"
        steps = [step for step in steps if not step.stops]
    config_by_variant = configs_by_variant(attempt.config)
    if config_by_variant:
        for variant, config in config_by_variant.items():
            yield f"{variant}: {_median_in_turns(attempt, config, variant, steps)}"
    elif steps:
        yield _median_after_warmup(attempt, [step.step_s for step in steps])
    alternated = attempt.manifest.get("alternated")
    if config_by_variant and alternated:
        end = msgspec.convert(alternated, schema.AlternationEnd)
        width = "unknown" if end.half_width is None else f"{format_number(100 * end.half_width)} %"
        yield f"{end.blocks} turns each, ended by the {end.stopped}; half-width of the ratios {width}"
    for epoch in epochs[-1:]:
        if epoch.val_top1 is not None:
            yield f"top-1 {format_number(epoch.val_top1)} % after {epoch.step} steps"
        elif epoch.val_loss is not None:
            yield f"validation loss {format_number(epoch.val_loss)} after {epoch.step} steps"


def _median_after_warmup(attempt: Attempt, step_s: Sequence[float]) -> str:
    """Return the median time of the steps after the warm-up, as figures show it."""
    from analysis.records.steps import count_warmup_steps  # pandas comes with it

    timing = attempt.config.get("timing", {})
    num_cold = count_warmup_steps(step_s, int(timing.get("warmup_steps", 0)))
    text = _median_text(attempt, timing.get("mode"), step_s[num_cold:])
    return f"{text}, {num_cold} steps of warm-up left out)"


def _median_in_turns(
    attempt: Attempt, config: Mapping[str, Any], variant: str, steps: Sequence[schema.StepLine]
) -> str:
    """Return the median time of a variant's steps after its warm-up, without the first step of each turn."""
    own_steps = [step for step in steps if step.variant == variant]
    has_single_steps = attempt.config.get("alternate", {}).get("block_steps") == 1
    first_by_turn = {step.block: step.step for step in reversed(own_steps)}
    counted_s = [
        step.step_s
        for step in own_steps
        if step.block and (has_single_steps or step.step != first_by_turn[step.block])
    ]
    return f"{_median_text(attempt, config['timing']['mode'], counted_s)})"


def _median_text(attempt: Attempt, mode: Any, step_s: Sequence[float]) -> str:
    median = f"{format_number(1e3 * statistics.median(step_s))} ms" if step_s else "not known"
    simulated = "*simulated*, " if attempt.manifest.get("simulated") else ""
    return f"median step {median} on rank 0 ({simulated}{mode}, n = {len(step_s)}"
