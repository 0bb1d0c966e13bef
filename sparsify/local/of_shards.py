"""Local steps of a sharded model: each replica steps by itself, and what its shards have moved meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparsify.doors.sharded.checks import inner_of
from sparsify.doors.sharded.hook import grid_of
from sparsify.doors.sharded.units import local, units_of
from sparsify.doors.wrapping import group_in
from sparsify.local.optimiser import LocalOptimiser
from sparsify.local.strategy import Local


class ShardedLocal(LocalOptimiser):
    """`optimiser` of a model sharded by `fully_shard` within each replica. Every so many steps the workers
    that have the same shard average what they have moved, each its own shard. As `LocalOptimiser` in
    everything else; a method's buckets are those of the shards.

    Within a round replicas differ, so nothing may average between them: of a model on a mesh of replicas and
    shards (HSDP) the all-reduce is taken away.

    Raises:
        ValueError: as `sparsify.shard`; or an overlap is asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        strategy: Local,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        check: bool = True,
        select: str = "auto",
        *,
        steps_per_epoch: int | None = None,
        debug: bool = False,
    ) -> None:
        units, optimiser = units_of(model), inner_of(optimiser)
        grid = grid_of(units, group_in(replicas))
        if not isinstance(optimiser, torch.optim.Optimizer):
            raise ValueError(
                f"{type(optimiser).__name__} is no optimiser; sparsify.shard takes a model, its optimiser, "
                "and a method, in this order"
            )
        parts = dict[int, nn.Parameter]()
        mirrored, self.whole = Mirror(model, parts), optimiser
        super().__init__(
            OfParts(optimiser, parts), mirrored, strategy, grid.replicas, seed, check, debug, select,
            steps_per_epoch=steps_per_epoch,
        )  # fmt: skip
        for unit in units:
            unit.average_within()

    # As in `Front`: properties, which can't be set, hence the type checker's objection.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the optimiser of the sharded model."""
        return self.whole.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the optimiser of the sharded model."""
        return self.whole.state


class Mirror(nn.Module):
    """A model's tree of modules with, in the place of each DTensor, this worker's part of it, in the same
    memory. It computes nothing.

    Args:
        parts: of each parameter, by its id; filled here.
    """

    def __init__(self, model: nn.Module, parts: dict[int, nn.Parameter]) -> None:
        super().__init__()
        for name, p in model.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) not in parts:
                parts[id(p)] = nn.Parameter(local(p), requires_grad=p.requires_grad)
            self.register_parameter(name, parts[id(p)])
        for name, buffer in model.named_buffers(recurse=False, remove_duplicate=False):
            self.register_buffer(name, buffer)
        for name, child in model.named_children():
            self.add_module(name, Mirror(child, parts))


class OfParts(torch.optim.Optimizer):
    """An optimiser of DTensors, as one of this worker's parts of them; it leaves all work to that one."""

    def __init__(self, whole: torch.optim.Optimizer, parts: dict[int, nn.Parameter]) -> None:
        for group in whole.param_groups:
            for p in group["params"]:
                if id(p) not in parts:
                    raise ValueError(
                        f"the optimiser has a parameter of shape {tuple(p.shape)} that the model does not "
                        "have; make the optimiser after fully_shard, which replaces the parameters"
                    )
        self.whole, self.parts = whole, parts
        groups = [
            {**group, "params": [parts[id(p)] for p in group["params"]]} for group in whole.param_groups
        ]
        super().__init__(groups, dict(whole.defaults))

    @property
    def state(self) -> Any:
        """That of each part, its tensors in the memory of the optimiser's own."""
        found = dict[nn.Parameter, dict[str, Any]]()
        for p, of_parameter in self.whole.state.items():
            found[self.parts[id(p)]] = {
                name: local(value) if isinstance(value, torch.Tensor) else value
                for name, value in of_parameter.items()
            }
        return found

    @state.setter
    def state(self, _: Any) -> None:
        """Optimizer.__init__ sets it."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of all of them."""
        return self.whole.step(closure) if closure is not None else self.whole.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.whole.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of the sharded model's optimiser."""
        return self.whole.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The same way back."""
        self.whole.load_state_dict(state_dict)
