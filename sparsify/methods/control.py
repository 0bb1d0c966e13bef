from collections.abc import Sequence

from sparsify.exchange import AllGather
from sparsify.feedback import NoFeedback
from sparsify.method import Sparsifier
from sparsify.ranges import Density, Scope
from sparsify.select import FirstK


def control(
    density: Density = 0.001, scope: Scope = "global", density_warmup: Sequence[Density] = ()
) -> Sparsifier:
    """No method: sends the first k elements. A control: what it spends on selection is the harness's own
    overhead.

    Args:
        density: k/n, the share of the elements that each worker sends in a step.
        scope: what k is taken of: the whole model (`global`), every tensor (`layer`), or buckets of so many
            MB.
        density_warmup: lower bounds of the density for the first epochs, one each.
    """
    return Sparsifier(density, FirstK(), NoFeedback(), AllGather(), scope, tuple(density_warmup))
