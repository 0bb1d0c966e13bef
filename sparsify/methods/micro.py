from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsify.aggregate import Sparsifier
from sparsify.comm import Comm
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.partitions import ExclusiveThreshold, Threshold, split_evenly
from sparsify.parts import Selection


def micro(
    density: float = 0.001,
    scope: str | float = "global",
    density_warmup: Sequence[float] = (),
    rule: str = "intended",
    threshold: float | None = None,
) -> Sparsifier:
    """MiCRO: each worker a partition of its own and one threshold for all. Yoon and Oh, HiPC 2023,
    arXiv:2310.00967.

    No build-up (partitions do not overlap), and no top-k: one pass over n/P elements. Two host
    synchronisations per step and bucket.

    The threshold moves by 0.5 % per step at most. From the published first one, where it is 100 times off,
    about 920 steps pass until the density is reached: if it is too low, n elements are sent meanwhile; if too
    high, one of each worker. Give `threshold` where the scale of the gradients is known.

    Args:
        scope: see topk. Buckets of fewer than P elements leave some workers without a partition.
        rule: `intended`, or `published`: the public code, where inside the band of 0.909 < k'/k <= 1.1 the
            threshold always rises. See `sparsify.partitions.ExclusiveThreshold`.
        threshold: the first one; None: 1 / (2 sqrt k).
    """
    return Sparsifier(
        density, Micro(rule, threshold), ErrorFeedback(), AllReduce(), scope, tuple(density_warmup)
    )


@dataclass(frozen=True)
class Micro(ExclusiveThreshold):
    """P partitions of one size, which the workers take in turns."""

    def select(self, acc: Tensor, k: int, comm: Comm, state: Threshold) -> Selection:
        everybody = self.choose(acc, k, split_evenly(acc.numel(), comm.size), comm, state)
        self.follow(len(everybody.indices), k, comm.size, state)
        return Selection(everybody.indices, everybody.sent_bytes)
