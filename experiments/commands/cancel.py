from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analysis.records.store import Attempt
from experiments.commands._arguments import SweepsAndRuns
from experiments.commands._messages import say
from experiments.commands._named_runs import (
    find_sweeps,
    group_by_slurm_conf,
    is_part_of_name,
    is_whole_name,
    listed,
    newest_attempts_in_sweeps,
    runs_of,
    use_recorded_slurm_conf,
)
from experiments.config.folders import ResultFolders
from experiments.launch import submission
from experiments.launch.diagnosis import CANCEL_FILE
from experiments.launch.status import StatusView
from slurm import commands, jobs
from sparsify.ranges import format_value, quote

GROUP = "cluster"


def cancel(words: SweepsAndRuns, *, matching: bool = False) -> int:
    """End jobs; what is finished or saved is kept.

    Args:
        words: the names of sweeps and runs whose jobs end, or runs' keys as `list` shows them.
        matching: also of those whose names have one of the words in them.
    """
    folders, means = ResultFolders(), is_part_of_name if matching else is_whole_name
    if not words:
        names = ", ".join(sweep.name for sweep in submission.read_sweeps(folders, say))
        raise ValueError(f"cancel what? Sweeps: {names or 'none'}; or a run's name")
    chosen = find_sweeps(words, folders, means)
    for word in words:
        if not find_sweeps([word], folders, means):
            raise ValueError(_unknown(word, folders))
    ended, given_up, refused = 0, list[Attempt](), list[str]()
    for conf, sweeps in group_by_slurm_conf(chosen).items():
        try:
            with use_recorded_slurm_conf(conf):
                done = _cancel(newest_attempts_in_sweeps(sweeps, folders, words, means), folders)
        except commands.SlurmError as error:
            refused.append(str(error))
        else:
            ended, given_up = ended + done.ended, given_up + done.given_up
            refused += done.refused
    if ended:
        print(f"cancelled {ended} jobs; `submit` with the same words goes on where checkpoints are")
    if given_up:
        print(f"gave up {len(given_up)} runs whose jobs SLURM does not show; a job that begins ends at once")
    if refused:
        raise ValueError("; ".join(refused))
    if not ended and not given_up:
        say(f"nothing to cancel: {format_value(' '.join(words))} has ended already")
    return 0


def _unknown(word: str, folders: ResultFolders) -> str:
    """The refusal of a word that is no whole name."""
    near = find_sweeps([word], folders)
    names = [sweep.name for sweep in near if word in sweep.name]
    names = names or [run for sweep in near for run in runs_of(sweep) if word in run]
    if not names:
        return f"no sweep or run {quote(word)} was submitted; `status` lists them"
    return (
        f"{quote(word)} is part of a name, and `cancel` wants it whole: {listed(names)}; --matching ends "
        "all that have it in their names"
    )


class Cancelled(NamedTuple):
    """What became of jobs of one cluster."""

    ended: int
    given_up: list[Attempt]  # whose jobs SLURM does not show
    refused: list[str]  # what SLURM said of those that go on


def _cancel(attempts: Sequence[Attempt], folders: ResultFolders) -> Cancelled:
    """Cancel the jobs of these attempts that are under way on one cluster, and close the unknown ones."""
    view = StatusView.query_settled(folders, attempts, say)
    states = {attempt: view.run_status(attempt) for attempt in attempts}
    unknown = [attempt for attempt, run in states.items() if run.state == "unknown"]
    for attempt in unknown:
        attempt.fail("given up: SLURM did not show its job", "cancelled")
    wanted = {
        attempt: report
        for attempt, run in states.items()
        if run.is_under_way and (report := view.job_report(attempt)).status == "queued"
    }
    if wanted:
        say(f"ends {listed([attempt.run_id for attempt in wanted])}")
    for attempt in wanted:
        (folders.launch(attempt) / CANCEL_FILE).touch()
    refused = jobs.cancel_jobs(wanted.values())
    for attempt, report in wanted.items():
        if report in refused:
            (folders.launch(attempt) / CANCEL_FILE).unlink(missing_ok=True)
    why = [f"{words} (who submitted a job can cancel it)" for words in sorted({*refused.values()})]
    return Cancelled(len({*wanted.values()} - {*refused}), unknown, why)
