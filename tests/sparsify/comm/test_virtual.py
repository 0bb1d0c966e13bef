"""Virtual ranks: lockstep, determinism, clocks, and what happens when code under them is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import virtual
from sparsify.comm.clocks import ClockMark
from sparsify.comm.virtual import VirtualComm
from sparsify.cost import Link, Network

LINK = Link(alpha_s=1.0, beta_s_per_byte=0.5)


def test_what_is_gathered_is_a_snapshot() -> None:
    def body(comm: VirtualComm) -> list[float]:
        mine = torch.tensor([float(comm.rank)])
        gathered = comm.all_gather(mine)
        mine.fill_(99)  # rank 0 gets here before rank 1 has read what it was sent
        comm.barrier()
        return [theirs.item() for theirs in gathered]

    assert virtual.run(2, body) == [[0.0, 1.0]] * 2


def test_grad_mode_belongs_to_the_rank() -> None:
    def body(comm: VirtualComm) -> bool:
        if comm.rank == 0:
            with torch.no_grad():
                comm.barrier()
                return torch.is_grad_enabled()
        comm.barrier()
        return torch.is_grad_enabled()

    assert virtual.run(2, body) == [False, True]
    assert torch.is_grad_enabled()


class Instant(NamedTuple):
    """An event of a device whose clock the test moves."""

    at_s: float

    def elapsed_time(self, end: Instant) -> float:
        return 1e3 * (end.at_s - self.at_s)


def seconds_between(marks: list[ClockMark]) -> list[float]:
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def test_marks_tell_what_the_clocks_would_have_told_and_wait_for_nothing() -> None:
    """Over three collectives: late ranks are waited for, the link is paid, and a vote moves no clock."""
    device_s = 0.0

    def body(comm: VirtualComm) -> list[float]:
        nonlocal device_s
        marks = [comm.record_mark()]
        for busy_s, collective in (
            (10.0 * comm.rank, lambda: comm.all_gather(torch.zeros(1, dtype=torch.float64))),
            (2.0, lambda: comm.lagged_max(0)),
            (5.0 - comm.rank, lambda: comm.barrier()),
        ):
            device_s += busy_s
            marks.append(comm.record_mark())
            collective()
            marks.append(comm.record_mark())
        return seconds_between(marks)

    price = LINK.transfer_seconds(cost.all_gather(8, 3))
    found = virtual.run(
        3,
        body,
        Network(LINK),
        synchronise=lambda: pytest.fail("waits"),
        record_event=lambda: Instant(device_s),
    )
    assert found == [
        [0.0, 20.0 + price, 2.0, 0.0, 5.0, 0.0],
        [10.0, 10.0 + price, 2.0, 0.0, 4.0, 1.0],
        [20.0, price, 2.0, 0.0, 3.0, 2.0],
    ]


NODES = Network(LINK, Link(0.25, 0.125), workers_per_node=2)


def seconds_of_each_collective(network: Network) -> list[float]:
    """Return what rank 0 of four spends in each, by a clock that shows nothing but the network."""

    def body(comm: VirtualComm) -> list[float]:
        data = torch.zeros(4, dtype=torch.float64)
        marks = [comm.record_mark()]
        for call in (
            lambda: comm.all_reduce(data),
            lambda: comm.all_gather(data),
            lambda: comm.broadcast(data),
            lambda: comm.all_to_all(data, [1, 1, 1, 1], [1, 1, 1, 1]),
            lambda: comm.permute(data, [(0, 1), (2, 3)]),
            lambda: comm.permute(data, [(1, 2)]),
        ):
            call()
            marks.append(comm.record_mark())
        return seconds_between(marks)

    return virtual.run(4, body, network, record_event=lambda: Instant(0.0))[0]


def test_each_collective_costs_what_the_network_says() -> None:
    calls = {"all_reduce": 32, "all_gather": 32, "broadcast": 32, "all_to_all": 24}
    routes = [[(0, 1), (2, 3)], [(1, 2)]]
    for network in (Network(LINK), NODES):
        expected = [network.collective_seconds(call, nbytes, 4) for call, nbytes in calls.items()]
        expected += [network.permute_seconds(32, route) for route in routes]
        assert seconds_of_each_collective(network) == expected


WRONG: dict[str, Callable[[VirtualComm], object]] = {
    r"not stand at the same.*0: 'all_gather', 1: 'barrier'": lambda comm: (
        comm.barrier() if comm.rank else comm.all_gather(torch.zeros(1))
    ),
    r"rank 0 waits in barrier, but ended already: ranks \[1\]": lambda comm: (
        None if comm.rank else comm.barrier()
    ),
    r"rank 0 expects pieces of \[1, 3\], and gets \[1, 1\]": lambda comm: comm.all_to_all(
        torch.zeros(4), [1, 3], [1, 3]
    ),
}


def test_ranks_that_do_not_meet_are_named() -> None:
    for sentence, body in WRONG.items():
        with pytest.raises(RuntimeError, match=sentence):
            virtual.run(2, body)
    with pytest.raises(ValueError, match="at least one rank"):
        virtual.run(0, lambda comm: None)


def test_an_error_of_one_rank_ends_all_and_their_clean_up_runs() -> None:
    closed = []

    def body(comm: VirtualComm) -> None:
        try:
            comm.barrier()
            if comm.rank == 1:
                raise ArithmeticError("rank 1 is broken")
            comm.barrier()
        finally:
            assert comm.now_s() >= 0  # a timer reads the clock here
            closed.append(comm.rank)

    with pytest.raises(ArithmeticError, match="rank 1 is broken"):
        virtual.run(3, body)
    assert sorted(closed) == [0, 1, 2]


def test_an_error_in_what_is_made_once_is_every_ranks() -> None:
    calls = []

    def fail() -> None:
        calls.append("made")
        raise OSError("no such file")

    def body(comm: VirtualComm) -> str:
        with pytest.raises(OSError, match="no such file"):
            comm.make_on_rank_0(fail)
        return comm.make_on_rank_0(lambda: f"of rank {comm.rank}")

    assert virtual.run(3, body) == ["of rank 0"] * 3
    assert calls == ["made"]


def test_sums_are_taken_in_rank_order_whatever_the_pieces() -> None:
    """Bit for bit what adding whole tensors gives; and where two ranks bring the same memory."""

    def check_sum(brought: list[Tensor], expected: Tensor) -> None:
        for total in virtual.run(len(brought), lambda comm: comm.all_reduce(brought[comm.rank])):
            assert torch.equal(total, expected)

    for elements in (0, 1, 100_003):
        first, second, third = (
            torch.randn(elements, generator=torch.Generator().manual_seed(rank)) for rank in range(3)
        )
        check_sum([first, second, third], (first + second) + third)
        ones = torch.ones(elements)
        twos = ones + ones
        check_sum([ones, ones.clone()], twos)
        one = torch.ones(elements)
        check_sum([one, one], twos)


def test_idle_time_moves_the_clock_of_one_rank_and_no_other() -> None:
    """Marks from before stay where they were; the others wait for it, for exactly as long."""

    def body(comm: VirtualComm) -> list[float]:
        marks = [comm.record_mark()]
        if comm.rank == 1:
            comm.idle(0.25)
        marks.append(comm.record_mark())
        comm.barrier()
        marks.append(comm.record_mark())
        return seconds_between(marks)

    found = virtual.run(3, body, record_event=lambda: Instant(0.0))
    assert found == [[0.0, 0.25], [0.25, 0.0], [0.0, 0.25]]
