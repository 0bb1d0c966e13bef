"""What worker processes and virtual ranks of the tests do: module-level functions over a communicator.

As a program, `python -m tests.bodies FUNCTION RANK SIZE FOLDER`, it is one gloo process of a group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments import data as datasets
from experiments.tasks import REGISTRY as TASKS
from experiments.train import Setting, train
from sparsify import build
from sparsify.comm import Comm, Metered
from sparsify.comm.torch import TorchComm
from sparsify.timer import PhaseTimer

METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "topk": {"density": 0.01},
    "topk layer": {"density": 0.01, "scope": "layer"},
    "randomk": {"density": 0.01},
    "randomk feedback": {"density": 0.01, "feedback": "gradient"},
}
LATE_S, STEPS = 0.2, 3


class NoLog:
    def add(self, kind: str, **values: Any) -> None: ...

    def flush(self) -> None: ...


def weights_after_20_steps(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Flat final weights by method, trained in float64 on the digits."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    data, task = datasets.load("digits", None, device), TASKS.build("cnn_digits", {"lr": 0.05})
    setting = Setting(seed=0, num_steps=20, validate=False, device=device, dtype=torch.float64)
    found = {}
    for name, hyperparameters in METHODS.items():
        method = build(name.partition(" ")[0], **hyperparameters)
        model = train(task, data, method, comm, PhaseTimer("serialised", now), NoLog(), setting)
        found[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
    return found


def one_late_rank(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Mean wait and transfer of steps in which rank 1 comes late by LATE_S, by timing mode."""
    found = {}
    for mode in ("serialised", "production"):
        timer = PhaseTimer(mode, now)
        metered = Metered(comm, timer)
        for _ in range(STEPS):
            comm.barrier()
            with timer.step():
                if comm.rank == 1:
                    time.sleep(LATE_S)
                metered.all_gather(torch.zeros(1000))
        samples = timer.resolve(
            lambda mine: [one.tolist() for one in comm.all_gather(torch.tensor(mine, dtype=torch.float64))]
        )
        phases = [[sample.phases["wait"], sample.phases["transfer"]] for sample in samples]
        found[mode] = torch.tensor(phases).median(dim=0).values
    return found


def main(function: str, rank: int, size: int, folder: Path) -> None:
    comm = TorchComm.start(f"file://{folder / 'rendezvous'}", rank, size, torch.device("cpu"))
    found = globals()[function](comm, time.perf_counter)
    torch.save(found, folder / f"{rank}.pt")
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
