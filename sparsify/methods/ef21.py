from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.methods._ef21 import EF21
from sparsify.ranges import Density, PositiveFraction, Scope, check_arguments
from sparsify.select import TopK


@check_arguments
def ef21(density: Density = 0.001, scope: Scope = "global", eta: PositiveFraction = 1.0) -> EF21:
    """EF21: the k largest changes of each gradient are sent. Richtarik et al. 2021 (NeurIPS), algorithm 2.

    arXiv:2106.05203; `sparsify.methods._ef21` numbers its steps. The update is the sum of all changes: the
    optimizer steps by an estimate of the whole gradient, not by k elements. Memory: two (n,)
    vectors besides the residual.

    Args:
        density: k/n, the share of the elements that each worker sends in a step. Lower: fewer bytes, more
            error.
        scope: the elements of which k are chosen: the whole model (`global`), every tensor (`layer`), or
            buckets of a size in MB.
        eta: share of the new gradient in the smoothed one; 1 as published, below 1 the method is EF21-SGDM.
    """
    return EF21(Sparsifier(density, TopK(), ErrorFeedback(), AllGather(), scope), eta)
