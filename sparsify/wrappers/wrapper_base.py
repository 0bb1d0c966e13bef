"""The base of all wrappers: steps, the last report, and epochs."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from sparsify.comm import Comm
from sparsify.method import Method
from sparsify.ranges import repr_without_addresses
from sparsify.types import StepSettings
from sparsify.wrappers.checks import bucket_learning_rates, check_momentum_applied_once
from sparsify.wrappers.engine import Engine, StepReport
from sparsify.wrappers.handshake import check_workers_agree, optimizer_facts

# An epoch of CIFAR-10 has 1,563 steps for one worker with batches of 32, and 49 for 8 with 128.
LONG_EPOCH_STEPS = 2000
log = logging.getLogger(__name__)


class WrapperBase:
    """The part that all wrappers have: steps, a report, and the `epoch` that density schedules follow.

    Args:
        steps_per_epoch: None: the user sets `epoch`.
        scaler: a GradScaler that is disabled counts as None.
    """

    engine: Engine
    last_report: StepReport | None = None

    def __init__(
        self, method: Method, comm: Comm, steps_per_epoch: int | None, scaler: GradScaler | None
    ) -> None:
        if steps_per_epoch is not None and (type(steps_per_epoch) is not int or steps_per_epoch < 1):
            raise ValueError(f"{steps_per_epoch=} must be a whole number above 0, such as len(batches)")
        self.comm = comm
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._steps_per_epoch = steps_per_epoch
        self._warmup_densities = [
            method.density_at(epoch) for epoch in range(method.num_density_warmup_epochs + 1)
        ]
        self.user_epoch: int | None = None  # as set by the user; saved
        self._epoch_start: tuple[int | None, int] = (None, 0)  # an epoch that was set, and its first step
        self._warns = comm.rank == 0  # where an epoch of the warm-up does not end

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self.engine.step

    @property
    def epoch(self) -> int:
        """Number of epochs before this one, by `steps_per_epoch` or as the user has set it."""
        return self.steps // self._steps_per_epoch if self._steps_per_epoch else self.user_epoch or 0

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if self._steps_per_epoch:
            raise ValueError("the epoch follows from steps_per_epoch; leave one of them out")
        if operator.index(epoch) < 0:
            raise ValueError(f"{epoch=} is out of range: epochs are counted from 0")
        self.user_epoch = operator.index(epoch)

    def check_momentum_and_epoch(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuse a step with momentum applied twice, or of an unknown epoch."""
        if optimizer is not None:
            check_momentum_applied_once(optimizer, self.engine.method)  # schedulers may bring it
        self.check_epoch_known()

    def check_epoch_known(self) -> None:
        """Refuse a step of an unknown epoch, and warn once of an epoch of the warm-up that does not end."""
        if len(set(self._warmup_densities)) == 1 or self._steps_per_epoch is not None:
            return
        if self.user_epoch is None:
            raise ValueError(
                "the method's density falls in the first epochs (density_warmup), and nobody says which "
                "one this is; pass steps_per_epoch=, or set .epoch, counted from 0, before each begins"
            )
        if self.user_epoch != self._epoch_start[0]:
            self._epoch_start = (self.user_epoch, self.steps)
        is_warming_up = self.user_epoch < len(self._warmup_densities) - 1
        is_long = self.steps - self._epoch_start[1] >= LONG_EPOCH_STEPS
        if is_warming_up and is_long and self._warns:
            self._warns = False
            # No `warnings.warn`, which may be an error, and then the other workers wait for this one.
            log.warning(
                f".epoch has been {self.user_epoch} for {LONG_EPOCH_STEPS} steps, so the density stays at "
                f"{self._warmup_densities[self.epoch]:g} and does not fall to "
                f"{self._warmup_densities[-1]:g} (density_warmup); unless an epoch is that long, set .epoch "
                "before each one, or pass steps_per_epoch=len(batches)"
            )

    def find_learning_rates(
        self, optimizer: torch.optim.Optimizer | None, parameters: Sequence[tuple[str, nn.Parameter]]
    ) -> float | list[float]:
        """Return the learning rate of each bucket; 1 where the method does not follow them.

        Args:
            parameters: all that lie in buckets, with their names.
        """
        if not self.engine.method.needs_lr:
            return 1.0
        assert optimizer is not None  # such a method is refused without one
        return bucket_learning_rates(parameters, self.engine.buckets, optimizer)


class HookBase(WrapperBase):
    """The base of hooks, which average gradients during the backward pass; the user steps the optimizer.

    Args:
        optimizer: None: the method needs none.
    """

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer | None,
        comm: Comm,
        steps_per_epoch: int | None,
        scaler: GradScaler | None,
        check_finite: bool,
        debug: bool,
    ) -> None:
        super().__init__(method, comm, steps_per_epoch, scaler)
        self.method = method
        self.optimizer = optimizer
        self.check_finite = check_finite
        self.debug = debug
        self._steps = list[StepSettings]()  # of this step, by the engine's buckets
        self._reports = list[StepReport]()  # of this step

    def set_step_settings(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Set the density and learning rate of each bucket for this step.

        Args:
            parameters: all that lie in buckets, with their names.
        """
        lr = self.find_learning_rates(self.optimizer, parameters)
        self._steps = self.engine.make_step_settings(self.epoch, lr)

    def check_workers_agree_on_step(self, comm: Comm, more_facts: Mapping[str, Any], like: Tensor) -> None:
        """Compare method, step, epoch, optimizer and more over the workers of `comm`."""
        step = {"method": repr_without_addresses(self.method), "step": self.steps, "epoch": self.epoch}
        check_workers_agree(comm, {**step, **more_facts, **optimizer_facts(self.optimizer)}, like)

    def count_step_if_averaged(self) -> None:
        """Count a step in which something was averaged, and report it."""
        if self._reports:
            self.engine.step += 1
            self.last_report = StepReport.total(self._reports)
