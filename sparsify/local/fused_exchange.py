"""The exchange of a fragment at once, where all that follows the average is a plain outer step.

Anchor and parameters then differ from the anchor before in those elements only that some worker has sent. So
one pass over memory, 20 bytes per float32 element, adds the drift to the residual, searches that, and puts
the parameters back to the anchor; all else is done in those elements. One after the other, drift, average,
outer step and copy take 56 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsify.bucket_group import BucketGroup
from sparsify.method import Sparsifier
from sparsify.types import StepSettings
from sparsify.wrappers.engine import MAX_GROUP_ELEMENTS, Engine, StepReport


def moved(
    engine: Engine, own: Sequence[Tensor], anchor: Sequence[Tensor], step: StepSettings
) -> StepReport | None:
    """Average the drift, anchor less own, of all that an engine has; anchor and own become the anchor less
    `step.lr` times that, to the bit what `PlainStep` makes of it. Collective. None where it can't be had here,
    on all workers or on some: what they send is the same, and nothing has changed.

    Args:
        own, anchor: tensors (m,) that follow each other, of the same lengths.
    """
    method = engine.method
    if (
        type(method) is not Sparsifier or not method.group_support.pieces
    ):  # one with a step of its own takes that
        return None
    if len(set(engine.kinds)) > 1 or engine.num_elements > MAX_GROUP_ELEMENTS:  # they travel in several messages
        return None
    gradients = engine.divide_gradients(own, [step] * len(engine.buckets))
    kernel = engine.kernel_for_group(gradients)
    if kernel is None:
        return None
    group = BucketGroup(gradients, kernel)
    with engine.timer.phase("select"):
        found = method.search_group(group, anchor)
    if found is None:
        return None
    selection, _ = found

    def act() -> int:
        total = method.exchange_group(selection, group, engine.comm, engine.timer)
        with engine.timer.phase("scatter"):
            kernel.move(anchor, own, total, 1 / engine.comm.size if method.average else 1.0, -step.lr)
        return selection.indices.numel()

    return engine.report(gradients, act)
