"""A decoder-only language model on several workers that step by themselves, and average every tenth step.

    torchrun --nproc-per-node 2 examples/local_steps.py

Two lines are sparsify's: its import, and `sparsify.distribute`. What is evaluated is the anchor, which all
workers have in common. The text is made up, each worker's its own.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import sparsify

WORDS, LENGTH, WIDTH, STEPS, BATCH = 64, 32, 64, 300, 16


class Decoder(nn.Module):
    """Two layers that look back, never ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) -> (B, T, WORDS)."""
        length = words.shape[1]
        ahead = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        inside = self.words(words) + self.places(torch.arange(length, device=words.device))
        scores: Tensor = self.head(self.layers(inside, mask=ahead, is_causal=True))
        return scores


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if is_gpu else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1 + rank)

    model = Decoder().to(device)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = sparsify.distribute(adamw, model, sparsify.diloco(every=10))

    for step in range(STEPS):
        words = text(BATCH, draws).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 9 and (report := optimizer.last_report):
            print(f"step {step + 1}: loss {loss.item():.3f}, {report.wire_bytes} bytes", flush=True)

    words = text(64, torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad(), optimizer.at_anchor():
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
