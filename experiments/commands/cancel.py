from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analysis.records.store import Attempt
from experiments.commands._arguments import SweepsAndRuns
from experiments.commands._messages import say
from experiments.commands._named_runs import (
    find_named_sweeps,
    is_whole_name_or_key,
    join_first_names,
    newest_attempts_in_sweeps,
    occurs_in_name,
    sweep_run_ids,
    use_slurm_conf_if_trusted,
)
from experiments.config.folders import ResultFolders
from experiments.launch import submission
from experiments.launch.diagnosis import CANCEL_FILE
from experiments.launch.status import StatusSnapshot
from slurm import commands, jobs
from sparsify.ranges import format_value, quote

GROUP = "cluster"


def cancel(words: SweepsAndRuns, *, matching: bool = False) -> int:
    """Cancel jobs of sweeps and runs; finished and saved work is kept.

    Args:
        words: the names of sweeps and runs whose jobs are cancelled, or runs' keys as `list` shows them.
        matching: cancel also the jobs of those that have one of the words in their names.
    """
    folders = ResultFolders()
    is_named = occurs_in_name if matching else is_whole_name_or_key
    if not words:
        names = ", ".join(sweep.name for sweep in submission.read_sweeps(folders, say))
        raise ValueError(f"cancel what? Sweeps: {names or 'none'}; or a run's name")
    for word in words:
        if not find_named_sweeps([word], folders, is_named):
            raise ValueError(_explain_unknown_name(word, folders))
    sweeps = find_named_sweeps(words, folders, is_named)
    num_cancelled = 0
    num_given_up = 0
    refusals = list[str]()
    for conf in dict.fromkeys(sweep.slurm_conf for sweep in sweeps):
        of_cluster = [sweep for sweep in sweeps if sweep.slurm_conf == conf]
        try:
            with use_slurm_conf_if_trusted(conf):
                attempts = newest_attempts_in_sweeps(of_cluster, folders, words, is_named)
                result = _cancel_attempts(attempts, folders)
        except commands.SlurmError as error:
            refusals.append(str(error))
        else:
            num_cancelled += result.num_cancelled
            num_given_up += result.num_given_up
            refusals += result.refusals
    if num_cancelled:
        print(f"cancelled {num_cancelled} jobs; `submit` with the same words goes on where checkpoints are")
    if num_given_up:
        print(f"gave up {num_given_up} runs whose jobs SLURM does not show; a job that begins ends at once")
    if refusals:
        raise ValueError("; ".join(refusals))
    if not num_cancelled and not num_given_up:
        say(f"nothing to cancel: {format_value(' '.join(words))} has ended already")
    return 0


def _explain_unknown_name(word: str, folders: ResultFolders) -> str:
    """Return the refusal of a word that is no whole name."""
    sweeps = find_named_sweeps([word], folders)
    names = [sweep.name for sweep in sweeps if word in sweep.name]
    names = names or [run for sweep in sweeps for run in sweep_run_ids(sweep) if word in run]
    if not names:
        return f"no sweep or run {quote(word)} was submitted; `status` lists them"
    return (
        f"{quote(word)} is part of a name, and `cancel` wants it whole: {join_first_names(names)}; "
        "--matching ends all that have it in their names"
    )


class CancelResult(NamedTuple):
    """Numbers of cancelled jobs and given up runs of one cluster."""

    num_cancelled: int
    num_given_up: int  # runs whose jobs SLURM does not show
    refusals: list[str]  # SLURM's words on jobs that go on


def _cancel_attempts(attempts: Sequence[Attempt], folders: ResultFolders) -> CancelResult:
    """Cancel the jobs of these attempts that are under way on one cluster, and close the unknown ones."""
    view = StatusSnapshot.query_until_settled(folders, attempts, say)
    states = {attempt: view.run_status(attempt) for attempt in attempts}
    unknown = [attempt for attempt, run in states.items() if run.state == "unknown"]
    for attempt in unknown:
        attempt.mark_failed_unless_whole("given up: SLURM did not show its job", "cancelled")
    reports = {attempt: view.job_report(attempt) for attempt, run in states.items() if run.is_under_way}
    report_by_queued_attempt = {
        attempt: report for attempt, report in reports.items() if report.status == "queued"
    }
    if report_by_queued_attempt:
        say(f"ends {join_first_names([attempt.run_id for attempt in report_by_queued_attempt])}")
    for attempt in report_by_queued_attempt:
        (folders.launch_folder(attempt) / CANCEL_FILE).touch()
    refused = jobs.try_cancel_jobs(report_by_queued_attempt.values())
    for attempt, report in report_by_queued_attempt.items():
        if report in refused:
            (folders.launch_folder(attempt) / CANCEL_FILE).unlink(missing_ok=True)
    refusals = [f"{words} (who submitted a job can cancel it)" for words in sorted({*refused.values()})]
    return CancelResult(len({*report_by_queued_attempt.values()} - {*refused}), len(unknown), refusals)
