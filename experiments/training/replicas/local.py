"""Local steps within the training loop: each worker's own parameters and optimiser, and the rounds of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.training.replicas.shared import MakeOptimizer, set_learning_rate
from sparsify.comm import Comm
from sparsify.core.gradients import FlatGradients
from sparsify.core.timer import PhaseTimer
from sparsify.local.local_optimizer import LocalOptimizer
from sparsify.local.strategy import LocalSteps
from sparsify.types import SearchStats
from sparsify.wrappers.engine import StepReport
from sparsify.wrappers.saved_states import check_all_can_load


class LocalReplica:
    """Model of a worker under a strategy of local steps, as the loop has an `Aggregator` under a method.

    Virtual ranks have parameters and inner optimisers of their own: P times the memory of one.

    Attributes:
        moved: () share of the anchor's elements that the last step moved.
    """

    def __init__(
        self,
        strategy: LocalSteps,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        comm: Comm,
        timer: PhaseTimer,
        seed: int,
        select: str,
    ) -> None:
        for buffer in model.buffers():
            comm.broadcast(buffer)
        self.model = model
        self.inner = make_optimizer(model)
        self.comm = comm
        # NaN and Inf are what the log looks for, as under a method.
        self.optimiser = LocalOptimizer(
            self.inner, model, strategy, comm, seed, check=False, select=select, timer=timer
        )
        self.gradients = FlatGradients(model.named_parameters(), "global")
        self.num_elements = self.optimiser.num_elements
        self.nothing = self.gradients.flat.new_zeros(())
        self.moved = self.nothing
        for fragment in self.optimiser.fragments:
            fragment.on_average = self._note

    def step(self, rate: float) -> None:
        """Make the worker's own step."""
        set_learning_rate(self.inner, rate)
        self.optimiser.step_locally()

    def exchange_if_due(self, epoch: int) -> StepReport:
        """Exchange what is due after the step."""
        self.moved = self.nothing
        self.optimiser.epoch = epoch
        return self.optimiser.exchange_if_due()

    def _note(self, average: list[Tensor]) -> None:
        """Count what an average moves."""
        moved = sum((torch.count_nonzero(piece) for piece in average), torch.zeros_like(self.nothing))
        self.moved = self.moved + moved / self.num_elements

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Give the model the anchor's values within a `with` block, for validation."""
        with self.optimiser.at_anchor():
            yield

    def move_to_anchor(self) -> None:
        """Give the model the anchor's values for good."""
        with self.optimiser.at_anchor():
            anchors = [p.detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            torch._foreach_copy_([p.detach() for p in self.model.parameters()], anchors)

    def residual_norm(self) -> Tensor:
        """Euclidean norm of this worker's residuals, in double precision."""
        norms = [fragment.engine.residual_norm() for fragment in self.optimiser.fragments]
        return torch.stack(norms).square().sum().sqrt()

    def search_stats(self) -> dict[str, SearchStats]:
        """Return the kernels that searched the drift, by name; see `Engine.searching`."""
        stats_by_kernel = dict[str, SearchStats]()
        for fragment in self.optimiser.fragments:
            for name, stats in fragment.engine.search_stats().items():
                stats_by_kernel[name] = stats_by_kernel.get(name, SearchStats()) + stats
        return stats_by_kernel

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, without its parameters and its inner optimizer's."""
        return self.optimiser.worker_state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. Collective."""
        check_all_can_load(
            self.comm,
            self.nothing.device,
            partial(self.optimiser.check_worker_state_and_collect_facts, saved),
        )
        self.optimiser.restore_worker_state(saved)
