"""The calls of SLURM's commands. One call serves any number of jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from slurm import environment

TIMEOUT_S = 60  # of one command; a controller under load answers slowly
JOBS_PER_COMMAND = 500  # job ids on one command line
NO_ANSWER_MESSAGE = re.compile(r"timed out|Unable to contact|Zero Bytes|temporarily unable", re.IGNORECASE)
REQUEUE_S = 60  # less than a job has left after SLURM's stop signal
PATIENCE_S = 15  # with accounting, which learns of an end later than those who wait for it
RETRY_S = 1
UNENDED_STATES = {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING"}


class EndedJob(NamedTuple):
    """The end of a job, from SLURM's accounting."""

    state: str  # COMPLETED, CANCELLED, NODE_FAIL, OUT_OF_MEMORY, TIMEOUT, ...
    nodes: str
    ended_at: str  # local time
    name: str


class SlurmError(ValueError):
    """A command of SLURM failed; the message has what it printed."""


class NoAnswerError(SlurmError):
    """The controller does not answer, or the command has not ended in time."""


class UncertainSubmissionError(SlurmError):
    """Nobody knows whether SLURM has taken a job: sbatch failed, and the controller can't be asked."""


def await_job_ends(job: str, num_starts: int) -> list[EndedJob] | None:
    """Return the end of each start of a requeued job; None on a cluster without accounting.

    Args:
        num_starts: that have ended. SLURM notes ends some time after them; it is asked again until it knows
            so many, for PATIENCE_S at most.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            reports = query_accounting("--duplicates", "-j", job)
        except SlurmError:
            return None
        ends = [end for _, end in reports if end.state not in UNENDED_STATES]
        if len(ends) >= num_starts or time.monotonic() > deadline:
            return ends
        time.sleep(RETRY_S)


def query_accounting(*words: str) -> list[tuple[str, EndedJob]]:
    """Return the ids of jobs, each with its end, as SLURM's accounting has them."""
    output = run_command("sacct", "-X", "-n", "-P", "--format=JobID,State,End,NodeList,JobName", *words)
    reports = []
    for line in output.splitlines():
        if line.count("|") >= 4:
            job, state, ended_at, nodes, name = line.split("|", 4)
            state = state.partition(" ")[0]  # "CANCELLED by 1000" is CANCELLED
            reports.append((job, EndedJob(state, nodes, ended_at, name)))
    return reports


def cancel_jobs(jobs: Sequence[str], *words: str) -> None:
    """Stop all of these jobs that can be stopped, waiting or running.

    Raises:
        SlurmError: some can't be stopped, after the others were.
    """
    refusals = []
    for ids in split_job_ids(jobs):
        try:
            run_command("scancel", *words, *ids)
        except SlurmError as error:
            refusals.append(str(error))
    if refusals:
        raise SlurmError("; ".join(refusals))


def requeue_job(job: str) -> None:
    """Restart the job with its id; if it is the caller's own, this also ends the caller.

    A controller that is down for a moment is asked again, for REQUEUE_S at most.
    """
    deadline = time.monotonic() + REQUEUE_S
    while True:
        try:
            run_command("scontrol", "requeue", job)
        except NoAnswerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return


def exclude_nodes(job: str, nodes: Iterable[str]) -> None:
    """Let a waiting job avoid these nodes, in addition to those that it avoids already."""
    before = run_command("squeue", "--all", "--noheader", f"--jobs={job}", "--format=%x").strip()
    excluded = {*nodes, *(expand_nodes(before) if before != "(null)" else [])}
    run_command("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(sorted(excluded))}")


def has_exclusive_nodes(job: str) -> bool:
    """Tell whether nobody else runs on this job's nodes; no, where SLURM does not say so."""
    try:
        fields = show_fields("job", job)[0]
    except SlurmError:
        return False
    # Newer versions (26.05) say OverSubscribe=NO of shared nodes, and have a field of its own.
    exclusive = fields.get("Exclusive")
    return exclusive == "NODE" if exclusive else fields.get("OverSubscribe") == "NO"


def find_down_nodes(nodes: Iterable[str]) -> set[str]:
    """Return the nodes among these that SLURM cannot use."""
    output = run_command("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T")
    states = (line.partition("|") for line in output.splitlines())
    return {node for node, _, state in states if re.search(r"down|drain|fail|\*", state)}


def find_nodes_restarted_since(nodes: Iterable[str], time_s: float) -> set[str]:
    """Return the nodes among these whose own daemon was started after a time, in seconds since the epoch."""
    restarted = set()
    for fields in show_fields("node", ",".join(nodes)):
        try:
            started = time.strptime(fields.get("SlurmdStartTime", ""), "%Y-%m-%dT%H:%M:%S")
        except ValueError:  # SLURM does not know it of every node
            continue
        if time.mktime(started) > time_s:
            restarted.add(fields["NodeName"])
    return restarted


def show_fields(kind: str, names: str) -> list[dict[str, str]]:
    """Return the fields of each job, or node, as `scontrol show` prints them."""
    lines = run_command("scontrol", "--oneliner", "show", kind, names).splitlines()
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines] or [{}]


def expand_nodes(nodes: str) -> list[str]:
    """Return the nodes of a list in SLURM's notation: n[1-3] -> n1, n2, n3."""
    return run_command("scontrol", "show", "hostnames", nodes).split() if nodes else []


def run_command(*words: str) -> str:
    """Return what a command of SLURM prints.

    Raises:
        SlurmError: it is not installed, it failed, or it did not answer.
    """
    process = run_program(words, environment.slurm_command_variables())
    if process.returncode:
        answer = process.stderr.strip() or process.stdout.strip()
        raise (NoAnswerError if is_no_answer(answer) else SlurmError)(f"{words[0]}: {answer}")
    return process.stdout


def is_no_answer(output: str) -> bool:
    """Tell whether a command printed that the controller did not answer it."""
    return NO_ANSWER_MESSAGE.search(output) is not None


def run_program(
    words: Sequence[str], variables: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM in this environment; return its exit code, output and errors.

    Raises:
        NoAnswerError: it has not ended in time.
        SlurmError: it is not installed.
    """
    if shutil.which(words[0]) is None:
        raise SlurmError(
            f"no {words[0]} on this machine: run this on a login node of the cluster; or take cluster=local, "
            "or on a machine of your own `make slurm-up` and cluster=devcluster"
        )
    try:
        return subprocess.run(
            words,
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        why = f"{words[0]} has not answered for {timeout_s} s; is SLURM's controller up?"
        raise NoAnswerError(why) from error


def split_job_ids(jobs: Sequence[str]) -> list[Sequence[str]]:
    """Return the ids in lists that fit on a command line."""
    return [jobs[start : start + JOBS_PER_COMMAND] for start in range(0, len(jobs), JOBS_PER_COMMAND)]
