from collections.abc import Sequence

from sparsify.aggregate import Sparsifier
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback
from sparsify.select import TopK


def topk(density: float = 0.001, scope: str = "global", density_warmup: Sequence[float] = ()) -> Sparsifier:
    """Top-k SGD: each worker sends its k largest, keeps the rest. Aji and Heafield 2017; Shi et al. 2019.

    `scope` is global (k of the whole model, as Yoon and Oh 2022 ran it) or layer (k of every tensor).
    `density_warmup` holds lower bounds of the density for the first epochs, one each.
    """
    return Sparsifier(density, TopK(), ErrorFeedback(), AllGather(), scope, tuple(density_warmup))
