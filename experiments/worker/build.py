"""The components of a run on this worker's device: task, data, method, and those of its variants."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.config.config import Config
from experiments.config.machines import SlurmCluster, VirtualCluster
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.alternation import AlternationSchedule
from experiments.training.datasets import Dataset
from experiments.training.graph import CudaGraphRecorder
from experiments.training.loop import LoopSettings
from experiments.training.stop_signal import count_sigcont_signals
from experiments.training.task import Task
from slurm.environment import WorkerPlace
from sparsify.comm import Comm
from sparsify.comm.virtual import VirtualComm
from sparsify.core.timer import PhaseTimer, record_cuda_event
from sparsify.cost import Network
from sparsify.local.strategy import LocalSteps
from sparsify.method import Method
from sparsify.methods import REGISTRY as METHODS

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}
FIRST_WITH_TF32 = (8, 0)  # compute capability: Ampere


class RunComponents(NamedTuple):
    """The objects that a config describes, on this worker's device."""

    config: Config
    task: Task
    data: Dataset
    method: Method | LocalSteps
    settings: LoopSettings
    steps_per_epoch: int
    variants: Mapping[str, RunComponents] = {}  # where several take turns, with the same data

    @property
    def alternation_schedule(self) -> AlternationSchedule:
        """The rules by which variants take turns."""
        return AlternationSchedule(self.config.alternate, self.config.timing.warmup_steps, self.config.seed)

    @property
    def num_steps(self) -> int:
        """Steps of all variants; where they take turns, the least."""
        return self.settings.num_steps or len(
            self.variants
        ) * self.alternation_schedule.count_steps_per_variant(self.config.alternate.blocks)

    def virtual_run_arguments(
        self, mode: str
    ) -> tuple[Network, Callable[[], None], Callable[[], Any] | None]:
        """Return the last three arguments of `virtual.run`: network, synchronize, event; by timing mode."""
        cluster = self.config.cluster
        assert isinstance(cluster, VirtualCluster), cluster
        return (
            cluster.to_network(),
            self.synchronize_device,
            self.event_recorder if mode == "production" else None,
        )

    def make_timer(self, mode: str, comm: Comm, num_done_steps: int = 0) -> PhaseTimer:
        """Return the timer of one rank.

        Every span is kept of the first steps that count; after an interruption the machine has to warm up
        again.

        Args:
            num_done_steps: steps before this start.
        """
        timing = self.config.timing
        event = self.event_recorder
        clock = time.perf_counter
        if isinstance(comm, VirtualComm):
            event = event and comm.record_mark
            clock = comm.now_s
        first_steps = [start + timing.warmup_steps for start in (0, num_done_steps)]
        if timing.span_steps is None:
            kept_steps: Container[int] = range(first_steps[0], sys.maxsize)
        else:
            kept_steps = {first + offset for first in first_steps for offset in range(timing.span_steps)}
        return PhaseTimer(
            mode, clock, self.synchronize_device, event, kept_steps.__contains__, count_sigcont_signals
        )

    @property
    def event_recorder(self) -> Callable[[], Any] | None:
        """The function that records a CUDA event, to time steps without waiting; None without a GPU."""
        return record_cuda_event if self.settings.device.type == "cuda" else None

    def synchronize_device(self) -> None:
        """Wait until the device has done all its work."""
        if self.settings.device.type == "cuda":
            torch.cuda.synchronize()


def build_run(config: Config, data_root: Path | None, device: torch.device) -> RunComponents:
    """Build the components of a config on a device, and those of each of its variants.

    Raises:
        ValueError: hyperparameters or data that can't be used.
    """
    task: Task = TASKS.build(config.task.name, config.task.arguments)
    data = datasets.load(task.dataset, data_root, device)
    if config.train.held_out:
        data = data.hold_out(config.train.held_out)
    if config.train.validate_on:
        data = data.limit_validation(config.train.validate_on)
    takes_turns = bool(config.variants)
    variants = {
        variant.name: build_components_on_data(data, variant.config, device, takes_turns)
        for variant in config.variants
    }
    return build_components_on_data(data, config, device, takes_turns)._replace(variants=variants)


def build_components_on_data(
    data: Dataset, config: Config, device: torch.device, takes_turns: bool
) -> RunComponents:
    """Build the components of a config without its variants, on loaded data.

    Args:
        takes_turns: train until the turns of variants end, instead of for a number of steps.
    """
    task: Task = TASKS.build(config.task.name, config.task.arguments)
    method: Method | LocalSteps = METHODS.build(config.method.name, config.method.arguments)
    if isinstance(method, LocalSteps):
        check_local_steps_settings(config)
    train = config.train
    if train.validate != "never" and not task.has_metric:
        raise ValueError(
            f"task={config.task.name} learns nothing that train.validate={train.validate} could "
            "measure; take train.validate=never"
        )
    if train.lr_decay_epochs > train.epochs:
        raise ValueError(
            f"train.lr_decay_epochs={train.lr_decay_epochs:g} is more than train.epochs={train.epochs}: the "
            "learning rate would begin below task.lr; take at most as many"
        )
    steps_per_epoch = train.epoch_steps or task.steps_per_epoch(data, config.workers)
    settings = LoopSettings(
        seed=config.seed,
        num_steps=None if takes_turns else train.steps or train.epochs * steps_per_epoch,
        train=train,
        device=device,
        dtype=DTYPES[config.precision],
        has_bf16_products=config.precision == "bf16",
        select=config.select,
        overlap=config.overlap,
        graph_recorder=CudaGraphRecorder(device) if device.type == "cuda" and config.cuda_graph else None,
        late=config.late,
    )
    return RunComponents(config, task, data, method, settings, steps_per_epoch)


def check_local_steps_settings(config: Config) -> None:
    """Refuse settings that say how every step's gradients are averaged, where none are.

    Raises:
        ValueError: which one, and what to take instead.
    """
    name = f"method={config.method.name} averages every {config.method.arguments['every']} steps"
    if config.overlap:
        raise ValueError(
            f"overlap=true averages gradients during backpropagation, and {name} what the steps moved; leave "
            "it out"
        )
    if config.timing.mode == "as_published":
        raise ValueError(
            f"timing.mode=as_published times a system that averages in every step, and {name}; take "
            "serialised or production"
        )
    if config.train.look_every:
        raise ValueError(
            f"train.look_every looks at the gradients that a method selects from, and {name}; leave it out"
        )


def prepare_device(config: Config, place: WorkerPlace) -> torch.device:
    """Set up this worker's device as the config says, and return it.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    torch.set_num_threads(config.threads)
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no GPU here; take profile=laptop, or device=cpu")
    visible = torch.cuda.device_count()
    index = place.local_rank
    # SLURM may bind GPUs to tasks, each of which sees its own only, as number 0: connect.py compares them.
    if isinstance(config.cluster, SlurmCluster):
        index %= visible
    if index >= visible:
        raise ValueError(
            f"{place.size} workers need {place.size} GPUs and this machine has {visible}; "
            "take fewer workers, or cluster=virtual, which runs them all on one"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = True  # as published
    torch.backends.cudnn.benchmark = False
    set_gpu_precision(config.precision, device)
    return device


def effective_precision(requested: str, device: torch.device) -> str:
    """Return the precision in which a device multiplies when `requested` is asked for.

    GPUs before Ampere have no TF32, and multiply in fp32, as the published code did on them.
    """
    is_too_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_WITH_TF32
    return "fp32" if requested == "tf32" and is_too_old else requested


def set_gpu_precision(requested: str, device: torch.device) -> None:
    """Set in what precision GPUs multiply; print where this one can't as requested."""
    precision = effective_precision(requested, device)
    for backend in tf32_backends():
        backend.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    if precision != requested:
        name = torch.cuda.get_device_name(device)
        print(f"precision={requested}: {name} has no TF32, so this run is in {precision}", file=sys.stderr)


def tf32_backends() -> list[Any]:
    """Return torch's backends that can multiply in TF32, each with a switch of its own."""
    cuda: Any = torch.backends.cuda  # types of torch's leave these parts out
    cudnn: Any = torch.backends.cudnn
    return [cuda.matmul, cudnn.conv, cudnn.rnn]
