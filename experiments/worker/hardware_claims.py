"""Checks of a config's claims on its GPUs (cluster.gpu) and on what joins them (cluster.link).

Judged from facts that all workers have heard of each other and from nothing else, so that all judge alike.
A fact that no worker could find out does not contradict a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

from slurm import gpus

UNCHECKED = ("none", "any")
LABEL_ADVICE = "or launch.on_mismatch=label to go on and have it recorded as a label"


class WorkerHardware(NamedTuple):
    """The GPU of one worker, and what joins it to the other GPUs that its process may see."""

    host: str
    gpu: str
    memory_gib: float
    bus: str
    driver: str | None  # from here on None where the driver does not say
    pcie: float | None  # GB/s that its slot can carry, one way
    nvlinks: list[float] | None  # GB/s of each active one, one way
    idle_nvlinks: int | None
    links: dict[str, str]  # by bus id, as in the matrix of nvidia-smi: NV12, PIX, SYS ...
    peers: dict[str, bool]  # by bus id: does CUDA allow peer access?
    nccl: dict[str, str]  # what the environment tells NCCL


class GroupHardware(NamedTuple):
    """The hardware of all workers, by rank, and the bus bandwidth measured over all of them."""

    workers: list[WorkerHardware]
    bus_bandwidth_gb_s: float | None  # GB/s

    @property
    def hosts(self) -> list[str]:
        """Names of the nodes, in the order of ranks."""
        return list(dict.fromkeys(worker.host for worker in self.workers))

    @property
    def same_node_pairs(self) -> list[tuple[WorkerHardware, WorkerHardware]]:
        """Pairs of workers on the same node."""
        return [(a, b) for a, b in combinations(self.workers, 2) if a.host == b.host]

    @property
    def fastest_pcie_gb_s(self) -> float | None:
        """GB/s of the fastest PCIe slot; None where one is unknown, or the workers are on several nodes."""
        bandwidths = [worker.pcie for worker in self.workers if worker.pcie is not None]
        return max(bandwidths) if len(bandwidths) == len(self.workers) and len(self.hosts) == 1 else None


def connection_between(a: WorkerHardware, b: WorkerHardware) -> str | None:
    """Return NV12, PIX, SYS ..., or `net` between nodes; None where a can't see b's GPU."""
    return "net" if a.host != b.host else a.links.get(b.bus)


def is_peer_access_disabled_by_environment(worker: WorkerHardware) -> bool:
    """Tell whether NCCL's variables keep it from peer-to-peer, and so from NVLink."""
    disabling = {("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "LOC"), ("NCCL_P2P_LEVEL", "0")}
    return bool(disabling & worker.nccl.items())


def describe_mismatches(gpu: str, link: str, group: GroupHardware) -> list[str]:
    """Return a sentence for each claim that does not hold: what was asked, what there is, what to do."""
    sentences = []
    wrong = [
        worker for worker in group.workers if gpu not in UNCHECKED and not gpus.is_gpu_model(gpu, worker.gpu)
    ]
    if wrong:
        models = sorted({worker.gpu for worker in wrong})
        hosts = GroupHardware(wrong, None).hosts
        observation = f"{', '.join(hosts)} has {' and '.join(models)}"
        advice = f"choose another partition or constraint, correct cluster.gpu, {LABEL_ADVICE}"
        sentences.append(f"gpu={gpu} was asked for, but {observation}; {advice}")
    kind = link_kind(link)
    if kind and len(group.workers) > 1:
        for observation, instead in CHECKS_BY_LINK_KIND[kind](group):
            advice = f"choose {instead}, another partition, {LABEL_ADVICE}"
            sentences.append(f"link={link} was asked for, but {observation}; {advice}")
            break  # the first says it best; what follows is mostly its consequence
    return sentences


# Bandwidth is judged by proof, not by experience: what is faster than a PCIe slot did not go through it, and
# NVLinks that could carry twice as much as the slot, and carried no more than it can, were not used.


def _find_nvlink_faults(group: GroupHardware) -> Iterator[tuple[str, str]]:
    if not group.same_node_pairs:
        yield "every worker has a node of its own", "link=ethernet, more workers to a node"
    for a, b in group.same_node_pairs:
        if b not in _nvlink_component(a, group):
            ranks = f"{group.workers.index(a)} and {group.workers.index(b)}"
            entry = connection_between(a, b) or "no NVLink"
            refused = " without peer access" if gpus.count_nvlinks(entry) else ""
            yield f"workers {ranks} on {a.host} are joined by {entry}{refused}", "link=pcie"
    if any(map(is_peer_access_disabled_by_environment, group.workers)):
        yield "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL forbids it", "link=pcie, to unset them"
    slot = group.fastest_pcie_gb_s
    offered = min(_nvlink_gb_s(worker, group) for worker in group.workers)
    if slot and group.bus_bandwidth_gb_s and offered >= 2 * slot >= 2 * group.bus_bandwidth_gb_s:
        rates = f"{group.bus_bandwidth_gb_s} GB/s, where NVLink offers {offered:.0f} and PCIe {slot}"
        yield f"an all-reduce ran at {rates}", "link=pcie, to let NCCL_DEBUG=INFO tell what NCCL takes"


def _find_pcie_faults(group: GroupHardware) -> Iterator[tuple[str, str]]:
    if not group.same_node_pairs:
        yield "every worker has a node of its own", "link=ethernet, more workers to a node"
    free_hosts = [
        a.host
        for a, b in group.same_node_pairs
        if gpus.count_nvlinks(connection_between(a, b)) and not is_peer_access_disabled_by_environment(a)
    ]
    if free_hosts:
        yield (
            f"NVLink joins workers on {free_hosts[0]} and NCCL may use it",
            "link=nvlink, NCCL_P2P_DISABLE=1",
        )
    if (
        group.fastest_pcie_gb_s
        and group.bus_bandwidth_gb_s
        and group.bus_bandwidth_gb_s > group.fastest_pcie_gb_s
    ):
        rates = f"{group.bus_bandwidth_gb_s} GB/s, more than PCIe can carry there, {group.fastest_pcie_gb_s}"
        yield f"an all-reduce ran at {rates}", "link=nvlink"


def _find_ethernet_faults(group: GroupHardware) -> Iterator[tuple[str, str]]:
    if len(group.hosts) == 1:
        yield f"all workers are on {group.hosts[0]}", "link=nvlink or link=pcie, fewer workers to a node"


def _find_loopback_faults(group: GroupHardware) -> Iterator[tuple[str, str]]:
    if len(group.hosts) > 1:
        yield f"the workers are on {len(group.hosts)} nodes", "link=ethernet or link=nvlink"


CHECKS_BY_LINK_KIND: dict[str, Callable[[GroupHardware], Iterator[tuple[str, str]]]] = {
    "nvlink": _find_nvlink_faults,
    "pcie": _find_pcie_faults,
    "ethernet": _find_ethernet_faults,
    "infiniband": _find_ethernet_faults,
    "loopback": _find_loopback_faults,
}


def link_kind(link: str) -> str | None:
    """Return the kind of a link of conf/link, one of `CHECKS_BY_LINK_KIND`.

    Its name begins with the kind, as nvlink4 and ethernet_10g do. None: a link of which nothing is claimed.
    """
    return next((kind for kind in CHECKS_BY_LINK_KIND if link.startswith(kind)), None)


def _nvlink_component(start: WorkerHardware, group: GroupHardware) -> list[WorkerHardware]:
    """Return the workers that NVLinks join to one, also over others: in a DGX-1 many pairs have no link."""
    reached = [start]
    for worker in reached:  # grows meanwhile
        reached += [
            other for other in group.workers if other not in reached and _are_joined_by_nvlink(worker, other)
        ]
    return reached


def _are_joined_by_nvlink(a: WorkerHardware, b: WorkerHardware) -> bool:
    entry = connection_between(a, b)
    if entry is None:  # SLURM may show each task its own GPU only; then at least both have NVLinks
        return a.nvlinks != [] and b.nvlinks != []
    return gpus.count_nvlinks(entry) > 0 and a.peers.get(b.bus) is not False


def _nvlink_gb_s(worker: WorkerHardware, group: GroupHardware) -> float:
    """Return GB/s of the NVLinks from one GPU to those of the other workers; 0 where they are not known.

    NV12 to each of seven others is twelve links in all, through switches.
    """
    num_used = sum(gpus.count_nvlinks(connection_between(worker, other)) for other in group.workers)
    return sum(sorted(worker.nvlinks or [])[:num_used])
