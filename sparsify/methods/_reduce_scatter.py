"""A reduce-scatter of gradients that are rounded to a few bits, within a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsify.comm import CountingComm
from sparsify.comm.torch import ProcessGroup, ReduceOp, TorchComm
from sparsify.methods._quantise import PackedCodes


class BlockQuantiser(Protocol):
    """The parts of a method that the reduce-scatter needs: it writes blocks of elements in few bits."""

    @property
    def block(self) -> int: ...
    @property
    def bits(self) -> int: ...
    def encode(self, values: Tensor, work: Tensor, codes: PackedCodes) -> Tensor:
        """Round values (m,), and write them as (bytes,)."""

    def decode(self, message: Tensor, out: Tensor, codes: PackedCodes) -> Tensor:
        """Read a message of `encode` into `out` (m,)."""


class QuantisedReduceScatter:
    """The first half of `sparsify.qgz`, with the interface of torch.distributed.fsdp's ReduceScatter.

    Every worker rounds the shards that the others sum, sends them there by an all-to-all, and sums its own
    shard in single precision. Wang et al. 2023 (ZeRO++, arXiv:2306.10209).

    Attributes:
        sent_bytes: bytes that this worker has sent so far.
    """

    def __init__(self, method: BlockQuantiser) -> None:
        self.method = method
        self._comms = dict[ProcessGroup, CountingComm]()
        self._codes = dict[tuple[int, torch.device], PackedCodes]()

    @property
    def sent_bytes(self) -> int:
        return sum(comm.sent_bytes for comm in self._comms.values())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for an input or an output, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write the sum or mean over the workers of this worker's shard (n,), given all shards (P n,)."""
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(
                "set_gradient_divide_factor scales in torch's own reduce-scatter, which within= replaces; "
                "leave one of them out"
            )
        method = self.method
        n = output_tensor.numel()
        comm = self._comms.setdefault(group, CountingComm(TorchComm(group)))
        work = output_tensor.new_empty(n, dtype=torch.float32)
        codes = self._codes.setdefault(
            (n, work.device), PackedCodes.allocate(work, method.block, method.bits)
        )
        messages = [method.encode(shard.float(), work, codes).clone() for shard in input_tensor.split(n)]
        lengths = [len(message) for message in messages]
        received = comm.all_to_all(torch.cat(messages), lengths, lengths)
        total = torch.zeros_like(work)
        for message in received:  # in the order of ranks
            total.add_(method.decode(message, work, codes))
        output_tensor.copy_(total.div_(comm.size) if op == ReduceOp.AVG else total)
