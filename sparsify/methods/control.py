from collections.abc import Sequence

from sparsify.exchange import AllGather
from sparsify.feedback import NoFeedback
from sparsify.method import Sparsifier
from sparsify.ranges import Density, Scope, check_arguments
from sparsify.select import FirstK


@check_arguments
def control(
    density: Density = 0.001, scope: Scope = "global", density_warmup: Sequence[Density] = ()
) -> Sparsifier:
    """No method: sends the first k elements. Ours, for measurements; there is no paper.

    A control for measurements: what it spends on selection is the harness's own overhead. Hyperparameters are
    as for `sparsify.topk`.
    """
    return Sparsifier(density, FirstK(), NoFeedback(), AllGather(), scope, tuple(density_warmup))
