"""One run: a resolved config in, one rank's records (or all virtual ranks' records) out."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from analysis.records import Attempt, RankLog, write_atomic
from experiments import data as datasets
from experiments import groups, machine
from experiments.checkpoints import Keeper
from experiments.provenance import provenance, state
from experiments.signals import Preempted, Stop
from experiments.tasks import REGISTRY as TASKS
from experiments.train import Setting, Trained, train
from slurm.environment import Place
from sparsify.comm import Comm, GivenUp, WorkerLost, virtual
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
    searching: dict[str, Any]  # of rank 0, see `train.searched`


def execute(
    orders: Mapping[str, Any],
    attempt: Attempt,
    place: Place,
    start_folder: Path,
    stop: Stop,
    comm: Comm | None = None,
) -> None:
    """Carry out the run that `attempt` is for, as the worker at `place`, and finish the attempt on rank 0.

    Where an earlier start left a checkpoint, go on from it.

    Args:
        start_folder: for what concerns this start only: the meeting point of the workers, notes of progress.
        comm: the group, where this process has joined it already; it is closed at the end.

    Raises:
        Preempted: on all workers, after `stop` told one of them.
    """
    config = orders["config"]
    device = prepare_device(config, place)
    machine.prepare(config, device)
    task = TASKS.build(*_split(config["task"]))
    method = METHODS.build(*_split(config["method"]))
    data = datasets.load(task.dataset, Path(root) if (root := orders["data_root"]) else None, device)
    steps_per_epoch = task.steps_per_epoch(data, config["workers"])
    num_steps = config["train"]["steps"] or config["train"]["epochs"] * steps_per_epoch
    validates, dtype = config["train"]["validate"] == "epoch", DTYPES[config["precision"]]
    setting = Setting(
        config["seed"], num_steps, validates, device, dtype, config["select"], config["overlap"]
    )
    synchronise: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    link, is_virtual = config["cluster"]["link"], config["cluster"]["where"] == "virtual"
    facts = {**provenance(data.name, data.digest, device), "image": orders.get("image")}
    progress = Progress(start_folder / "progress.json", num_steps)

    def live(comm: Comm, clock: Callable[[], float]) -> Outcome:
        facts["machine"] = machine.check(config, device, comm)
        log = RankLog(attempt.rank_path(comm.rank))
        keeper = Keeper(attempt, comm, log, stop, config.get("launch", {}).get("checkpoint_min"), device)
        done = keeper.find()
        if comm.rank == 0:
            attempt.start(done, facts["host"], steps=num_steps, provenance=facts)
        mode, first = config["timing"]["mode"], config["timing"]["warmup_steps"]
        # After an interruption the machine has to warm up again.
        kept = {start + first + at for start in (0, done) for at in range(config["timing"]["span_steps"])}
        timer = PhaseTimer(
            mode, clock, synchronise, device.type == "cuda" and not is_virtual, kept.__contains__
        )
        try:
            told = progress if comm.rank == 0 else (lambda step: None)
            trained = train(task, data, method, comm, timer, log, setting, told, keeper)
        finally:
            log.flush(durable=True)
        return outcome(trained, comm, num_steps, steps_per_epoch)

    try:
        if is_virtual:
            net = Link(link["alpha_s"], link["beta_s_per_byte"])
            result = virtual.run(config["workers"], lambda comm: live(comm, comm.now), net, synchronise)[0]
        else:
            if comm is None:
                comm = meet(config, attempt, place, start_folder, orders, device, stop)
            result = live(comm, time.perf_counter)
            comm.barrier()  # every rank's log is on the disk before rank 0 declares them whole
            comm.close()
    except Preempted as preempted:
        if place.rank == 0:
            attempt.preempt(preempted.step)
        if comm is not None:
            comm.close()
        raise
    if place.rank == 0:
        attempt.finish(simulated=is_virtual, after=state(device), **result._asdict())


def meet(
    config: Mapping[str, Any],
    attempt: Attempt,
    place: Place,
    start_folder: Path,
    orders: Mapping[str, Any],
    device: torch.device,
    stop: Stop,
) -> groups.Group:
    """`groups.start`, for workers that may be told to stop while they wait for each other."""
    try:
        return groups.start(config, place, start_folder, orders, device, stop.is_overdue)
    except WorkerLost as lost:
        if stop.told or isinstance(lost, GivenUp):
            raise Preempted(attempt.saved_step()) from lost
        raise


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


def outcome(trained: Trained, comm: Comm, steps: int, steps_per_epoch: int) -> Outcome:
    """Compare the final weights over the ranks, bit for bit. Collective."""
    parameters = [p.detach() for p in trained.model.parameters()]
    digest = hashlib.sha256()
    for p in parameters:
        digest.update(p.cpu().contiguous().numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.int32, device=parameters[0].device)
    agreed = all(torch.equal(mine, other) for other in comm.all_gather(mine))
    size = sum(p.numel() for p in parameters)
    weights, searching = digest.hexdigest(), trained.searching
    return Outcome(steps, steps_per_epoch, size, len(parameters), weights, agreed, searching)


class Progress:
    """Tells the starting side, now and then, where the run stands."""

    def __init__(self, path: Path, num_steps: int) -> None:
        self.path, self.num_steps, self.told = path, num_steps, 0.0

    def __call__(self, step: int) -> None:
        clock = time.monotonic()
        if clock - self.told >= PROGRESS_S or step == self.num_steps:
            self.told = clock
            write_atomic(self.path, json.dumps({"step": step, "steps": self.num_steps}), durable=False)
