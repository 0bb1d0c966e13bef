"""Tables of what publications state: constants, bytes of a message, and waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsify
from tests.sparsify.laws import SHAPES, build, live, parse_choices

DEFAULTS = """
    adacomp scope=layer conv_bin=50 other_bin=500
    dgc density=0.001 scope=layer momentum=0.9 sample=0.01 adaptations=10
    oktopk threshold_every=32 regions_every=64 local_drift=1.012 global_drift=1.008
    qsgd scope=global bits=4 block=512 norm=l2 feedback=none
    scalecom beta=1.0
    sidco first_ratio=0.25 adapt_every=5 tolerance=0.2
    terngrad clip=2.5
"""


def test_defaults_are_the_published_ones() -> None:
    """ScaleCom has plain error feedback unless asked."""
    for name, published in map(parse_choices, DEFAULTS.strip().splitlines()):
        assert published.items() <= sparsify.defaults(name).items(), name


MATRIX = (30, 20)
KERNEL = (4, 5, 2, 3)
BYTES: list[tuple[str, int, list[tuple[int, ...]], torch.dtype, int]] = [
    ("dgc density=0.01", 2, [(500,)], torch.float64, 8 * 500),  # vectors are averaged whole
    ("dgc density=0.01", 2, [(500,)], torch.bfloat16, 2 * 500),
    ("efsignsgd", 2, [(1001,)], torch.float64, 126 + 4),  # a bit for each element, and a scale
    ("signsgd", 2, [(1001,)], torch.float64, 126),
    ("qsgd", 2, [(2000,)], torch.float64, 2000 // 2 + 4 * 4),  # four blocks
    ("terngrad", 2, [(1001,)], torch.float64, 251 + 4),  # two bits for each; GRACE's sends 8
    # A rounded all-reduce: 2 (P-1)/P of half a byte an element, and a scale of 4 bytes for every 256.
    ("qgz scope=global", 4, [(4096,)], torch.float64, 2 * 3 * (1024 // 2 + 1024 // 256 * 4)),
    # Two all-reduces: of all P with what is not compressed, and of all Q. 2 (4 + 30) 2 >= 120: not compressed
    # by more than 2.
    ("powersgd rank=2", 2, [MATRIX, KERNEL, (9,), (2, 2)], torch.float64, 8 * (2 * 30 + 133 + 2 * 20)),
    ("powersgd min_compression_rate=1.0", 2, [KERNEL], torch.float64, 8 * 2 * (4 + 30)),
    # P and Q of rank 2 in 4 bytes, by rings of three workers: 2 (P - 1) / P of them.
    ("powersgd", 3, [MATRIX], torch.bfloat16, 4 * 4 * (30 + 20) * 2 // 3),
]


@pytest.mark.parametrize(
    ("name", "choices", "size", "shapes", "dtype", "nbytes"),
    [(*parse_choices(words), *case) for words, *case in BYTES],
)
def test_messages_take_the_published_bytes(
    name: str,
    choices: dict[str, Any],
    size: int,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    nbytes: int,
) -> None:
    assert live(build(name, **choices), size, 2, shapes=shapes, dtype=dtype)[0].counted_bytes == [nbytes] * 2


TWENTY: list[tuple[int, ...]] = [(5, 3)] * 20
WAITS: list[tuple[int, list[tuple[int, ...]], str]] = [
    (0, SHAPES, "qsgd"),
    (0, SHAPES, "terngrad"),
    (0, SHAPES, "signsgd"),
    (0, SHAPES, "efsignsgd"),
    (0, SHAPES, "powersgd"),
    (0, SHAPES, "scalecom density=0.05"),
    (0, [(8, 8)], "stable_topk density=0.25 block=4 every=2"),  # blocks divide n
    (2, SHAPES, "hardthreshold density=0.05 scope=global"),
    (2, SHAPES, "sidco density=0.05 scope=global"),
    # However many tensors. Published DEFT waits once per fragment.
    (2, TWENTY, "deft density=0.1"),
    (2, TWENTY, "exdyna density=0.1"),
    (2, TWENTY, "micro density=0.1"),
    (2, [(8, 4, 3, 3), (7,), (30, 37)] * 5, "adacomp scope=global"),
]


@pytest.mark.parametrize(
    ("name", "choices", "waits", "shapes"), [(*parse_choices(words), *case) for *case, words in WAITS]
)
def test_the_host_waits_as_often_as_stated(
    name: str, choices: dict[str, Any], waits: int, shapes: list[tuple[int, ...]]
) -> None:
    method = sparsify.build(name, **choices)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert live(method, 3, 4, shapes=shapes, dtype=dtype)[0].host_syncs == [waits] * 4
