"""Train a language model on several workers that step by themselves and average every tenth step.

    torchrun --nproc-per-node 2 examples/local_steps.py

Two lines come from sparsify: the import, and `sparsify.distribute`. The script evaluates the anchor, which is
equal on all workers. Each worker has random text of its own.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import sparsify

VOCABULARY, LENGTH, WIDTH, STEPS, BATCH = 64, 32, 64, 300, 16


class Decoder(nn.Module):
    """A language model of two layers with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, VOCABULARY) for tokens (B, T)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        positions = torch.arange(length, device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        logits: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if is_gpu else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1 + rank)

    model = Decoder().to(device)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = sparsify.distribute(adamw, model, sparsify.diloco(every=10))

    for step in range(STEPS):
        tokens = random_text(BATCH, generator).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 9 and (report := optimizer.last_report):
            print(f"step {step + 1}: loss {loss.item():.3f}, {report.wire_bytes} bytes", flush=True)

    tokens = random_text(64, torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad(), optimizer.at_anchor():
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
