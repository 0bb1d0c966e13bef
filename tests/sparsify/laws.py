"""The laws of every method, and a toy model whose gradients are given, on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import yaml
from torch import Tensor
from torch.nn import Parameter

import sparsify
from sparsify.bucket_group import BucketGradients
from sparsify.comm import Comm, InstrumentedComm, virtual
from sparsify.core.timer import PhaseTimer
from sparsify.cost import Link, Network
from sparsify.kernels import make_kernel
from sparsify.method import Method
from sparsify.methods import per_step_names
from sparsify.methods._chunked import ChunkTopK
from sparsify.methods._ef21 import EF21
from sparsify.methods.adacomp import AdaComp
from sparsify.methods.deft import Deft
from sparsify.methods.dgc import SparsifierWithDenseVectors
from sparsify.methods.sparcml import TopKPerBucket
from sparsify.methods.stable_topk import StableBlocks
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketStep,
    PredictedBytes,
    exact_bytes,
    num_selected,
)
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import StepReport
from tests.conftest import there

METHODS = per_step_names()
INEXACT = (AdaComp, EF21, SparsifierWithDenseVectors, ChunkTopK, Deft, StableBlocks, TopKPerBucket)
SHAPES = [(40, 5), (5,), (7, 3), (1,)]  # of the toy model's tensors: 227 elements, not divisible by most P

Make = Callable[[int, int, tuple[int, ...]], Tensor]


class Lived(NamedTuple):
    """History of one rank: what it saw in each step, and what it holds at the end."""

    gradients: list[Tensor]  # (n,) before aggregation
    updates: list[Tensor]  # (n,) after
    residual: Tensor  # (n,)
    wire_bytes: list[int]  # in each step, as reported
    counted_bytes: list[int]  # in each step, as the backend charges for its collectives
    predicted_bytes: list[PredictedBytes | None]  # in each step, by the closed forms
    selected: list[int]
    host_syncs: list[int]
    limits: tuple[int, int]  # on `selected`, of one step


A_SECOND_A_BYTE = Network(Link(alpha_s=0.0, beta_s_per_byte=1.0))


class ChargingComm(virtual.VirtualComm):
    """A virtual rank that keeps account of what the cluster charges it, and of the lengths it announces."""

    def __init__(self, comm: virtual.VirtualComm) -> None:
        super().__init__(comm.cluster, comm.rank)
        self.cluster.network = A_SECOND_A_BYTE
        self.charged = 0  # bytes
        self.announced: list[int] = []

    def _join_collective(
        self,
        name: str,
        contribution: Any,
        combine: Any,
        network_s: float | None,
        signature: Any = None,
        charges_combine_to_all: bool = False,
    ) -> Any:
        self.charged += int(network_s or 0)
        if name == "all_gather" and contribution.dtype == torch.int64 and contribution.numel() == 1:
            self.announced.append(int(contribution))
        return super()._join_collective(
            name, contribution, combine, network_s, signature, charges_combine_to_all
        )


class Share(NamedTuple):
    """Share of one rank in one step of buckets that travel together."""

    shapes: tuple[tuple[int, ...], ...]
    k: int
    selected: int
    announced: list[int]


class GroupOfOne:
    """As much of a communicator as one worker without others needs."""

    rank, size, algorithm, links, predict_cost = 0, 1, Comm.algorithm, Comm.links, Comm.predict_cost

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


ALONE = cast(Comm, GroupOfOne())


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
    own = torch.Generator().manual_seed(1000 * step + 10 * rank + len(shape))
    return torch.randn(shape, generator=own, dtype=torch.float64)


def build(name: str, density: float = 0.05, scope: str | float = "layer", **others: Any) -> Method:
    """Build the method with those of the values that it has options for."""
    known = sparsify.defaults(name)
    wanted = {"density": density, "scope": scope, **others}
    method: Method = sparsify.build(name, **{key: value for key, value in wanted.items() if key in known})
    return method


def parse_choices(words: str) -> tuple[str, dict[str, Any]]:
    """Return a method's name and its choices, of words such as "topk index=delta16 density=0.1"."""
    name, *pairs = words.split()
    texts = dict(pair.split("=") for pair in pairs)
    return name, {key: yaml.safe_load(text) for key, text in texts.items()}


def live(
    method: Method,
    size: int,
    steps: int = 5,
    make: Make = gradient,
    shapes: list[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float64,
    lr: float = 1.0,
    device: str = "cpu",
    select: str | None = None,
    together: bool = True,
) -> list[Lived]:
    """Run the method on `size` virtual ranks over a toy model whose gradients are given.

    The fused kernel searches unless `select` names another.
    """
    select = select or searching(dtype, device)

    def body(virtual_comm: virtual.VirtualComm) -> tuple[Lived, list[list[Share]]]:
        comm, timer = ChargingComm(virtual_comm), PhaseTimer("serialised", virtual_comm.now_s)
        parameters = [
            (f"p{i}", Parameter(torch.zeros(shape, dtype=dtype, device=device)))
            for i, shape in enumerate(shapes)
        ]
        instrumented = InstrumentedComm(comm, timer)
        aggregator = Aggregator(
            method, parameters, instrumented, timer, seed=3, select=select, group_buckets=together
        )
        seen = watched(aggregator, comm)
        reports, counted, before, after = [], [], [], []
        for step in range(steps):
            aggregator.gradients.flat.fill_(torch.nan)  # what lies between buckets is not read
            for _, p in parameters:
                there(p.grad).copy_(make(comm.rank, step, tuple(p.shape)))
            before.append(torch.cat(aggregator.gradients.views))
            charged = comm.charged
            with timer.step():
                reports.append(aggregator.aggregate(epoch=step, lr=lr))
            counted.append(comm.charged - charged)
            after.append(torch.cat(aggregator.gradients.views))
        selected, _, wire_bytes, host_syncs, _, _ = map(list, zip(*reports, strict=True))
        residuals = [method.residual(state) for state in aggregator.states]
        held = [
            torch.zeros_like(bucket.flat) if residual is None else residual
            for residual, bucket in zip(residuals, aggregator.gradients.buckets, strict=True)
        ]
        within = limits_of(method, aggregator)
        lived = Lived(before, after, torch.cat(held), wire_bytes, counted, [], selected, host_syncs, within)
        num_shares = len(seen) // steps
        return lived, [seen[at : at + num_shares] for at in range(0, len(seen), num_shares)]

    lives, seen = zip(*virtual.run(size, body), strict=True)
    promises = [
        predict_step_bytes(method, step, dtype, ranks) for step, ranks in enumerate(zip(*seen, strict=True))
    ]
    return [lived._replace(predicted_bytes=promises) for lived in lives]


def searching(dtype: torch.dtype, device: str = "cpu") -> str:
    """`fused` where it works: `auto` leaves buckets as small as these to torch."""
    try:
        make_kernel(torch.empty(1, dtype=dtype, device=device), "fused")
    except ValueError:
        return "auto"
    return "fused"


def watched(aggregator: Aggregator, comm: ChargingComm) -> list[Share]:
    """Record what the aggregator does from now on, message by message."""
    seen, original, buckets = list[Share](), aggregator.run_and_report, aggregator.buckets

    def report(gradients: BucketGradients, act: Callable[[], int]) -> StepReport:
        comm.announced = []
        found = original(gradients, act)
        shapes = tuple(shape for number in gradients.numbers for shape in buckets[number].shapes)
        k = sum(
            num_selected(size, step.step_density)
            for size, step in zip(gradients.sizes, gradients.steps, strict=True)
        )
        seen.append(Share(shapes, k, found.selected, comm.announced))
        return found

    aggregator.run_and_report = report  # type: ignore[method-assign]  # it looks on, and calls the real one
    return seen


def predict_step_bytes(
    method: Method, step: int, dtype: torch.dtype, ranks: tuple[list[Share], ...]
) -> PredictedBytes | None:
    """Predict the bytes of all buckets together, given what each rank did.

    Buckets that travel together are promised as one bucket.
    """
    total = exact_bytes()
    for shares in zip(*ranks, strict=True):
        announced = [share.announced[0] for share in shares if share.announced]
        selected = [share.selected for share in shares]
        longest = max(announced, default=None)
        seen = BucketStep(shares[0].shapes, shares[0].k, dtype, len(ranks), step, selected, longest)
        if (promise := method.predict_bytes(seen)) is None:
            return None
        total += promise
    return total


def limits_of(method: Method, aggregator: Aggregator) -> tuple[int, int]:
    """Return the least and the largest number of elements that a worker may send in a step.

    A selector that is exact sends k of each bucket, but for those whose counts their own tests know.
    """
    sizes = [bucket.flat.numel() for bucket in aggregator.gradients.buckets]
    selector: Any = getattr(method, "select", None)
    if selector is None and not isinstance(method, INEXACT):
        return sum(sizes), sum(sizes)
    if isinstance(method, INEXACT) or isinstance(selector, INEXACT) or not selector.selects_fixed_count:
        return 0, sum(sizes)
    k = sum(num_selected(n, method.density_at(10**9)) for n in sizes)
    return k, k


def mass(lived: list[Lived]) -> tuple[Tensor, Tensor]:
    """(n,) all gradients that were seen; (n,) all that were applied or are held still."""
    seen = torch.stack([torch.stack(rank.gradients).sum(dim=0) for rank in lived]).sum(dim=0)
    applied = len(lived) * torch.stack(lived[0].updates).sum(dim=0)
    return seen, applied + torch.stack([rank.residual for rank in lived]).sum(dim=0)


def check_laws(method: Method, lived: list[Lived], tolerance: float = 1e-9) -> None:
    """Check the laws that hold for every method.

    Workers agree bit for bit; bytes reported are bytes sent, and those that the closed forms promise; as many
    elements as stated are sent; and what was seen was applied or is owed.
    """
    updates = lived[0].updates
    for rank in lived:
        assert all(map(torch.equal, rank.updates, updates)), "workers differ"
        assert rank.wire_bytes == rank.counted_bytes
        for counted, promise in zip(rank.counted_bytes, rank.predicted_bytes, strict=True):
            assert promise is not None, "no bytes are promised"
            assert promise.least <= counted <= promise.most, (
                f"{counted} bytes were sent; it promised {promise}"
            )
        least, most = rank.limits
        assert all(least <= selected <= most for selected in rank.selected), (rank.selected, rank.limits)
    assert torch.stack(updates).isfinite().all()
    assert any(lived[0].counted_bytes) is (len(lived) > 1)
    if NOTHING_IS_LOST not in method.broken_laws() and updates[0].dtype == torch.float64:
        seen, accounted = mass(lived)
        torch.testing.assert_close(accounted, seen, rtol=tolerance, atol=tolerance * float(seen.abs().max()))


def check_alike(lived: list[Lived], others: list[Lived]) -> None:
    """Check that two runs do the same, to the bit, and wait for the device as often."""
    for one, other in zip(lived, others, strict=True):
        assert all(map(torch.equal, one.updates, other.updates))
        assert torch.equal(one.residual, other.residual)
        assert (one.selected, one.host_syncs) == (other.selected, other.host_syncs)


def check_excuses(method: Method, at_1: Method, rounding: float = 1e-6) -> None:
    """Check that the laws that a method breaks, and its like at density 1, are those that it names."""
    lived = live(method, 4, steps=6)
    check_laws(method, lived, 1e-6)
    seen, accounted = mass(lived)
    is_balanced = torch.allclose(accounted, seen, rtol=1e-6, atol=1e-6)
    assert is_balanced is (NOTHING_IS_LOST not in method.broken_laws())
    is_dense = distance_from_dense(at_1, 4) < rounding
    assert is_dense is (DENSE_AT_DENSITY_1 not in at_1.broken_laws())
    assert all(method.broken_laws().values())


def distance_from_dense(method: Method, size: int) -> float:
    """Return the largest difference between the method's first update and the mean of the gradients."""
    lived = live(method, size, steps=1)
    mean = torch.stack([rank.gradients[0] for rank in lived]).mean(dim=0)
    return float((lived[0].updates[0] - mean).abs().max())
