"""Networks, and the ways of training them whose steps are compared: DDP as it is, with torch's own hooks, and
through each of our wrappers.
"""

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

NetworkName: TypeAlias = Literal["linears", "resnet50", "vgg16"]
Inside: TypeAlias = Callable[[], AbstractContextManager[object]]
WIDTH = 64  # of each linear layer
RATE = 1e-4  # so small that no way trains into numbers that others do not have
# torch's PowerSGD waits for collectives within gloo's threads, and starts the next ones there: with several
# buckets it hangs, or mixes up their messages.
ONE_BUCKET_MB = 2**14
POWERSGD_FROM = 2  # steps that it leaves dense, the fewest that it takes with error feedback


class BenchNetwork(NamedTuple):
    """A model, and what it is trained on."""

    make: Callable[[int], nn.Module]  # given the number of layers of `linears`
    batch: int  # samples a worker
    shape: tuple[int, ...]  # of a sample
    classes: int
    turns: int  # steps of each way in a launch


def linears(layers: int) -> nn.Module:
    """So many linear layers of 64 x 64, two small tensors each. Orthogonal, else gradients would vanish."""
    made = [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
    for layer in made:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*made)


# Images are small: what the network itself computes is not what is compared.
NETWORKS: dict[str, BenchNetwork] = {
    "linears": BenchNetwork(linears, 8, (WIDTH,), WIDTH, 40),
    "resnet50": BenchNetwork(lambda _: networks.imagenet_resnet50(3, 64, 1000), 2, (3, 64, 64), 1000, 9),
    "vgg16": BenchNetwork(lambda _: networks.vgg16(3, 32, 10), 8, (3, 32, 32), 10, 9),
}


@dataclass(frozen=True)
class WaySetup:
    """What the ways of a launch share."""

    network: str
    layers: int  # of `linears`
    density: float
    bucket_mb: float
    rank: int
    inside: Inside | None = None  # entered where gradients are averaged: by a hook, or before a step

    def model(self) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        """The same on all workers; and the loss on this one's batch."""
        network = NETWORKS[self.network]
        torch.manual_seed(0)
        model = network.make(self.layers)
        own = torch.Generator().manual_seed(self.rank)
        samples = torch.randn(network.batch, *network.shape, generator=own)
        labels = torch.randint(network.classes, (network.batch,), generator=own)
        return model, lambda called: cross_entropy(called(samples), labels)

    def topk(self, scope: str | float) -> Any:
        return sparsify.build("topk", density=self.density, scope=scope)


class WatchedDDP(DistributedDataParallel):
    """A DDP that enters `inside` whenever it calls its communication hook."""

    inside: Inside

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        def watched(state: object, bucket: Any) -> Any:
            with self.inside():
                return hook(state, bucket)

        watched.__annotations__.clear()  # DDP inspects them, and would not know what is text here
        super().register_comm_hook(state, watched)


Step: TypeAlias = Callable[[], None]
Way: TypeAlias = Callable[[WaySetup], Step]


def under_ddp(
    setup: WaySetup,
    hook: Callable[[DistributedDataParallel, torch.optim.Optimizer], object],
    bucket_mb: float | None = None,
) -> Step:
    """A step under DDP, which was given a hook.

    Args:
        bucket_mb: of DDP's own buckets; its default without.
    """
    module, loss_of = setup.model()
    made = DistributedDataParallel if setup.inside is None else WatchedDDP
    model = made(module, bucket_cap_mb=bucket_mb)
    if isinstance(model, WatchedDDP) and setup.inside is not None:
        model.inside = setup.inside
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    hook(model, optimiser)

    def step() -> None:
        optimiser.zero_grad()
        loss_of(model).backward()
        optimiser.step()

    return step


def registered(setup: WaySetup, method: Callable[[WaySetup], Any], overlap: bool = False) -> Step:
    """A step under DDP whose gradients `sparsify.register` averages."""
    built = method(setup)
    return under_ddp(
        setup, lambda model, optimiser: sparsify.register(model, built, optimiser, overlap=overlap)
    )


def distributed(setup: WaySetup, method: Callable[[WaySetup], Any]) -> Step:
    """A step of an optimiser that averages before it steps."""
    model, loss_of = setup.model()
    optimiser = sparsify.distribute(torch.optim.SGD(model.parameters(), lr=RATE), model, method(setup))

    def step() -> None:
        optimiser.zero_grad()
        loss_of(model).backward()
        if setup.inside is not None:
            with setup.inside():
                optimiser.aggregate()
        optimiser.step()

    return step


def powersgd(model: DistributedDataParallel, optimiser: torch.optim.Optimizer) -> None:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWERSGD_FROM)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def fp16(model: DistributedDataParallel, optimiser: torch.optim.Optimizer) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def dense(setup: WaySetup) -> Any:
    return sparsify.build("dense")


def scoped(scope: str | None = None) -> Callable[[WaySetup], Any]:
    """Top-k of this scope; without one, of so many MB."""
    return lambda setup: setup.topk(setup.bucket_mb if scope is None else scope)


WAYS: dict[str, Way] = {
    "ddp": lambda setup: under_ddp(setup, lambda model, optimiser: None),
    "ddp_fp16": partial(under_ddp, hook=fp16),
    "ddp_powersgd": partial(under_ddp, hook=powersgd, bucket_mb=ONE_BUCKET_MB),
    "register_dense": partial(registered, method=dense),
    "register_dense_overlap": partial(registered, method=dense, overlap=True),
    "distribute_dense": partial(distributed, method=dense),
    "register_topk_global": partial(registered, method=scoped("global")),
    "register_topk_mb": partial(registered, method=scoped()),
    "register_topk_bucket": partial(registered, method=scoped("bucket")),
    "register_topk_layer": partial(registered, method=scoped("layer")),
    "register_topk_layer_overlap": partial(registered, method=scoped("layer"), overlap=True),
    "distribute_topk_global": partial(distributed, method=scoped("global")),
    "distribute_topk_layer": partial(distributed, method=scoped("layer")),
}


def ways_here() -> list[str]:
    """All but those of a scope that this library does not have."""
    try:
        sparsify.build("topk", density=0.01, scope="bucket")
    except ValueError:
        return [name for name in WAYS if name != "register_topk_bucket"]
    return [*WAYS]
