"""Codes of values in few bits."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from sparsify.core.codes import VALUE_CODES, LevelCode, TensorSegments
from sparsify.ranges import CodeName

WORDS = get_args(CodeName)
COARSE = [word for word in WORDS if isinstance(VALUE_CODES[word], LevelCode)]
DTYPES = [torch.float32, torch.float64]
SCALE_BYTES = {"int8": 4, "e3m0": 4, "symmetric2": 8, "statistical2": 16}
BITS = {"fp32": 32, "bf16": 16, "int8": 8, "e3m0": 4, "symmetric2": 2, "statistical2": 2}
EXACT = 1e-6  # relative: scales travel as fp32
every_code = pytest.mark.parametrize("word", WORDS)


def random(k: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def trip(word: CodeName, values: Tensor, counts: list[int] | None = None) -> Tensor:
    """Return the values as receivers read them."""
    code = VALUE_CODES[word]
    parts = TensorSegments.from_counts(counts or [len(values)], values)
    message = code.encode(values, parts)
    assert message.dtype == torch.uint8
    assert len(message) == code.nbytes(parts.counts, values.dtype)
    shifted = torch.cat([message.new_zeros(3), message])[3:]  # from the middle of a message
    read, read_again = (code.decode(sent, parts, values.dtype) for sent in (message, shifted))
    torch.testing.assert_close(read_again, read, rtol=0, atol=0, equal_nan=True)
    assert read.dtype == values.dtype
    return read


def gaussian_choice(chunks: int = 300) -> Tensor:
    """Return the 64 largest of each 4096 numbers of a bell."""
    return largest(random(chunks * 4096))


def heavy_tailed_choice(chunks: int = 300) -> Tensor:
    """Return the 64 largest of each 4096 numbers of Student's t with 3 degrees of freedom."""
    n = chunks * 4096
    squares = torch.stack([random(n, seed).square() for seed in (2, 3, 4)])
    return largest(random(n, 1) / squares.mean(dim=0).sqrt())


def largest(values: Tensor) -> Tensor:
    rows = values.view(-1, 4096)
    return rows.gather(1, rows.abs().topk(64, dim=1).indices).view(-1)


def squared_error(word: CodeName, values: Tensor) -> float:
    """Return the error relative to the values' own square."""
    return float((trip(word, values) - values).square().sum() / values.square().sum())


@every_code
def test_messages_have_the_stated_size(word: CodeName) -> None:
    """Empty tensors have scales, too; and nothing at all is a message of no values."""
    for dtype in DTYPES:
        bits = BITS.get(word, 8 * dtype.itemsize)
        for counts in [[1], [0], [7, 0, 1], [64, 63, 130]]:
            nbytes = VALUE_CODES[word].nbytes(counts, dtype)
            assert nbytes == SCALE_BYTES.get(word, 0) * len(counts) + -(-sum(counts) * bits // 8)
            assert len(trip(word, random(sum(counts), dtype=dtype), counts)) == sum(counts)
        assert VALUE_CODES[word].nbytes([], dtype) == 0


@every_code
def test_each_tensor_has_scales_of_its_own(word: CodeName) -> None:
    """However different they are, and wherever one ends."""
    counts = [64, 1, 0, 131]
    for dtype in DTYPES:
        pieces = [random(n, n, dtype) * 10.0 ** (-3 * at) for at, n in enumerate(counts)]
        together = trip(word, torch.cat(pieces), counts)
        for piece, read in zip(pieces, together.split(counts), strict=True):
            torch.testing.assert_close(read, trip(word, piece), rtol=1e-6, atol=0)  # sums of another order


@every_code
def test_a_constant_and_a_single_value_are_kept(word: CodeName) -> None:
    """To bf16's own precision there, else to that of fp32, which is coarse below 1e-38."""
    for value in (0.0, 1.0, -3.0, 0.1, -1e-30, 1e30, 1e-44):
        is_tiny = 0 < abs(value) < 1e-38
        if is_tiny and word == "bf16":
            continue  # below what bf16 can tell from 0
        rounding = 2**-8 if word == "bf16" else 0.1 if is_tiny else EXACT
        for dtype in DTYPES:
            for k in (1, 77):
                values = torch.full((k,), value, dtype=dtype)
                torch.testing.assert_close(trip(word, values), values, rtol=rounding, atol=0)


def test_numbers_that_are_not_finite_stay_where_they_are_or_make_their_tensor_nan() -> None:
    for strange in (torch.nan, torch.inf, -torch.inf):
        values = random(30)
        values[12] = strange
        for word in ("as_is", "fp32"):
            read = trip(word, values.float())
            torch.testing.assert_close(read, values.float(), rtol=0, atol=0, equal_nan=True)
        for word in COARSE:
            read = trip(word, values, [10, 10, 10])
            assert read.isnan().tolist() == [False] * 10 + [True] * 10 + [False] * 10, (word, strange)


def test_what_is_read_is_read_alike_when_it_is_sent_on() -> None:
    """LevelCode are their own nearest levels; of the published bins only where they are not cut anew."""
    for word in COARSE:
        if word != "statistical2":
            once = trip(word, gaussian_choice(4))
            torch.testing.assert_close(trip(word, once), once, rtol=EXACT, atol=0)


def test_int8_and_e3m0_read_the_nearest_of_their_levels() -> None:
    """Multiples of 1/127 of the largest magnitude; its halves, down to 1/64, and 0."""
    values = torch.cat([random(5000), random(500) / 100, torch.zeros(3)])
    scale = values.abs().max().float().double()
    halves = [0.0, *(2.0**-power for power in range(7))]
    all_levels: dict[CodeName, Tensor] = {"int8": torch.arange(128) / 127, "e3m0": torch.tensor(halves)}
    for word, levels in all_levels.items():
        read = trip(word, values)
        nearest = (values.abs()[:, None] - levels * scale).abs().min(dim=1).values
        torch.testing.assert_close((read - values).abs(), nearest, rtol=1e-5, atol=1e-6)
        assert (read.sign() * values.sign() >= 0).all()


def test_symmetric_codes_keep_signs_and_means() -> None:
    """Each of the two magnitudes is the mean of those that it stands for.

    So the sum of the magnitudes is kept, and a magnitude is read as the nearer of the two.
    """
    values = gaussian_choice(20)
    read = trip("symmetric2", values)
    assert torch.equal(read.sign(), values.sign())
    low, high = read.abs().unique().tolist()
    for level in (low, high):
        assert values.abs()[read.abs() == level].mean() == pytest.approx(level, rel=EXACT)
    is_near = (values.abs() - low).abs() < (values.abs() - high).abs()
    assert (is_near == (read.abs() == low)).double().mean() > 0.97  # the border of one round less


def test_statistical_codes_are_those_of_the_published_code() -> None:
    """Its own lines, for one tensor: codes from 0 to 3 around the mean, read as the means of the bins."""
    values = random(4096) + 0.3
    centred = values - values.mean()
    scale = 6 * centred.norm() / (len(values) - 1) ** 0.5 / 4
    codes = (centred / scale + 2).round().clamp(0, 3).long()
    sums = torch.zeros(4).double().index_add_(0, codes, values)
    expected = (sums / codes.bincount(minlength=4).clamp(min=1))[codes]
    torch.testing.assert_close(trip("statistical2", values), expected, rtol=EXACT, atol=EXACT)


def test_errors_are_in_the_order_of_the_bits_and_symmetric_codes_beat_the_published_ones() -> None:
    """Errors are measured on the largest 1.56 % of a bell, and of heavy tails.

    Symmetric codes have less than half the error; the published bins say one bit only.
    """
    for values, most in ((gaussian_choice(), 0.0058), (heavy_tailed_choice(), 0.212)):
        error = {word: squared_error(word, values) for word in WORDS}
        assert error["as_is"] == 0 <= error["fp32"] < error["bf16"] < error["int8"]
        assert error["int8"] < min(error["e3m0"], error["symmetric2"])
        assert error["symmetric2"] < 0.5 * error["statistical2"]
        assert error["symmetric2"] < most
    assert trip("statistical2", gaussian_choice()).unique().numel() <= 3
    assert squared_error("statistical2", gaussian_choice()) == pytest.approx(0.0125, rel=0.1)


def test_codes_have_names() -> None:
    assert [word for word in WORDS if VALUE_CODES[word].is_exact] == ["as_is", "fp32"]
