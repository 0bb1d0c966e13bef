"""Within a replica: a reduce-scatter of gradients that are rounded to a few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsify.comm import CountingComm
from sparsify.comm.torch import ProcessGroup, ReduceOp, TorchComm
from sparsify.methods._quantise import PackedCodes


class Rounds(Protocol):
    """As much of a method as is needed here."""

    @property
    def block(self) -> int: ...
    @property
    def bits(self) -> int: ...
    def encode(self, values: Tensor, work: Tensor, codes: PackedCodes) -> Tensor:
        """(m,) -> (bytes,), rounded."""

    def decode(self, message: Tensor, out: Tensor, codes: PackedCodes) -> Tensor:
        """The inverse, into `out` (m,)."""


class QuantisedScatter:
    """The first half of `sparsify.qgz`, as FSDP2 asks for it (torch.distributed.fsdp's ReduceScatter): every
    worker rounds what each other one sums, sends it there by an all-to-all, and sums what comes in single
    precision. Wang et al. 2023 (ZeRO++, arXiv:2306.10209).

    Attributes:
        sent_bytes: bytes that this worker sent, until now.
    """

    def __init__(self, method: Rounds) -> None:
        self.method = method
        self._comms = dict[ProcessGroup, CountingComm]()
        self._codes = dict[tuple[int, torch.device], PackedCodes]()

    @property
    def sent_bytes(self) -> int:
        return sum(comm.sent_bytes for comm in self._comms.values())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what goes in or comes out."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """(workers * n,) -> (n,), the sum over the workers of this worker's part, or their mean."""
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(
                "set_gradient_divide_factor scales in torch's own reduce-scatter, which within= replaces; "
                "leave one of them out"
            )
        method, n = self.method, output_tensor.numel()
        comm = self._comms.setdefault(group, CountingComm(TorchComm(group)))
        room = output_tensor.new_empty(n, dtype=torch.float32)
        codes = self._codes.setdefault((n, room.device), PackedCodes.like(room, method.block, method.bits))
        messages = [method.encode(theirs.float(), room, codes).clone() for theirs in input_tensor.split(n)]
        lengths = [len(message) for message in messages]
        received = comm.all_to_all(torch.cat(messages), lengths, lengths)
        total = torch.zeros_like(room)
        for message in received:  # in the order of ranks
            total.add_(method.decode(message, room, codes))
        output_tensor.copy_(total.div_(comm.size) if op == ReduceOp.AVG else total)
