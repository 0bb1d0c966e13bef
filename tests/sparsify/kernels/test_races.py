"""The interpreter notices kernels that are wrong, and runs programs in any order.

These tests run in a process of their own, which test_gpu_kernels.py starts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.sparsify.kernels.interpreter import checking_memory
from tests.sparsify.kernels.test_gpu_kernels import INTERPRETED, QUIET

if INTERPRETED:  # else the import would settle how Triton works in this process
    from tests.sparsify.kernels import racy


def zeros(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.int32)


@QUIET
class TestInterpreter:
    __test__ = INTERPRETED

    def test_what_no_gpu_would_do_reliably_ends_a_launch(self) -> None:
        with checking_memory():
            with pytest.raises(AssertionError, match="programs of count_plainly race"):
                racy.count_plainly[(4,)](zeros(1))
            racy.count_plainly[(1,)](zeros(1))
            with pytest.raises(Exception, match="store_twice stores twice"):
                racy.store_twice[(1,)](zeros(4))
            with pytest.raises(Exception, match="number uses memory that no tensor has"):
                racy.number[(4,)](zeros(3), zeros(1))

    def test_programs_run_in_any_order(self) -> None:
        orders = set()
        for seed in range(20):
            places = zeros(4)
            with checking_memory(seed):
                racy.number[(4,)](places, zeros(1))
            assert sorted(places.tolist()) == [0, 1, 2, 3]
            orders.add(tuple(places.tolist()))
        assert len(orders) > 12  # of 24
