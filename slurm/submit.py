"""Scripts -> jobs of SLURM: sbatch, the id that SLURM gave, and submitit's pickles for the tasks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from submitit.core.utils import DelayedSubmission, JobPaths

from slurm import commands, environment, jobs
from slurm.batch_script import BatchScript
from slurm.reasons import explain_sbatch_refusal
from slurm.task import WorkerTask

SBATCH_S = 300  # sbatch tries for two minutes by itself where a controller takes no jobs for a moment
SETTLE_S = 10.0  # that a job which sbatch has just sent may need to be shown
POLL_S = 1.0
# What sbatch prints of a job: with --parsable, and where somebody's sbatch has dropped that word.
JOB_ID = re.compile(r"(?:Submitted batch job )?(?P<id>\d+)(?:(?:;| on cluster )(?P<cluster>[\w.-]+))?")


class QueuedJob(NamedTuple):
    """A job, or an array of jobs, that SLURM has made of a script."""

    id: str
    cluster: str | None  # that took it, where sbatch had a choice of several


class QueuedArray(NamedTuple):
    """The jobs of an array that SLURM has queued."""

    job_ids: list[str]
    cluster: str | None  # that took them, where sbatch had a choice of several


def submit_array(
    tasks: Sequence[WorkerTask], folder: Path, script: BatchScript, say: Callable[[str], None]
) -> QueuedArray:
    """Submit one array of SLURM jobs, a job for each task, without waiting for any.

    Args:
        folder: for the script, submitit's files and the logs; on a file system that the nodes share.

    Raises:
        UncertainSubmissionError: it may be queued or not.
        ValueError: SLURM refused; the message has its words, and the field to change.
    """
    job, cluster = submit_script(script, folder, say)
    ids = [job] if len(tasks) == 1 else [f"{job}_{number}" for number in range(len(tasks))]
    for job_id, task in zip(ids, tasks, strict=True):  # the job waits for these files
        submission = DelayedSubmission(task)
        submission.set_timeout(int(script.text_by_option["time"]), 0)
        unfinished = folder / f"{job_id}.new"
        submission.dump(unfinished)
        unfinished.rename(JobPaths(folder, job_id).submitted_pickle)
    return QueuedArray(ids, cluster)


def submit_script(script: BatchScript, folder: Path, say: Callable[[str], None]) -> QueuedJob:
    """Submit a script, which is kept in the folder, without waiting for its job.

    Raises:
        UncertainSubmissionError: it may be queued or not.
        ValueError: SLURM refused; the message has its words, and the field to change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{time.time_ns()}.sh"
    file.write_text(script.text)
    variables, drop_notes = environment.sbatch_variables(script.text_by_option)
    if drop_notes:
        say(f"exported, and set aside: {'; '.join(drop_notes)}")
    job = None
    is_refused = False
    try:
        process = commands.run_program(["sbatch", "--parsable", str(file)], variables, SBATCH_S)
    except commands.NoAnswerError as error:
        answer = str(error)
    else:
        answer = process.stderr.strip() or process.stdout.strip()
        if process.returncode == 0:
            job = _parse_job_id(process.stdout)
        else:
            is_refused = not commands.is_no_answer_message(answer)
    if job is None:
        job = QueuedJob(_look_up_job(file, answer, 0 if is_refused else SETTLE_S), None)
        say(f"SLURM has the job {job.id}, of which sbatch said: {answer}")
    file.rename(folder / f"{job.id}_submission.sh")
    return job


def _parse_job_id(output: str) -> QueuedJob | None:
    """Return the job that sbatch named, among what a site's own sbatch prints; None if that is unclear."""
    matches = (JOB_ID.fullmatch(line.strip()) for line in output.splitlines())
    named = {QueuedJob(match["id"], match["cluster"]) for match in matches if match}
    return named.pop() if len(named) == 1 else None


def _look_up_job(script: Path, answer: str, patience_s: float) -> str:
    """Return the id of the job that was made of a script, from the queue.

    A controller that answers too late has taken a job of which sbatch says that it failed; a site's own
    sbatch may hide the id, or the refusal.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            job = jobs.find_job_by_script(script)
        except commands.SlurmError as error:
            why = f"it is not known whether SLURM has taken the job: {answer}; then {error}"
            raise commands.UncertainSubmissionError(why) from error
        if job is not None:
            return job
        if time.monotonic() > deadline:
            raise ValueError(explain_sbatch_refusal(answer))
        time.sleep(POLL_S)
