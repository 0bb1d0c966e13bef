"""The text of a job for sbatch: options, then commands of the shell around one call of srun."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Each task of srun unpickles what `slurm.submit.submit_array` has pickled for its job, and calls it.
UNPICKLE = "from submitit.core.submission import submitit_main; submitit_main()"


@dataclass(frozen=True)
class BatchScript:
    """A script for sbatch.

    Args:
        options: options of sbatch by name; True for one without a value, None for one that is left out.
        setup: lines before the call of srun.
        srun_options: options of this call.
        command: command of srun's tasks.
        teardown: lines after the call.
    """

    options: Mapping[str, str | int | None]
    setup: Sequence[str]
    srun_options: Sequence[str]
    command: Sequence[str]
    teardown: Sequence[str] = ()

    @property
    def text_by_option(self) -> dict[str, str]:
        """The options that are not left out, as text by name; empty text for one without a value.

        Raises:
            ValueError: one has a line break, and the script's next line would be a command of the shell.
        """
        options = {
            name: "" if value is True else str(value)
            for name, value in sorted(self.options.items())
            if value is not None
        }
        for name, value in options.items():
            if {*value} & {"\n", "\r"}:
                raise ValueError(
                    f"{name} of a job has a line break, which no option of sbatch may: {value!r}"
                )
        return options

    @property
    def text(self) -> str:
        """The script as sbatch reads it."""
        directives = [
            f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "")
            for name, value in self.text_by_option.items()
        ]
        call = ["srun", "--unbuffered", *self.srun_options, *self.command]
        return "\n".join(
            ["#!/bin/bash", *directives, "", *self.setup, "", shlex.join(call), "", *self.teardown, ""]
        )


def log_name_pattern(num_jobs: int, task: str) -> str:
    """Return a log's name, without its ending, in sbatch's patterns, for an array or for a single job.

    Args:
        task: number of the task, or %t for the tasks of srun, each with a log.
    """
    return f"{'%A_%a' if num_jobs > 1 else '%j'}_{task}_log"
