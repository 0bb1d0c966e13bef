"""The checks of `doctor`: what the probes of a cluster's nodes mean, and what to do about it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from analysis.records import locks
from experiments.config.config import Config
from experiments.config.machines import Container, SlurmCluster
from experiments.launch import probe
from experiments.launch.cluster_prober import GroupTestResult, NodeProbe
from experiments.launch.probe import TaskFacts
from slurm import gpus
from slurm.partition import PartitionNode

MAX_CLOCK_OFFSET_S = 2.0  # of a node, unnoticed: a file takes its time to be seen
Verdict = Literal["works", "note", "FAULT"]
VERDICTS: tuple[Verdict, ...] = ("works", "note", "FAULT")  # in the order of the output
# By what a node's probe finds of the lock that this machine holds.
LOCK_FINDINGS: dict[str, tuple[Verdict, str]] = {
    probe.HELD: ("works", "of the results folder are seen on {nodes}"),
    probe.NOT_HELD: (
        "note",
        "{nodes}: locks of the results folder hold on one node only; submit from one machine at a time, or "
        "mount it with locks (Lustre: -o flock; NFS: without local_lock)",
    ),
    probe.NO_LOCKS: (
        "note",
        "{nodes}: files of the results folder can't be locked; submit from one machine at a time, or set "
        f"SPARSIFY_RESULTS to {locks.ELSEWHERE}",
    ),
}
UNOPENED: tuple[Verdict, str] = (
    "FAULT",
    "{nodes}: files of the results folder can't be opened ({lock}); make them writable there",
)
V = TypeVar("V")


class Finding(NamedTuple):
    """Line of the output, and the fields of the cluster's file that follow from it."""

    verdict: Verdict
    subject: str
    text: str
    suggested_fields: Mapping[str, Any] = {}


@dataclass(frozen=True)
class ClusterObservations:
    """Facts about a cluster or this machine: from probes, from a test of a group, and from SLURM."""

    config: Config
    probes: Sequence[NodeProbe]
    group_test: GroupTestResult | None = None
    container_fault: str = ""  # why this machine can't start runs in their container
    nodes: Sequence[PartitionNode] = ()  # of the partition, by SLURM
    max_array_jobs: int | None = None  # jobs of an array that SLURM takes
    accounting_storage: str | None = None  # SLURM's setting
    untested_version: str = ""  # a sentence where tests run with other versions of SLURM

    @property
    def cluster(self) -> SlurmCluster | None:
        """The cluster's description, if it is one of SLURM's."""
        return self.config.cluster if isinstance(self.config.cluster, SlurmCluster) else None

    @property
    def facts_of_all_tasks(self) -> list[TaskFacts]:
        """The facts that the tasks of all probes found."""
        return [facts for node_probe in self.probes for facts in node_probe.facts]

    def node_names_by_fact(self, read: Callable[[TaskFacts], V]) -> dict[V, str]:
        """Return the names of the nodes by the value that their facts have; of several tasks the last."""
        return _join_names_by_value({facts.node: read(facts) for facts in self.facts_of_all_tasks})


def judge_cluster(observed: ClusterObservations) -> list[Finding]:
    """Return the findings of all checks; of two that give a field of the cluster's file, the last counts."""
    return [finding for check in CHECKS for finding in check(observed)]


def _judge_probes(observed: ClusterObservations) -> Iterator[Finding]:
    for node in observed.nodes:
        if not node.is_usable:
            yield Finding("note", node.name, f"not asked: SLURM has it as {node.state}")
    for node_probe in observed.probes:
        if not node_probe.has_all_facts:
            yield Finding(_fault_verdict(node_probe.why_missing), node_probe.node, node_probe.why_missing)
    names = sorted({facts.node for facts in observed.facts_of_all_tasks})
    if names:
        yield Finding("works", "results", f"what nodes write is seen here: {', '.join(names)}")


def _judge_python(observed: ClusterObservations) -> Iterator[Finding]:
    fields = {"python": observed.cluster.python} if observed.cluster and observed.cluster.python else {}
    for version, nodes in observed.node_names_by_fact(lambda facts: facts.python_version).items():
        yield Finding("works", "Python", f"{version} on {nodes}", fields)


def _judge_containers(observed: ClusterObservations) -> Iterator[Finding]:
    container = observed.config.container
    if observed.container_fault:
        yield Finding("FAULT", "container", f"on this machine: {observed.container_fault}")
    for why, nodes in observed.node_names_by_fact(lambda facts: facts.container_error).items():
        if why:
            yield Finding("FAULT", "container", f"{nodes}: {why}")
        elif isinstance(container, Container):
            yield Finding("works", "container", f"container={container.name} starts on {nodes}")
    if not isinstance(container, Container):
        for runtime, nodes in observed.node_names_by_fact(lambda facts: facts.container_runtime).items():
            presence = f"{runtime or 'neither apptainer nor singularity'} is there"
            yield Finding("works", "container", f"none was asked for; {presence}, on {nodes}")


def _judge_network(observed: ClusterObservations) -> Iterator[Finding]:
    for address, nodes in observed.node_names_by_fact(
        lambda facts: " and ".join(facts.hostname_addresses)
    ).items():
        if observed.cluster and (not address or address.startswith("127.")):
            means = f"own name resolves to {address or 'nothing'}"
            text = f"of {nodes}: their {means}, so workers go by the interface that reaches the others"
            yield Finding("note", "names", text)
    for why, nodes in observed.node_names_by_fact(lambda facts: facts.closed_ports_warning).items():
        if why:
            yield Finding("note", "ports", f"{nodes}: {why}")
    group = observed.group_test
    if group is None:
        return
    workers = f"workers of {' and '.join(group.nodes)}"
    if group.why:
        yield Finding(_fault_verdict(group.why), "network", f"{workers}: {group.why}")
        return
    names = list(dict.fromkeys(filter(None, group.interfaces)))
    by = f" by {' and '.join(names)}" if names else ""
    # One name may be written down; where nodes have others, workers find theirs by themselves.
    fields = {"interface": names[0]} if observed.cluster and len(names) == 1 else {}
    yield Finding("works", "network", f"{workers} meet{by}", fields)


def _judge_cores(observed: ClusterObservations) -> Iterator[Finding]:
    for node_probe in observed.probes:
        cores_by_worker = [set(facts.cores) for facts in node_probe.facts]
        threads = max((_count_cpus(core) for cores in cores_by_worker for core in cores), default=1)
        if node_probe is observed.probes[0] and cores_by_worker:
            threads_text = f"{threads} threads a core" if threads > 1 else "one thread a core"
            count = min(len(facts.cores) for facts in node_probe.facts)
            text = f"{threads_text}; {count} CPUs for each worker on {node_probe.node}"
            yield Finding("works", "cores", text)
        are_shared = sum(map(len, cores_by_worker)) > len(set().union(*cores_by_worker))
        if are_shared and observed.cluster:
            text = "workers share cores, which makes timings worthless; "
            sbatch = observed.cluster.sbatch
            if threads > 1 and not any("multithread" in option for option in sbatch):
                text += "sbatch: [--hint=nomultithread] gives each core to one"
                yield Finding("note", node_probe.node, text, {"sbatch": [*sbatch, "--hint=nomultithread"]})
            else:
                text += "srun: [--cpu-bind=cores] binds them, where the site lets SLURM do so"
                yield Finding("note", node_probe.node, text)
            return


def _judge_exclusive(observed: ClusterObservations) -> Iterator[Finding]:
    if observed.cluster is None:
        return
    is_alone_by_node = {node_probe.node: node_probe.is_alone for node_probe in observed.probes}
    for is_alone, nodes in _join_names_by_value(is_alone_by_node).items():
        if is_alone:
            yield Finding("works", "exclusive", f"a job has {nodes} for itself", {"exclusive": True})
        elif is_alone is not None and observed.cluster.exclusive:
            text = (
                f"{nodes}: SLURM does not say that a job has its nodes for itself; timings may be disturbed"
            )
            yield Finding("note", "exclusive", text)
        elif is_alone is not None:
            text = f"{nodes}: others may run beside a job; exclusive: true makes timings worth more"
            yield Finding("note", "exclusive", text, {"exclusive": False})


def _judge_gpus(observed: ClusterObservations) -> Iterator[Finding]:
    if observed.config.device != "cuda":
        return
    gpu_model = observed.config.cluster.gpu
    for node_probe in observed.probes:
        if not node_probe.facts:
            continue
        gpus_by_worker = [facts.assigned_gpus() for facts in node_probe.facts]
        models = sorted({model for facts in node_probe.facts for model in facts.model_by_bus_id.values()})
        count = len({gpu for assigned in gpus_by_worker for gpu in assigned})
        if not all(gpus_by_worker) or count < len(gpus_by_worker):
            view = f"{len(gpus_by_worker)} workers see {count} GPUs"
            text = (
                f"{view if all(gpus_by_worker) else 'workers see no GPU'}; cluster.gres and gpus are "
                "asked for as `plan --sbatch` shows: ask for them as the site's manual says, or take "
                "device=cpu"
            )
            yield Finding("FAULT", node_probe.node, text)
            continue
        is_bound = max(map(len, gpus_by_worker)) == 1 < len(gpus_by_worker)
        bound = "each worker sees its own" if is_bound else "workers see all of their job"
        yield Finding("works", "GPUs", f"{node_probe.node}: {', '.join(models)}; {bound}")
        if gpu_model not in ("any", "none") and not all(
            gpus.is_gpu_model(gpu_model, model) for model in models
        ):
            text = f"it has {', '.join(models)}, and cluster.gpu={gpu_model}; change gpu, or the partition"
            yield Finding("FAULT", node_probe.node, text)


def _judge_locks(observed: ClusterObservations) -> Iterator[Finding]:
    for lock, nodes in observed.node_names_by_fact(lambda facts: facts.lock).items():
        verdict, text = LOCK_FINDINGS.get(lock, UNOPENED)
        yield Finding(verdict, "locks", text.format(nodes=nodes, lock=lock))


def _judge_clocks(observed: ClusterObservations) -> Iterator[Finding]:
    for node_probe in observed.probes:
        for facts in node_probe.facts[:1]:
            slow_s = node_probe.submitted_at - facts.epoch_s
            fast_s = facts.epoch_s - node_probe.seen_at
            if max(slow_s, fast_s) > MAX_CLOCK_OFFSET_S:
                offset = f"{max(slow_s, fast_s):.0f} s {'slow' if slow_s > fast_s else 'fast'}"
                text = f"its clock is at least {offset}; times in records are off by as much (chrony)"
                yield Finding("note", node_probe.node, text)


def _judge_limits(observed: ClusterObservations) -> Iterator[Finding]:
    cluster = observed.cluster
    if cluster is None:
        return
    limit = observed.max_array_jobs
    if limit is not None:
        if cluster.max_array > limit:
            text = f"max_array={cluster.max_array}, and SLURM takes arrays of {limit} jobs; say max_array: "
            yield Finding("FAULT", "arrays", f"{text}{limit}", {"max_array": limit})
        else:
            yield Finding("works", "arrays", f"of up to {limit} jobs", {"max_array": limit})
    limit_min = max((node.time_limit_min for node in observed.nodes), default=math.inf)
    if cluster.time_min > limit_min:
        text = (
            f"time_min={cluster.time_min} is more than the partition's {limit_min:g} minutes; say time_min: "
        )
        yield Finding("FAULT", "time limit", f"{text}{limit_min:g}", {"time_min": int(limit_min)})
    if observed.untested_version:
        yield Finding("note", "SLURM", observed.untested_version)
    if (observed.accounting_storage or "").endswith("none"):
        text = "SLURM keeps no accounts: of a job that is gone, only what it wrote is known"
        yield Finding("note", "accounting", text)


CHECKS: tuple[Callable[[ClusterObservations], Iterable[Finding]], ...] = (
    _judge_probes, _judge_python, _judge_containers, _judge_network, _judge_cores, _judge_exclusive,
    _judge_gpus, _judge_locks, _judge_clocks, _judge_limits,
)  # fmt: skip


def _fault_verdict(why: str) -> Verdict:
    return "note" if why.startswith("not known") else "FAULT"


def _count_cpus(core: str) -> int:
    """Return the number of CPUs in a list of Linux's: 2 of 0,4 or of 0-1."""
    ranges = (part.split("-") for part in core.split(","))
    return sum(int(first_last[-1]) - int(first_last[0]) + 1 for first_last in ranges)


def _join_names_by_value(value_by_node: Mapping[str, V]) -> dict[V, str]:
    """Return the names of the nodes, joined by commas, by the value that they share."""
    names = defaultdict[V, list[str]](list)
    for node, value in value_by_node.items():
        names[value].append(node)
    return {value: ", ".join(nodes) for value, nodes in names.items()}
