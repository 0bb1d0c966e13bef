from collections.abc import Sequence
from typing import Literal

from sparsify import feedback as feedbacks
from sparsify.core.wire import Wire
from sparsify.exchange import AllGather, AllReduce
from sparsify.method import Sparsifier
from sparsify.ranges import AnyFeedbackName, Density, IndexFormat, Scope, ValueFormat, check_arguments
from sparsify.select import RandomK


@check_arguments
def randomk(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    feedback: AnyFeedbackName = "none",
    exchange: Literal["allgather", "allreduce"] = "allgather",
    shared: bool = False,
    unbiased: bool = False,
    sampling: Literal["hash", "permutation"] = "hash",
    index: IndexFormat = "int32",
    value: ValueFormat = "as_is",
    packed: bool = True,
) -> Sparsifier:
    """Random-k SGD: k indices drawn uniformly. Yoon and Oh 2022; Eghlidi and Jaggi 2020, section 3.

    A step (Eghlidi and Jaggi's algorithm 1):

    1. acc = residual + gradient; the gradient alone without feedback.
    2. Select k random elements of acc.
    3. All-gather them, or all-reduce them where all workers draw the same ones.
    4. The residual, if any, keeps the other elements of acc.
    5. The update is the sum over the workers, divided by P.

    The code that Yoon and Oh ran (hclhkbu/GaussianK-SGD, 2019) keeps no residual for Random-k: the line that
    adds it back is commented out. So the default is no feedback; `feedback=gradient` is the variant that
    theory asks for.

    Args:
        exchange: `allgather` sends each worker's indices and values. `allreduce` sends values only, and
            needs `shared=true`.
        shared: all workers draw the same indices, so that only values need to travel.
        unbiased: scale by n/k, so that the expectation is the gradient; without feedback only.
        sampling: `hash`, in O(k); or `permutation`, the published operator torch.randperm, in O(n).
    """
    gather = AllGather(Wire(index, value), packed=packed)
    return Sparsifier(
        density,
        RandomK(shared, sampling),
        feedbacks.FEEDBACKS[feedback],
        gather if exchange == "allgather" else AllReduce(),
        scope,
        tuple(density_warmup),
        unbiased,
        average=feedback != "literal",
    )
