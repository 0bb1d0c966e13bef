"""Train in a plain loop on several workers that send a twentieth of their gradients.

    torchrun --nproc-per-node 2 examples/plain_loop.py

Two lines come from sparsify: the import, and `sparsify.distribute`. Each worker has random data of its own.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import sparsify

INPUTS, CLASSES, STEPS, BATCH = 32, 10, 400, 64


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if is_gpu else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1 + rank)

    model = nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, CLASSES)).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = sparsify.distribute(optimizer, model, sparsify.build("topk", density=0.05))

    for step in range(STEPS):
        inputs, labels = random_batch(BATCH, generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    inputs, labels = random_batch(2000, torch.Generator().manual_seed(0))
    with torch.no_grad():
        accuracy = (model(inputs.to(device)).argmax(1).cpu() == labels).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


def random_batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs (size, INPUTS) and labels (size,), which a fixed linear map determines."""
    inputs = torch.randn(size, INPUTS, generator=generator)
    weights = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(99))
    return inputs, (inputs @ weights).argmax(1)


if __name__ == "__main__":
    main()
