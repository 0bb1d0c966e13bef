"""Codes of values in C++: those of torch's operators, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsify.core.codes import Membership, Statistical2
from sparsify.kernels import trouble_with_native
from sparsify.kernels.native_codes import NativeStatistical2

pytestmark = pytest.mark.skipif(bool(trouble_with_native()), reason=str(trouble_with_native()))
COUNTS = [1, 0, 2, 64, 3001, 640, 5]


def values(kind: str) -> Tensor:
    """Some for each tensor of `COUNTS`."""
    x = torch.randn(sum(COUNTS), generator=torch.Generator().manual_seed(3))
    strange = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}
    if kind in strange:
        x[[0, 100, 3200]] = strange[kind]
    return {
        "zeros": x * 0, "shifted": x + 5, "Top-k": x + 2 * x.sign(), "halves": (4 * x).round() / 4,
        "huge": x * 1e38, "tiny": x * 1e-42, "magnitudes": x * 10 ** (8 * x.roll(1)),
    }.get(kind, x)  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    ["bell", "zeros", "shifted", "Top-k", "halves", "huge", "tiny", "magnitudes", "nan", "inf", "-inf"],
)
def test_the_published_code_is_the_same_to_the_bit(kind: str) -> None:
    """Messages too, in which a tensor that is not finite has any codes."""
    x = values(kind)
    parts = Membership.of(COUNTS, x)
    ours, theirs = (code.encode(x, parts) for code in (NativeStatistical2(), Statistical2()))
    read, expected = (Statistical2().decode(message, parts, x.dtype) for message in (ours, theirs))
    torch.testing.assert_close(read, expected, rtol=0, atol=0, equal_nan=True)
    if expected.isfinite().all():
        assert torch.equal(ours, theirs)


def test_other_types_are_left_to_torch() -> None:
    x = values("bell").double()
    parts = Membership.of(COUNTS, x)
    found = zip(NativeStatistical2().quantise(x, parts), Statistical2().quantise(x, parts), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in found)
