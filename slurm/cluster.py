"""A cluster's description and a number of workers -> what sbatch is asked for.

conf/cluster/generic_slurm.yaml explains every field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WHOLE = (
    "workers_per_node",
    "cpus_per_worker",
    "time_min",
    "signal_delay_s",
    "max_array",
    "array_parallelism",
)
LISTS = ("srun", "sbatch", "setup")
WORDS = (
    "partition", "account", "qos", "reservation", "constraint", "exclude", "comment", "gres", "python",
    "slurm_conf", "interface",
)  # fmt: skip
PLAIN_SBATCH = (
    "partition",
    "account",
    "qos",
    "constraint",
    "comment",
)  # named alike here and in SLURM


class Shape(NamedTuple):
    """What one job needs. Jobs of one shape can be tasks of one array."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int

    def __str__(self) -> str:
        gpus = f", {self.gpus_per_node} GPUs" if self.gpus_per_node else ""
        return f"{self.nodes} nodes x {self.tasks_per_node} tasks x {self.cpus_per_task} cores{gpus}"


def check(cluster: Mapping[str, Any]) -> None:
    """Refuse a description that no job could be made of.

    Raises:
        ValueError: names the field.
    """
    for name in WHOLE:
        _whole(name, cluster[name], 1)
    _whole("requeues", cluster["requeues"], 0)
    for name in LISTS:
        if not isinstance(cluster[name], list) or not all(isinstance(word, str) for word in cluster[name]):
            raise ValueError(
                f"cluster.{name}={cluster[name]!r} must be a list of words, such as ['--mpi=none']"
            )
    for word in cluster["sbatch"]:
        if not word.startswith("--"):
            raise ValueError(f"cluster.sbatch: {word!r} is no long option, such as '--mail-type=END'")
    words = {name: cluster[name] for name in WORDS if cluster[name] is not None}
    for name, value in {**words, "sbatch": " ".join(cluster["sbatch"])}.items():
        # Directives are comments to the shell, which executes nothing in them; a second line would be code.
        if "\n" in str(value) or "\r" in str(value):
            raise ValueError(f"cluster.{name}={value!r} has a line break, which no option of sbatch can have")
    if cluster["signal_delay_s"] >= 60 * cluster["time_min"]:
        raise ValueError(
            f"cluster.signal_delay_s={cluster['signal_delay_s']} is no less than the whole time limit, "
            f"cluster.time_min={cluster['time_min']}: jobs would be told to stop as they start"
        )


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"cluster.{name}={value} must be a whole number, {least} or more")


def shape(cluster: Mapping[str, Any], workers: int, threads: int, gpus: bool) -> Shape:
    """The workers spread evenly over as few nodes as hold them.

    Raises:
        ValueError: more threads than cores.
    """
    if threads > cluster["cpus_per_worker"]:
        raise ValueError(
            f"threads={threads} is more than the cores of a worker, "
            f"cluster.cpus_per_worker={cluster['cpus_per_worker']}; ask for more cores or for fewer threads"
        )
    nodes = math.ceil(workers / cluster["workers_per_node"])
    while workers % nodes:
        nodes += 1
    per_node = workers // nodes
    return Shape(nodes, per_node, cluster["cpus_per_worker"], per_node if gpus else 0)


def parameters(
    cluster: Mapping[str, Any], shape: Shape, name: str, cwd: Path, after: str, exclude: Sequence[str] = ()
) -> dict[str, Any]:
    """Keyword arguments for submitit's SlurmExecutor.

    Args:
        cwd: where the job runs; Python finds the code there.
        after: a shell line that the batch script ends with, whatever became of the workers.
        exclude: nodes to stay away from, besides the cluster's own.
    """
    options: dict[str, Any] = {
        "job_name": name,
        "time": cluster["time_min"],
        "nodes": shape.nodes,
        "ntasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cpus_per_task,
        "signal_delay_s": cluster["signal_delay_s"],
        "array_parallelism": cluster["array_parallelism"],
        "setup": cluster["setup"] or None,
        "teardown": [after],
        # Since SLURM 22.05 srun no longer takes this from sbatch, and workers would share one core.
        "srun_args": [f"--cpus-per-task={shape.cpus_per_task}", *cluster["srun"]],
        "wckey": None,  # submitit's own; clusters that check such keys would refuse it
        **{option: cluster[option] for option in PLAIN_SBATCH if cluster[option] is not None},
    }
    if cluster["mem_gb"] is not None:
        options["mem"] = f"{cluster['mem_gb']}G"
    if cluster["exclusive"]:
        options["exclusive"] = True
    if shape.gpus_per_node and cluster["gres"]:
        options["gres"] = f"{cluster['gres']}:{shape.gpus_per_node}"
    elif shape.gpus_per_node:
        options["gpus_per_node"] = shape.gpus_per_node
    if away := [*filter(None, [cluster["exclude"]]), *exclude]:
        options["exclude"] = ",".join(away)
    further: dict[str, Any] = {"requeue": True, "chdir": str(cwd)}
    if cluster["reservation"] is not None:
        further["reservation"] = cluster["reservation"]
    for word in cluster["sbatch"]:
        option, equals, value = word.removeprefix("--").partition("=")
        further[option] = value if equals else True
    options["additional_parameters"] = further
    return options
