from collections.abc import Sequence
from typing import Literal

from sparsify.feedback import DecayedFeedback
from sparsify.local.strategy import HeavyBall, LocalSteps, Nesterov, OuterStep, PlainStep
from sparsify.method import Sparsifier
from sparsify.methods._chunked import ChunkGather, ChunkTopK
from sparsify.ranges import (
    AverageOver,
    ChunkSide,
    CodeName,
    Density,
    MomentumFactor,
    NonNegativeFraction,
    PositiveFloat,
    PositiveInt,
    Scope,
    check_arguments,
)


@check_arguments
def sparseloco(
    every: PositiveInt = 30,
    density: Density = 1 / 64,
    decay: NonNegativeFraction = 0.95,
    lr: PositiveFloat = 1.0,
    code: CodeName = "statistical2",
    average: AverageOver = "workers",
    clip: bool = False,
    momentum: MomentumFactor = 0.0,
    nesterov: bool = False,
    side: ChunkSide = 64,
    scope: Literal["layer"] | Scope = "layer",
    density_warmup: Sequence[Density] = (),
) -> LocalSteps:
    """SparseLoCo: every H steps the drift's largest, in two bits. Sarfi et al. 2025 (arXiv), algorithm 1.

    arXiv:2508.15706. A residual that decays stands for outer momentum. A round on worker r, from the anchor
    theta, with the residual e:

    1. H steps of the inner optimizer, from theta to theta_r; drift = theta - theta_r
    2. e <- decay e + drift
    3. q = code(Top-k of each chunk of e)
    4. e <- e - q
    5. All-gather q, and average it over the workers: theta <- theta - lr mean(q)

    All defaults are the paper's. The live run of 2025 (tplr-ai/templar, 2025-09-19) has `average="senders"`
    and `clip=True`, and applies its outer rate twice, so that lr there is lr^2 here. Other public codes add
    an outer momentum (0.95 in DisTrOpZ), which algorithm 1 does not have.

    Args:
        every: H; the paper has 15 to 250, the live run 30. Higher: fewer bytes, and workers drift further
            apart.
        density: k/n of each chunk: 64 of 4096. The paper calls 1 to 3 % best. Lower: fewer bytes, more error.
        decay: share of the residual that a round keeps; 0 is no residual. Lower: more of the drift is lost,
            sooner.
        lr: learning rate of the outer step.
        code: how values travel, see `sparsify.methods._chunked.ChunkGather`: `statistical2` is the published
            quantiser of two bits; `symmetric2` has as many bits and errs less on what Top-k leaves.
        average: over all `workers`, or for each element over its `senders`.
        clip: scale each worker's message of a tensor down to the median norm.
        momentum: heavy-ball momentum of the outer step, 0 as published.
        nesterov: use Nesterov momentum instead, as DiLoCo does.
        side: the largest side of a chunk.
        scope: the elements of which k are chosen, distributed over chunks: a tensor (`layer`), the whole
            model (`global`), or a size in MB. Chunks do not depend on it, and all travel in one message.
        density_warmup: lower bounds of the density for the first epochs, one each.

    Raises:
        ValueError: nesterov=True without a momentum.
    """
    if nesterov and not momentum:
        raise ValueError(
            "nesterov=True with momentum=0 is a plain step; give momentum, or leave nesterov out"
        )
    outer: OuterStep = PlainStep(lr)
    if momentum:
        outer = Nesterov(lr, momentum) if nesterov else HeavyBall(lr, momentum)
    method = Sparsifier(
        density,
        ChunkTopK(side),
        DecayedFeedback(decay),
        ChunkGather(code, average, clip, side),
        scope,
        tuple(density_warmup),
    )
    return LocalSteps(every, method, outer)
