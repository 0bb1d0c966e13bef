from collections.abc import Sequence

from sparsify.aggregate import Sparsifier
from sparsify.exchange import AllGather
from sparsify.feedback import Forget
from sparsify.select import FirstK


def control(
    density: float = 0.001, scope: str | float = "global", density_warmup: Sequence[float] = ()
) -> Sparsifier:
    """No method: sends the first k elements. A control: what it spends on selection is the harness's own
    overhead.
    """
    return Sparsifier(density, FirstK(), Forget(), AllGather(), scope, tuple(density_warmup))
