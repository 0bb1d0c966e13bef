"""MNIST on several workers, with plain DistributedDataParallel or with sparsified gradients.

    torchrun --nproc-per-node 2 examples/mnist_ddp.py                                   plain DDP
    torchrun --nproc-per-node 2 examples/mnist_ddp.py --method topk --density 0.01      a hook in DDP
    torchrun --nproc-per-node 2 examples/mnist_ddp.py --method topk --through distribute    without DDP

What the library needs are the lines that begin with `sparsify.`; all else is as one would write it without.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

import sparsify

Sampler = DistributedSampler[Any]
Batches = DataLoader[Any]


class Net(nn.Module):
    """Two convolutions, two linear layers: 50,914 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, stride=2), nn.Conv2d(16, 32, 5, stride=2)
        self.fc1, self.fc2 = nn.Linear(512, 72), nn.Linear(72, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.conv2(F.relu(self.conv1(images)))).flatten(1)
        scores: torch.Tensor = self.fc2(F.relu(self.fc1(hidden)))
        return scores


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="MNIST on several workers")
    parser.add_argument("--method", choices=["none", *sparsify.names()], default="none")
    parser.add_argument("--density", type=float, help="share of the gradients to send")
    parser.add_argument("--through", choices=["register", "distribute"], default="register")
    parser.add_argument("--overlap", action="store_true", help="average while backpropagation goes on")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="data", help="folder of the data set, which is downloaded to it")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> float:
    """Train; returns the accuracy on the test set."""
    args = options(words)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    if rank == 0:
        datasets.MNIST(args.data, download=True)
    dist.barrier()
    train_set = datasets.MNIST(args.data, train=True, transform=to_tensor)
    test_set = datasets.MNIST(args.data, train=False, transform=to_tensor)
    sampler: Sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    batches: Batches = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    model: nn.Module = Net().to(device)
    optimiser: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if args.method != "none":
        given = {} if args.density is None else {"density": args.density}
        method = sparsify.build(args.method, scope="layer", **given)
    if args.method != "none" and args.through == "distribute":
        optimiser = sparsify.distribute(optimiser, model, method, overlap=args.overlap)
    else:
        model = DistributedDataParallel(model)
        if args.method != "none":
            sparsify.register(model, method, optimiser, overlap=args.overlap)

    for step, (images, labels) in enumerate(itertools.islice(forever(batches, sampler), args.steps)):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimiser.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    accuracy = evaluate(model, DataLoader(test_set, 1000), device)
    if rank == 0:
        print(f"accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()
    return accuracy


def forever(batches: Batches, sampler: Sampler) -> Iterator[list[torch.Tensor]]:
    """Epoch after epoch, each in another order."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from batches


def evaluate(model: nn.Module, batches: Batches, device: torch.device) -> float:
    """The share of images that are told rightly."""
    model.eval()
    with torch.no_grad():
        right = [
            (model(images.to(device)).argmax(1) == labels.to(device)).float().mean()
            for images, labels in batches
        ]
    return float(torch.stack(right).mean())


if __name__ == "__main__":
    main()
