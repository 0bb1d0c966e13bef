from collections.abc import Sequence

from sparsify.aggregate import Sparsifier
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback, Forget
from sparsify.select import RandomK


def randomk(
    density: float = 0.001,
    scope: str = "global",
    density_warmup: Sequence[float] = (),
    feedback: bool = False,
) -> Sparsifier:
    """Random-k SGD: each worker draws its own k indices, exchanged by allgather. Yoon and Oh 2022.

    The code they ran (hclhkbu/GaussianK-SGD, 2019) keeps no residual for Random-k: the line that adds it back
    is commented out. So `feedback` is off by default; turned on, it is the variant that theory asks for.
    """
    rest = ErrorFeedback() if feedback else Forget()
    return Sparsifier(density, RandomK(), rest, AllGather(), scope, tuple(density_warmup))
