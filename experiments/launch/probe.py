"""What a worker would meet on a node, found out there, for `doctor`:

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
from experiments.worker.cores import siblings
from slurm import container, environment, gpus, images
from slurm.environment import WorkerPlace
from slurm.images import ContainerConfig

REQUEST_FILE, LOCK_FILE = "asked.json", "lock"  # in FOLDER; whoever asks holds the lock
HELD, NOT_HELD, NO_LOCKS = "held", "not held", "no locks"


class ProbeRequest(msgspec.Struct):
    """What a run would need there."""

    container: ContainerConfig | None = None
    ports: tuple[int, int] | None = None  # that are open, as a range


class NodeFacts(msgspec.Struct):
    """What one task found."""

    node: str
    rank: int
    python: str  # its version
    name: list[str]  # what the host's name resolves to
    interfaces: dict[str, list[str]]  # IPv4 addresses of each
    closed: str  # what to say where the kernel gives workers other ports than cluster.ports
    cores: list[str]  # of each CPU that it may use: those of the same core
    gpus: dict[str, str]  # the models of those that NVIDIA's driver shows, by their bus ids
    visible_gpus: list[str] | None  # of CUDA_VISIBLE_DEVICES
    lock: str  # HELD, NOT_HELD, NO_LOCKS, or why the file can't be opened
    container: str  # why it does not start; empty where it does, or none was asked for
    runtime: str | None  # the program for containers that is there
    at: float  # seconds since 1970, by this node's clock

    def own_gpus(self) -> list[str]:
        """Names of those that CUDA_VISIBLE_DEVICES leaves to this task: bus ids, or its own names."""
        shown, left = [*self.gpus], self.visible_gpus
        if left is None:
            return shown
        if not all(name.isdigit() for name in left):
            return left[: len(shown)]
        return [shown[int(name)] for name in left if int(name) < len(shown)]


def collect_facts(folder: Path, asked: ProbeRequest, place: WorkerPlace) -> NodeFacts:
    """The facts of this task."""
    why = ""
    if asked.container is not None:
        try:
            container.check_container_starts(asked.container)
        except ValueError as error:
            why = str(error)
    return NodeFacts(
        node=environment.node_name(),
        rank=place.rank,
        python=platform.python_version(),
        name=addresses.of_name(),
        interfaces=addresses.by_interface(),
        closed=addresses.beyond(range(*asked.ports) if asked.ports else None),
        cores=[siblings(cpu) for cpu in sorted(os.sched_getaffinity(0))],
        gpus={bus: gpu.name for bus, gpu in gpus.gpus_by_bus_id().items()},
        visible_gpus=environment.visible_gpus(),
        lock=lock_state(folder / LOCK_FILE),
        container=why,
        runtime=images.find_runtime(),
        at=time.time(),
    )


def lock_state(path: Path) -> str:
    """Whether a lock that somebody else holds on this file is seen here."""
    try:
        with path.open("r+b") as file:
            return {False: HELD, True: NOT_HELD, None: NO_LOCKS}[locks.try_flock(path, file.fileno())]
    except OSError as error:
        return os.strerror(error.errno or 0)


def main(folder: Path) -> None:
    """Be one task."""
    place = environment.read_place("srun") or environment.worker_place()
    asked = msgspec.json.decode((folder / REQUEST_FILE).read_bytes(), type=ProbeRequest)
    facts = collect_facts(folder, asked, place)
    (own := folder / facts.node).mkdir(exist_ok=True)
    write_atomic(own / f"facts{place.rank}.json", msgspec.json.encode(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
