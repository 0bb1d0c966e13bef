"""What quantisers share: packed codes, blocks, rounding at random."""

from __future__ import annotations

import pytest
import torch

import sparsify
from sparsify.comm import virtual
from sparsify.methods._quantise import PackedCodes, in_blocks
from sparsify.methods.qsgd import qsgd
from sparsify.types import BucketContext
from tests.sparsify.laws import live
from tests.sparsify.methods.replays import given


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 3, 8, 227])
def test_codes_survive_packing_and_take_their_bits(n: int, bits: int) -> None:
    message = PackedCodes.like(torch.empty(n), block=100, bits=bits)
    codes = torch.randint(2**bits, (n,), generator=torch.Generator().manual_seed(n)).to(torch.uint8)
    scales = torch.rand(-(-n // 100))
    message.codes.copy_(codes)
    written = message.write(scales).clone()
    assert written.numel() == -(-n * bits // 8) + 4 * len(scales)
    message.codes.zero_()
    within = torch.cat([torch.zeros(3, dtype=torch.uint8), written])[3:]  # of a larger buffer, unaligned
    assert torch.equal(message.read(within), scales)
    assert torch.equal(message.codes, codes)


def test_blocks_are_views_of_everything() -> None:
    tensor = torch.arange(10)
    assert [view.tolist() for view in in_blocks(tensor, 4)] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9]]]
    assert [view.shape for view in in_blocks(tensor, 5)] == [(2, 5)]
    assert [view.shape for view in in_blocks(tensor, 11)] == [(1, 10)]
    assert in_blocks(tensor, 3)[1].data_ptr() == tensor[9:].data_ptr()


@pytest.mark.parametrize("name", ["qsgd", "terngrad"])
def test_rounding_at_random_keeps_the_expectation(name: str) -> None:
    values = torch.tensor([0.0, 1e-3, -0.5, 2.0, -3.0, 0.7, 0.7, -1e-2], dtype=torch.float64)
    draws, size = 1500, 2
    if name == "qsgd":  # what one level stands for, in blocks of 4
        method, step = sparsify.build(name, block=4), values.view(2, 4).norm(dim=1).repeat_interleave(4) / 7
    else:
        method, step = sparsify.build(name, clip=float("inf")), torch.tensor(3.0)
    updates = torch.stack(live(method, size, draws, lambda *where: values, [(8,)])[0].updates)
    p = (values.abs() / step).frac()  # of rounding up
    deviation = step * (p * (1 - p)).sqrt()
    error = (updates.mean(dim=0) - values).abs()
    assert (error <= 5 * deviation / (draws * size) ** 0.5 + 1e-6).all()  # 1e-6: scales travel as fp32
    assert (updates.var(dim=0) > 0).any()


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "efsignsgd"])
def test_zeros_are_sent_as_zeros(name: str) -> None:
    """GRACE's QSGD divides 0 by 0 there."""
    lived = live(sparsify.build(name), 2, 3, given([0.0] * 8), [(8,)])
    assert all(torch.equal(update, torch.zeros(8).double()) for update in lived[0].updates)


@pytest.mark.parametrize(("name", "scale"), [("signsgd", 0), ("efsignsgd", 4)])
def test_a_sign_takes_one_bit(name: str, scale: int) -> None:
    assert live(sparsify.build(name), 2, 1, shapes=[(1001,)])[0].wire_bytes == [126 + scale]


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "signsgd", "efsignsgd", "powersgd"])
def test_the_host_never_waits(name: str) -> None:
    assert all(rank.host_syncs == [0, 0] for rank in live(sparsify.build(name), 2, 2))


def test_workers_round_at_random_each_for_itself() -> None:
    def body(comm: virtual.VirtualComm) -> torch.Tensor:
        method = qsgd()
        state = method.quantise.init(torch.ones(600), BucketContext(0, comm.rank, 0))
        encoded: torch.Tensor = method.quantise.encode(torch.ones(600), torch.empty(600), state)
        return encoded

    first, second = virtual.run(2, body)
    assert not torch.equal(first, second)
