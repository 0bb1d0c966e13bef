"""A decoder-only language model whose replicas are each sharded over several workers.

    torchrun --nproc-per-node 4 examples/sharded.py

The mesh and `fully_shard` are what PyTorch asks for (HSDP): here two replicas of half as many shards as there
are workers. Two lines are sparsify's: its import, and `sparsify.shard`. The text is made up, each worker's
its own.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import sparsify

WORDS, LENGTH, WIDTH, STEPS, BATCH = 64, 32, 64, 150, 16


class Decoder(nn.Module):
    """Two layers that look back, never ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) -> (B, T, WORDS)."""
        length = words.shape[1]
        ahead = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        inside = self.words(words) + self.places(torch.arange(length, device=words.device))
        for layer in self.layers:
            inside = layer(inside, src_mask=ahead, is_causal=True)
        scores: Tensor = self.head(inside)
        return scores


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if is_gpu else "gloo")
    rank, shards = dist.get_rank(), dist.get_world_size() // 2
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1 + rank)

    mesh = init_device_mesh(device.type, (2, shards), mesh_dim_names=("replicate", "shard"))
    model = Decoder().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hook = sparsify.shard(model, optimizer, sparsify.topk(density=0.05, scope="bucket"))

    for step in range(STEPS):
        words = text(BATCH, draws).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 50 == 9 and (report := hook.last_report):
            print(f"step {step + 1}: loss {loss.item():.3f}, {report.wire_bytes} bytes", flush=True)

    words = text(64, torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        accuracy = (model(words[:, :-1]).argmax(2) == words[:, 1:]).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


def text(size: int, draws: torch.Generator) -> Tensor:
    """(size, LENGTH) words, each of which follows from the one before it, by a rule that is to be learnt."""
    following = torch.randperm(WORDS, generator=torch.Generator().manual_seed(99))
    words = [torch.randint(WORDS, (size,), generator=draws)]
    for _ in range(LENGTH - 1):
        words.append(following[words[-1]])
    return torch.stack(words, dim=1)


if __name__ == "__main__":
    main()
