from collections.abc import Sequence
from typing import Literal

from sparsify import feedback as feedbacks
from sparsify.exchange import AllGatherBlocks, AllReduce
from sparsify.method import Sparsifier
from sparsify.ranges import AnyFeedbackName, Density, Scope, check_arguments
from sparsify.select import BlockRandomK


@check_arguments
def blockrandomk(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    feedback: AnyFeedbackName = "gradient",
    exchange: Literal["allgather", "allreduce"] = "allgather",
    aligned: bool = False,
) -> Sparsifier:
    """Block-random-k SGD: k elements in a row from a random start. Eghlidi and Jaggi 2020, section 3.

    A step (algorithm 1 there):

    1. acc = residual + gradient.
    2. Select k consecutive elements of acc, from a start that is drawn anew in each step.
    3. All-gather them, or all-reduce them where all workers have the same start.
    4. The residual keeps the other elements of acc.
    5. The update is the sum over the workers, divided by P.

    The other hyperparameters are as for `sparsify.topk`.

    Args:
        exchange: `allgather`, each worker its own block, sent as one start and k values; or `allreduce`, the
            same block on all workers, values only.
        aligned: starts are multiples of k; else any element can be one and the block wraps around the end.
    """
    shared = exchange == "allreduce"
    return Sparsifier(
        density,
        BlockRandomK(shared, aligned),
        feedbacks.FEEDBACKS[feedback],
        AllReduce() if shared else AllGatherBlocks(),
        scope,
        tuple(density_warmup),
        average=feedback != "literal",
    )
