"""EF21, which compresses the change of each worker's gradient, and applies the sum of all changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from sparsify.comm import Comm
from sparsify.core import huge_pages
from sparsify.core.timer import PhaseTimer
from sparsify.method import Method
from sparsify.ranges import PositiveFraction
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketContext,
    BucketStep,
    PredictedBytes,
    StepSettings,
    accumulation_dtype,
)


class EF21State(NamedTuple):
    """The state of the method inside, and two vectors."""

    own: Any
    tracker: Tensor  # (n,) h: this worker's gradient, smoothed
    estimate: Tensor  # (n,) g: the sum of all deliveries; alike on all workers


@dataclass(frozen=True)
class EF21(Method):
    """EF21 with momentum, around a method with error feedback.

    Richtarik et al. 2021 (arXiv:2106.05203), algorithm 2; Fatkhullin et al. 2023 (arXiv:2305.15155),
    EF21-SGDM. A step, with a compressor C:

    1. h' = (1 - eta) h + eta grad.
    2. Each worker's estimate moves by C(h' - estimate).
    3. The update is the mean of the estimates.

    Error feedback that is given h' - h accumulates h' - estimate. So this is the method, fed with
    differences, and a running sum of its averages.

    Args:
        method: the compressor, with error feedback in the gradient domain.
        eta: share of the new gradient; 1 is EF21 without momentum.
    """

    method: Method
    eta: PositiveFraction

    @property
    def scope(self) -> str | float:
        return self.method.scope

    def density_at(self, epoch: int) -> float:
        return self.method.density_at(epoch)

    def init(self, like: Tensor, context: BucketContext) -> EF21State:
        dtype = accumulation_dtype(like.dtype)
        return EF21State(
            self.method.init(like, context),
            huge_pages.zeros_like(like, dtype),
            huge_pages.zeros_like(like, dtype),
        )

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: EF21State, comm: Comm, timer: PhaseTimer
    ) -> int:
        with timer.phase("select"):
            # 1. Smooth: grad <- h' - h = eta (grad - h).
            grad.sub_(state.tracker).mul_(self.eta)
            state.tracker.add_(grad)
        # 2. Compress the differences: grad <- mean of C(h' - estimate).
        num_sent = self.method.aggregate(grad, step, state.own, comm, timer)
        with timer.phase("scatter"):
            # 3. Move the mean estimate, and step by it.
            grad.copy_(state.estimate.add_(grad))
        return num_sent

    def residual(self, state: EF21State) -> Tensor | None:
        return self.method.residual(state.own)

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes | None:
        return self.method.predict_bytes(bucket_step)

    def broken_laws(self) -> dict[str, str]:
        running = "an update is the running estimate of the gradient, not what a step delivers"
        broken = self.method.broken_laws() | {NOTHING_IS_LOST: running}
        if self.eta < 1:
            broken[DENSE_AT_DENSITY_1] = "the gradient is smoothed, from 0 on; with eta=1 it is not"
        return broken
