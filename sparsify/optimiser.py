"""Sparsified gradients in a plain training loop: an optimiser that averages before it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsify.aggregate import Method, Report
from sparsify.aggregator import Aggregator
from sparsify.comm import Comm
from sparsify.comm.torch import TorchComm


class DistributedOptimiser(torch.optim.Optimizer):
    """`optimiser`, whose `step` first replaces the gradients by their average over the workers.

    Gradients may accumulate over any number of backward passes: they are compressed once per `step`. The
        model
    of rank 0 is broadcast at the beginning. Schedulers take the inner optimiser or this one.

    Mixed precision: residuals must not see scaled gradients, and a step that overflows on one worker must be
    skipped by all. So tell it the scale before the scaler steps:

        scaler.scale(loss).backward()
        optimiser.aggregate(scaler.get_scale())
        scaler.step(optimiser)
        scaler.update()

    Args:
        comm: default: torch.distributed's default group.
        check: look for NaN and Inf before every step, one host synchronisation; all workers then raise
            `NonFinite`, with residuals untouched. Without it they get into the residuals and stay there.
        debug, select: see `Aggregator`.

    Raises:
        ValueError: the optimiser has momentum, and the method has its own; or no process group is there.
    """

    def __init__(
        self,
        optimiser: torch.optim.Optimizer,
        model: nn.Module,
        method: Method,
        comm: Comm | None = None,
        seed: int = 0,
        check: bool = True,
        debug: bool = False,
        select: str = "auto",
    ) -> None:
        # Not Optimizer.__init__: parameters, state and defaults are the inner optimiser's.
        self.optimiser, self.check = optimiser, check
        self.comm = comm or default_comm()
        self.epoch = 0  # counted from 0, for methods that raise the density in the first epochs
        self._aggregated = False
        check_momentum(optimiser, method)
        broadcast(model.state_dict().values(), self.comm)
        self.aggregator = Aggregator(
            method, model.named_parameters(), self.comm, seed=seed, debug=debug, select=select
        )

    # Properties where Optimizer has attributes: `load_state_dict` gives the inner optimiser new ones, and
    # these must follow. Nobody may set them, hence the type checker's objection.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimiser.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimiser.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimiser.defaults

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients in place: backpropagation goes on writing into the method's own buffer."""
        self.aggregator.gradients.collect()
        self.aggregator.gradients.zero_()
        self._aggregated = False  # a step that was skipped leaves it set

    def aggregate(self, scale: float | None = None) -> Report | None:
        """Average the gradients now; the next `step` then doesn't. None where a step must be skipped.

        Args:
            scale: what the loss was multiplied with. The gradients are divided by it before the method sees
                them and multiplied again afterwards, for the scaler. If any worker's have overflowed, all
                workers' become infinite, so that every scaler skips the step; residuals are untouched.
        """
        gradients = self.aggregator.gradients
        gradients.collect()
        self._aggregated = True
        if scale is not None:
            gradients.flat.div_(scale)
            overflown = (~gradients.finite().all()).float()
            if self.comm.all_reduce(overflown.reshape(1)).item():
                gradients.flat.fill_(torch.inf)
                return None
        elif self.check:
            self.aggregator.check_finite()
        report = self.aggregator.aggregate(self.epoch, lr=float(self.param_groups[0]["lr"]))
        if scale is not None:
            gradients.flat.mul_(scale)
        return report

    # Optimizer's returns the closure's loss; this one takes no closure.
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Average, unless `aggregate` has done so since the last step; then the optimiser's own step."""
        if closure is not None:
            raise ValueError(
                "a closure would compute gradients anew within the step; call backward before it"
            )
        if not self._aggregated:
            self.aggregate()
        self._aggregated = False
        self.optimiser.step()

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's and the method's state of this worker: save it per rank."""
        return {
            "optimiser": self.optimiser.state_dict(),
            "method": self.aggregator.state_dict(),
            "epoch": self.epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; see `Aggregator.load_state_dict` for what is refused."""
        self.aggregator.load_state_dict(state_dict["method"])
        self.optimiser.load_state_dict(state_dict["optimiser"])
        self.epoch = state_dict["epoch"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("parameters can't join later: their residuals would be missing; wrap the model anew")

    def __repr__(self) -> str:
        return f"DistributedOptimiser({self.aggregator.method!r}, {self.optimiser!r})"


def default_comm() -> Comm:
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group; call torch.distributed.init_process_group first, or pass comm="
        )
    return TorchComm()


def broadcast(tensors: Iterable[Tensor], comm: Comm) -> None:
    """Rank 0's, to all."""
    for tensor in tensors:
        comm.broadcast(tensor)


def check_momentum(optimiser: torch.optim.Optimizer, method: Method) -> None:
    """Momentum is applied once."""
    theirs = [group.get("momentum") or group.get("betas") for group in optimiser.param_groups]
    if method.momentum_inside and any(theirs):
        raise ValueError(
            f"the method applies momentum itself, and the optimiser has {theirs[0]} too; give the optimiser "
            "momentum=0, or build the method with momentum=0"
        )
