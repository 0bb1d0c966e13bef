"""Codes of a few bits packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(lanes: Tensor, bits: int, out: Tensor) -> None:
    """(8 / bits, m) uint8 codes -> (m,) uint8. A byte holds one code of each lane, so those of elements that
    lie m apart: neighbours would mean strided access. Nothing is allocated.
    """
    out.copy_(lanes[0])
    for at, lane in enumerate(lanes[1:], start=1):
        out.add_(lane, alpha=1 << bits * at)  # no two codes share a bit: adding is or-ing


def unpack(packed: Tensor, bits: int, out: Tensor) -> None:
    """The inverse of `pack`."""
    for at, lane in enumerate(out):
        torch.bitwise_right_shift(packed, bits * at, out=lane)
    out.bitwise_and_((1 << bits) - 1)


def packed_nbytes(k: int, bits: int) -> int:
    """Bytes of k codes."""
    return -(-k * bits // 8)


def packed(codes: Tensor, bits: int) -> Tensor:
    """(k,) uint8 codes of 1, 2, 4 or 8 bits -> (bytes,) uint8; the last byte is filled with zeros."""
    lanes = torch.zeros(8 // bits, packed_nbytes(len(codes), bits), dtype=torch.uint8, device=codes.device)
    lanes.view(-1)[: len(codes)] = codes
    out = torch.empty_like(lanes[0])
    pack(lanes, bits, out)
    return out


def unpacked(message: Tensor, bits: int, k: int) -> Tensor:
    """The inverse of `packed`: (bytes,) uint8 -> (k,) uint8."""
    lanes = message.new_empty(8 // bits, len(message))
    unpack(message, bits, lanes)
    return lanes.view(-1)[:k]


PLACE_BITS = 12
MOST_PLACES = 1 << PLACE_BITS


def places_nbytes(k: int) -> int:
    """Bytes of k places: 3 for two."""
    return k + packed_nbytes(k, PLACE_BITS - 8)


def pack_places(places: Tensor) -> Tensor:
    """(k,) whole numbers from 0 to 4095 -> (bytes,) uint8: the low bytes of all, then the high halves."""
    low, high = places & 0xFF, places >> 8
    return torch.cat([low.to(torch.uint8), packed(high.to(torch.uint8), PLACE_BITS - 8)])


def unpack_places(message: Tensor, k: int) -> Tensor:
    """The inverse of `pack_places`: (bytes,) uint8 -> (k,) int64."""
    return message[:k].long() + (unpacked(message[k:], PLACE_BITS - 8, k).long() << 8)
