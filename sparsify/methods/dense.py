from sparsify.method import Dense
from sparsify.ranges import Scope, check_arguments


@check_arguments
def dense(scope: Scope = "global") -> Dense:
    """Plain gradient averaging: one allreduce of the whole model by default. Yoon and Oh 2022 (arXiv).

    It is their baseline: density 1, one merged Horovod tensor, after backpropagation. With
    `sparsify.register` it runs over DDP's buckets, overlapped with the backward pass.

    Args:
        scope: what one allreduce holds: the whole model (`global`), every tensor (`layer`), or a size in MB.
    """
    return Dense(scope)
