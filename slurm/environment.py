"""Environment variables: ranks, folders, SLURM's job, settings of libraries. Nothing else reads them."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple


class WorkerPlace(NamedTuple):
    """The rank of a process in its group."""

    rank: int
    size: int
    local_rank: int  # among the processes of one node


# The variables that say a process's rank, size and local rank, by the program that starts the group.
OURS = "us"
RANK_VARIABLES_BY_LAUNCHER = {
    OURS: ("SPARSIFY_RANK", "SPARSIFY_SIZE", "SPARSIFY_LOCAL_RANK"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # The size is a job step's: SLURM_NTASKS is set in every batch script and salloc shell as well.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def read_rank_variables(launcher: str) -> WorkerPlace | None:
    """Return this process's place in the group that a launcher started; None where its variables aren't set.

    Args:
        launcher: one of RANK_VARIABLES_BY_LAUNCHER.
    """
    values = [os.environ.get(name, "") for name in RANK_VARIABLES_BY_LAUNCHER[launcher]]
    return WorkerPlace(*map(int, values)) if all(value.isdigit() for value in values) else None


def worker_place() -> WorkerPlace:
    """Return this process's place among the workers that we started; rank 0 of 1 without others."""
    return read_rank_variables(OURS) or WorkerPlace(0, 1, 0)


class LauncherGroup(NamedTuple):
    """A group of processes that an external launcher started, seen from one of them."""

    launcher: str  # of RANK_VARIABLES_BY_LAUNCHER
    place: WorkerPlace


def find_launcher_group() -> LauncherGroup | None:
    """Return the group in which an external launcher started this process; None without one.

    Raises:
        ValueError: torchrun's variables are set, and torchrun was not there.
    """
    for launcher, variables in RANK_VARIABLES_BY_LAUNCHER.items():
        place = read_rank_variables(launcher)
        if launcher == OURS or place is None or place.size == 1:
            continue
        # Only steps that srun started have a number; a batch script's has not.
        if launcher == "srun" and (
            not os.environ.get("SLURM_STEP_ID", "").isdigit() or is_in_srun_pty_shell()
        ):
            continue
        if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ValueError(
                f"{', '.join(variables)} are set, as torchrun does, but not by torchrun (there "
                "is no TORCHELASTIC_RUN_ID): unset them, or start these processes with torchrun"
            )
        return LauncherGroup(launcher, place)
    return None


def is_srun_pty_step() -> bool:
    """Tell whether `srun --pty` started this job step, often for a shell that only its first task runs."""
    return "SLURM_PTY_PORT" in os.environ


def is_in_srun_pty_shell() -> bool:
    """Tell whether a person typed this command into a shell that `srun --pty` opened.

    Only shells with a terminal put a command into a process group of its own; what srun itself has started,
    also by a script, is in the group of its session's first process.
    """
    if not is_srun_pty_step() or os.getpgrp() == os.getsid(0):
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True


def worker_variables(place: WorkerPlace, threads: int, interface: str | None) -> dict[str, str]:
    """Return the environment of one worker process.

    Args:
        interface: network interface on which gloo is to meet the others; None: the one of the host's name.
    """
    variables = dict(os.environ)
    for name, number in zip(RANK_VARIABLES_BY_LAUNCHER[OURS], place, strict=True):
        variables[name] = str(number)
    # Idle threads must not spin: they would take cores from the other workers.
    variables.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
    variables["PYTHONUNBUFFERED"] = "1"
    if interface:
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def all_variables() -> dict[str, str]:
    """Return all variables, for a program that replaces this process."""
    return dict(os.environ)


def folder_from_variable(name: str) -> str | None:
    """Return the folder that a variable names; None where it is not set.

    DATA_ROOT has the data sets, SPARSIFY_RESULTS all results (on a scratch file system, for example), and
    SPARSIFY_IMAGES the container images.
    """
    return os.environ.get(name) or None


def conf_folders() -> list[Path]:
    """Return the folders of configurations that $SPARSIFY_CONF names, separated by colons."""
    names = os.environ.get("SPARSIFY_CONF", "").split(os.pathsep)
    return [require_utf8(Path(name), "a folder of SPARSIFY_CONF") for name in names if name]


def require_utf8(path: Path, description: str) -> Path:
    """Return the path; refuse one that is not UTF-8, for records and orders are.

    Args:
        description: names the path in the error's sentence.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{description} is {os.fsencode(path)!r}, whose letters are not read as UTF-8 here: set "
            "LC_ALL=C.UTF-8, or give the folder another name"
        ) from None
    return path


def cache_folder() -> Path:
    """Return the folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def command_line_to_complete() -> str | None:
    """Return the line up to the cursor that a shell wants completed, by argcomplete; None without one."""
    if "_ARGCOMPLETE" not in os.environ:
        return None
    return os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]


def is_variable_true(name: str) -> bool:
    """Tell whether the variable is set to 1, yes, true or on."""
    return os.environ.get(name, "").lower() in ("1", "yes", "true", "on")


# SLURM's job that this process belongs to.

GPU_NAME = re.compile(r"\d+|(GPU|MIG)-\S+")  # of CUDA_VISIBLE_DEVICES; another word ends the list


def current_job_id_or_empty() -> str:
    """Return SLURM's id of this job: 12, or 12_3 for a job of an array; empty outside of a job."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    number = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{number}" if array and number else os.environ.get("SLURM_JOB_ID", "")


def current_cluster_name() -> str | None:
    """Return SLURM's name of the cluster that this job is on; None outside of a job."""
    return os.environ.get("SLURM_CLUSTER_NAME") or None


def visible_gpus() -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None where it is not set.

    They have numbers, or the names of GPUs (GPU-UUID) or of slices of one (MIG-UUID): SLURM 26.05 sets names
    where gres.conf has Flags=env_uuid. As CUDA does, stop at the first word that is neither, and leave out
    all slices but the first: a process computes on one.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [*itertools.takewhile(GPU_NAME.fullmatch, (word.strip() for word in value.split(",")))]
    return names[:1] if any(map(is_gpu_slice, names)) else names


def is_gpu_slice(name: str) -> bool:
    """Tell whether a name in CUDA_VISIBLE_DEVICES is that of a slice of a GPU (MIG)."""
    return name.startswith("MIG-")


def job_restart_count() -> int:
    """Return the number of times that SLURM has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def job_start_name() -> str:
    """Return a name for this start of this job (12-0), equal on all its nodes."""
    return f"{current_job_id_or_empty()}-{job_restart_count()}"


def job_step_name() -> str:
    """Return a name for this step of this start of this job (12-0-3), equal in all its tasks."""
    return f"{job_start_name()}-{os.environ.get('SLURM_STEP_ID', '')}"


def node_name() -> str:
    """Return SLURM's name of this node; outside of SLURM the host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def job_hostlist() -> str:
    """Return this job's nodes, in SLURM's notation for lists."""
    return os.environ.get("SLURM_JOB_NODELIST", "")


class Allocation(NamedTuple):
    """The resources of the SLURM job that this process belongs to."""

    nodes: int
    tasks: int
    cpus_per_task: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {self.tasks} tasks x {self.cpus_per_task} cores"


def current_allocation() -> Allocation | None:
    """Return this job's resources; None outside of SLURM."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    return Allocation(
        nodes=int(os.environ["SLURM_JOB_NUM_NODES"]),
        tasks=int(os.environ.get("SLURM_NTASKS", 1)),
        cpus_per_task=int(os.environ.get("SLURM_CPUS_PER_TASK", 1)),
    )


def count_task_slots() -> int | None:
    """Return how many tasks the job's nodes have places for; None where SLURM does not say so."""
    slots = os.environ.get("SLURM_TASKS_PER_NODE")  # such as 2(x3),1
    if not slots:
        return None
    matches = re.findall(r"(\d+)(?:\(x(\d+)\))?", slots)
    return sum(int(tasks) * int(nodes or 1) for tasks, nodes in matches)


# What a record keeps: SLURM's description of the job, Horovod's settings that affect its speed (others of its
# own are hosts and ranks), and whether torch leaves its collectives to TorchComms.
RECORDED_VARIABLE = re.compile(
    r"SLURM_(JOB_ID|JOB_PARTITION|JOB_NUM_NODES|NTASKS|GPUS_ON_NODE)"
    r"|HOROVOD_(AUTOTUNE|BATCH_D2D_MEMCOPIES|CACHE_CAPACITY|CONTROLLER|CYCLE_TIME|FUSION_THRESHOLD)"
    r"|HOROVOD_((CPU|GPU)_OPERATIONS|HIERARCHICAL_ALL(GATHER|REDUCE)|NUM_NCCL_STREAMS)"
    r"|TORCH_DISTRIBUTED_USE_TORCHCOMMS"
)


def recorded_variables(program: Literal["SLURM", "HOROVOD", "TORCH"]) -> dict[str, str]:
    """Return the variables of a program that a record keeps."""
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
CONTAINER_DECIDES = "container= decides"
REASON_BY_REFUSED_OPTION = {
    "wait": "sbatch is to return at once",
    "array": "a job for each run",
    "container": CONTAINER_DECIDES,
    "container-id": CONTAINER_DECIDES,
}
# Options of containers, which srun and the programs of images read; not the folders of those programs.
CONTAINER_VARIABLE = re.compile(
    r"PYXIS_.*|\w*SLURM_SPANK_OPTION_pyxis_\w+"  # what srun hands on of an sbatch with pyxis options
    r"|(APPTAINER|SINGULARITY)_(?!(LOCAL)?(CACHE|CONFIG|TMP)DIR$).*|(APPTAINER|SINGULARITY)ENV_.*"
)


class FilteredVariables(NamedTuple):
    """The environment for a program, and words on each variable that was left out of it."""

    variables: dict[str, str]
    drop_notes: list[str]  # such as "PYXIS_X (container= decides)"


def variables_without_container_options() -> FilteredVariables:
    """Return the environment without a person's options of containers, of which `container=` alone decides.

    The words on these variables have no values: some are passwords.
    """
    variables = {name: value for name, value in os.environ.items() if not CONTAINER_VARIABLE.fullmatch(name)}
    dropped = sorted(os.environ.keys() - variables.keys())
    return FilteredVariables(variables, [f"{name} ({CONTAINER_DECIDES})" for name in dropped])


def sbatch_variables(options: Mapping[str, str]) -> FilteredVariables:
    """Return the environment for sbatch.

    A job that this process belongs to is hidden. What a person has exported for sbatch counts where the
    script says nothing of it; sbatch itself would let it count before the script.

    Args:
        options: options in the script, by name without dashes.
    """
    exported, drop_notes = variables_without_container_options()
    variables = {
        name: value
        for name, value in exported.items()
        if name in CLUSTER_VARIABLES or not JOB_VARIABLE.fullmatch(name)
    }
    for name, value in sorted(os.environ.items()):
        # SLURM itself sets the excepted ones within a job.
        if not name.startswith("SBATCH_") or re.match(r"SBATCH_(CPU|MEM)_BIND", name) or name in variables:
            continue
        short_name = name.removeprefix("SBATCH_")
        option = OPTION_BY_VARIABLE.get(short_name, short_name.lower().replace("_", "-"))
        alternatives = next((group for group in ALTERNATIVE_OPTIONS if option in group), (option,))
        in_script = [(other, options[other]) for other in alternatives if other in options]
        if option in REASON_BY_REFUSED_OPTION:
            drop_notes.append(f"{name}={value} ({REASON_BY_REFUSED_OPTION[option]})")
        elif not in_script:
            variables[name] = value
        elif in_script[0] != (option, value):
            words = "=".join(filter(None, in_script[0]))
            drop_notes.append(f"{name}={value} (--{words} counts)")
    return FilteredVariables(variables, drop_notes)


def exported_sbatch_options(options: Mapping[str, str]) -> list[str]:
    """Return the options that a person has exported for sbatch and a script leaves: SBATCH_ACCOUNT=mine.

    Args:
        options: options in the script, by name without dashes.
    """
    variables = sbatch_variables(options).variables
    return [f"{name}={value}" for name, value in sorted(variables.items()) if name.startswith("SBATCH_")]


def set_slurm_conf_variable_if_given(conf: str | None) -> None:
    """Let SLURM's commands read a configuration file; None leaves the variable as it is.

    Needed on a login node of several clusters.
    """
    if conf:
        os.environ["SLURM_CONF"] = os.path.expanduser(conf)


def slurm_command_variables() -> dict[str, str]:
    """Return the environment for SLURM's commands, without variables that hide jobs or change the output."""
    return {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"(SQUEUE|SACCT|SCANCEL|SINFO|SCONTROL)_|SLURM_(TIME_FORMAT|BITSTR_LEN)$", name)
    }


def slurm_conf_file() -> str | None:
    """Return the configuration file that SLURM's commands read; None for the machine's own."""
    return os.environ.get("SLURM_CONF")


@contextlib.contextmanager
def temporary_slurm_conf_if_given(conf: str | None) -> Iterator[None]:
    """Let SLURM's commands read a configuration file inside the block; None changes nothing."""
    previous = slurm_conf_file()
    set_slurm_conf_variable_if_given(conf)
    try:
        yield
    finally:
        os.environ.pop("SLURM_CONF", None)
        set_slurm_conf_variable_if_given(previous)


# Settings of the libraries that workers communicate with.


def set_default_variables(settings: Mapping[str, str]) -> None:
    """Set variables for gloo and NCCL, which read them as the group starts, unless the user has set them."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def gloo_interface() -> str | None:
    """Return the network interface that gloo is told to use; None: it goes by the host's name."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def nccl_settings_with_paths_hidden() -> dict[str, str]:
    """Return NCCL's environment variables, with 'a file' for a path: records are meant to be shared."""
    return {
        name: "a file" if os.sep in value else value
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_")
    }


def set_horovod_variables(settings: Mapping[str, str]) -> None:
    """Set Horovod's ranks and addresses, which it reads from the environment when it starts."""
    os.environ.update(settings)
