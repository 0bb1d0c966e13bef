"""Environment variables: ranks, folders, SLURM's job, settings of libraries. Nothing else reads them."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class WorkerPlace(NamedTuple):
    """The rank of a process in its group."""

    rank: int
    size: int
    local_rank: int  # among the processes of one node


# Who starts the processes of a group -> the variables that say a process's place in it.
RANK_VARIABLES_BY_LAUNCHER = {
    "us": ("SPARSIFY_RANK", "SPARSIFY_SIZE", "SPARSIFY_LOCAL_RANK"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # The size is a job step's: SLURM_NTASKS is set in every batch script and salloc shell as well.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def read_place(starter: str) -> WorkerPlace | None:
    """This process's place in the group that one of STARTERS started; None where it did not."""
    found = [os.environ.get(name, "") for name in RANK_VARIABLES_BY_LAUNCHER[starter]]
    return WorkerPlace(*map(int, found)) if all(value.isdigit() for value in found) else None


def worker_place() -> WorkerPlace:
    """This process's place among the workers that we started; without others it is rank 0 of 1."""
    return read_place("us") or WorkerPlace(0, 1, 0)


class LauncherGroup(NamedTuple):
    """A group of processes that an external launcher started with our command line; this is one of them."""

    starter: str  # of STARTERS
    place: WorkerPlace


def find_launcher_group() -> LauncherGroup | None:
    """The group in which an external launcher started this process; None without one.

    Raises:
        ValueError: torchrun's variables are set, and torchrun was not there.
    """
    for starter in [*RANK_VARIABLES_BY_LAUNCHER][1:]:
        if (found := read_place(starter)) and found.size > 1:
            # Only steps that srun started have a number; a batch script's has not.
            if starter == "srun" and not os.environ.get("SLURM_STEP_ID", "").isdigit():
                continue
            if starter == "srun" and is_in_srun_shell():
                continue
            if starter == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ:
                raise ValueError(
                    f"{', '.join(RANK_VARIABLES_BY_LAUNCHER[starter])} are set, as torchrun does, but not by torchrun (there "
                    "is no TORCHELASTIC_RUN_ID): unset them, or start these processes with torchrun"
                )
            return LauncherGroup(starter, found)
    return None


def has_terminal() -> bool:
    """Tell whether `srun --pty` started this job step: often a shell, of which only the first task is one."""
    return "SLURM_PTY_PORT" in os.environ


def is_in_srun_shell() -> bool:
    """Tell whether a person typed this command into a shell that `srun --pty` opened.

    Only shells with a terminal put a command into a process group of its own; what srun itself has started,
    also by a script, is in the group of its session's first process.
    """
    if not has_terminal() or os.getpgrp() == os.getsid(0):
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True


def worker_variables(where: WorkerPlace, threads: int, interface: str | None) -> dict[str, str]:
    """The environment of one worker process.

    Args:
        interface: of the network on which gloo is to meet the others; None: the one of the host's name.
    """
    environment = dict(os.environ)
    for name, value in zip(RANK_VARIABLES_BY_LAUNCHER["us"], where, strict=True):
        environment[name] = str(value)
    # Idle threads must not spin: they would take cores from the other workers.
    environment.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
    environment["PYTHONUNBUFFERED"] = "1"
    if interface:
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment


def all_variables() -> dict[str, str]:
    """All variables, for a program that replaces this process."""
    return dict(os.environ)


def folder_from_variable(name: str) -> str | None:
    """The folder that a variable names: DATA_ROOT (data sets), SPARSIFY_RESULTS (all results, for example on
    a scratch file system), SPARSIFY_IMAGES (container images).
    """
    return os.environ.get(name) or None


def conf_folders() -> list[Path]:
    """The folders of configurations that $SPARSIFY_CONF names, separated by colons."""
    names = os.environ.get("SPARSIFY_CONF", "").split(os.pathsep)
    return [require_utf8(Path(name), "a folder of SPARSIFY_CONF") for name in names if name]


def require_utf8(path: Path, what: str) -> Path:
    """Return the path; refuse one that is not UTF-8, for records and orders are.

    Args:
        what: names the path in the sentence.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{what} is {os.fsencode(path)!r}, whose letters are not read as UTF-8 here: set LC_ALL=C.UTF-8, "
            "or give the folder another name"
        ) from None
    return path


def cache_folder() -> Path:
    """The folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def completion_line() -> str | None:
    """The line up to the cursor, where a shell asks through argcomplete what may come; else None."""
    if "_ARGCOMPLETE" not in os.environ:
        return None
    return os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]


def is_variable_true(name: str) -> bool:
    """Tell whether the variable is set to 1, yes, true or on."""
    return os.environ.get(name, "").lower() in ("1", "yes", "true", "on")


# SLURM's job that this process belongs to.


def job_id() -> str:
    """SLURM's id of this job, as squeue shows it: 12, or 12_3 for a job of an array; empty outside of one."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def cluster_name() -> str | None:
    """SLURM's name of the cluster that this job is on; None outside of one."""
    return os.environ.get("SLURM_CLUSTER_NAME") or None


def visible_gpus() -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None: it says nothing."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if said is None else [name for name in said.split(",") if name.strip()]


def restart_count() -> int:
    """Number of times that SLURM has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def start_name() -> str:
    """A name for this start of this job, the same on all its nodes."""
    return f"{job_id()}-{restart_count()}"


def step_name() -> str:
    """A name for this start of this job step, the same in all its tasks."""
    return f"{start_name()}-{os.environ.get('SLURM_STEP_ID', '')}"


def node_name() -> str:
    """SLURM's name of this node; outside of SLURM the host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def node_list() -> str:
    """This job's nodes, in SLURM's notation for lists."""
    return os.environ.get("SLURM_JOB_NODELIST", "")


class Allocation(NamedTuple):
    """The resources of the SLURM job that this process belongs to."""

    nodes: int
    tasks: int
    cpus_per_task: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {self.tasks} tasks x {self.cpus_per_task} cores"


def current_allocation() -> Allocation | None:
    """This job's resources; None outside of SLURM."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    nodes, tasks = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ.get("SLURM_NTASKS", 1))
    return Allocation(nodes, tasks, int(os.environ.get("SLURM_CPUS_PER_TASK", 1)))


def count_task_slots() -> int | None:
    """Return how many tasks the job's nodes have been given places for; None where SLURM does not say so."""
    said = os.environ.get("SLURM_TASKS_PER_NODE")  # such as 2(x3),1
    if not said:
        return None
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", said)
    return sum(int(tasks) * int(nodes or 1) for tasks, nodes in parts)


# What a record keeps: SLURM's description of the job, and Horovod's settings that affect its speed; others
# of Horovod's are hosts and ranks.
RECORDED_VARIABLE = re.compile(
    r"SLURM_(JOB_ID|JOB_PARTITION|JOB_NUM_NODES|NTASKS|GPUS_ON_NODE)"
    r"|HOROVOD_(AUTOTUNE|BATCH_D2D_MEMCOPIES|CACHE_CAPACITY|CONTROLLER|CYCLE_TIME|FUSION_THRESHOLD)"
    r"|HOROVOD_((CPU|GPU)_OPERATIONS|HIERARCHICAL_ALL(GATHER|REDUCE)|NUM_NCCL_STREAMS)"
)


def recorded_variables(program: str) -> dict[str, str]:
    """The variables of a program, SLURM or HOROVOD, that a record keeps."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(program) and RECORDED_VARIABLE.fullmatch(name)
    }


# Which cluster SLURM's commands speak to, and as whom; SLURM's other variables belong to one job.
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SBATCH_CLUSTERS")
JOB_VARIABLE = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SUBMITIT)_.*|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)"
)
# Options of sbatch whose variable has another name: SBATCH_TIMELIMIT is --time.
OPTION_BY_VARIABLE = {
    "TIMELIMIT": "time", "MEM_PER_NODE": "mem", "REQ_SWITCH": "switches", "WAIT4SWITCH": "switches",
    "ARRAY_INX": "array",
}  # fmt: skip
# Options of which a job has one: what decides about the first decides about the others.
ALTERNATIVE_OPTIONS = (
    ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
    ("mem", "mem-per-cpu", "mem-per-gpu"),
    ("requeue", "no-requeue"),
)
REASON_BY_REFUSED_OPTION = {
    "wait": "sbatch is to return at once",
    "array": "a job for each run",
    "container": "container= decides",
    "container-id": "container= decides",
}
# Options of containers, which srun and the programs of images read; not the folders of those programs.
CONTAINER_VARIABLE = re.compile(
    r"PYXIS_.*|(APPTAINER|SINGULARITY)_(?!(LOCAL)?(CACHE|CONFIG|TMP)DIR$).*|(APPTAINER|SINGULARITY)ENV_.*"
)


def drop_container_options() -> tuple[dict[str, str], list[str]]:
    """Return the environment without a person's options of containers, and words on what was left out.

    `container=` alone decides about those. The words have no values: some are passwords.
    """
    found = {name: value for name, value in os.environ.items() if not CONTAINER_VARIABLE.fullmatch(name)}
    aside = sorted(os.environ.keys() - found.keys())
    return found, [f"{name} (container= decides)" for name in aside]


def sbatch_variables(given: Mapping[str, str], conf: str | None) -> tuple[dict[str, str], list[str]]:
    """The environment for sbatch, and words on what was left out of it.

    A job that this process belongs to is hidden. What a person has exported for sbatch counts where the
    script says nothing of it; sbatch itself would let it count before the script.

    Args:
        given: options in the script, without their dashes, and their values.
        conf: SLURM's configuration file; None: the one of the environment.
    """
    exported, aside = drop_container_options()
    found = {name: value for name, value in exported.items() if not JOB_VARIABLE.fullmatch(name)}
    found |= {name: os.environ[name] for name in CLUSTER_VARIABLES if name in os.environ}
    for name, value in sorted(os.environ.items()):
        # SLURM itself sets the excepted ones within a job.
        if not name.startswith("SBATCH_") or re.match(r"SBATCH_(CPU|MEM)_BIND", name) or name in found:
            continue
        short = name.removeprefix("SBATCH_")
        option = OPTION_BY_VARIABLE.get(short, short.lower().replace("_", "-"))
        same = next((each for each in ALTERNATIVE_OPTIONS if option in each), (option,))
        if option in REASON_BY_REFUSED_OPTION:
            aside.append(f"{name}={value} ({REASON_BY_REFUSED_OPTION[option]})")
        elif counts := next((each for each in same if each in given), None):
            if (counts, given[counts]) != (option, value):
                ours = "=".join(filter(None, (counts, given[counts])))
                aside.append(f"{name}={value} (--{ours} counts)")
        else:
            found[name] = value
    if conf:
        found["SLURM_CONF"] = os.path.expanduser(conf)
    return found, aside


def use_slurm_conf(conf: str | None) -> None:
    """Let SLURM's commands read this configuration file; needed on a login node of several clusters."""
    if conf:
        os.environ["SLURM_CONF"] = os.path.expanduser(conf)


def slurm_command_variables() -> dict[str, str]:
    """The environment for SLURM's commands without what hides jobs or changes what they print."""
    return {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"(SQUEUE|SACCT|SCANCEL|SINFO|SCONTROL)_", name)
        and name not in ("SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")
    }


def slurm_conf() -> str | None:
    """The configuration file that SLURM's commands are told to read; None: the machine's own."""
    return os.environ.get("SLURM_CONF")


@contextlib.contextmanager
def temporary_slurm_conf(conf: str | None) -> Iterator[None]:
    """Within this, SLURM's commands read that configuration file; None: the one that they read before."""
    before = slurm_conf()
    use_slurm_conf(conf)
    try:
        yield
    finally:
        os.environ.pop("SLURM_CONF", None)
        use_slurm_conf(before)


# Settings of the libraries that workers communicate with.


def set_default_variables(settings: Mapping[str, str]) -> None:
    """Set these for gloo and NCCL, which read them when the group starts, unless the user has set others."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def gloo_interface() -> str | None:
    """The network interface that gloo is told to use; None: it goes by the host's name."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def nccl_settings() -> dict[str, str]:
    """NCCL's settings in the environment. Paths are left out, because records are meant to be shared."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    return {name: "a file" if os.sep in value else value for name, value in found.items()}


def set_horovod_variables(settings: Mapping[str, str]) -> None:
    """Set Horovod's ranks and addresses, which it reads from the environment when it starts."""
    os.environ.update(settings)
