from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.local.strategy import HeavyBall, LocalSteps
from sparsify.method import Method
from sparsify.ranges import MomentumFactor, PositiveFloat, PositiveInt, check_arguments
from sparsify.select import RandomKeyStream
from sparsify.types import ANCHORS_AGREE, BucketContext, BucketStep, PredictedBytes, StepSettings, exact_bytes


@check_arguments
def noloco(every: PositiveInt = 50, lr: PositiveFloat = 0.7, momentum: MomentumFactor = 0.5) -> LocalSteps:
    """NoLoCo: pairs of workers, drawn anew each round, average their drift. Kolehmainen et al. 2025 (arXiv).

    arXiv:2506.10911. There is no all-reduce. Worker i has an anchor phi_i of its own and parameters theta_i.
    A round, with all means taken over the pair:

    1. Each worker takes `every` steps of the inner optimizer from phi_i to theta_i.
    2. Workers are paired at random; the two of a pair exchange theta - phi and phi.
    3. m_i <- mu m_i + lr mean(theta - phi) + lr (mean(phi) - phi_i)
    4. phi_i <- phi_i + m_i; theta_i <- phi_i

    Each worker sends two messages of a whole model in a round. The workers' models differ, by design, and one
    worker's model is evaluated. With an odd number of workers one stays alone in each round and sends
    nothing; its bytes are counted as the others' are.

    Args:
        every: steps from one round to the next. Higher: fewer bytes, and workers drift further apart. The
            DiLoCo of the published configurations has 100.
        lr: learning rate of the outer step, and of the pull between two anchors. Lower: anchors move less.
        momentum: heavy-ball momentum of the outer step.
    """
    return LocalSteps(every, PairwiseAverage(), HeavyBall(lr, momentum))


@dataclass(frozen=True)
class PairwiseAverage(Method):
    """A method that averages over pairs of workers, drawn anew in every step from a shared seed."""

    scope: str = "layer"

    def init(self, like: Tensor, context: BucketContext) -> RandomKeyStream:
        # Without the bucket in its key the draw is the same for all tensors, so they go to the same worker.
        return RandomKeyStream(context.without_rank._replace(bucket=0))

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: RandomKeyStream, comm: Comm, timer: PhaseTimer
    ) -> int:
        with timer.phase("exchange"):
            received = comm.permute(grad, draw_pair_routes(comm.size, state.next_key()))
        with timer.phase("scatter"):
            if received is None:  # this worker has no partner in this step
                return 0
            grad.add_(received).div_(2)
        return grad.numel()

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        num_paired = bucket_step.world_size // 2 * 2
        return exact_bytes(cost.permute(bucket_step.n * bucket_step.dtype.itemsize, num_paired))

    def broken_laws(self) -> dict[str, str]:
        return {ANCHORS_AGREE: "a worker meets one other in a round"}


def draw_pair_routes(size: int, key: int) -> list[tuple[int, int]]:
    """Pair the ranks at random; return the (source, destination) routes of all pairs, in both directions."""
    order = np.random.default_rng(key).permutation(size).tolist()
    routes = []
    for first, second in zip(order[0::2], order[1::2], strict=False):
        routes += [(first, second), (second, first)]
    return routes
