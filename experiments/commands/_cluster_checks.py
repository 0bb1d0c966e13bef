"""What `doctor` makes of its probes: findings, each with what to do, and fields for the cluster's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from analysis.records import locks
from experiments.config.config import Config
from experiments.config.machines import Container, SlurmCluster
from experiments.launch import probe
from experiments.launch.examination import GroupTestResult, NodeProbe
from experiments.launch.probe import NodeFacts
from slurm import gpus
from slurm.partition import PartitionNode

CLOCK_S = 2.0  # that a node's clock may differ unnoticed: a file takes its time to be seen
Verdict = Literal["works", "note", "FAULT"]


class Finding(NamedTuple):
    """One thing that was found."""

    verdict: Verdict
    about: str
    text: str


@dataclass(frozen=True)
class Examined:
    """All that was found out."""

    config: Config
    probes: Sequence[NodeProbe]
    met: GroupTestResult | None = None
    no_container: str = ""  # why runs can't be started in theirs from here
    nodes: Sequence[PartitionNode] = ()  # of the partition, by SLURM
    most_tasks: int | None = None  # of an array, by SLURM
    accounting: str | None = None

    @property
    def cluster(self) -> SlurmCluster | None:
        """The cluster's description, if it is one of SLURM's."""
        return self.config.cluster if isinstance(self.config.cluster, SlurmCluster) else None

    @property
    def facts(self) -> list[NodeFacts]:
        """Those of all tasks."""
        return [facts for each in self.probes for facts in each.facts]


@dataclass
class Health:
    """Findings, and the fields of the cluster's file that follow from them."""

    findings: list[Finding] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, examined: Examined) -> Health:
        """What follows from all that was found out."""
        found = cls()
        for judge in JUDGES:
            for finding, fields in judge(examined):
                found.findings.append(finding)
                found.fields.update(fields)
        order = ("works", "note", "FAULT")
        found.findings.sort(key=lambda finding: order.index(finding.verdict))
        return found

    @property
    def is_well(self) -> bool:
        """Tell whether runs would work."""
        return all(finding.verdict != "FAULT" for finding in self.findings)


Judged = Iterator[tuple[Finding, Mapping[str, Any]]]


def _nodes(examined: Examined) -> Judged:
    for node in examined.nodes:
        if not node.is_usable:
            yield Finding("note", node.name, f"not asked: SLURM has it as {node.state}"), {}
    for each in examined.probes:
        if not each.is_well:
            verdict: Verdict = "note" if each.why.startswith("not known") else "FAULT"
            yield Finding(verdict, each.node, each.why), {}
    if told := sorted({facts.node for facts in examined.facts}):
        yield Finding("works", "results", f"what nodes write is seen here: {', '.join(told)}"), {}


def _python(examined: Examined) -> Judged:
    for version, where in _by(examined.facts, lambda facts: facts.python).items():
        fields = {"python": examined.cluster.python} if examined.cluster and examined.cluster.python else {}
        yield Finding("works", "Python", f"{version} on {where}"), fields


def _containers(examined: Examined) -> Judged:
    wanted = examined.config.container
    if examined.no_container:
        yield Finding("FAULT", "container", f"on this machine: {examined.no_container}"), {}
    for why, where in _by(examined.facts, lambda facts: facts.container).items():
        if why:
            yield Finding("FAULT", "container", f"{where}: {why}"), {}
        elif isinstance(wanted, Container):
            yield Finding("works", "container", f"container={wanted.name} starts on {where}"), {}
    if not isinstance(wanted, Container):
        for runtime, where in _by(examined.facts, lambda facts: facts.runtime or "").items():
            there = f"{runtime} is there" if runtime else "neither apptainer nor singularity is there"
            yield Finding("works", "container", f"none was asked for; {there}, on {where}"), {}


def _network(examined: Examined) -> Judged:
    met, cluster = examined.met, examined.cluster
    for name, where in _by(examined.facts, lambda facts: " and ".join(facts.name)).items():
        if cluster and (not name or name.startswith("127.")):
            means = f"own name resolves to {name or 'nothing'}"
            text = f"of {where}: their {means}, so workers go by the interface that reaches the others"
            yield Finding("note", "names", text), {}
    for why, where in _by(examined.facts, lambda facts: facts.closed).items():
        if why:
            yield Finding("note", "ports", f"{where}: {why}"), {}
    if met is None:
        return
    if met.why:
        verdict: Verdict = "note" if met.why.startswith("not known") else "FAULT"
        yield Finding(verdict, "network", f"workers of {' and '.join(met.nodes)}: {met.why}"), {}
        return
    names = list(dict.fromkeys(name for name in met.interfaces if name))
    by = f" by {' and '.join(names)}" if names else ""
    # One name may be written down; where nodes have others, workers find theirs by themselves.
    fields = {"interface": names[0]} if cluster and len(names) == 1 else {}
    yield Finding("works", "network", f"workers of {' and '.join(met.nodes)} meet{by}"), fields


def _cores(examined: Examined) -> Judged:
    cluster = examined.cluster
    for each in examined.probes:
        cores = [{*facts.cores} for facts in each.facts]
        many = [name for own in cores for name in own if _cpus(name) > 1]
        threads = max((_cpus(name) for name in many), default=1)
        if each is examined.probes[0] and cores:
            has = f"{threads} threads a core" if threads > 1 else "one thread a core"
            count = min(len(facts.cores) for facts in each.facts)
            yield Finding("works", "cores", f"{has}; {count} CPUs for each worker on {each.node}"), {}
        shared = [one & other for at, one in enumerate(cores) for other in cores[:at] if one & other]
        if shared and cluster:
            text, fields = "workers share cores, which makes timings worthless; ", {}
            if threads > 1 and not any("multithread" in word for word in cluster.sbatch):
                text += "sbatch: [--hint=nomultithread] gives each core to one"
                fields = {"sbatch": [*cluster.sbatch, "--hint=nomultithread"]}
            else:
                text += "srun: [--cpu-bind=cores] binds them, where the site lets SLURM do so"
            yield Finding("note", each.node, text), fields
            return


def _alone(examined: Examined) -> Judged:
    cluster = examined.cluster
    if cluster is None:
        return
    for alone, where in _by_probe(examined.probes, lambda each: each.is_alone).items():
        if alone is None:
            continue
        if alone:
            yield Finding("works", "exclusive", f"a job has {where} for itself"), {"exclusive": True}
        elif cluster.exclusive:
            text = (
                f"{where}: SLURM does not say that a job has its nodes for itself; timings may be disturbed"
            )
            yield Finding("note", "exclusive", text), {}
        else:
            text = f"{where}: others may run beside a job; exclusive: true makes timings worth more"
            yield Finding("note", "exclusive", text), {"exclusive": False}


def _gpus(examined: Examined) -> Judged:
    if examined.config.device != "cuda":
        return
    cluster = examined.config.cluster
    for each in examined.probes:
        if not each.facts:
            continue
        seen = [facts.assigned_gpus() for facts in each.facts]
        models = sorted({name for facts in each.facts for name in facts.gpus.values()})
        count = len({gpu for own in seen for gpu in own})
        if not all(seen) or count < len(seen):
            found = f"{len(seen)} workers see {count} GPUs" if all(seen) else "workers see no GPU"
            text = (
                f"{found}; cluster.gres and gpus are asked for as `plan --sbatch` shows: ask for "
                "them as the site's manual says, or take device=cpu"
            )
            yield Finding("FAULT", each.node, text), {}
            continue
        is_bound = max(map(len, seen)) == 1 < len(seen)
        bound = "each worker sees its own" if is_bound else "workers see all of their job"
        yield Finding("works", "GPUs", f"{each.node}: {', '.join(models)}; {bound}"), {}
        wrong = [name for name in models if cluster.gpu not in ("any", "none")]
        if any(not gpus.is_gpu_model(cluster.gpu, name) for name in wrong):
            text = f"it has {', '.join(models)}, and cluster.gpu={cluster.gpu}; change gpu, or the partition"
            yield Finding("FAULT", each.node, text), {}


def _locks(examined: Examined) -> Judged:
    for lock, where in _by(examined.facts, lambda facts: facts.lock).items():
        if lock == probe.HELD:
            yield Finding("works", "locks", f"of the results folder are seen on {where}"), {}
        elif lock == probe.NOT_HELD:
            text = (
                f"{where}: locks of the results folder hold on one node only; submit from one machine at a "
                "time, or mount it with locks (Lustre: -o flock; NFS: without local_lock)"
            )
            yield Finding("note", "locks", text), {}
        elif lock == probe.NO_LOCKS:
            text = (
                f"{where}: files of the results folder can't be locked; submit from one machine at a time, "
                f"or set SPARSIFY_RESULTS to {locks.ELSEWHERE}"
            )
            yield Finding("note", "locks", text), {}
        else:
            text = f"{where}: files of the results folder can't be opened ({lock}); make them writable there"
            yield Finding("FAULT", "locks", text), {}


def _clocks(examined: Examined) -> Judged:
    for each in examined.probes:
        for facts in each.facts[:1]:
            early, late = each.submitted_at - facts.at, facts.at - each.seen_at
            if (off := max(early, late)) > CLOCK_S:
                way = "slow" if early > late else "fast"
                text = (
                    f"its clock is at least {off:.0f} s {way}; times in records are off by as much (chrony)"
                )
                yield Finding("note", each.node, text), {}


def _limits(examined: Examined) -> Judged:
    cluster = examined.cluster
    if cluster is None:
        return
    if (most := examined.most_tasks) is not None:
        if cluster.max_array > most:
            text = (
                f"max_array={cluster.max_array}, and SLURM takes arrays of {most} jobs; say max_array: {most}"
            )
            yield Finding("FAULT", "arrays", text), {"max_array": most}
        else:
            yield Finding("works", "arrays", f"of up to {most} jobs"), {"max_array": most}
    if examined.nodes and cluster.time_min > (limit := max(node.limit_min for node in examined.nodes)):
        text = f"time_min={cluster.time_min} is more than the partition's {limit:g} minutes; say time_min: "
        yield Finding("FAULT", "time limit", f"{text}{limit:g}"), {"time_min": int(limit)}
    if (examined.accounting or "").endswith("none"):
        text = "SLURM keeps no accounts: of a job that is gone, only what it wrote is known"
        yield Finding("note", "accounting", text), {}


JUDGES: tuple[Callable[[Examined], Judged], ...] = (
    _nodes, _python, _containers, _network, _cores, _alone, _gpus, _locks, _clocks, _limits,
)  # fmt: skip


def _cpus(listed: str) -> int:
    """How many CPUs a list of Linux's names: 0,4 or 0-1."""
    ranges = (part.split("-") for part in listed.split(","))
    return sum(int(each[-1]) - int(each[0]) + 1 for each in ranges)


def _one_a_node(found: Iterable[NodeFacts]) -> list[NodeFacts]:
    return list({facts.node: facts for facts in found}.values())


def _by(found: Iterable[NodeFacts], key: Callable[[NodeFacts], str]) -> dict[str, str]:
    """The nodes, listed, by what is found there."""
    nodes: dict[str, list[str]] = {}
    for facts in _one_a_node(found):
        nodes.setdefault(key(facts), []).append(facts.node)
    return {value: ", ".join(names) for value, names in nodes.items()}


def _by_probe(found: Iterable[NodeProbe], key: Callable[[NodeProbe], Any]) -> dict[Any, str]:
    nodes: dict[Any, list[str]] = {}
    for each in found:
        nodes.setdefault(key(each), []).append(each.node)
    return {value: ", ".join(names) for value, names in nodes.items()}
