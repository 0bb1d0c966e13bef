"""The facts that a worker would meet on a node, found out there, for `doctor`.

    python -m experiments.launch.probe FOLDER

Started as the tasks of a run are. It needs no torch, and leaves facts<rank>.json in FOLDER/<node>.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import msgspec

from analysis.records import locks
from analysis.records.files import write_atomic
from experiments.worker import addresses
from experiments.worker.cores import sibling_cpu_list, usable_cpus
from slurm import container, environment, gpus, images
from slurm.environment import WorkerPlace
from slurm.images import ContainerConfig

REQUEST_FILE = "asked.json"  # in FOLDER
LOCK_FILE = "lock"  # in FOLDER; whoever asks holds it
HELD = "held"
NOT_HELD = "not held"
NO_LOCKS = "no locks"


class ProbeRequest(msgspec.Struct):
    """A request to probe a node: what a run would need there."""

    container: ContainerConfig | None = None
    open_ports: tuple[int, int] | None = None  # the range's start and stop


class TaskFacts(msgspec.Struct):
    """The facts that one task of a probe found on its node."""

    node: str
    rank: int
    python_version: str
    hostname_addresses: list[str]
    addresses_by_interface: dict[str, list[str]]  # IPv4
    closed_ports_warning: str  # empty unless the kernel gives workers other ports than cluster.ports
    cores: list[str]  # of each CPU that the task may use: the CPUs of the same core
    model_by_bus_id: dict[str, str]  # of the GPUs that NVIDIA's driver shows
    visible_gpus: list[str] | None  # of CUDA_VISIBLE_DEVICES
    lock: str  # HELD, NOT_HELD, NO_LOCKS, or why the file can't be opened
    container_error: str  # why the container does not start; empty where it does, or none was asked for
    container_runtime: str | None  # the program for containers that is there
    epoch_s: float  # by this node's clock

    def assigned_gpus(self) -> list[str]:
        """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this task: bus ids, or its own names."""
        bus_ids = [*self.model_by_bus_id]
        if self.visible_gpus is None:
            return bus_ids
        if not all(name.isdigit() for name in self.visible_gpus):
            return self.visible_gpus[: len(bus_ids)]
        return [bus_ids[int(name)] for name in self.visible_gpus if int(name) < len(bus_ids)]


def collect_task_facts(folder: Path, request: ProbeRequest, place: WorkerPlace) -> TaskFacts:
    """Return the facts that a worker would meet in this process's place."""
    why = ""
    if request.container is not None:
        try:
            container.check_container_starts(request.container)
        except ValueError as error:
            why = str(error)
    return TaskFacts(
        node=environment.node_name(),
        rank=place.rank,
        python_version=platform.python_version(),
        hostname_addresses=addresses.hostname_addresses(),
        addresses_by_interface=addresses.addresses_by_interface(),
        closed_ports_warning=addresses.closed_ports_warning(
            range(*request.open_ports) if request.open_ports else None
        ),
        cores=[sibling_cpu_list(cpu) for cpu in sorted(usable_cpus())],
        model_by_bus_id={bus_id: gpu.name for bus_id, gpu in gpus.gpus_by_bus_id().items()},
        visible_gpus=environment.visible_gpus(),
        lock=observe_lock_of_other_process(folder / LOCK_FILE),
        container_error=why,
        container_runtime=images.find_container_runtime(),
        epoch_s=time.time(),
    )


def observe_lock_of_other_process(path: Path) -> str:
    """Return whether the lock that another process holds on a file is seen here: HELD, NOT_HELD, ..."""
    try:
        with path.open("r+b") as file:
            return {"held elsewhere": HELD, "locked": NOT_HELD, "unsupported": NO_LOCKS}[
                locks.try_flock(path, file.fileno())
            ]
    except OSError as error:
        return os.strerror(error.errno or 0)


def write_task_facts(folder: Path) -> None:
    """Write the facts of this task into FOLDER/<node>/facts<rank>.json."""
    place = environment.read_rank_variables("srun") or environment.worker_place()
    request = msgspec.json.decode((folder / REQUEST_FILE).read_bytes(), type=ProbeRequest)
    facts = collect_task_facts(folder, request, place)
    node_folder = folder / facts.node
    node_folder.mkdir(exist_ok=True)
    write_atomic(node_folder / f"facts{place.rank}.json", msgspec.json.encode(facts))


if __name__ == "__main__":
    write_task_facts(Path(sys.argv[1]))
