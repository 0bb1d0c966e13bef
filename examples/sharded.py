"""Train a language model whose replicas are each sharded over several workers.

    torchrun --nproc-per-node 4 examples/sharded.py

The mesh and `fully_shard` are PyTorch's HSDP: here two replicas, each sharded over half of the workers. Two
lines come from sparsify: the import, and `sparsify.shard`. Each worker has random text of its own.
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

VOCABULARY, LENGTH, WIDTH, STEPS, BATCH = 64, 32, 64, 150, 16


class Decoder(nn.Module):
    """A language model of two layers with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, VOCABULARY) for tokens (B, T)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        positions = torch.arange(length, device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if is_gpu else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1 + rank)

    mesh = init_device_mesh(
        device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    model = Decoder().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hook = sparsify.shard(model, optimizer, sparsify.topk(density=0.05, scope="bucket"))

    for step in range(STEPS):
        tokens = random_text(BATCH, generator).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 50 == 9 and (report := hook.last_report):
            print(f"step {step + 1}: loss {loss.item():.3f}, {report.wire_bytes} bytes", flush=True)

    tokens = random_text(64, torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        accuracy = (model(tokens[:, :-1]).argmax(2) == tokens[:, 1:]).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


def random_text(size: int, generator: torch.Generator) -> Tensor:
    """Return tokens (size, LENGTH), each of which determines the next one, by a rule to be learnt."""
    next_token = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(99))
    tokens = [torch.randint(VOCABULARY, (size,), generator=generator)]
    for _ in range(LENGTH - 1):
        tokens.append(next_token[tokens[-1]])
    return torch.stack(tokens, dim=1)


if __name__ == "__main__":
    main()
