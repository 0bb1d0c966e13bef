"""The exchange of a fragment in one pass over memory, where a plain outer step follows the average.

Anchor and parameters then differ from the anchor before in those elements only that some worker has sent. So
one pass over memory, 20 bytes per float32 element, adds the drift to the residual, searches the residual, and
sets the parameters to the anchor. The other work is done in the elements that were sent. Drift, average,
outer step and copy, one after the other, take 56 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsify.bucket_group import BucketGroup
from sparsify.method import Sparsifier
from sparsify.types import StepSettings
from sparsify.wrappers.engine import MAX_GROUP_ELEMENTS, Engine, StepReport


def try_fused_exchange(
    engine: Engine, parameters: Sequence[Tensor], anchor: Sequence[Tensor], step: StepSettings
) -> StepReport | None:
    """Average the drift of all of an engine's buckets and take the outer step, or return None.

    Anchor and parameters become the anchor less `step.lr` times the average drift, to the bit as `PlainStep`
    computes it. The drift is the anchor less the parameters. Collective. Where None is returned nothing has
    changed; that may be so on some workers only, for the messages are the same.

    Args:
        parameters, anchor: tensors (m,) that follow each other, of the same lengths.
    """
    method = engine.method
    # A subclass may have a step of its own, which this one would replace.
    if type(method) is not Sparsifier or not method.group_support.accepts_pieces:
        return None
    travels_in_several_messages = len(set(engine.kinds)) > 1 or engine.num_elements > MAX_GROUP_ELEMENTS
    if travels_in_several_messages:
        return None
    gradients = engine.bucket_gradients(parameters, [step] * len(engine.buckets))
    kernel = engine.kernel_for_group(gradients)
    if kernel is None:
        return None
    group = BucketGroup(gradients, kernel)
    with engine.timer.phase("select"):
        search = method.try_accumulate_and_select_group(group, anchor)
    if search is None:
        return None
    selection, _ = search

    def exchange_and_move() -> int:
        total = method.exchange_and_retain_group(selection, group, engine.comm, engine.timer)
        scale = 1 / engine.comm.size if method.average else 1.0
        with engine.timer.phase("scatter"):
            kernel.add_sum_to_anchors_and_copies(anchor, parameters, total, scale, -step.lr)
        return selection.indices.numel()

    return engine.run_and_report(gradients, exchange_and_move)
