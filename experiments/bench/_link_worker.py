"""A worker of `make bench BENCH=link`: what messages and collectives take, by size."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from analysis.files import read_json, write_json
from experiments.worker import hardware, lifeline
from experiments.worker.connect import open_group
from experiments.worker.run import prepare_device
from slurm import environment
from sparsify.comm import Comm, gather_json
from sparsify.cost import ALGORITHMS, Cost

LONGEST_S = 0.2  # no larger size of a kind is measured once one takes so long
KINDS = ("ping-pong", "all_reduce", "all_gather", "all_to_all")


def main(orders_file: Path, folder: Path) -> int:
    lifeline.end_with_stdin()
    place, orders = environment.place(), read_json(orders_file)
    assert orders is not None, orders_file
    config = orders["config"]
    device = prepare_device(config, place)
    hardware.prepare(config, place, device)
    comm = open_group(config, place, folder, orders, device)
    found = measure(comm, device, orders["sizes"], orders["repeats"], orders["per_node"])
    if place.rank == 0:
        write_json(folder / "found.json", {"cases": found})
    comm.barrier()
    comm.close()
    return 0


def measure(
    comm: Comm, device: torch.device, sizes: list[int], repeats: int, per_node: int
) -> list[dict[str, Any]]:
    """Of each kind and size: messages and bytes by `sparsify.cost`, and the seconds of each repetition, the
    mean over the workers. Collective; the same on all workers.

    Args:
        sizes: bytes, ascending: of a message, or of what all workers have after an all_gather.
        per_node: workers on a node; ping-pong goes between nodes where there are several.
    """
    partner = per_node if per_node < comm.size else 1
    cases = []
    for kind in KINDS:
        for size in sizes:
            cases.append(case := Case(comm, device, kind, size, partner))
            case.seconds()  # connections are made, and memory is mapped
            if case.seconds() > LONGEST_S:
                break
    took: dict[int, list[float]] = {at: [] for at in range(len(cases))}
    order = random.Random(0)  # the same for all workers
    for _ in range(repeats):
        for at in order.sample(range(len(cases)), len(cases)):
            took[at].append(cases[at].seconds())
    return [
        {"kind": case.kind, "size": case.size, **case.cost._asdict(), "seconds": took[at]}
        for at, case in enumerate(cases)
    ]


class Case:
    """One kind of message or collective at one size."""

    def __init__(self, comm: Comm, device: torch.device, kind: str, size: int, partner: int) -> None:
        self.comm, self.device, self.kind, self.size = comm, device, kind, size
        self.sees_all = kind != "ping-pong" or comm.rank == 0  # the other one is done once it has answered
        share = max(1, size // (4 * comm.size))  # elements of one of P parts
        elements = {"all_gather": share, "all_to_all": share * comm.size}.get(kind, max(1, size // 4))
        data = torch.zeros(elements, device=device)
        forms = ALGORITHMS[getattr(comm, "algorithm", "textbook")]
        do: Mapping[str, Callable[[], object]] = {
            "ping-pong": lambda: (comm.permute(data, [(0, partner)]), comm.permute(data, [(partner, 0)])),
            "all_reduce": lambda: comm.all_reduce(data),
            "all_gather": lambda: comm.all_gather(data),
            "all_to_all": lambda: comm.all_to_all(data, [share] * comm.size, [share] * comm.size),
        }
        self.do = do[kind]
        if kind == "ping-pong":
            self.cost = Cost(2, 2 * data.nbytes)
        else:
            sent = data.nbytes - 4 * share if kind == "all_to_all" else data.nbytes
            self.cost = forms[kind](sent, comm.size)

    def seconds(self) -> float:
        """Of one repetition, which all workers begin together; the same on all workers."""
        self.comm.barrier()
        self._synchronise()
        began = time.perf_counter()
        self.do()
        self._synchronise()
        mine = time.perf_counter() - began if self.sees_all else None
        took = [theirs for theirs in gather_json(self.comm, mine, self.device) if theirs is not None]
        return float(sum(took)) / len(took)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except json.JSONDecodeError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
