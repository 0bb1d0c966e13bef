"""One worker is odd: what it wraps is other than what the others wrap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsify
from sparsify.comm import Comm
from sparsify.doors.handshake import Disagreement
from tests.sparsify.doors import uses

ODD = 1  # its rank


@dataclass
class Parts:
    """What is wrapped."""

    model: nn.Module = field(default_factory=uses.net)
    kind: type[torch.optim.Optimizer] = torch.optim.SGD
    of_optimiser: dict[str, Any] = field(default_factory=lambda: {"lr": uses.LR})
    method: str = "topk"
    of_method: dict[str, Any] = field(default_factory=lambda: {"density": 0.1, "scope": "layer"})
    options: dict[str, Any] = field(default_factory=dict)
    of_ddp: dict[str, Any] = field(default_factory=dict)

    def wrap(self, door: str, comm: Comm | None) -> object:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimiser = self.kind(parameters, **self.of_optimiser)
        if door == "locally":
            self.method, self.of_method = "localsgd", {"every": 2}
        method = sparsify.build(self.method, **self.of_method)
        if door != "register":
            return sparsify.distribute(optimiser, self.model, method, comm, **self.options)
        ddp = DistributedDataParallel(self.model, **self.of_ddp)
        return sparsify.register(ddp, method, optimiser, **self.options)


def other_type(parts: Parts) -> None:
    """Of the same size, or DDP itself comes to grief."""
    parts.model.half()


def other_shape(parts: Parts) -> None:
    parts.model.output = nn.Linear(16, 4).double()


def other_name(parts: Parts) -> None:
    parts.model.add_module("head", parts.model._modules.pop("output"))


def other_order(parts: Parts) -> None:
    parts.model.add_module("convolution", parts.model._modules.pop("convolution"))


def one_more(parts: Parts) -> None:
    parts.model.more = nn.Linear(2, 2).double()


def frozen(parts: Parts) -> None:
    parts.model.convolution.bias.requires_grad_(False)  # type: ignore[union-attr]  # a convolution has one


def a_buffer_in_the_way(parts: Parts) -> None:
    parts.model.register_buffer("calls", torch.zeros(2), persistent=False)


def other_strides(parts: Parts) -> None:
    parts.model.to(memory_format=torch.channels_last)


def other_method(parts: Parts) -> None:
    parts.method = "randomk"


def other_density(parts: Parts) -> None:
    parts.of_method["density"] = 0.2


def other_rate(parts: Parts) -> None:
    parts.of_optimiser["lr"] = 1.0


def other_optimiser(parts: Parts) -> None:
    parts.kind = torch.optim.Adam


def momentum_twice(parts: Parts) -> None:
    parts.method, parts.of_method = "dgc", {"density": 0.1}
    parts.of_optimiser["momentum"] = 0.9


def option(**options: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.options.update(options)


STRIDES = (
    "parameter convolution.weight: ranks [0, 2] have (4, 2, 2, 2) torch.float64 on cpu, trained; ranks [1] "
    "have (4, 2, 2, 2) torch.float64 on cpu, trained, with strides (8, 1, 4, 2)"
)
# Of each difference, what all workers read; what DDP itself refuses has no case for `register`.
FOR_DISTRIBUTE: dict[str, tuple[Callable[[Parts], None], str]] = {
    "shape": (other_shape, "parameter output.weight: ranks [0, 2] have (3, 16) torch.float64 on cpu, "
              "trained; ranks [1] have (4, 16)"),
    "order": (other_order, "on the order; in one place: ranks [0, 2] have parameter convolution.weight; "
              "ranks [1] have parameter output.weight"),
    "one more": (one_more, "parameter more.weight: ranks [0, 2] have none; ranks [1] have (2, 2)"),
    "frozen": (frozen, "parameter convolution.bias: ranks [0, 2] have (4,) torch.float64 on cpu, trained; "
               "ranks [1] have (4,) torch.float64 on cpu."),
    "strides": (other_strides, STRIDES),
    "buffer": (a_buffer_in_the_way, "buffer calls: ranks [0, 2] have (1,)"),
}  # fmt: skip
FOR_BOTH: dict[str, tuple[Callable[[Parts], None], str]] = {
    "type": (other_type, "parameter convolution.weight: ranks [0, 2] have (4, 2, 2, 2) torch.bfloat16 on cpu,"
             " trained; ranks [1] have (4, 2, 2, 2) torch.float16"),
    "name": (other_name, "parameter output.weight: ranks [0, 2] have (3, 16) torch.float64 on cpu, trained; "
             "ranks [1] have none"),
    "method": (other_method, "on method: ranks [0, 2] have ... select=TopK(), "),
    "density": (other_density, "on method: ranks [0, 2] have Sparsifier(density=0.1, ...; ranks [1] have "),
    "seed": (option(seed=7), "on seed: ranks [0, 2] have 0; ranks [1] have 7"),
    "check": (option(check=False), "on check: ranks [0, 2] have True; ranks [1] have False"),
    "overlap": (option(overlap=True), "on overlap: ranks [0, 2] have False; ranks [1] have True"),
    "epochs": (option(steps_per_epoch=3), "on steps_per_epoch: ranks [0, 2] have None; ranks [1] have 3"),
    "rate": (other_rate, "on lr of group 0: ranks [0, 2] have 0.05; ranks [1] have 1.0"),
    "optimiser": (other_optimiser, "on optimiser: ranks [0, 2] have SGD; ranks [1] have Adam"),
    "refused on one": (momentum_twice, "wrapped: ranks [0, 2] have yes; ranks [1] have no: the method "
                       "applies momentum itself, and the"),
}  # fmt: skip
CASES = {
    **{f"distribute {name}": case for name, case in (FOR_DISTRIBUTE | FOR_BOTH).items()},
    **{f"locally {name}": case for name, case in FOR_DISTRIBUTE.items()},
    **{f"register {name}": case for name, case in FOR_BOTH.items()},
    "register strides": (other_strides, STRIDES),
}


def told(case: str, rank: int, comm: Comm | None = None) -> str:
    """What this worker is told in this case."""
    door, _, _ = case.partition(" ")
    parts = Parts()
    if case.endswith("type"):
        parts.model.bfloat16()
    if case.endswith("strides"):
        parts.of_ddp["init_sync"] = False  # else DDP itself refuses it
    if rank == ODD:
        CASES[case][0](parts)
    try:
        parts.wrap(door, comm)
    except Disagreement as error:
        return str(error)
    return "nothing"


def told_in_a_step(rank: int) -> str:
    """What this worker is told under DDP with `debug`, when one's rate is another in the second step."""
    parts = Parts()
    ddp = DistributedDataParallel(parts.model)
    optimiser = torch.optim.SGD(ddp.parameters(), lr=uses.LR)
    sparsify.register(ddp, sparsify.build("topk", **parts.of_method), optimiser, debug=True)
    try:
        for at in range(2):
            optimiser.zero_grad()
            uses.loss_of(ddp, rank, at).backward()
            optimiser.step()
            if rank == ODD:
                optimiser.param_groups[0]["lr"] = 0.01
    except Disagreement as error:
        return f"step {at}: {error}"
    return "nothing"
