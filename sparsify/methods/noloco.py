from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.local.strategy import ANCHORS_AGREE, HeavyBall, Local
from sparsify.method import Method
from sparsify.ranges import MomentumFactor, PositiveFloat, PositiveInt, check_arguments
from sparsify.select import DrawCounter
from sparsify.types import BucketContext, BucketStep, PredictedBytes, StepSettings, exact_bytes


@check_arguments
def noloco(every: PositiveInt = 50, lr: PositiveFloat = 0.7, momentum: MomentumFactor = 0.5) -> Local:
    """NoLoCo: pairs of workers, drawn anew each round, average their drift; no all-reduce. Kolehmainen et al.
    2025, arXiv:2506.10911.

    With phi_i the anchor of worker i, which is its own, theta_i its parameters and the means over the pair:
    m_i <- mu m_i + lr mean(theta - phi) + lr (mean(phi) - phi_i); phi_i <- phi_i + m_i; theta_i <- phi_i. Two
    messages of a whole model for each worker and round. Workers do not agree, by design: what is evaluated is
    one worker's model. With an odd number of workers one stays alone in each round and sends nothing; it is
    counted as the others are.

    Args:
        every: steps from one round to the next. In the published configurations their DiLoCo has 100.
        lr: of the outer step, and of the pull between two anchors.
        momentum: heavy ball.
    """
    return Local(every, PairAverage(), HeavyBall(lr, momentum))


@dataclass(frozen=True)
class PairAverage(Method):
    """The average of two workers, that are drawn anew in every step, alike on all workers."""

    scope: str = "layer"

    def init(self, like: Tensor, context: BucketContext) -> DrawCounter:
        return DrawCounter(context.shared._replace(bucket=0))  # so that all tensors go to the same worker

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: DrawCounter, comm: Comm, timer: PhaseTimer
    ) -> int:
        with timer.phase("exchange"):
            theirs = comm.permute(grad, pairs(comm.size, state.next_key()))
        with timer.phase("scatter"):
            if theirs is None:
                return 0
            grad.add_(theirs).div_(2)
        return grad.numel()

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        each = cost.permute(bucket_step.n * bucket_step.dtype.itemsize, bucket_step.world_size // 2 * 2)
        return exact_bytes(each) if bucket_step.world_size > 1 else exact_bytes()

    def broken_laws(self) -> dict[str, str]:
        return {ANCHORS_AGREE: "a worker meets one other in a round"}


def pairs(size: int, key: int) -> list[tuple[int, int]]:
    """Routes between workers two by two, in both directions."""
    order = [int(rank) for rank in np.random.default_rng(key).permutation(size)]
    both = zip(order[0::2], order[1::2], strict=False)
    return [route for one, other in both for route in ((one, other), (other, one))]
