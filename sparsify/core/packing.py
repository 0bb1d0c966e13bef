"""Codes of a few bits packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(lanes: Tensor, bits: int, out: Tensor) -> None:
    """Pack codes (8 / bits, m) uint8 into bytes (m,) uint8, without allocating anything.

    A byte holds one code of each lane, so those of elements that lie m apart: neighbours would mean strided
    access.
    """
    out.copy_(lanes[0])
    for number, lane in enumerate(lanes[1:], start=1):
        out.add_(lane, alpha=1 << bits * number)  # no two codes share a bit: adding is or-ing


def unpack(packed: Tensor, bits: int, out: Tensor) -> None:
    """Unpack bytes into codes; the inverse of `pack`."""
    for number, lane in enumerate(out):
        torch.bitwise_right_shift(packed, bits * number, out=lane)
    out.bitwise_and_((1 << bits) - 1)


def packed_nbytes(k: int, bits: int) -> int:
    """Return the number of bytes of k codes."""
    return -(-k * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (k,) uint8 of 1, 2, 4 or 8 bits into (bytes,) uint8; the last byte is filled with zeros."""
    lanes = torch.zeros(8 // bits, packed_nbytes(len(codes), bits), dtype=torch.uint8, device=codes.device)
    lanes.view(-1)[: len(codes)] = codes
    out = torch.empty_like(lanes[0])
    pack(lanes, bits, out)
    return out


def unpack_codes(message: Tensor, bits: int, k: int) -> Tensor:
    """Unpack (bytes,) uint8 into codes (k,) uint8; the inverse of `pack_codes`."""
    lanes = message.new_empty(8 // bits, len(message))
    unpack(message, bits, lanes)
    return lanes.view(-1)[:k]


PLACE_BITS = 12
MAX_PLACES = 1 << PLACE_BITS


def packed_places_nbytes(k: int) -> int:
    """Return the number of bytes of k places: 3 for two."""
    return k + packed_nbytes(k, PLACE_BITS - 8)


def pack_places(places: Tensor) -> Tensor:
    """Pack whole numbers (k,) from 0 to 4095 into (bytes,) uint8: the low bytes, then the high halves."""
    low = places & 0xFF
    high = places >> 8
    return torch.cat([low.to(torch.uint8), pack_codes(high.to(torch.uint8), PLACE_BITS - 8)])


def unpack_places(message: Tensor, k: int) -> Tensor:
    """Unpack (bytes,) uint8 into whole numbers (k,) int64; the inverse of `pack_places`."""
    return message[:k].long() + (unpack_codes(message[k:], PLACE_BITS - 8, k).long() << 8)
