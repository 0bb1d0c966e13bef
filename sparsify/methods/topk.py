from collections.abc import Sequence

from sparsify import feedback as feedbacks
from sparsify.core.wire import Wire
from sparsify.exchange import AllGather
from sparsify.method import Sparsifier
from sparsify.ranges import AnyFeedbackName, Density, IndexFormat, ScopeOrBucket, ValueFormat, check_arguments
from sparsify.select import TopK


@check_arguments
def topk(
    density: Density = 0.001,
    scope: ScopeOrBucket = "global",
    density_warmup: Sequence[Density] = (),
    feedback: AnyFeedbackName = "gradient",
    index: IndexFormat = "int32",
    value: ValueFormat = "as_is",
    packed: bool = True,
) -> Sparsifier:
    """Top-k SGD: each worker sends its k largest, keeps the rest. Aji and Heafield 2017; Shi et al. 2019.

    A step (algorithm 1 of Eghlidi and Jaggi 2020, lines 6 to 11):

    1. acc = residual + gradient.
    2. Select the k elements of acc of largest magnitude.
    3. All-gather indices and values, and sum them over the workers.
    4. The residual keeps the other elements of acc.
    5. The update is the sum, divided by P.

    Args:
        density: k/n, the share of the elements that each worker sends in a step. Lower: fewer bytes, more
            error.
        scope: the elements among which the k largest are chosen: the whole model (`global`, as Yoon and Oh
            2022 ran it), every tensor (`layer`), buckets of a size in MB, or each bucket of
            DistributedDataParallel (`bucket`, for `sparsify.register`).
        density_warmup: lower bounds of the density for the first epochs, one each.
        feedback: what becomes of the elements that are not sent: added to the next gradient (`gradient`, Shi
            et al.), added times the learning rate of their step (`learning_rate`, Stich et al. 2018), dropped
            (`none`), or `literal`: algorithm 1 of Eghlidi and Jaggi 2020 as printed, which does not average
            (see `sparsify.feedback.LiteralFeedback`).
        index: how indices travel: `int32`, `int64`, or `delta16`, in 2 bytes each at the cost of sorting k.
        value: how values travel: `as_is`, in the gradient's own type, or rounded to `fp32`, `bf16` or `fp16`.
        packed: send values and indices in one message; the published code sends two.
    """
    return Sparsifier(
        density,
        TopK(),
        feedbacks.FEEDBACKS[feedback],
        AllGather(Wire(index, value), packed=packed),
        scope,
        tuple(density_warmup),
        average=feedback != "literal",
    )
