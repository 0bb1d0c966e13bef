"""One run: a resolved config in, one rank's records (or all virtual ranks' records) out."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from analysis.records import Attempt, RankLog, now, write_atomic
from experiments import data as datasets
from experiments.provenance import provenance, state
from experiments.tasks import REGISTRY as TASKS
from experiments.train import Setting, train
from slurm.environment import Place
from sparsify.comm import Comm, virtual
from sparsify.comm.torch import TorchComm
from sparsify.cost import Link
from sparsify.methods import REGISTRY as METHODS
from sparsify.timer import PhaseTimer

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64}
PROGRESS_S = 0.5  # between two notes of where the run stands


class Outcome(NamedTuple):
    """What the manifest says of a run besides its provenance."""

    steps: int
    steps_per_epoch: int
    parameters: int
    tensors: int
    weights: str  # SHA-256 of rank 0's final parameters
    agreed: bool  # do all ranks hold these very weights?


def execute(
    config: dict[str, Any], attempt: Attempt, place: Place, launch: Path, data_root: Path | None
) -> None:
    """Carry out the run that `attempt` is for, as the worker at `place`, and finish the attempt on rank 0.

    Args:
        launch: a folder for what concerns this start only: the meeting point of the workers, notes of
        progress.
    """
    device = prepare_device(config, place)
    task = TASKS.build(*_split(config["task"]))
    method = METHODS.build(*_split(config["method"]))
    data = datasets.load(task.dataset, data_root, device)
    steps_per_epoch = task.steps_per_epoch(data, config["workers"])
    num_steps = config["train"]["steps"] or config["train"]["epochs"] * steps_per_epoch
    setting = Setting(
        config["seed"], num_steps, config["train"]["validate"] == "epoch", device, DTYPES[config["precision"]]
    )
    synchronise: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    link, is_virtual = config["cluster"]["link"], config["cluster"]["where"] == "virtual"
    facts = provenance(data.name, data.digest, device)
    progress = Progress(launch / "progress.json", num_steps)

    def live(comm: Comm, clock: Callable[[], float]) -> Outcome:
        mode, first = config["timing"]["mode"], config["timing"]["warmup_steps"]
        kept = range(first, first + config["timing"]["span_steps"])
        timer = PhaseTimer(
            mode, clock, synchronise, device.type == "cuda" and not is_virtual, kept.__contains__
        )
        log = RankLog(attempt.rank_path(comm.rank))
        if comm.rank == 0:
            attempt.update(state="running", started=now(), steps=num_steps, provenance=facts)
        try:
            told = progress if comm.rank == 0 else (lambda step: None)
            model = train(task, data, method, comm, timer, log, setting, told)
        finally:
            log.flush(durable=True)
        return outcome(model, comm, num_steps, steps_per_epoch)

    if is_virtual:
        net = Link(link["alpha_s"], link["beta_s_per_byte"])
        result = virtual.run(config["workers"], lambda comm: live(comm, comm.now), net, synchronise)[0]
    else:
        comm = TorchComm.start(f"file://{launch / 'rendezvous'}", place.rank, place.size, device)
        result = live(comm, time.perf_counter)
        comm.barrier()  # every rank's log is on the disk before rank 0 declares them whole
        comm.close()
    if place.rank == 0:
        attempt.finish(simulated=is_virtual, after=state(device), **result._asdict())


def _split(choice: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return choice["name"], {key: value for key, value in choice.items() if key != "name"}


def prepare_device(config: dict[str, Any], place: Place) -> torch.device:
    """The device of this worker, set up as the config says.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    torch.set_num_threads(config["threads"])
    if config["device"] == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no GPU here; take profile=laptop, or device=cpu")
    if place.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"{place.size} workers need {place.size} GPUs and this machine has {torch.cuda.device_count()}; "
            "take fewer workers, or cluster=virtual, which runs them all on one"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False  # as published
    reduced = config["precision"] == "tf32"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = reduced
    return device


def outcome(model: nn.Module, comm: Comm, steps: int, steps_per_epoch: int) -> Outcome:
    """Compare the final weights over the ranks, bit for bit. Collective."""
    parameters = [p.detach() for p in model.parameters()]
    digest = hashlib.sha256()
    for p in parameters:
        digest.update(p.cpu().contiguous().numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.int32, device=parameters[0].device)
    agreed = all(torch.equal(mine, other) for other in comm.all_gather(mine))
    size = sum(p.numel() for p in parameters)
    return Outcome(steps, steps_per_epoch, size, len(parameters), digest.hexdigest(), agreed)


class Progress:
    """Tells the starting side, now and then, where the run stands."""

    def __init__(self, path: Path, num_steps: int) -> None:
        self.path, self.num_steps, self.told = path, num_steps, 0.0

    def __call__(self, step: int) -> None:
        clock = time.monotonic()
        if clock - self.told >= PROGRESS_S or step == self.num_steps:
            self.told = clock
            write_atomic(self.path, json.dumps({"step": step, "steps": self.num_steps}), durable=False)
