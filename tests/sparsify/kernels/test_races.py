"""No order in which the programs of a launch may run changes what the Triton kernels find; and what would be
noticed if one did. In Triton's interpreter, in a process of its own, which test_gpu_kernels.py starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sparsify.kernels.test_gpu_kernels import INTERPRETED, QUIET, less_slow

__all__ = ["less_slow"]  # a fixture is found by its name in this module
SEEDS = range(20)
FEW_SEEDS = range(8)  # in which a race of two instructions is to be seen

if INTERPRETED:  # else the import would settle how Triton works in this process
    from tests.sparsify.kernels import concurrent, racy
    from tests.sparsify.kernels.concurrent import Concurrent
    from tests.sparsify.kernels.contests import Contest


def zeros(length: int = 1) -> Tensor:
    return torch.zeros(length, dtype=torch.int32)


def count_by(kernel: Any, programs: int = 4) -> int:
    counter = zeros()
    kernel[(programs,)](counter)
    return int(counter)


@QUIET
class TestInterpreter:
    __test__ = INTERPRETED

    def test_a_lost_count_is_seen_which_the_ordinary_interpreter_does_not_show(self) -> None:
        """And an atomic loses none."""
        assert count_by(racy.count_plainly) == 4
        wrong = 0
        for seed in FEW_SEEDS:
            with Concurrent(seed) as run:
                wrong += count_by(racy.count_plainly) != 4
            (meeting,) = run.meetings  # in whatever order
            assert meeting.count("count_plainly, count_plainly (racy.py:") == 2
            assert {"load", "store"} < set(meeting.split())
            with Concurrent(seed) as run:
                assert count_by(racy.count_atomically) == 4
            assert not run.meetings
        assert wrong > 1

    def test_a_store_of_many_elements_is_not_one_event(self) -> None:
        mixed = 0
        for seed in SEEDS:
            places = zeros(16)
            racy.fill[(3,)](places, SIZE=16)
            assert len(places.unique()) == 1
            with Concurrent(seed):
                racy.fill[(3,)](places, SIZE=16)
            mixed += len(places.unique()) > 1
        assert mixed

    def test_programs_come_in_any_order_and_a_seed_repeats_it(self) -> None:
        def order(seed: int) -> tuple[int, ...]:
            places = zeros(4)
            with Concurrent(seed) as run:
                racy.own[(4,)](places, zeros())
            assert not run.meetings
            assert sorted(places.tolist()) == [0, 1, 2, 3]
            return tuple(places.tolist())

        orders = list(map(order, SEEDS))
        assert list(map(order, SEEDS)) == orders
        assert len(set(orders)) > 12  # of 24

    def test_what_a_program_raises_ends_all_of_them(self) -> None:
        for seed in FEW_SEEDS:
            with Concurrent(seed), pytest.raises(Exception, match="the second program"):
                racy.fail[(3,)](zeros(3))
            with Concurrent(seed):
                assert count_by(racy.count_atomically) == 4


@QUIET
class TestKernels:
    __test__ = INTERPRETED

    def test_random_cases_find_what_the_oracle_finds_in_turn(self) -> None:
        for seed in range(100, 102):
            Contest(seed).run()

    def test_in_a_few_orders_they_find_what_the_oracle_finds(self) -> None:
        check_contests(range(2))

    @pytest.mark.extended
    def test_they_find_what_the_oracle_finds_and_meet_in_atomics_only(self) -> None:
        switches, atomics = check_contests(SEEDS)
        assert switches > 3000
        assert atomics > {"accumulate_and_mark", "emit_largest", "accumulate_and_count", "emit_group_largest"}


def check_contests(seeds: Iterable[int]) -> tuple[int, set[str]]:
    """Check cases; return how often programs took turns in them, and the kernels that used atomics."""
    switches = 0
    atomics = set[str]()
    for seed in seeds:
        run, faults = concurrent.contest(seed)
        assert not faults, seed
        switches += run.num_switches
        atomics |= run.atomics
    return switches, atomics
