"""The processor's cores, and a check that each worker has one for each of its threads.

Two hardware threads of one core do the work of about one.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class WorkerCores(NamedTuple):
    """The cores on which one worker may run."""

    host: str
    threads: int  # that the worker computes with
    cores: list[str]  # each by its CPUs, as Linux lists them: 0,8

    @classmethod
    def from_this_process(cls, threads: int) -> WorkerCores:
        """Return the cores that the system leaves to this process; none where it does not say."""
        return cls(platform.node(), threads, sorted({sibling_cpu_list(cpu) for cpu in usable_cpus()}))


def usable_cpus() -> set[int]:
    """Return the CPUs that this process may use; empty where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def cpu_model() -> str:
    """Return the processor's name."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def sibling_cpu_list(cpu: int) -> str:
    """Return the CPUs of a CPU's core, as Linux lists them (0,8); the CPU alone where Linux does not."""
    try:
        return Path(SIBLINGS.format(cpu)).read_text().strip()
    except OSError:
        return str(cpu)


def all_cpus_unless_restricted() -> set[int]:
    """Return the machine's CPUs; none where this process may use only some, or can't be pinned."""
    cpus = usable_cpus()
    return cpus if len(cpus) == os.cpu_count() else set()


def last_core_cpus_if_spare(num_used_cores: int) -> list[int]:
    """Return the CPUs of the machine's last core if `num_used_cores` leave it free; else none."""
    cores = dict[str, list[int]]()
    for cpu in sorted(all_cpus_unless_restricted()):
        cores.setdefault(sibling_cpu_list(cpu), []).append(cpu)
    return [*cores.values()][-1] if len(cores) > num_used_cores else []


def describe_core_shortages(workers: Sequence[WorkerCores]) -> list[str]:
    """Return a sentence for each group of workers with fewer cores among them than they compute with."""
    groups = list[tuple[set[tuple[str, str]], list[WorkerCores]]]()
    for worker in workers:
        shared_cores = {(worker.host, core) for core in worker.cores}
        sharing_workers = [worker]
        separate_groups = []
        for cores, group in groups:
            if shared_cores & cores:
                shared_cores = shared_cores | cores
                sharing_workers = sharing_workers + group
            else:
                separate_groups.append((cores, group))
        groups = [*separate_groups, (shared_cores, sharing_workers)]
    sentences = []
    for cores, group in groups:
        num_threads = sum(worker.threads for worker in group)
        if cores and num_threads > len(cores):
            sentences.append(
                f"{group[0].host}: {num_threads} threads of {len(group)} worker{'s' * (len(group) > 1)} "
                f"have {len(cores)} core{'s' * (len(cores) > 1)} among them; take fewer threads or workers a "
                "node, or where SLURM gave them threads of the same core, "
                "cluster.sbatch=['--hint=nomultithread']"
            )
    return sentences
