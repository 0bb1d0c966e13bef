from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sparsify.comm import Comm
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.methods._partitions import ExclusiveThreshold, Threshold, split_evenly
from sparsify.ranges import Density, Positive, Scope
from sparsify.types import Selection


def micro(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    rule: Literal["intended", "published"] = "intended",
    threshold: Positive | None = None,
) -> Sparsifier:
    """MiCRO: each worker a partition of its own and one threshold for all. Yoon and Oh, HiPC 2023,
    arXiv:2310.00967.

    No build-up (partitions do not overlap), and no top-k: one pass over n/P elements. Two host
    synchronisations per step and bucket.

    The threshold moves by 0.5 % per step at most. From the published first one, where it is 100 times off,
    about 920 steps pass until the density is reached: if it is too low, n elements are sent meanwhile; if too
    high, one of each worker. Give `threshold` where the scale of the gradients is known.

    Nor does it rest where k of the first gradient lie above it: what is not sent piles up in the residual, so
    the threshold rises, as published, until as much leaves in each step as comes in. Where n elements of
    magnitude g always have the same sign, each is sent whenever it has summed up to the threshold t, n g / t
    of them in a step, so t comes to about g / density; where signs are random, to about g / sqrt(density);
    with several workers, who see a partition in turns, to at most twice that. At density 0.001 this takes
    some 1,000 steps from a threshold that suits the first gradient.

    Args:
        density: k/n, the share of the elements that all workers send together in a step.
        scope: what k is taken of: the whole model (`global`), every tensor (`layer`), or buckets of so many
            MB. Buckets of fewer than P elements leave some workers without a partition.
        density_warmup: lower bounds of the density for the first epochs, one each.
        rule: `intended`, or `published`: the public code, where inside the band of 0.909 < k'/k <= 1.1 the
            threshold always rises. See `sparsify.methods._partitions.ExclusiveThreshold`.
        threshold: the first one; None: 1 / (2 sqrt k).
    """
    return Sparsifier(
        density, Micro(rule, threshold), ErrorFeedback(), AllReduce(), scope, tuple(density_warmup)
    )


@dataclass(frozen=True)
class Micro(ExclusiveThreshold):
    """P partitions of one size, which the workers take in turns."""

    def select(self, acc: Tensor, k: int, comm: Comm, state: Threshold) -> Selection:
        union = self.choose(acc, k, split_evenly(acc.numel(), comm.size), comm, state)
        self.follow(len(union.indices), k, comm.size, state)
        return Selection(union.indices)
