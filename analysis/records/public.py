"""Records for everyone: the provenance without what says on whose machine they were made.

What is not listed here stays behind, so that a fact that is recorded one day is not shipped by accident.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from analysis.records import schema
from analysis.records.frames import Frames, with_provenance

ALL = None  # a fact with all that is in it
Listed = Mapping[str, Any]  # name of a fact -> ALL, or what is public of it

SLURM: Listed = dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_GPUS_ON_NODE"), ALL)
IMAGE: Listed = dict.fromkeys(("name", "sha256", "arch", "runtime", "runtime_version", "definition"), ALL)
# Of NCCL's settings those that are choices and numbers. The others may hold addresses, interfaces and paths.
NCCL: Listed = dict.fromkeys(
    (
        "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_BUFFSIZE",
        "NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "NCCL_NTHREADS",
        "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_CROSS_NIC", "NCCL_DEBUG",
    ),
    ALL,
)  # fmt: skip
WORKER: Listed = dict.fromkeys(
    ("host", "gpu", "memory_gib", "driver", "pcie", "nvlinks", "idle_nvlinks"), ALL
)
MACHINE: Listed = {
    **dict.fromkeys(
        ("checked", "hosts", "topology", "peer_access", "bus_bandwidth", "probe_s", "link", "mismatch"), ALL
    ),
    "workers": WORKER,
    "nccl": NCCL,
}
PROVENANCE: Listed = {
    **dict.fromkeys(
        ("cpu", "cores", "memory_gib", "gpu", "before", "nccl", "platform", "versions", "commit", "dirty"),
        ALL,
    ),
    "data": {"name": ALL, "digest": ALL},
    "horovod": ALL,
    "image": IMAGE,
    "machine": MACHINE,
    "slurm": SLURM,
}


def public(frames: Frames) -> Frames:
    """These frames without what is private in their provenance."""
    return with_provenance(frames, public_provenance)


def public_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are listed above, with hosts numbered in their order."""
    seen = msgspec.convert(provenance, schema.Provenance)
    machine = seen.machine or schema.MachineFacts()
    names = dict.fromkeys(
        filter(None, (*machine.hosts, *(worker.host for worker in machine.workers), seen.host))
    )
    numbered = {name: f"host{number}" for number, name in enumerate(names, 1)}
    kept: dict[str, Any] = _renamed(_listed(provenance, PROVENANCE), numbered)
    return kept


def _listed(value: Any, listed: Listed | None) -> Any:
    if listed is ALL:
        return value
    if isinstance(value, list):
        return [_listed(part, listed) for part in value]
    if isinstance(value, Mapping):
        return {name: _listed(fact, listed[name]) for name, fact in value.items() if name in listed}
    return None  # no such fact


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The value with other words for these names wherever they stand."""
    if isinstance(value, Mapping):
        return {key: _renamed(part, names) for key, part in value.items()}
    if isinstance(value, list):
        return [_renamed(part, names) for part in value]
    if isinstance(value, str) and names:
        words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])({words})(?![\w-])", lambda found: names[found[1]], value)
    return value
