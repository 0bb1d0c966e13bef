from sparsify.aggregate import Dense


def dense() -> Dense:
    """Plain gradient averaging: one allreduce over the whole model, not overlapped with backpropagation.

    The baseline of Yoon and Oh 2022 (density 1, one merged Horovod tensor).
    """
    return Dense()
