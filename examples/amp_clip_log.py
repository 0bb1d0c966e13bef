"""Train with mixed precision, gradient clipping and a log of the bytes that are sent, in a plain loop.

    torchrun --nproc-per-node 2 examples/amp_clip_log.py

`aggregate` averages over the workers. After it, `clip_grad_norm_` clips the average, equally on all workers.
Before it, `clip_grad_norm_` would clip each worker's own gradient. Without mixed precision, leave out
`autocast` and the scaler.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import sparsify

INPUTS, CLASSES, STEPS, BATCH, MAX_NORM = 32, 10, 400, 64, 1.0


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if is_gpu else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1 + rank)

    model = nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, CLASSES)).to(device)
    scaler = torch.amp.GradScaler(device.type)
    method = sparsify.build("topk", density=0.05)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = sparsify.distribute(sgd, model, method, scaler=scaler)

    for step in range(STEPS):
        inputs, labels = random_batch(BATCH, generator)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
        scaler.scale(loss).backward()
        optimizer.aggregate()  # also divides by the scale
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        report = optimizer.last_report  # None if a gradient overflowed and all workers skipped the step
        if rank == 0 and step % 100 == 0 and report is not None:
            print(
                f"step {step}: loss {loss.item():.3f}, norm {norm.item():.2f}, "
                f"density {report.sent_density:.4f}, {report.wire_bytes} bytes",
                flush=True,
            )

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
