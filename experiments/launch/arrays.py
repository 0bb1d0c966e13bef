"""Planned runs -> arrays of SLURM jobs: what is grouped, in which order, and what sbatch is told of it."""

from __future__ import annotations

import json
import math
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from analysis.records.configs import run_id
from experiments.config import code_version
from experiments.config.config import Config
from experiments.config.folders import Folders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun
from experiments.launch.attempt import worker_command
from experiments.launch.bad_nodes import LEDGER_FILE, unreliable_nodes

EQUAL_OPTIONS = ("partition", "account", "qos", "constraint", "comment")  # the same names here and in SLURM

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
    def python(self) -> str:
        """The Python that the nodes run."""
        return self.cluster.python or sys.executable

    @property
    def gpus_blocked(self) -> int:
        """GPUs of a node that nobody else can use meanwhile: all that it has, if the job has it alone."""
        used = self.shape.gpus_per_node
        return max(used, self.cluster.workers_per_node) if used and self.cluster.exclusive else used

    @property
    def node_hours(self) -> float:
        """The most that the jobs take: each may need its whole time limit."""
        return float(self.shape.nodes * len(self.jobs) * self.cluster.time_min / 60)

    def options(
        self, name: str, folder: Path, cwd: Path, ledger: Path, srun: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Keyword arguments for submitit's SlurmExecutor; sbatch is told nothing of those that are None.

        Args:
            folder: of the array, with the spec of each job.
            cwd: the job's working directory, with the code.
            ledger: of nodes to avoid, in addition to those of the cluster's description.
            srun: further words for it.
        """
        cluster, shape, gpus = self.cluster, self.shape, self.shape.gpus_per_node
        # Of an array each job has its own number, of a single job there is none.
        spec = f"{shlex.quote(str(folder))}/task${{SLURM_ARRAY_TASK_ID:-0}}.json"
        python, noted = shlex.quote(self.python), shlex.quote(str(ledger))
        options: dict[str, Any] = {
            "job_name": name,
            "time": cluster.time_min,
            "nodes": shape.nodes,
            "ntasks_per_node": shape.tasks_per_node,
            "cpus_per_task": shape.cpus_per_task,
            "signal_delay_s": cluster.signal_delay_s,
            "array_parallelism": cluster.array_parallelism,
            "setup": [
                *cluster.setup,
                code_version.WITHOUT_BYTECODE,
                f"sh experiments/launch/begin.sh {python} {spec} {noted} || exit",
            ],
            "teardown": [f"{python} -u -m experiments.launch.job_hooks end {spec}"],  # however they ended
            # Since SLURM 22.05 srun does not take cores from sbatch: all workers would share one. And where
            # SBATCH_EXPORT=NONE is exported, workers would not get what the script has set.
            "srun_args": ["--export=ALL", f"--cpus-per-task={shape.cpus_per_task}", *srun, *cluster.srun],
            "wckey": None,  # instead of submitit's default, which clusters that check these keys would refuse
            **{option: getattr(cluster, option) for option in EQUAL_OPTIONS},
            "mem": cluster.mem_gb and f"{cluster.mem_gb}G",
            "exclusive": cluster.exclusive or None,
            "gres": f"{cluster.gres}:{gpus}" if gpus and cluster.gres else None,
            "gpus_per_node": gpus if gpus and not cluster.gres else None,
            "exclude": ",".join([*filter(None, [cluster.exclude]), *unreliable_nodes(ledger, self.python)])
            or None,
        }
        further: dict[str, Any] = {"requeue": True, "chdir": str(cwd)}
        if cluster.reservation is not None:
            further["reservation"] = cluster.reservation
        said = {name.replace("_", "-") for name, value in (options | further).items() if value is not None}
        for word in (*cluster.sbatch, *cluster.more_sbatch):
            option, equals, value = word.removeprefix("--").partition("=")
            if option in said or option in DECIDER_BY_OPTION:
                by = DECIDER_BY_OPTION.get(option) or FIELD_BY_OPTION.get(option, f"cluster.{option}")
                raise ValueError(f"{word} would replace what sbatch is told by {by}; change that instead")
            further[option] = value if equals else True
        return {**options, "additional_parameters": further}


def job_shape(cluster: SlurmCluster, config: Config) -> JobShape:
    """The workers of a run in equal numbers on as few nodes as possible.

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


def group_into_arrays(planned: Sequence[PlannedRun], block: bool) -> list[JobArray]:
    """Runs grouped by what they ask SLURM for: all tasks of an array get the same. No array exceeds the
    cluster's limit.
    """
    groups: dict[str, list[PlannedRun]] = {}
    for run in planned:
        config = run.config
        where = [config.cluster.as_dict(), config.container.as_dict()]
        asks = json.dumps([*where, config.workers, config.threads, config.device], sort_keys=True)
        groups.setdefault(asks, []).append(run)
    found = []
    for group in groups.values():
        cluster = group[0].config.cluster
        assert isinstance(cluster, SlurmCluster), cluster
        shape = job_shape(cluster, group[0].config)
        jobs = [shuffle_runs(group)] if block else [[run] for run in group]
        size = cluster.max_array
        found += [JobArray(cluster, shape, jobs[start : start + size]) for start in range(0, len(jobs), size)]
        found[-1].options(
            "", Path(), Path(), Path(LEDGER_FILE)
        )  # whoever plans hears of words that can't be, too
    return found


def shuffle_runs(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The order for one allocation: repetition by repetition, the methods of each in a random order.

    Within a repetition runs compare on the same nodes at about the same time; a drift falls on each method
    alike in the mean. The order follows from the runs, so that planning it again gives the same.
    """
    named = sorted(((run_id(run.config), run) for run in planned), key=lambda each: each[0])
    chance = random.Random("".join(name for name, _ in named))
    chance.shuffle(named)
    return sorted((run for _, run in named), key=lambda run: run.config.seed)


def sbatch_texts(found: Sequence[JobArray], folders: Folders, name: str) -> list[str]:
    """The texts that `submit` would hand to sbatch, and below each what its tasks start as a worker."""
    from slurm.submit import exported_options, sbatch_text  # submitit comes with it

    texts, code = [], folders.code / code_version.digest()
    for number, array in enumerate(found):
        folder = folders.sweeps / name / f"a{number}"
        worker = worker_command(array.jobs[0][0], folders, code)
        own = f"{name}-a{number}", folder, code, folders.scratch / LEDGER_FILE, worker.srun_words()
        text = sbatch_text(folder, array.options(*own), worker.python, len(array.jobs))
        around = "".join(f"# Exported for sbatch: {each}\n" for each in exported_options(text))
        texts.append(f"{text}\n\n{around}# Each task of srun starts a worker:\n# {worker.text()}\n")
    return texts
