"""One run: a resolved config in, one rank's records (or all virtual ranks' records) out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from analysis.files import PATIENCE_S, RankLog, write_atomic
from analysis.records import Attempt, variant_configs
from experiments.config.network import network
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.alternation import TurnLog, Turns, Variant, alternate
from experiments.training.checkpoint import Checkpointer
from experiments.training.datasets import Dataset
from experiments.training.graph import CudaRecorder
from experiments.training.lateness import Lateness
from experiments.training.loop import Settings, Trained, Training, train
from experiments.training.stop import Preempted, Stop
from experiments.training.task import Task
from experiments.worker import hardware, memory
from experiments.worker.connect import connect
from experiments.worker.provenance import provenance, state
from slurm.environment import Place
from sparsify.comm import Comm, virtual
from sparsify.comm.torch import TorchComm
from sparsify.cost import Link
from sparsify.method import Method
from sparsify.methods import REGISTRY as METHODS
from sparsify.timer import PhaseTimer, cuda_event

if TYPE_CHECKING:  # it names Horovod's communicator, which may not be installed
    from experiments.worker.connect import AnyComm

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64}
T = TypeVar("T")
FIRST_WITH_TF32 = (8, 0)  # compute capability: Ampere
NAME_BYTES = 128  # of a name that ranks exchange
PROGRESS_S = 0.5  # between two notes of how far the run is


class Built(NamedTuple):
    """What a config describes, on this worker's device."""

    config: Mapping[str, Any]
    task: Task
    data: Dataset
    method: Method
    settings: Settings
    steps_per_epoch: int
    variants: Mapping[str, Built] = {}  # where several take turns, with the same data

    @property
    def turns(self) -> Turns:
        return Turns(
            **self.config["alternate"],
            warmup_steps=self.config["timing"]["warmup_steps"],
            seed=self.config["seed"],
        )

    @property
    def num_steps(self) -> int:
        """Of all variants; where they take turns, the least."""
        return self.settings.num_steps or len(self.variants) * self.turns.steps(self.turns.blocks)

    @property
    def is_virtual(self) -> bool:
        return bool(self.config["cluster"]["where"] == "virtual")

    def on_virtual_ranks(self, mode: str, body: Callable[[virtual.VirtualComm], T]) -> list[T]:
        """What each rank returns, in this timing mode."""
        event = self.event if mode == "production" else None
        joined = network(self.config["cluster"])
        return virtual.run(self.config["workers"], body, joined, self.synchronise, event)

    def timer(
        self,
        mode: str,
        comm: Comm,
        clock: Callable[[], float],
        keep_spans: Callable[[int], bool] = lambda step: False,
    ) -> PhaseTimer:
        """Of one rank."""
        event = comm.mark if self.event and isinstance(comm, virtual.VirtualComm) else self.event
        return PhaseTimer(mode, clock, self.synchronise, event, keep_spans)

    @property
    def event(self) -> Callable[[], Any] | None:
        """In production, steps on a GPU are timed by its events, so that nothing waits for it."""
        return cuda_event if self.settings.device.type == "cuda" else None

    def synchronise(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.settings.device.type == "cuda":
            torch.cuda.synchronize()


class Outcome(NamedTuple):
    """What the manifest says of a run besides its provenance; of several variants, of the first."""

    steps: int  # of each variant
    steps_per_epoch: int
    parameters: int
    tensors: int
    weights: str  # SHA-256 of rank 0's final parameters
    agreed: bool  # do all ranks hold these very weights?
    searching: dict[str, Any]  # of rank 0, see `loop.searched`; kernel: of all ranks
    graph: str | None  # of rank 0, see `loop.Trained`
    alternated: dict[str, Any] | None = None  # how the turns ended, and what became of each variant

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if name != "alternated" or value}


def execute(
    orders: Mapping[str, Any],
    attempt: Attempt,
    place: Place,
    start_folder: Path,
    stop: Stop,
    comm: AnyComm | None = None,
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
    hardware.prepare(config, place, device)
    run = build(config, orders["data_root"], device)
    if run.is_virtual:
        built = [*run.variants.values()] or [run]
        memory.check([(each.task, each.method, each.settings) for each in built], run.data, config["workers"])
    facts = {**provenance(run.data.name, run.data.digest, device), "image": orders.get("image")}
    facts["precision"] = precision_of(config["precision"], device)
    progress = ProgressNote(start_folder / "progress.json", run.num_steps)

    def body(comm: Comm, clock: Callable[[], float]) -> Outcome:
        path = attempt.rank_path(comm.rank)
        log = owned.enter_context(RankLog(path, PATIENCE_S, lambda: stop.told))
        if comm.rank == 0:
            attempt.check_open()
            progress.newest = log.newest
        return record(run, comm, clock, attempt, log, facts, stop, progress, orders.get("network"))

    with contextlib.ExitStack() as owned:  # the attempt is this process's until its manifest is written
        try:
            if run.is_virtual:
                mode = config["timing"]["mode"]
                outcome = run.on_virtual_ranks(mode, lambda comm: body(comm, comm.now))[0]
            else:
                if comm is None:
                    comm = connect(config, attempt, place, start_folder, orders, device, stop)
                outcome = body(comm, time.perf_counter)
                comm.barrier()  # every rank's log is on the disk before rank 0 declares them whole
                comm.close()
        except Preempted as preempted:
            if place.rank == 0:
                attempt.preempt(preempted.step)
            if comm is not None:
                comm.close()
            raise
        if place.rank == 0:
            attempt.finish(
                config["workers"], simulated=run.is_virtual, after=state(device), **outcome.facts()
            )


def prepare_device(config: Mapping[str, Any], place: Place) -> torch.device:
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
    prepare_precision(config["precision"], device)
    return device


def precision_of(asked: str, device: torch.device) -> str:
    """What this device multiplies in when it is asked for that: GPUs before Ampere have no TF32, and multiply
    in fp32, as the published code did on them.
    """
    is_too_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_WITH_TF32
    return "fp32" if asked == "tf32" and is_too_old else asked


def prepare_precision(asked: str, device: torch.device) -> None:
    """Let a GPU multiply as asked, or say why it can't."""
    got = precision_of(asked, device)
    for backend in tf32_backends():
        backend.fp32_precision = "tf32" if got == "tf32" else "ieee"
    if got != asked:
        name = torch.cuda.get_device_name(device)
        print(f"precision={asked}: {name} has no TF32, so this run is in {got}", file=sys.stderr)


def tf32_backends() -> list[Any]:
    """What can multiply in TF32, each with a switch of its own."""
    cuda: Any = torch.backends.cuda  # types of torch's leave these parts out
    cudnn: Any = torch.backends.cudnn
    return [cuda.matmul, cudnn.conv, cudnn.rnn]


def build(config: Mapping[str, Any], data_root: str | None, device: torch.device) -> Built:
    """Task, data and method of a config, and of each of its variants.

    Raises:
        ValueError: hyperparameters or data that can't be used.
    """
    task: Task = TASKS.build(*_name_and_values(config["task"]))
    data = datasets.load(task.dataset, Path(data_root) if data_root else None, device)
    if config["train"].get("held_out"):  # older orders do not say
        data = data.holding_out(config["train"]["held_out"])
    run = build_on(data, config, device)
    if not (configs := variant_configs(config)):
        return run
    return endless(run)._replace(
        variants={name: endless(build_on(data, variant, device)) for name, variant in configs.items()}
    )


def endless(run: Built) -> Built:
    """Until its turns are over."""
    return run._replace(settings=run.settings._replace(num_steps=None))


def build_on(data: Dataset, config: Mapping[str, Any], device: torch.device) -> Built:
    """The same without variants, on data that were loaded."""
    task: Task = TASKS.build(*_name_and_values(config["task"]))
    method: Method = METHODS.build(*_name_and_values(config["method"]))
    train = config["train"]
    if train["validate"] != "never" and not task.has_metric:
        raise ValueError(
            f"task={config['task']['name']} learns nothing that train.validate={train['validate']} could "
            "measure; take train.validate=never"
        )
    steps_per_epoch = train.get("epoch_steps") or task.steps_per_epoch(data, config["workers"])
    repeats = config.get("cuda_graph", True)  # older orders do not say
    settings = Settings(
        seed=config["seed"],
        num_steps=train["steps"] or train["epochs"] * steps_per_epoch,
        validate=train["validate"] == "epoch",
        device=device,
        dtype=DTYPES[config["precision"]],
        select=config["select"],
        overlap=config["overlap"],
        recorder=CudaRecorder(device) if device.type == "cuda" and repeats else None,
        epoch_steps=steps_per_epoch,
        validate_every=train.get("validate_every", 1),
        look_every=train.get("look_every"),
        late=Lateness.of(config["late"], config["seed"]) if "late" in config else None,
    )
    return Built(config, task, data, method, settings, steps_per_epoch)


def record(
    run: Built,
    comm: Comm,
    clock: Callable[[], float],
    attempt: Attempt,
    log: RankLog,
    facts: dict[str, Any],
    stop: Stop,
    progress: Callable[[int], None],
    network: Mapping[str, Any] | None,
) -> Outcome:
    """Train as one rank of the group, and leave its log in the attempt.

    Args:
        log: of this rank, in the attempt.
        facts: the provenance; what is found out about the machine is added.
        progress: told by rank 0 how many steps are done.
        network: facts about the emulated one, if there is one.
    """
    config, settings = run.config, run.settings
    facts["machine"] = hardware.check(config, settings.device, comm, network)
    if isinstance(comm, TorchComm) and "link" in facts["machine"]:
        kinds = facts["machine"]["link"]["kinds"]
        comm.links = {kind: Link(alpha_s, beta) for kind, (alpha_s, beta) in kinds.items()}
    every_min = config.get("launch", {}).get("checkpoint_min")
    checkpointer = Checkpointer(attempt, comm, log, stop, every_min, settings.device)
    done = checkpointer.find()
    if comm.rank == 0:
        attempt.start(done, facts["host"], steps=run.num_steps, provenance=facts)
    told = progress if comm.rank == 0 else (lambda step: None)
    try:
        if run.variants:
            return take_turns(run, comm, clock, log, told, checkpointer)
        timer = run.timer(config["timing"]["mode"], comm, clock, keeps_spans(config["timing"], done))
        trained = train(run.task, run.data, run.method, comm, timer, log, settings, told, checkpointer)
    finally:
        log.flush(durable=True)
    return outcome_of(trained, comm, run.num_steps, run.steps_per_epoch)


def take_turns(
    run: Built,
    comm: Comm,
    clock: Callable[[], float],
    log: RankLog,
    progress: Callable[[int], None],
    checkpointer: Checkpointer,
) -> Outcome:
    """Train the variants in turns, and say what became of each."""

    def variant(name: str, built: Built) -> Variant:
        own, timing = TurnLog(log, name), built.config["timing"]
        timer = built.timer(timing["mode"], comm, clock, keeps_spans(timing))
        return Variant(Training(built.task, built.data, built.method, comm, timer, own, built.settings), own)

    def after_block(steps: int) -> None:
        progress(steps)
        checkpointer.end_block()

    variants = {name: variant(name, built) for name, built in run.variants.items()}
    ended = alternate(variants, comm, run.turns, run.settings.device, after_block)
    steps = run.turns.steps(ended.blocks)
    outcomes = {
        name: outcome_of(training.finish(), comm, steps, run.steps_per_epoch)
        for name, (training, _) in variants.items()
    }
    became = {name: outcome.facts() for name, outcome in outcomes.items()}
    return next(iter(outcomes.values()))._replace(alternated={**ended._asdict(), "variants": became})


def keeps_spans(timing: Mapping[str, Any], done: int = 0) -> Callable[[int], bool]:
    """Of which steps every span is kept; after an interruption the machine has to warm up again.

    Args:
        done: steps, before this start.
    """
    first_steps = [start + timing["warmup_steps"] for start in (0, done)]
    if timing["span_steps"] is None:
        return lambda step: step >= first_steps[0]
    return {first + at for first in first_steps for at in range(timing["span_steps"])}.__contains__


def outcome_of(trained: Trained, comm: Comm, steps: int, steps_per_epoch: int) -> Outcome:
    """Compare the final weights over the ranks, bit for bit. Collective."""
    parameters = [p.detach() for p in trained.model.parameters()]
    digest = hashlib.sha256()
    for p in parameters:
        digest.update(p.cpu().contiguous().numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.int32, device=parameters[0].device)
    agreed = trained.agreed and all(torch.equal(mine, other) for other in comm.all_gather(mine))
    size = sum(p.numel() for p in parameters)
    kernels = names_of_all(trained.searching["kernel"] or "", comm, parameters[0].device)
    weights, searching = digest.hexdigest(), {**trained.searching, "kernel": " and ".join(kernels) or None}
    return Outcome(steps, steps_per_epoch, size, len(parameters), weights, agreed, searching, trained.graph)


def names_of_all(name: str, comm: Comm, device: torch.device) -> list[str]:
    """Every rank's name, each once: machines may differ in their processors and compilers. Collective."""
    mine = torch.tensor(list(name.encode()[:NAME_BYTES].ljust(NAME_BYTES)), dtype=torch.int32, device=device)
    names = (bytes(other.tolist()).decode(errors="replace").strip() for other in comm.all_gather(mine))
    return [name for name in dict.fromkeys(names) if name]


def _name_and_values(choice: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return choice["name"], {key: value for key, value in choice.items() if key != "name"}


class ProgressNote:
    """Tells the starting side, now and then, how far the run is."""

    def __init__(self, path: Path, num_steps: int) -> None:
        self.path, self.num_steps, self.told = path, num_steps, 0.0
        self.newest: Mapping[str, float] = {}  # loss and accuracy

    def __call__(self, step: int) -> None:
        clock = time.monotonic()
        if clock - self.told >= PROGRESS_S or step == self.num_steps:
            self.told = clock
            told = {name: value for name, value in self.newest.items() if math.isfinite(value)}
            note = {"step": step, "steps": self.num_steps, **told}
            write_atomic(self.path, json.dumps(note), durable=False)
