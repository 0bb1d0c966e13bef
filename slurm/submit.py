"""Tasks -> arrays of SLURM jobs: submitit's script and pickles, sbatch, and the id that SLURM gave."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import _make_sbatch_string

from slurm import commands, environment, jobs
from slurm.reasons import explain_refusal
from slurm.task import RunTask

Say = Callable[[str], None]
SBATCH_S = 300  # sbatch tries for two minutes by itself where a controller takes no jobs for a moment
SETTLE_S, POLL_S = 10.0, 1.0  # that a job which sbatch has just sent may need to be shown
OPTION = re.compile(r"#SBATCH --([\w-]+)(?:=(.*))?")
# What sbatch prints of a job: with --parsable, and where somebody's sbatch has dropped that word.
JOB_ID = re.compile(r"(?:Submitted batch job )?(?P<id>\d+)(?:(?:;| on cluster )(?P<cluster>[\w.-]+))?")


class QueuedJob(NamedTuple):
    """What SLURM made of a script."""

    id: str  # of a job or an array
    cluster: str | None  # that took it, where sbatch had a choice of several


def submit_array(
    tasks: Sequence[RunTask], folder: Path, options: Mapping[str, Any], python: str, slurm_conf: str | None,
    say: Say,
) -> tuple[list[str], str | None]:  # fmt: skip
    """One array of SLURM jobs, a job for each task; returns their ids at once, and the cluster that took them
    where sbatch names one.

    Args:
        folder: for the script, submitit's files and the logs; on a file system that the nodes share.
        options: of submitit's SlurmExecutor.
        python: on the nodes.

    Raises:
        Unsure: it may be queued or not.
        ValueError: SLURM refused; its words are in the message, and the field to change.
    """
    job, cluster = _submit_script(sbatch_text(folder, options, python, len(tasks)), folder, slurm_conf, say)
    ids = [job] if len(tasks) == 1 else [f"{job}_{number}" for number in range(len(tasks))]
    for identity, task in zip(ids, tasks, strict=True):  # the job waits for these files
        pickled = DelayedSubmission(task)
        pickled.set_timeout(options["time"], 0)
        new = folder / f"{identity}.new"
        pickled.dump(new)
        new.rename(JobPaths(folder, identity).submitted_pickle)
    return ids, cluster


def submit_command(
    command: str, folder: Path, options: Mapping[str, Any], slurm_conf: str | None, say: Say
) -> str:
    """One job with the options of runs, whose tasks carry out a command of the shell; returns its id at once.

    Raises:
        ValueError: as `submit_array`.
    """
    check_no_line_breaks(folder, options)
    return _submit_script(_make_sbatch_string(command, folder, **options), folder, slurm_conf, say).id


def sbatch_text(folder: Path, options: Mapping[str, Any], python: str, tasks: int) -> str:
    """The very text that `submit_array` hands to sbatch; needs no SLURM."""
    check_no_line_breaks(folder, options)
    command = " ".join([shlex.quote(python), "-u -m submitit.core._submit", shlex.quote(str(folder))])
    return _make_sbatch_string(command, folder, map_count=tasks if tasks > 1 else None, **options)


def check_no_line_breaks(folder: Path, options: Mapping[str, Any]) -> None:
    """Refuse options of sbatch with a line break: the script's next line would be a command of the shell."""
    given = {"the folder of its logs": str(folder), **options, **options.get("additional_parameters", {})}
    for name, value in given.items():
        if isinstance(value, str) and {*value} & {"\n", "\r"}:
            raise ValueError(f"{name} of a job has a line break, which no option of sbatch may: {value!r}")


def exported_options(text: str) -> list[str]:
    """What a person has exported for sbatch that counts beside this script, such as SBATCH_ACCOUNT=mine."""
    around, _ = environment.sbatch_variables(dict(OPTION.findall(text)), None)
    return [f"{name}={value}" for name, value in sorted(around.items()) if name.startswith("SBATCH_")]


def _submit_script(text: str, folder: Path, slurm_conf: str | None, say: Say) -> QueuedJob:
    """The job that this script has become."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{time.time_ns()}.sh"
    script.write_text(text)
    around, aside = environment.sbatch_variables(dict(OPTION.findall(text)), slurm_conf)
    if aside:
        say(f"exported, and set aside: {'; '.join(aside)}")
    job, refused = None, False
    try:
        done = commands.run_program(["sbatch", "--parsable", str(script)], around, SBATCH_S)
        answer = done.stderr.strip() or done.stdout.strip()
        refused = done.returncode != 0 and not commands.is_no_answer(answer)
        job = _parse_job_id(done.stdout) if done.returncode == 0 else None
    except commands.NoAnswerError as error:
        answer = str(error)
    if job is None:
        with environment.temporary_slurm_conf(slurm_conf):
            job = _look_up_job(script, answer, refused)
        say(f"SLURM has the job {job.id}, of which sbatch said: {answer}")
    script.rename(folder / f"{job.id}_submission.sh")
    return job


def _parse_job_id(said: str) -> QueuedJob | None:
    """The job that sbatch named, among whatever a site's own sbatch prints around it; None: not clear."""
    matches = (JOB_ID.fullmatch(line.strip()) for line in said.splitlines())
    found = {QueuedJob(match["id"], match["cluster"]) for match in matches if match}
    return found.pop() if len(found) == 1 else None


def _look_up_job(script: Path, answer: str, refused: bool) -> QueuedJob:
    """The job that was made of a script, from the queue. A controller that answers too late has
    taken a job of which sbatch says that it failed; a site's own sbatch may hide the id, or the refusal.
    """
    deadline = time.monotonic() + (0 if refused else SETTLE_S)
    while True:
        try:
            job = jobs.find_job_by_script(script)
        except commands.SlurmError as error:
            why = f"it is not known whether SLURM has taken the job: {answer}; then {error}"
            raise commands.UncertainSubmissionError(why) from error
        if job is not None:
            return QueuedJob(job, None)
        if time.monotonic() > deadline:
            raise ValueError(explain_refusal(answer))
        time.sleep(POLL_S)
