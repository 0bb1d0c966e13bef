"""What the surroundings say: the only reader of environment variables."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
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


class Joined(NamedTuple):
    """Several processes that somebody else started with our command line; this is one of them."""

    starter: str
    place: Place


STARTERS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "torchrun": PLACES[1],
    # Of a job step: SLURM_NTASKS and SLURM_PROCID are there in every batch script and salloc shell as well.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def joined() -> Joined | None:
    """The group that this process was started in; None when it is alone."""
    for starter, names in STARTERS.items():
        found = [os.environ.get(name, "") for name in names]
        if all(value.isdigit() for value in found) and int(found[1]) > 1:
            # Steps of another kind, a batch script's for one, have no number.
            if starter == "srun" and not os.environ.get("SLURM_STEP_ID", "").isdigit():
                continue
            return Joined(starter, Place(*(int(value) for value in found)))
    return None


def step_name() -> str:
    """Names this step of this start of this job, alike in all its tasks."""
    return f"{start_name()}-{os.environ.get('SLURM_STEP_ID', '')}"


def data_root() -> str | None:
    """The folder of data sets that $DATA_ROOT names."""
    return os.environ.get("DATA_ROOT") or None


def results_root() -> str | None:
    """The folder for all results that $SPARSIFY_RESULTS names, for example on a scratch file system."""
    return os.environ.get("SPARSIFY_RESULTS") or None


def images_root() -> Path | None:
    """The folder of container images that $SPARSIFY_IMAGES names."""
    return Path(named) if (named := os.environ.get("SPARSIFY_IMAGES")) else None


def variables() -> dict[str, str]:
    """All of them, for a program that is started in this one's place."""
    return dict(os.environ)


def cache_root() -> Path:
    """Where programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


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


def node() -> str:
    """This node by SLURM's name for it, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def job_id() -> str:
    """SLURM's name of this job, as squeue shows it: 12, or 12_3 for a task of an array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def restarts() -> int:
    """How often SLURM has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def start_name() -> str:
    """Names this start of this job, alike on all its nodes."""
    return f"{job_id()}-{restarts()}"


def node_list() -> str:
    """This job's nodes, as SLURM writes lists."""
    return os.environ.get("SLURM_JOB_NODELIST", "")


class Allocation(NamedTuple):
    """What SLURM has given to the batch script that this process belongs to."""

    nodes: int
    tasks: int
    cpus_per_task: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {self.tasks} tasks x {self.cpus_per_task} cores"


def allocation() -> Allocation | None:
    """None outside of one."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    nodes, tasks = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ.get("SLURM_NTASKS", 1))
    return Allocation(nodes, tasks, int(os.environ.get("SLURM_CPUS_PER_TASK", 1)))


@contextlib.contextmanager
def as_submitit() -> Iterator[None]:
    """Processes started meanwhile take SLURM's word for their place, as submitit's jobs do."""
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"
    try:
        yield
    finally:
        del os.environ["SUBMITIT_EXECUTOR"]


def use_slurm(conf: str | None) -> None:
    """Let SLURM's commands read this configuration, as a login node of several clusters needs."""
    if conf:
        os.environ["SLURM_CONF"] = os.path.expanduser(conf)


def set_for_horovod(settings: Mapping[str, str]) -> None:
    """Tell Horovod, which reads its settings here when it starts, who is who."""
    os.environ.update(settings)


def set_for_nccl(settings: Mapping[str, str]) -> None:
    """Give NCCL these settings, which it reads when the group starts; what the user exported stays."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def use_interface(name: str) -> None:
    """Let gloo and NCCL talk over this network interface, unless the user exported another."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)


def nccl_settings() -> dict[str, str]:
    """What NCCL is told by the environment; files are not named, as records are meant to be shared."""
    told = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    return {name: "a file" if os.sep in value else value for name, value in told.items()}


HOROVOD_SETTINGS = (
    "HOROVOD_AUTOTUNE",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_GPU_OPERATIONS",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_NUM_NCCL_STREAMS",
)


def horovod_settings() -> dict[str, str]:
    """What the environment tells Horovod that changes its speed; the rest names hosts and ranks."""
    return {name: os.environ[name] for name in HOROVOD_SETTINGS if name in os.environ}


def flag(name: str) -> bool:
    """Is the variable set to something that means yes?"""
    return os.environ.get(name, "").lower() in ("1", "yes", "true", "on")
