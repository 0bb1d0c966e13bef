"""Planned runs -> arrays of SLURM jobs: their groups, their order, and their scripts for sbatch."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from analysis.records.configs import run_id
from experiments.config import code_version
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun
from experiments.launch.attempt import worker_command
from experiments.launch.bad_nodes import LEDGER_FILE, unreliable_nodes
from slurm import environment
from slurm.batch_script import UNPICKLE, BatchScript, log_name_pattern
from slurm.worker_process import WorkerCommand

EQUAL_OPTIONS = ("partition", "account", "qos", "constraint", "comment", "reservation")  # named alike in both

# Options of sbatch that nobody else may give, and what decides them; or the field that does, if it is set.
DECIDER_BY_OPTION = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "workers and cluster.workers_per_node"),
    **dict.fromkeys(("job-name", "output", "error", "open-mode", "chdir", "wrap"), "the sweep itself"),
    **dict.fromkeys(("requeue", "no-requeue"), "cluster.requeues"),
    "cpus-per-task": "cluster.cpus_per_worker", "time": "cluster.time_min",
    "signal": "cluster.signal_delay_s", "array": "cluster.array_parallelism",
}  # fmt: skip
FIELD_BY_OPTION = {"gpus-per-node": "cluster.gres", "mem": "cluster.mem_gb"}


class JobShape(NamedTuple):
    """The resources of one job. Jobs of the same shape can be in one array."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int

    def __str__(self) -> str:
        gpus = f", {self.gpus_per_node} GPUs" if self.gpus_per_node else ""
        return f"{self.nodes} nodes x {self.tasks_per_node} tasks x {self.cpus_per_task} cores{gpus}"


@dataclass(frozen=True)
class JobArray:
    """Jobs of one shape; each carries out one run, or in block mode all of them."""

    cluster: SlurmCluster
    shape: JobShape
    jobs: list[list[PlannedRun]]

    @property
    def node_python(self) -> str:
        """The Python that the nodes run."""
        return self.cluster.python or sys.executable

    @property
    def blocked_gpus_per_node(self) -> int:
        """GPUs of a node that nobody else can use meanwhile: all that it has, if the job has it alone."""
        gpus = self.shape.gpus_per_node
        return max(gpus, self.cluster.workers_per_node) if gpus and self.cluster.exclusive else gpus

    @property
    def max_node_hours(self) -> float:
        """The most that the jobs take: each may need its whole time limit."""
        return float(self.shape.nodes * len(self.jobs) * self.cluster.time_min / 60)

    def sbatch_options(self, name: str, folder: Path, cwd: Path, ledger: Path) -> dict[str, str | int | None]:
        """Return the options of sbatch by name; None for those that are left out.

        Args:
            folder: folder of the array's logs.
            cwd: the job's working directory, with the code.
            ledger: file of nodes to avoid, in addition to those of the cluster's description.

        Raises:
            ValueError: a word of the cluster's description would replace one of them.
        """
        cluster = self.cluster
        num_gpus = self.shape.gpus_per_node
        num_jobs = len(self.jobs)
        log = folder / log_name_pattern(num_jobs, task="0")
        excluded = [*filter(None, [cluster.exclude]), *unreliable_nodes(ledger, self.node_python)]
        options: dict[str, str | int | None] = {
            "job-name": name,
            "chdir": str(cwd),
            "output": f"{log}.out",
            "error": f"{log}.err",
            "open-mode": "append",
            "requeue": True,
            "time": cluster.time_min,
            "signal": f"USR2@{cluster.signal_delay_s}",
            "nodes": self.shape.nodes,
            "ntasks-per-node": self.shape.tasks_per_node,
            "cpus-per-task": self.shape.cpus_per_task,
            "gres": f"{cluster.gres}:{num_gpus}" if num_gpus and cluster.gres else None,
            "gpus-per-node": num_gpus if num_gpus and not cluster.gres else None,
            "mem": f"{cluster.mem_gb}G" if cluster.mem_gb else None,
            "exclusive": cluster.exclusive or None,
            "exclude": ",".join(excluded) or None,
        }
        if num_jobs > 1:
            options["array"] = f"0-{num_jobs - 1}%{min(num_jobs, cluster.array_parallelism)}"
        options |= {option: getattr(cluster, option) for option in EQUAL_OPTIONS}
        further: dict[str, str | int | None] = {}
        for word in (*cluster.sbatch, *cluster.more_sbatch):
            option, equals, value = word.removeprefix("--").partition("=")
            if options.get(option) is not None or option in DECIDER_BY_OPTION:
                decider = DECIDER_BY_OPTION.get(option) or FIELD_BY_OPTION.get(option, f"cluster.{option}")
                raise ValueError(
                    f"{word} would replace what sbatch is told by {decider}; change that instead"
                )
            further[option] = value if equals else True
        check_gpus_are_asked_for_once(
            [
                *(f"--{name}={value}" for name, value in options.items() if value is not None),
                *cluster.sbatch,
                *cluster.more_sbatch,
                *cluster.srun,
            ]
        )
        return options | further

    def batch_script(self, name: str, folder: Path, ledger: Path, worker: WorkerCommand) -> BatchScript:
        """Return the script for sbatch of the whole array.

        Args:
            folder: folder of the array, with the spec of each job, and for its logs.
            ledger: file of nodes that failed.
            worker: command that starts the workers of the array's runs.
        """
        # Of an array each job has its own number, of a single job there is none.
        spec = f"{shlex.quote(str(folder))}/task${{SLURM_ARRAY_TASK_ID:-0}}.json"
        python = shlex.quote(self.node_python)
        log = folder / log_name_pattern(len(self.jobs), task="%t")
        return BatchScript(
            options=self.sbatch_options(name, folder, Path(worker.cwd), ledger),
            setup=[
                *self.cluster.setup,
                code_version.WITHOUT_BYTECODE,
                "export SUBMITIT_EXECUTOR=slurm",
                f"sh experiments/launch/begin.sh {python} {spec} {shlex.quote(str(ledger))} || exit",
            ],
            # Since SLURM 22.05 srun does not take cores from sbatch: all workers would share one. And where
            # SBATCH_EXPORT=NONE is exported, workers would not get what the script has set.
            srun_options=[
                f"--output={log}.out",
                f"--error={log}.err",
                "--export=ALL",
                f"--cpus-per-task={self.shape.cpus_per_task}",
                *worker.srun_pyxis_options(),
                *self.cluster.srun,
            ],
            command=[worker.task_python, "-u", "-c", UNPICKLE, str(folder)],
            teardown=[f"{python} -u -m experiments.launch.job_hooks end {spec}"],  # however they ended
        )


def check_gpus_are_asked_for_once(words: Sequence[str]) -> None:
    """Refuse --gres=gpu beside --gpus-per-node, which sbatch and srun refuse since SLURM 26.05.

    Args:
        words: options of sbatch and of srun, which gets sbatch's from the job.

    Raises:
        ValueError: there are both.
    """
    by_gres = [word for word in words if re.match(r"--gres=(.*,)?(gres[:/])?gpu\b", word)]
    by_node = [word for word in words if word.startswith("--gpus-per-node")]
    if by_gres and by_node:
        raise ValueError(
            f"{by_gres[0]} and {by_node[0]} both ask for GPUs, and SLURM 26.05 and newer refuse a job with "
            "both; keep one: cluster.gres=gpu asks by --gres, cluster.gres=null by --gpus-per-node"
        )


def job_shape(cluster: SlurmCluster, config: Config) -> JobShape:
    """Return the nodes and tasks for a run: equal numbers of workers on as few nodes as possible.

    Raises:
        ValueError: there are more threads than cores, or jobs would be told to stop as they start.
    """
    if cluster.signal_delay_s >= 60 * cluster.time_min:
        raise ValueError(
            f"cluster.signal_delay_s={cluster.signal_delay_s} is no less than the whole time limit, "
            f"cluster.time_min={cluster.time_min}: jobs would be told to stop as they start"
        )
    if config.threads > cluster.cpus_per_worker:
        raise ValueError(
            f"threads={config.threads} is more than the cores of a worker, "
            f"cluster.cpus_per_worker={cluster.cpus_per_worker}; ask for more cores or for fewer threads"
        )
    nodes = math.ceil(config.workers / cluster.workers_per_node)
    while config.workers % nodes:
        nodes += 1
    per_node = config.workers // nodes
    return JobShape(nodes, per_node, cluster.cpus_per_worker, per_node if config.device == "cuda" else 0)


def group_into_arrays(planned: Sequence[PlannedRun], *, one_job_per_group: bool) -> list[JobArray]:
    """Return runs grouped by what they ask SLURM for, in arrays that do not exceed the cluster's limit.

    Args:
        one_job_per_group: one job carries out all runs of a group, one after the other.
    """
    runs_by_request: dict[str, list[PlannedRun]] = {}
    for run in planned:
        config = run.config
        settings = [config.cluster.as_dict(), config.container.as_dict()]
        request = json.dumps([*settings, config.workers, config.threads, config.device], sort_keys=True)
        runs_by_request.setdefault(request, []).append(run)
    arrays = []
    for group in runs_by_request.values():
        cluster = group[0].config.cluster
        assert isinstance(cluster, SlurmCluster), cluster
        shape = job_shape(cluster, group[0].config)
        jobs = [shuffle_runs_within_repetitions(group)] if one_job_per_group else [[run] for run in group]
        size = cluster.max_array
        for start in range(0, len(jobs), size):
            arrays.append(JobArray(cluster, shape, jobs[start : start + size]))
        # Whoever plans hears of words that can't be, too.
        arrays[-1].sbatch_options("", Path(), Path(), Path(LEDGER_FILE))
    return arrays


def shuffle_runs_within_repetitions(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs in the order for one allocation: by repetition, each repetition in random order.

    Within a repetition runs compare on the same nodes at about the same time; a drift falls on each method
    alike in the mean. The order follows from the runs, so that planning it again gives the same.
    """
    run_by_id = {run_id(run.config): run for run in planned}
    ids = sorted(run_by_id)
    random.Random("".join(ids)).shuffle(ids)
    return sorted((run_by_id[name] for name in ids), key=lambda run: run.config.seed)


def sbatch_script_previews(arrays: Sequence[JobArray], folders: ResultFolders, name: str) -> list[str]:
    """Return the scripts that `submit` would hand to sbatch, each with comments below it.

    These name what a person has exported for sbatch, and what each task starts as a worker.
    """
    code = folders.code / code_version.code_digest()
    texts = []
    for number, array in enumerate(arrays):
        folder = folders.sweeps / name / f"a{number}"
        worker = worker_command(array.jobs[0][0], folders, code)
        script = array.batch_script(f"{name}-a{number}", folder, folders.scratch / LEDGER_FILE, worker)
        comments = [
            f"Exported for sbatch: {word}"
            for word in environment.exported_sbatch_options(script.text_by_option)
        ]
        comments += ["Each task of srun starts a worker:", worker.format_for_display()]
        texts.append(script.text + "".join(f"\n# {comment}" for comment in comments) + "\n")
    return texts
