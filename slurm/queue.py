"""What SLURM says of jobs, and what it is told: one question for any number of them."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TIMEOUT_S = 60  # of one command; a controller under load answers late
PER_CALL = 500  # job ids on one command line


class Queued(NamedTuple):
    """A job that has not ended."""

    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str  # why it waits
    nodes: str
    name: str


class Ended(NamedTuple):
    """How a job ended, by the accounting."""

    state: str  # COMPLETED, CANCELLED, NODE_FAIL, OUT_OF_MEMORY, TIMEOUT, ...
    nodes: str
    at: str  # local time


class SlurmError(ValueError):
    """A command of SLURM's failed; its own words are in the message."""


def queue() -> dict[str, Queued]:
    """All jobs of this user that have not ended, by id (12, or 12_3 for a task of an array).

    Raises:
        SlurmError: there is no SLURM here, or its controller does not answer.
    """
    lines = command("squeue", "--user", getpass.getuser(), "--array", "--noheader", "--format=%i|%T|%r|%N|%j")
    fields = (line.split("|", 4) for line in lines.splitlines() if line.count("|") >= 4)
    return {job: Queued(*rest) for job, *rest in fields}


def accounts(jobs: Iterable[str]) -> dict[str, Ended]:
    """How these jobs ended. Empty where the cluster keeps no accounts: many do not."""
    arrays = sorted({job.partition("_")[0] for job in jobs})
    if not arrays:
        return {}
    try:
        lines = "".join(
            command("sacct", "-X", "-n", "-P", "--format=JobID,State,End,NodeList", "-j", ",".join(part))
            for part in _parts(arrays)
        )
    except SlurmError:
        return {}
    fields = (line.split("|", 3) for line in lines.splitlines() if line.count("|") >= 3)
    # "CANCELLED by 1000" is CANCELLED.
    return {job: Ended(state.partition(" ")[0], nodes, at) for job, state, at, nodes in fields}


def past_ends(job: str) -> list[Ended] | None:
    """How each start of a job that was requeued has ended; None where the cluster keeps no accounts."""
    try:
        lines = command(
            "sacct", "--duplicates", "-X", "-n", "-P", "--format=State,End,NodeList", "-j", job
        ).splitlines()
    except SlurmError:
        return None
    fields = (line.split("|", 2) for line in lines if line.count("|") >= 2)
    return [Ended(state.partition(" ")[0], nodes, at) for state, at, nodes in fields]


def cancel(jobs: Sequence[str]) -> None:
    for part in _parts(jobs):
        command("scancel", *part)


def requeue(job: str) -> None:
    """Let the job run again from its beginning; ends the caller's own job if it is that."""
    command("scontrol", "requeue", job)


def keep_away(job: str, nodes: Iterable[str]) -> None:
    """As well as from the nodes that it avoids already; it must be waiting."""
    before = command("squeue", "--noheader", f"--jobs={job}", "--format=%x").strip()
    avoided = {*nodes, *(expand(before) if before != "(null)" else [])}
    command("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(sorted(avoided))}")


def down(nodes: Iterable[str]) -> set[str]:
    """Those of these nodes that SLURM can't use."""
    lines = command("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T")
    states = (line.split("|", 1) for line in lines.splitlines() if "|" in line)
    return {node for node, state in states if re.search(r"down|drain|fail|\*", state.strip())}


def expand(nodes: str) -> list[str]:
    """n[1-3] -> n1, n2, n3"""
    return command("scontrol", "show", "hostnames", nodes).split() if nodes else []


def command(*words: str) -> str:
    """What a command of SLURM's prints.

    Raises:
        SlurmError: it is not here, failed, or did not answer.
    """
    if shutil.which(words[0]) is None:
        raise SlurmError(
            f"no {words[0]} on this machine: run this on a login node of the cluster; or take cluster=local, "
            "or on a machine of your own `make slurm-up` and cluster=devcluster"
        )
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"{words[0]} has not answered for {TIMEOUT_S} s; is SLURM's controller up?"
        ) from error
    if done.returncode:
        raise SlurmError(f"{words[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _parts(jobs: Sequence[str]) -> list[Sequence[str]]:
    return [jobs[start : start + PER_CALL] for start in range(0, len(jobs), PER_CALL)]


# What SLURM says when it refuses a job, and the field that is at fault.
REFUSALS = (
    ("invalid partition", "cluster.partition"),
    ("invalid account", "cluster.account (or cluster.partition, which the account may not use)"),
    ("invalid feature", "cluster.constraint"),
    ("invalid qos", "cluster.qos"),
    ("reservation", "cluster.reservation"),
    ("time limit", "cluster.time_min"),
    ("generic resource", "cluster.gres"),
    ("memory", "cluster.mem_gb"),
    ("array", "cluster.max_array"),
    ("node name", "cluster.exclude"),
    (
        "more processors",
        "cluster.cpus_per_worker, workers_per_node or workers: no such job fits the partition",
    ),
    ("node count", "cluster.workers_per_node, which decides how many nodes the workers need"),
    (
        "node configuration is not available",
        "cluster.workers_per_node, cpus_per_worker, gres or constraint, which no node of the partition has",
    ),
    ("cpu count", "cluster.cpus_per_worker"),
    ("submit job limit", "cluster.max_array, or wait until jobs have ended"),
    ("wckey", "cluster.sbatch=[--wckey=yours]"),
    ("comment", "cluster.comment"),
)


def refusal(said: str) -> str:
    """A sentence for what sbatch answered: its words, and which field to change."""
    reasons = [line for line in said.splitlines() if line.strip()]
    words = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in reasons)
    field = next((field for sign, field in REFUSALS if sign in words.lower()), None)
    return f"SLURM refused the job: {words}" + (f"; change {field}" if field else "")
