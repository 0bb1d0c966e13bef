"""Variants of one training for the benchmark of peers: torch's, torchft's, and our wrappers."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import sparsify
from experiments.bench._launches import CPU
from experiments.bench._step_variants import LEARNING_RATE, ONE_BUCKET_MB, POWERSGD_DENSE_STEPS
from experiments.training.datasets import Dataset
from experiments.training.replicas.shared import set_learning_rate
from experiments.training.task import Task
from sparsify.comm.torch import TorchComm
from sparsify.local.strategy import LocalSteps
from sparsify.method import Method
from sparsify.types import BucketContext

SCHEDULE_EPOCHS = 10  # over which the tasks' learning rates are planned; here they are all of a training
POST_LOCAL_SHARE = (
    0.5  # of a training before its local steps, as in most of Lin et al. 2020 (arXiv:1808.07217)
)
LOCALHOST = "127.0.0.1"
# The argument's name since torch 2.14, and before.
SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


@dataclass(frozen=True)
class PeerSetup:
    """The task, the data and the options that the variants of a launch share.

    Args:
        peer_folder: where the packages lie that only this benchmark needs.
        num_steps: steps of a whole training. None: rounds are timed, on a few batches, at a constant
            learning rate so small that no variant trains into numbers that the others do not have.
        every: steps of a round, after which all workers have the same parameters under every variant.
        rank: columns of PowerSGD's factors.
    """

    task: Task
    data: Dataset
    comm: TorchComm
    seed: int
    peer_folder: str
    num_steps: int | None
    every: int
    density: float
    rank: int
    outer_lr: float
    outer_momentum: float

    def make_model_and_optimizer(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model, equal on all workers and for all variants, and the task's own optimizer."""
        model = self.task.make_model(self.data, self.seed, CPU, torch.float32)
        return model, self.task.make_optimizer(model)

    def draw_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return this worker's batches, equal for all variants."""
        rank = self.comm.rank
        augmentation = BucketContext(self.seed, rank, -1).make_generator_for_rank(CPU)
        batches = self.task.batches(self.data, rank, self.comm.size, self.seed, augmentation, torch.float32)
        return batches if self.num_steps else cycle([*islice(batches, self.every)])

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step: the task's schedule, compressed into the steps that there are."""
        if self.num_steps is None:
            return LEARNING_RATE
        return self.task.learning_rate(step, max(1, self.num_steps // SCHEDULE_EPOCHS))

    @property
    def synchronous_steps(self) -> int:
        """Steps of post-local SGD that average gradients, in whole rounds; none where rounds are timed."""
        return int(POST_LOCAL_SHARE * (self.num_steps or 0)) // self.every * self.every


@dataclass
class PeerTraining:
    """A training by one variant, which is advanced a round at a time.

    Args:
        forward: the model, or the DDP around it.
        inner: the task's optimizer, whose learning rate follows the schedule.
        optimizer: the optimizer that a training loop calls.
        reporter: has the `last_report` of what this worker sent; None where nobody reports it.
        close: ends what the variant started, on all workers together.
    """

    setup: PeerSetup
    model: nn.Module
    inner: torch.optim.Optimizer
    forward: nn.Module
    optimizer: Any
    reporter: Any = None
    close: Callable[[], None] = lambda: None
    num_steps_done: int = 0

    def __post_init__(self) -> None:
        self.batches = self.setup.draw_batches()

    def run_round(self) -> int:
        """Take the steps of a round, and return the bytes that the reporter says this worker sent."""
        reported_bytes = 0
        for _ in range(self.setup.every):
            inputs, labels = next(self.batches)
            set_learning_rate(self.inner, self.setup.learning_rate(self.num_steps_done))
            self.optimizer.zero_grad()
            self.setup.task.loss(self.forward(inputs), labels).backward()
            self.optimizer.step()
            self.num_steps_done += 1
            if self.reporter is not None:
                reported_bytes += self.reporter.last_report.wire_bytes
        return reported_bytes

    def have_workers_same_parameters(self) -> bool:
        """Tell whether all workers have the same parameters, bit for bit. Collective."""
        flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        first, *others = self.setup.comm.all_gather(flat.view(torch.int32))
        return all(torch.equal(first, other) for other in others)


StartTraining: TypeAlias = Callable[[PeerSetup], PeerTraining]
MethodFactory: TypeAlias = Callable[[PeerSetup], Method | LocalSteps]
AddHook: TypeAlias = Callable[[PeerSetup, DistributedDataParallel, torch.optim.Optimizer], object]


def start_ddp(setup: PeerSetup, add_hook: AddHook, bucket_mb: float | None = None) -> PeerTraining:
    """Start a training under DDP with a communication hook, and DDP's buckets of so many MB.

    DDP's broadcasts of buffers are left out, since they would average nothing and stand in every step.
    """
    model, inner = setup.make_model_and_optimizer()
    options: dict[str, Any] = {SYNC_BUFFERS: False, "bucket_cap_mb": bucket_mb}
    ddp = DistributedDataParallel(model, process_group=setup.comm.group, **options)
    reporter = add_hook(setup, ddp, inner)
    return PeerTraining(setup, model, inner, ddp, inner, reporter)


def start_distributed(setup: PeerSetup, make_method: MethodFactory) -> PeerTraining:
    """Start a training whose optimizer `sparsify.distribute` wraps."""
    model, inner = setup.make_model_and_optimizer()
    optimizer = sparsify.distribute(inner, model, make_method(setup), group=setup.comm.group)
    return PeerTraining(setup, model, inner, model, optimizer, optimizer)


def start_post_local_sgd(setup: PeerSetup) -> PeerTraining:
    """Start a training by torch's post-local SGD, which has no outer optimizer: parameters are averaged.

    Its first average is moved to the end of the first local round, so that rounds end together.
    """
    start = setup.synchronous_steps

    def add_hook(setup: PeerSetup, ddp: DistributedDataParallel, inner: torch.optim.Optimizer) -> None:
        state = post_localSGD_hook.PostLocalSGDState(
            setup.comm.group, None, start, post_local_gradient_allreduce=False
        )
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)

    training = start_ddp(setup, add_hook)
    averager = PeriodicModelAverager(setup.every, start + setup.every - 1, setup.comm.group)
    training.optimizer = PostLocalSGDOptimizer(training.inner, averager)
    return training


def start_torchft_diloco(setup: PeerSetup) -> PeerTraining:
    """Start a training by torchft's DiLoCo: a lighthouse in rank 0's process, and a manager in each.

    torchft skips a round that failed and goes on. Closing the training fails if it has skipped one.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    if setup.peer_folder not in sys.path:
        sys.path.append(setup.peer_folder)
    torchft, coordination, local_sgd = (
        importlib.import_module(name) for name in ("torchft", "torchft.coordination", "torchft.local_sgd")
    )
    comm = setup.comm
    model, inner = setup.make_model_and_optimizer()
    stack = ExitStack()
    port = torch.zeros(1, dtype=torch.int64)
    if comm.rank == 0:
        lighthouse = coordination.LighthouseServer(bind=f"{LOCALHOST}:0", min_replicas=comm.size)
        stack.callback(lighthouse.shutdown)
        port += urlsplit(lighthouse.address()).port or 0
    comm.all_reduce(port)
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=comm.size,
        use_async_quorum=False, rank=0, world_size=1, store_addr=LOCALHOST, store_port=store.port,
        lighthouse_addr=f"http://{LOCALHOST}:{port.item()}", replica_id=f"worker{comm.rank}",
        hostname=LOCALHOST, init_sync=False,
    )  # fmt: skip
    stack.callback(bool, store)  # keeps it until then: other workers' managers ask it
    stack.callback(comm.barrier)  # no lighthouse ends before all managers have
    stack.callback(manager.shutdown)
    outer = torch.optim.SGD(
        model.parameters(), lr=setup.outer_lr, momentum=setup.outer_momentum, nesterov=True
    )
    stack.enter_context(local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=setup.every))

    def close() -> None:
        num_rounds = training.num_steps_done // setup.every
        num_committed = manager.current_step()
        stack.close()
        if num_committed != num_rounds:
            raise RuntimeError(f"torchft committed {num_committed} of {num_rounds} rounds")

    training = PeerTraining(setup, model, inner, model, inner, close=close)
    return training


def add_no_hook(setup: PeerSetup, ddp: DistributedDataParallel, inner: torch.optim.Optimizer) -> None: ...


def add_fp16_hook(setup: PeerSetup, ddp: DistributedDataParallel, inner: torch.optim.Optimizer) -> None:
    ddp.register_comm_hook(setup.comm.group, default_hooks.fp16_compress_hook)


def add_powersgd_hook(setup: PeerSetup, ddp: DistributedDataParallel, inner: torch.optim.Optimizer) -> None:
    state = powerSGD_hook.PowerSGDState(
        setup.comm.group, setup.rank, start_powerSGD_iter=POWERSGD_DENSE_STEPS
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def register_topk(setup: PeerSetup, ddp: DistributedDataParallel, inner: torch.optim.Optimizer) -> Any:
    return sparsify.register(ddp, make_topk(setup), inner)


def make_topk(setup: PeerSetup) -> Method:
    return sparsify.topk(density=setup.density, scope="global")


def make_powersgd(setup: PeerSetup) -> Method:
    return sparsify.powersgd(rank=setup.rank)


def make_diloco(setup: PeerSetup) -> LocalSteps:
    return sparsify.diloco(every=setup.every, lr=setup.outer_lr, momentum=setup.outer_momentum)


STARTERS: dict[str, StartTraining] = {  # in the order of peer_rows.yaml
    "ddp": partial(start_ddp, add_hook=add_no_hook),
    "ddp_fp16": partial(start_ddp, add_hook=add_fp16_hook),
    "ddp_powersgd": partial(start_ddp, add_hook=add_powersgd_hook, bucket_mb=ONE_BUCKET_MB),
    "post_local_sgd": start_post_local_sgd,
    "torchft_diloco": start_torchft_diloco,
    "register_topk": partial(start_ddp, add_hook=register_topk),
    "distribute_topk": partial(start_distributed, make_method=make_topk),
    "distribute_powersgd": partial(start_distributed, make_method=make_powersgd),
    "distribute_diloco": partial(start_distributed, make_method=make_diloco),
}
