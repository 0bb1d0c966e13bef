"""Networks, and the variants of their training steps: plain DDP, DDP with torch's hooks, and our wrappers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import sparsify
from experiments.training import networks
from sparsify.comm import Comm
from sparsify.method import Method

NetworkName: TypeAlias = Literal["linears", "resnet50", "vgg16"]
LINEAR_WIDTH = 64
LEARNING_RATE = 1e-4  # so small that no variant trains into numbers that the others do not have
# torch's PowerSGD waits for collectives in gloo's threads, and starts the next ones there: with several
# buckets it hangs, or mixes up their messages.
ONE_BUCKET_MB = 2**14
POWERSGD_DENSE_STEPS = 2  # the fewest that it takes with error feedback


class BenchmarkNetwork(NamedTuple):
    """A model, and the samples on which it is trained."""

    make: Callable[[int], nn.Module]  # given the number of layers of `linears`
    batch_per_worker: int  # samples a worker
    sample_shape: tuple[int, ...]
    num_classes: int
    default_turns: int  # steps of each variant in a launch


def make_linear_layers(num_layers: int) -> nn.Module:
    """Make linear layers of 64 x 64, two small tensors each; orthogonal, or else gradients would vanish."""
    linears = [nn.Linear(LINEAR_WIDTH, LINEAR_WIDTH) for _ in range(num_layers)]
    for layer in linears:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*linears)


# Images are small, because the network's own computation is not compared.
NETWORKS: dict[str, BenchmarkNetwork] = {
    "linears": BenchmarkNetwork(make_linear_layers, 8, (LINEAR_WIDTH,), LINEAR_WIDTH, 40),
    "resnet50": BenchmarkNetwork(lambda _: networks.imagenet_resnet50(3, 64, 1000), 2, (3, 64, 64), 1000, 9),
    "vgg16": BenchmarkNetwork(lambda _: networks.vgg16(3, 32, 10), 8, (3, 32, 32), 10, 9),
    "small_cnn": BenchmarkNetwork(lambda _: networks.small_cnn(3, 32, 10), 8, (3, 32, 32), 10, 9),
}


@dataclass(frozen=True)
class TrainingStepSetup:
    """The options that the variants of a launch share."""

    network: str
    layers: int  # of `linears`
    density: float
    bucket_mb: float
    rank: int
    batch: int | None = None  # samples a worker; by default the network's
    comm: Comm | None = None  # by default of all workers
    around_averaging: Callable[[], AbstractContextManager[object]] | None = None  # entered to average

    def make_model_and_loss(self) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        """Return a model, equal on all workers, and its loss on this worker's batch."""
        network = NETWORKS[self.network]
        torch.manual_seed(0)
        model = network.make(self.layers)
        rng = torch.Generator().manual_seed(self.rank)
        batch = self.batch or network.batch_per_worker
        samples = torch.randn(batch, *network.sample_shape, generator=rng)
        labels = torch.randint(network.num_classes, (batch,), generator=rng)
        return model, lambda model: cross_entropy(model(samples), labels)

    def make_topk(self, scope: str | None) -> Method:
        """Return Top-k of this scope; None is a scope of so many MB."""
        method: Method = sparsify.build("topk", density=self.density, scope=scope or self.bucket_mb)
        return method


class DDPWithHookContext(DistributedDataParallel):
    """A DDP that enters `around_averaging` whenever it calls its communication hook."""

    around_averaging: Callable[[], AbstractContextManager[object]]

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        def observed(state: object, bucket: Any) -> Any:
            with self.around_averaging():
                return hook(state, bucket)

        observed.__annotations__.clear()  # DDP inspects them, and would not know what is text here
        super().register_comm_hook(state, observed)


Step: TypeAlias = Callable[[], None]
AddHook: TypeAlias = Callable[[DistributedDataParallel, torch.optim.Optimizer], object]


def make_ddp_step(setup: TrainingStepSetup, add_hook: AddHook, bucket_mb: float | None = None) -> Step:
    """Return a training step under DDP with a communication hook, and DDP's buckets of so many MB."""
    module, loss_of = setup.make_model_and_loss()
    model: DistributedDataParallel
    if setup.around_averaging is None:
        model = DistributedDataParallel(module, bucket_cap_mb=bucket_mb)
    else:
        model = DDPWithHookContext(module, bucket_cap_mb=bucket_mb)
        model.around_averaging = setup.around_averaging
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    add_hook(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return step


MethodFactory: TypeAlias = Callable[[TrainingStepSetup], Method]


def make_registered_ddp_step(
    setup: TrainingStepSetup,
    make_method: MethodFactory,
    overlap: bool = False,
    bucket_mb: float | None = None,
) -> Step:
    """Return a training step under DDP whose gradients `sparsify.register` averages."""
    method = make_method(setup)

    def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        sparsify.register(model, method, optimizer, setup.comm, overlap=overlap)

    return make_ddp_step(setup, register, bucket_mb)


def make_distributed_optimizer_step(
    setup: TrainingStepSetup, make_method: MethodFactory, overlap: bool = False
) -> Step:
    """Return a training step of an optimizer that `sparsify.distribute` lets average gradients."""
    model, loss_of = setup.make_model_and_loss()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    optimizer = sparsify.distribute(inner, model, make_method(setup), setup.comm, overlap=overlap)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        if setup.around_averaging is not None:
            with setup.around_averaging():
                optimizer.aggregate()
        optimizer.step()

    return step


def add_no_hook(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None: ...


def add_powersgd_hook(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWERSGD_DENSE_STEPS)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def add_fp16_hook(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def make_dense_method(setup: TrainingStepSetup) -> Method:
    method: Method = sparsify.build("dense")
    return method


def make_topk_factory(scope: str | None) -> MethodFactory:
    """Return a function that makes Top-k of this scope; None is a scope of so many MB."""
    return lambda setup: setup.make_topk(scope)


STEP_MAKERS: dict[str, Callable[[TrainingStepSetup], Step]] = {
    "ddp": partial(make_ddp_step, add_hook=add_no_hook),
    "ddp_fp16": partial(make_ddp_step, add_hook=add_fp16_hook),
    "ddp_powersgd": partial(make_ddp_step, add_hook=add_powersgd_hook, bucket_mb=ONE_BUCKET_MB),
    "register_dense": partial(make_registered_ddp_step, make_method=make_dense_method),
    "register_dense_overlap": partial(make_registered_ddp_step, make_method=make_dense_method, overlap=True),
    "distribute_dense": partial(make_distributed_optimizer_step, make_method=make_dense_method),
    "register_topk_global": partial(make_registered_ddp_step, make_method=make_topk_factory("global")),
    "register_topk_mb": partial(make_registered_ddp_step, make_method=make_topk_factory(None)),
    "register_topk_bucket": partial(make_registered_ddp_step, make_method=make_topk_factory("bucket")),
    "register_topk_layer": partial(make_registered_ddp_step, make_method=make_topk_factory("layer")),
    "register_topk_layer_overlap": partial(
        make_registered_ddp_step, make_method=make_topk_factory("layer"), overlap=True
    ),
    "distribute_topk_global": partial(
        make_distributed_optimizer_step, make_method=make_topk_factory("global")
    ),
    "distribute_topk_layer": partial(make_distributed_optimizer_step, make_method=make_topk_factory("layer")),
}
