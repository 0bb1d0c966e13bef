"""Codes of values in C++: those of torch's operators, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparsify.core.codes import Membership, Statistical2
from sparsify.kernels import trouble_with_native
from sparsify.kernels.native_codes import NativeStatistical2
from tests.sparsify.core.test_chunks import check_equal, random

COUNTS = [1, 0, 2, 64, 3001, 640, 5]  # values of each tensor
STRANGE = torch.tensor([0, 100, 3200])
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "bell": lambda x: x,
    "zeros": lambda x: x * 0,
    "shifted": lambda x: x + 5,
    "Top-k": lambda x: x + 2 * x.sign(),
    "halves": lambda x: (4 * x).round() / 4,
    "huge": lambda x: x * 1e38,
    "tiny": lambda x: x * 1e-42,
    "magnitudes": lambda x: x * 10 ** (8 * x.roll(1)),
    "nan": lambda x: x.index_fill(0, STRANGE, torch.nan),
    "inf": lambda x: x.index_fill(0, STRANGE, torch.inf),
    "-inf": lambda x: x.index_fill(0, STRANGE, -torch.inf),
}


@pytest.mark.skipif(bool(trouble_with_native()), reason=str(trouble_with_native()))
def test_the_published_code_is_the_same_to_the_bit() -> None:
    """Messages too, in which a tensor that is not finite has any codes. Other types are left to torch."""
    for dtype in (torch.float32, torch.float64):
        for name, change in VALUES.items():
            values = change(random(sum(COUNTS), 3, dtype))
            parts = Membership.of(COUNTS, values)
            ours, theirs = (code.encode(values, parts) for code in (NativeStatistical2(), Statistical2()))
            read, expected = (Statistical2().decode(message, parts, dtype) for message in (ours, theirs))
            check_equal(read, expected)
            assert torch.equal(ours, theirs) or not expected.isfinite().all(), name
