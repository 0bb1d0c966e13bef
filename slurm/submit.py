"""Tasks -> arrays of SLURM jobs, through submitit."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from slurm import environment, queue
from slurm.reasons import refusal
from slurm.task import RunTask


def submit_array(
    tasks: Sequence[RunTask], folder: Path, options: Mapping[str, Any], python: str, slurm_conf: str | None
) -> list[str]:
    """One array of SLURM jobs, a job for each task; returns their ids at once.

    Args:
        folder: for submitit's files and the logs; on a file system that the nodes share.
        options: of submitit's SlurmExecutor.
        python: on the nodes.

    Raises:
        ValueError: SLURM refused; its words are in the message, and the field to change.
    """
    with _submitting(folder, options, python, slurm_conf) as executor, executor.batch():
        jobs = [executor.submit(task) for task in tasks]
    return [job.job_id for job in jobs]


def submit_command(command: str, folder: Path, options: Mapping[str, Any], slurm_conf: str | None) -> str:
    """One job with the options of runs, whose tasks carry out a command of the shell; returns its id at once.

    Raises:
        ValueError: as `submit_array`.
    """
    with _submitting(folder, options, "python", slurm_conf) as executor:
        return str(executor._submit_command(command).job_id)


@contextlib.contextmanager
def _submitting(
    folder: Path, options: Mapping[str, Any], python: str, slurm_conf: str | None
) -> Iterator[SlurmExecutor]:
    """submitit with these options, in the environment of a person; its refusal is ours."""
    folder.mkdir(parents=True, exist_ok=True)
    queue.command("sbatch", "--version")  # says in a sentence when there is no SLURM
    executor = SlurmExecutor(folder, python=shlex.quote(python))
    executor.update_parameters(**options)
    said = io.StringIO()
    try:
        hidden = environment.naming_the_cluster(submitit.helpers.clean_env())
        with hidden, contextlib.redirect_stderr(said):
            environment.use_slurm(slurm_conf)
            yield executor
    except FailedJobError as error:
        raise ValueError(refusal(str(error) or said.getvalue())) from error


def sbatch_text(folder: Path, options: Mapping[str, Any], python: str, tasks: int) -> str:
    """The very text that `submit_array` hands to sbatch; needs no SLURM."""
    command = " ".join([shlex.quote(python), "-u -m submitit.core._submit", shlex.quote(str(folder))])
    return _make_sbatch_string(command, folder, map_count=tasks if tasks > 1 else None, **options)
