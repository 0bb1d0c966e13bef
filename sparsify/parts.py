"""What travels between the parts of a method: selections, deliveries, and where a state belongs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

# Laws that a method may be excused from, by name; `exceptions` says why. The test suite checks that what is
# excused does fail.
NOTHING_IS_LOST = "nothing is lost"
DENSE_AT_DENSITY_1 = "dense at density 1"


class Part:
    """A selector, a feedback, an exchange or a quantiser."""

    exceptions: ClassVar[dict[str, str]] = {}  # law -> why it can't hold

    def broken_laws(self) -> dict[str, str]:
        """`exceptions`, unless they depend on hyperparameters."""
        return self.exceptions


class Sparse(NamedTuple):
    """Some elements of a bucket."""

    indices: Tensor  # (k,) distinct; int64 or int32
    values: Tensor  # (k,)

    def add_to(self, buffer: Tensor, alpha: float = 1) -> None:
        """buffer (n,) += alpha x these. Indices are distinct, so the order of additions is fixed."""
        buffer.index_add_(0, self.indices, self.values.to(buffer.dtype), alpha=alpha)


def without_nan(part: Sparse) -> Sparse:
    """The part but for its NaNs, which no comparison with a number holds for."""
    numbers = part.values == part.values
    return part if numbers.all() else Sparse(part.indices[numbers], part.values[numbers])


class Run(NamedTuple):
    """Consecutive elements of a bucket."""

    start: int
    values: Tensor  # (m,)

    def add_to(self, buffer: Tensor, alpha: float = 1) -> None:
        buffer[self.start : self.start + self.values.numel()].add_(self.values.to(buffer.dtype), alpha=alpha)


class Selection(NamedTuple):
    """What a selector chose."""

    indices: Tensor  # (k',) distinct
    sent_bytes: int = 0  # spent by this worker on agreeing upon them
    values: Tensor | None = None  # (k',) of these elements, where they were at hand


class Delivery(NamedTuple):
    """What an exchange brought about."""

    total: list[Sparse | Run]  # their sum, taken in this order, is the workers' total
    delivered: list[Sparse | Run]  # of mine, what is in it
    sent_bytes: int  # by this worker


class Place(NamedTuple):
    """Which bucket of which worker a state belongs to, and what lies in it."""

    seed: int
    rank: int
    bucket: int
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors in the bucket, in order
    select: str = "auto"  # by whom the bucket is searched, see `sparsify.kernels.kernel`

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor in the bucket."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def shared(self) -> Place:
        """The same for all workers: what they draw from it, they draw alike."""
        return self._replace(rank=-1)

    def key(self, step: int = 0) -> int:
        """A 63-bit number of its own for every (seed, rank, bucket, step)."""
        mixed = self.seed
        for number in (self.rank, self.bucket, step):
            mixed = scrambled(mixed * 0x9E3779B97F4A7C15 + number + 1)
        return mixed >> 1

    def generator(self, device: torch.device) -> Generator:
        """A generator of one's own; the global one belongs to the user's model and data."""
        own = Generator(device=device)
        own.manual_seed(self.key())
        return own


def scrambled(number: int) -> int:
    """A bijection of 64 bits in which every input bit moves half of the output bits: splitmix64's last step,
    Steele et al. 2014.
    """
    number &= 2**64 - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What residuals and selections are kept in: bfloat16 and float16 would tie and round, so float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass
class Work:
    """A buffer that is allocated once, and holds nothing from step to step."""

    buffer: Tensor = field(metadata={"saved": False})  # (n,)

    @classmethod
    def like(cls, like: Tensor) -> Work:
        return cls(torch.empty_like(like, dtype=work_dtype(like.dtype)))


def members(indices: Tensor, of: Tensor) -> Tensor:
    """(k,) bool: which indices occur in `of` (m,), sorted ascending? O(k log m), no host synchronisation."""
    if not of.numel():
        return torch.zeros_like(indices, dtype=torch.bool)
    found = torch.searchsorted(of, indices).clamp_(max=of.numel() - 1)
    return of[found] == indices


def check_k(k: int, n: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"{k=} elements can't be chosen of {n}; take k between 0 and n")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"no {name} {value!r}; there are: {', '.join(choices)}")


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} is out of range: it must be above 0")
