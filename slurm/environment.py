"""What the surroundings say: the only reader of environment variables."""

from __future__ import annotations

import os
from typing import NamedTuple


class Place(NamedTuple):
    """Where a process stands in its group."""

    rank: int
    size: int
    local_rank: int  # among the processes of one node


# The first complete set of these wins: our own launcher, torchrun, SLURM.
PLACES = (
    ("SPARSIFY_RANK", "SPARSIFY_SIZE", "SPARSIFY_LOCAL_RANK"),
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def place() -> Place:
    """This process's place; alone, it is rank 0 of 1."""
    for names in PLACES:
        if all(name in os.environ for name in names):
            return Place(*(int(os.environ[name]) for name in names))
    return Place(0, 1, 0)


def data_root() -> str | None:
    """The folder of data sets that $DATA_ROOT names."""
    return os.environ.get("DATA_ROOT") or None


def results_root() -> str | None:
    """The folder for all results that $SPARSIFY_RESULTS names, for example on a scratch file system."""
    return os.environ.get("SPARSIFY_RESULTS") or None


def slurm_facts() -> dict[str, str]:
    """What SLURM says of this job."""
    wanted = (
        "SLURM_JOB_ID",
        "SLURM_JOB_PARTITION",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NTASKS",
        "SLURM_GPUS_ON_NODE",
    )
    return {name: os.environ[name] for name in wanted if name in os.environ}


def of_worker(where: Place, threads: int, same_host: bool) -> dict[str, str]:
    """The environment for one worker process."""
    environment = dict(os.environ)
    for name, value in zip(PLACES[0], where, strict=True):
        environment[name] = str(value)
    # Idle threads that spin would take the cores from the other workers.
    environment.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
    environment["PYTHONUNBUFFERED"] = "1"
    if same_host:
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo resolves the host's name, which may lead nowhere
    return environment


def flag(name: str) -> bool:
    """Is the variable set to something that means yes?"""
    return os.environ.get(name, "").lower() in ("1", "yes", "true", "on")
