"""A cluster's description and a number of workers -> the options for sbatch.

conf/cluster/generic_slurm.yaml explains every field of the description.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PLAIN_SBATCH = ("partition", "account", "qos", "constraint", "comment")  # the same names here and in SLURM


class Shape(NamedTuple):
    """The resources of one job. Jobs of the same shape can be in one array."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int

    def __str__(self) -> str:
        gpus = f", {self.gpus_per_node} GPUs" if self.gpus_per_node else ""
        return f"{self.nodes} nodes x {self.tasks_per_node} tasks x {self.cpus_per_task} cores{gpus}"


def check(cluster: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: two fields of the description exclude each other.
    """
    if cluster["signal_delay_s"] >= 60 * cluster["time_min"]:
        raise ValueError(
            f"cluster.signal_delay_s={cluster['signal_delay_s']} is no less than the whole time limit, "
            f"cluster.time_min={cluster['time_min']}: jobs would be told to stop as they start"
        )


def shape(cluster: Mapping[str, Any], workers: int, threads: int, gpus: bool) -> Shape:
    """The workers in equal numbers on as few nodes as possible.

    Raises:
        ValueError: there are more threads than cores.
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
        cwd: the job's working directory, with the code.
        after: a shell command at the end of the batch script, which runs however the workers ended.
        exclude: nodes to avoid, in addition to those of the description.
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
        # Since SLURM 22.05 srun does not take this from sbatch, and all workers would share one core.
        "srun_args": [f"--cpus-per-task={shape.cpus_per_task}", *cluster["srun"]],
        "wckey": None,  # instead of submitit's default, which clusters that check these keys would refuse
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
