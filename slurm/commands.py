"""The calls of SLURM's commands. One call serves any number of jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from slurm import environment

TIMEOUT_S = 60  # of one command; a controller under load answers slowly
JOBS_PER_COMMAND = 500  # job ids on one command line
NO_ANSWER_MESSAGE = re.compile(r"timed out|Unable to contact|Zero Bytes|temporarily unable", re.IGNORECASE)
REQUEUE_S = 60  # less than a job has left after SLURM's stop signal
PATIENCE_S = 15  # with accounting, which learns of an end later than those who wait for it
RETRY_S = 1
UNENDED_STATES = {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING"}


class AccountingEntry(NamedTuple):
    """The entry of a job's start in SLURM's accounting."""

    job_id: str
    state: str  # RUNNING, COMPLETED, CANCELLED, NODE_FAIL, OUT_OF_MEMORY, TIMEOUT, ...
    nodes: str
    ended_at: str  # local time; Unknown while it goes on
    name: str


class SlurmError(ValueError):
    """A command of SLURM failed; the message has what it printed."""


class NoAnswerError(SlurmError):
    """The controller does not answer, or the command has not ended in time."""


class UncertainSubmissionError(SlurmError):
    """Nobody knows whether SLURM has taken a job: sbatch failed, and the controller can't be asked."""


def poll_accounting_for_ends(job_id: str, num_expected: int) -> list[AccountingEntry] | None:
    """Return the ended starts of a requeued job; None on a cluster without accounting.

    Args:
        num_expected: number of starts that have ended. SLURM notes ends some time after them; it is asked
            again until it knows so many, for PATIENCE_S at most.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            entries = query_accounting("--duplicates", "-j", job_id)
        except SlurmError:
            return None
        ends = [entry for entry in entries if entry.state not in UNENDED_STATES]
        if len(ends) >= num_expected or time.monotonic() > deadline:
            return ends
        time.sleep(RETRY_S)


def query_accounting(*sacct_options: str) -> list[AccountingEntry]:
    """Return the entries of jobs in SLURM's accounting."""
    output = run_command(
        "sacct", "-X", "-n", "-P", "--format=JobID,State,End,NodeList,JobName", *sacct_options
    )
    entries = []
    for line in output.splitlines():
        if line.count("|") >= 4:
            job_id, state, ended_at, nodes, name = line.split("|", 4)
            word = state.partition(" ")[0]  # "CANCELLED by 1000" is CANCELLED
            entries.append(AccountingEntry(job_id, word, nodes, ended_at, name))
    return entries


def cancel_jobs(job_ids: Sequence[str], *scancel_options: str) -> None:
    """Stop all of these jobs that can be stopped, waiting or running.

    Raises:
        SlurmError: some can't be stopped, after the others were.
    """
    refusals = []
    for ids in split_job_ids_per_command(job_ids):
        try:
            run_command("scancel", *scancel_options, *ids)
        except SlurmError as error:
            refusals.append(str(error))
    if refusals:
        raise SlurmError("; ".join(refusals))


def requeue_job(job_id: str, retry_for_s: float = REQUEUE_S) -> None:
    """Requeue a job, which keeps its id; if it is the caller's own, this also ends the caller.

    Args:
        retry_for_s: a controller that is down for a moment is asked again, for so long.
    """
    deadline = time.monotonic() + retry_for_s
    while True:
        try:
            run_command("scontrol", "requeue", job_id)
        except NoAnswerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return


def add_excluded_nodes(job_id: str, nodes: Iterable[str]) -> None:
    """Let a waiting job avoid these nodes, in addition to those that it avoids already."""
    excluded_before = run_command("squeue", "--all", "--noheader", f"--jobs={job_id}", "--format=%x").strip()
    excluded = {*nodes, *(expand_hostlist(excluded_before) if excluded_before != "(null)" else [])}
    run_command("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(sorted(excluded))}")


def has_exclusive_nodes(job_id: str) -> bool:
    """Tell whether nobody else runs on this job's nodes; no, where SLURM does not say so."""
    try:
        fields = query_scontrol_fields("job", job_id)[0]
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


def find_nodes_with_slurmd_restarted_since(nodes: Iterable[str], epoch_s: float) -> set[str]:
    """Return the nodes among these whose SLURM daemon was started after a time (seconds since the epoch)."""
    restarted = set()
    for fields in query_scontrol_fields("node", ",".join(nodes)):
        try:
            started = time.strptime(fields.get("SlurmdStartTime", ""), "%Y-%m-%dT%H:%M:%S")
        except ValueError:  # SLURM does not know it of every node
            continue
        if time.mktime(started) > epoch_s:
            restarted.add(fields["NodeName"])
    return restarted


def query_scontrol_fields(kind: Literal["job", "node"], names: str) -> list[dict[str, str]]:
    """Return the fields of each job, or node, as `scontrol show` prints them."""
    lines = run_command("scontrol", "--oneliner", "show", kind, names).splitlines()
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines] or [{}]


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the nodes of a list in SLURM's notation: n[1-3] -> n1, n2, n3."""
    return run_command("scontrol", "show", "hostnames", hostlist).split() if hostlist else []


def run_command(*words: str) -> str:
    """Return what a command of SLURM prints.

    Raises:
        SlurmError: it is not installed, it failed, or it did not answer.
    """
    process = run_program(words, environment.slurm_command_variables())
    if process.returncode:
        answer = process.stderr.strip() or process.stdout.strip()
        raise (NoAnswerError if is_no_answer_message(answer) else SlurmError)(f"{words[0]}: {answer}")
    return process.stdout


def is_no_answer_message(output: str) -> bool:
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


def split_job_ids_per_command(job_ids: Sequence[str]) -> list[Sequence[str]]:
    """Return the ids in lists that fit on a command line."""
    return [job_ids[start : start + JOBS_PER_COMMAND] for start in range(0, len(job_ids), JOBS_PER_COMMAND)]
