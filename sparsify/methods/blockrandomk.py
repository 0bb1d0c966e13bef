from collections.abc import Sequence
from typing import Literal

from sparsify import feedback as feedbacks
from sparsify.checks import check_choice
from sparsify.exchange import AllGatherBlocks, AllReduce
from sparsify.method import Sparsifier
from sparsify.ranges import AnyFeedback, Density, Scope
from sparsify.select import BlockRandomK


def blockrandomk(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    feedback: AnyFeedback = "gradient",
    exchange: Literal["allgather", "allreduce"] = "allgather",
    aligned: bool = False,
) -> Sparsifier:
    """Block-random-k SGD: k consecutive elements from a random start. Eghlidi and Jaggi 2020.

    Args:
        density: k/n, the share of the elements that each worker sends in a step.
        scope: what k is taken of: the whole model (`global`), every tensor (`layer`), or buckets of so many
            MB.
        density_warmup: lower bounds of the density for the first epochs, one each.
        feedback: what becomes of the elements that are not sent: added to the next gradient (`gradient`),
            added times the learning rate of their step (`learning_rate`), dropped (`none`), or `literal`, see
            topk.
        exchange: `allgather`, each worker its own block, sent as one start and k values; or `allreduce`, the
            same block on all workers, values only.
        aligned: starts are multiples of k; else any element can be one and the block wraps around the end.
    """
    check_choice("exchange", exchange, ("allgather", "allreduce"))
    shared = exchange == "allreduce"
    return Sparsifier(
        density,
        BlockRandomK(shared, aligned),
        feedbacks.named(feedback),
        AllReduce() if shared else AllGatherBlocks(),
        scope,
        tuple(density_warmup),
        average=feedback != "literal",
    )
