"""Run one step of two ranks, to see what an image can do.

It needs the standard library; torch, and Horovod under mpirun, are used where they are.

The step is the project's core in a few lines: gradients of a small network, the largest tenth of each rank's
gathered by all, the mean of dense ones for comparison. It runs on torch 1.8 as well.
"""

import importlib.util
import os
import platform
import sys
import tempfile

RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
SIZE = int(os.environ["OMPI_COMM_WORLD_SIZE"])


def step(torch, rendezvous):
    """Both ranks must end with the same sums, and density 1 must give the dense ones."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=RANK, world_size=SIZE)
    torch.manual_seed(RANK)
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    network(torch.randn(32, 8)).square().mean().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])

    dense = gradient.clone()
    dist.all_reduce(dense)
    for k in (gradient.numel() // 10, gradient.numel()):
        indices = gradient.abs().topk(k).indices
        every_index = [torch.empty_like(indices) for _ in range(SIZE)]
        every_value = [torch.empty_like(gradient[indices]) for _ in range(SIZE)]
        dist.all_gather(every_index, indices)
        dist.all_gather(every_value, gradient[indices])
        total = torch.zeros_like(gradient)
        for rank in range(SIZE):
            total.index_add_(0, every_index[rank], every_value[rank])
        copies = [torch.empty_like(total) for _ in range(SIZE)]
        dist.all_gather(copies, total)
        assert torch.equal(copies[0], copies[-1]), "the ranks disagree"
    assert torch.allclose(total, dense), "all elements are not the dense sum"
    dist.destroy_process_group()  # left to the interpreter's end, its threads may abort the process
    return f"torch {torch.__version__}: two ranks agree on a sparse and a dense step"


def horovod_sum(torch):
    import horovod.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.full((3,), float(hvd.rank() + 1)), op=hvd.Sum)
    assert total.tolist() == [SIZE * (SIZE + 1) / 2] * 3, total
    return "horovod: two ranks agree on a sum"


def main():
    assert SIZE == 2, "start me with mpirun -np 2"
    said = [f"python {platform.python_version()}: rank {RANK} of {SIZE}"]
    if importlib.util.find_spec("torch"):
        import torch

        # Both ranks are children of one mpirun, or were told where to meet.
        meet = os.path.join(tempfile.gettempdir(), f"two-ranks-{os.getppid()}")
        said.append(step(torch, (sys.argv[1:] or [meet])[0]))
        if importlib.util.find_spec("horovod") and "PMIX_RANK" in os.environ:
            said.append(horovod_sum(torch))
    print("; ".join(said), flush=True)


main()
