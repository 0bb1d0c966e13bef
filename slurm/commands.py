"""SLURM's commands: the state of jobs, and changes to them. One call serves any number of jobs."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from slurm import environment

TIMEOUT_S = 60  # of one command; a controller under load answers slowly
JOBS_PER_COMMAND = 500  # job ids on one command line
NO_ANSWER_MESSAGE = re.compile(r"timed out|Unable to contact|Zero Bytes|temporarily unable", re.IGNORECASE)
REQUEUE_S = 60  # less than a job that was told to stop has left
PATIENCE_S = 15  # with accounting, which learns of an end later than those who wait for it
UNENDED_STATES = {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING"}


class EndedJob(NamedTuple):
    """The end of a job, from SLURM's accounting."""

    state: str  # COMPLETED, CANCELLED, NODE_FAIL, OUT_OF_MEMORY, TIMEOUT, ...
    nodes: str
    at: str  # local time
    name: str


class SlurmError(ValueError):
    """A command of SLURM failed; the message has what it printed."""


class NoAnswerError(SlurmError):
    """The controller does not answer, or the command has not ended in time."""


class UncertainSubmissionError(SlurmError):
    """It is not known whether SLURM has taken a job: sbatch failed, and the controller can't be asked."""


def await_job_ends(job: str, starts: int) -> list[EndedJob] | None:
    """The end of each start of a requeued job; None on a cluster without accounting.

    Args:
        starts: that have ended. SLURM notes ends some time after them; it is asked again until it knows so
            many, for PATIENCE_S at most.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            ends = [
                end
                for _, end in query_accounting("--duplicates", "-j", job)
                if end.state not in UNENDED_STATES
            ]
        except SlurmError:
            return None
        if len(ends) >= starts or time.monotonic() > deadline:
            return ends
        time.sleep(1)


def query_accounting(*words: str) -> Iterator[tuple[str, EndedJob]]:
    """Jobs by id, as SLURM's accounting has them."""
    said = run_command("sacct", "-X", "-n", "-P", "--format=JobID,State,End,NodeList,JobName", *words)
    for line in (line.split("|", 4) for line in said.splitlines() if line.count("|") >= 4):
        job, state, at, nodes, name = line
        yield job, EndedJob(state.partition(" ")[0], nodes, at, name)  # "CANCELLED by 1000" is CANCELLED


def cancel_jobs(jobs: Sequence[str], *words: str) -> None:
    """Stop these jobs, waiting or running; all that it can, before it says of some that it can't."""
    refused = list[str]()
    for part in split_job_ids(jobs):
        try:
            run_command("scancel", *words, *part)
        except SlurmError as error:
            refused.append(str(error))
    if refused:
        raise SlurmError("; ".join(refused))


def requeue_job(job: str) -> None:
    """Restart the job with the same id; if it is the caller's own, this also ends the caller.

    A controller that is down for a moment is asked again, for REQUEUE_S at most.
    """
    deadline = time.monotonic() + REQUEUE_S
    while True:
        try:
            run_command("scontrol", "requeue", job)
        except NoAnswerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
        else:
            return


def exclude_nodes(job: str, nodes: Iterable[str]) -> None:
    """Let a waiting job avoid these nodes, in addition to those that it avoids already."""
    before = run_command("squeue", "--all", "--noheader", f"--jobs={job}", "--format=%x").strip()
    avoided = {*nodes, *(expand_nodes(before) if before != "(null)" else [])}
    run_command("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(sorted(avoided))}")


def has_exclusive_nodes(job: str) -> bool:
    """Tell whether nobody else runs on this job's nodes; no, where SLURM does not say so."""
    try:
        said = run_command("scontrol", "--oneliner", "show", "job", job)
    except SlurmError:
        return False
    fields = dict(word.split("=", 1) for word in said.split() if "=" in word)
    # Newer versions (26.05) say OverSubscribe=NO of shared nodes, and have a field of its own.
    exclusive = fields.get("Exclusive")
    return exclusive == "NODE" if exclusive else fields.get("OverSubscribe") == "NO"


def find_down_nodes(nodes: Iterable[str]) -> set[str]:
    """Nodes among these that SLURM cannot use."""
    lines = run_command("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T")
    states = (line.split("|", 1) for line in lines.splitlines() if "|" in line)
    return {node for node, state in states if re.search(r"down|drain|fail|\*", state.strip())}


def find_nodes_restarted_since(nodes: Iterable[str], at: float) -> set[str]:
    """Nodes among these whose own daemon was started after that time, in seconds since the epoch."""
    found = set[str]()
    for line in run_command("scontrol", "--oneliner", "show", "node", ",".join(nodes)).splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        with contextlib.suppress(KeyError, ValueError):  # SLURM does not know it of every node
            if time.mktime(time.strptime(fields["SlurmdStartTime"], "%Y-%m-%dT%H:%M:%S")) > at:
                found.add(fields["NodeName"])
    return found


def expand_nodes(nodes: str) -> list[str]:
    """A list of nodes in SLURM's notation: n[1-3] -> n1, n2, n3."""
    return run_command("scontrol", "show", "hostnames", nodes).split() if nodes else []


def run_command(*words: str) -> str:
    """The output of a command of SLURM.

    Raises:
        SlurmError: it is not installed, it failed, or it did not answer.
    """
    done = run_program(words, environment.slurm_command_variables())
    if done.returncode:
        answer = done.stderr.strip() or done.stdout.strip()
        raise (NoAnswerError if is_no_answer(answer) else SlurmError)(f"{words[0]}: {answer}")
    return done.stdout


def is_no_answer(words: str) -> bool:
    """Tell whether what a command printed says that the controller did not answer it."""
    return NO_ANSWER_MESSAGE.search(words) is not None


def run_program(
    words: Sequence[str], around: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """The same with its exit code and its errors, in this environment.

    Raises:
        NoAnswer: it has not ended in time.
        SlurmError: it is not installed.
    """
    if shutil.which(words[0]) is None:
        raise SlurmError(
            f"no {words[0]} on this machine: run this on a login node of the cluster; or take cluster=local, "
            "or on a machine of your own `make slurm-up` and cluster=devcluster"
        )
    try:
        return subprocess.run(
            words, env=around, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        why = f"{words[0]} has not answered for {timeout_s} s; is SLURM's controller up?"
        raise NoAnswerError(why) from error


def split_job_ids(jobs: Sequence[str]) -> list[Sequence[str]]:
    """The ids in lists that fit on a command line."""
    return [jobs[start : start + JOBS_PER_COMMAND] for start in range(0, len(jobs), JOBS_PER_COMMAND)]
