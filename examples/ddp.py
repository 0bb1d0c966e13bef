"""Train with DistributedDataParallel on several workers that send a twentieth of their gradients.

    torchrun --nproc-per-node 2 examples/ddp.py

Two lines come from sparsify: the import, and `sparsify.register`. The data are random.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sparsify

INPUTS, CLASSES, EPOCHS, BATCH = 32, 10, 4, 64


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if is_gpu else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    train_set = TensorDataset(*random_data(12_800, seed=1))
    test_set = TensorDataset(*random_data(2000, seed=2))
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, drop_last=True)
    batches: DataLoader[Any] = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)

    net = nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, CLASSES)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparsify.register(model, sparsify.build("topk", density=0.05), optimizer)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

    inputs, labels = test_set.tensors
    with torch.no_grad():
        accuracy = (net(inputs.to(device)).argmax(1).cpu() == labels).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


def random_data(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs (size, INPUTS) and labels (size,), which a fixed linear map determines."""
    inputs = torch.randn(size, INPUTS, generator=torch.Generator().manual_seed(seed))
    weights = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(99))
    return inputs, (inputs @ weights).argmax(1)


if __name__ == "__main__":
    main()
