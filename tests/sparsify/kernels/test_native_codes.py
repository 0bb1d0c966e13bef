"""Codes of values in C++: those of torch's operators, to the bit."""

from __future__ import annotations

import pytest
import torch

from sparsify.core.codes import Statistical2, TensorSegments
from sparsify.kernels import native_unavailable_reason
from sparsify.kernels.native_codes import NativeStatistical2
from tests.sparsify.core.test_chunks import check_equal
from tests.sparsify.kernels.oracle import INPUTS

COUNTS = [1, 0, 2, 64, 3001, 640, 5]  # values of each tensor


@pytest.mark.skipif(bool(native_unavailable_reason()), reason=str(native_unavailable_reason()))
def test_the_published_code_is_the_same_to_the_bit() -> None:
    """Messages too, in which a tensor that is not finite has any codes. Other types are left to torch."""
    for name, make in INPUTS.items():
        for dtype in (torch.float32, torch.float64):
            values = make(sum(COUNTS)).to(dtype)
            parts = TensorSegments.from_counts(COUNTS, values)
            ours = NativeStatistical2().encode(values, parts)
            theirs = Statistical2().encode(values, parts)
            read, expected = (Statistical2().decode(message, parts, dtype) for message in (ours, theirs))
            check_equal(read, expected)
            assert torch.equal(ours, theirs) or not expected.isfinite().all(), name
