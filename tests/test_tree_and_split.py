"""gTop-k, SparCML and Ok-Topk against transcriptions of their algorithms; bytes against the literature."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sparsify
from sparsify import cost
from sparsify.comm import virtual
from sparsify.methods.gtopk import merge
from sparsify.methods.oktopk import SplitReduceBalance, balanced_borders, overlaps
from sparsify.methods.sparcml import SplitAllGather
from sparsify.parts import Place, Sparse
from sparsify.split import even_borders
from tests.laws import Lived, gradient, live, mass

N, SHAPE = 240, (240,)
Array = np.ndarray


def run(name: str, size: int, steps: int, make: Any = gradient, n: int = N, **choices: Any) -> list[Lived]:
    return live(sparsify.build(name, **choices), size, steps, make, [(n,)])


def top(acc: Array, k: int) -> Array:
    """The indices of the k largest magnitudes."""
    return np.argsort(-np.abs(acc), kind="stable")[:k]


def against(lived: list[Lived], step_of: Callable[[list[Array], int], tuple[Array, list[Array]]]) -> None:
    """`step_of` takes everybody's gradient plus residual and the step, gives the sum and the residuals."""
    residuals = [np.zeros(lived[0].gradients[0].numel()) for _ in lived]
    for t in range(len(lived[0].gradients)):
        accs = [e + one.gradients[t].numpy() for e, one in zip(residuals, lived, strict=True)]
        total, residuals = step_of(accs, t)
        np.testing.assert_allclose(lived[0].updates[t].numpy(), total / len(lived), rtol=1e-9, atol=1e-12)
    for one, residual in zip(lived, residuals, strict=True):
        np.testing.assert_allclose(one.residual.numpy(), residual, rtol=1e-9, atol=1e-12)


def pairs(acc: Array, indices: Array) -> dict[int, float]:
    return {int(i): float(acc[i]) for i in indices}


@pytest.mark.parametrize("leak", ["returned", "published"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_gtopk_is_algorithm_2_of_shi_et_al(size: int, leak: str) -> None:
    k = 12

    def step_of(accs: list[Array], t: int) -> tuple[Array, list[Array]]:
        held = [pairs(acc, top(acc, k)) for acc in accs]
        mine = [set(one) for one in held]
        residuals, dropped = [acc.copy() for acc in accs], [dict[int, float]() for _ in accs]
        stride = 1
        while stride < size:
            for to in range(0, size - stride, 2 * stride):
                merged = {
                    i: held[to].get(i, 0.0) + held[to + stride].get(i, 0.0)
                    for i in held[to].keys() | held[to + stride].keys()
                }
                kept = sorted(merged, key=lambda i: -abs(merged[i]))[:k]
                held[to] = {i: merged.pop(i) for i in kept}
                for i, value in merged.items():
                    dropped[to][i] = dropped[to].get(i, 0.0) + value
            stride *= 2
        total = np.zeros(N)
        for i, value in held[0].items():
            total[i] = value
        for rank, residual in enumerate(residuals):
            residual[list(mine[rank] & held[0].keys())] = 0.0
            if leak == "returned":
                for i in dropped[rank].keys() & held[0].keys():
                    residual[i] += dropped[rank][i]
        return total, residuals

    against(run("gtopk", size, 6, density=0.05, leak=leak), step_of)


def test_gtopk_as_published_loses_what_a_merge_dropped_of_a_survivor() -> None:
    """Worker 2 has 3.0 at index 0; its partner's larger values push it out, and index 0 survives by way of
    worker 0. Published: worker 2 takes its 3.0 for sent.
    """
    values = torch.zeros(4, N, dtype=torch.float64)
    values[0, 0], values[1, 1], values[2, 0], values[3, 2] = 100.0, 1.0, 3.0, 50.0
    for leak, deficit in (("published", 3.0), ("returned", 0.0)):
        lived = run("gtopk", 4, 1, make=lambda r, s, shape: values[r], density=1 / N, leak=leak)
        seen, accounted = mass(lived)
        assert (seen - accounted).tolist()[0] == deficit
        assert lived[0].updates[0][0] == 25.0  # 100 of worker 0 only, a quarter of it
    assert torch.equal(seen, accounted)


def test_an_infinity_leaves_the_elements_beside_it_alone() -> None:
    one = Sparse(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    other = Sparse(torch.tensor([2, 3]), torch.tensor([math.inf, 0.0]))
    best, lost = merge(one, other, 2)
    assert dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)) == {1: 2.0, 2: math.inf}
    assert lost.values.sum() == 1.0


def test_gtopk_loses_a_known_share_on_random_gradients() -> None:
    """P = 8, k = 50: some of the final 50 are incomplete as published."""
    lived = run("gtopk", 8, 1, density=0.005, leak="published", n=10_000)
    seen, accounted = mass(lived)
    incomplete = int((~torch.isclose(seen, accounted, atol=1e-9)).sum())
    assert 1 <= incomplete <= 25


@pytest.mark.parametrize(("size", "n"), [(1, N), (2, N), (3, N), (4, N), (7, N), (7, 5)])
@pytest.mark.parametrize("dense_at", [None, 0.01, 1.0])
def test_sparcml_gives_the_update_of_topk(size: int, n: int, dense_at: float | None) -> None:
    """Whether what comes of it travels as pairs or dense; with more workers than elements, too."""
    k = max(1, n // 20)
    lived = run("sparcml", size, 5, n=n, density=k / n, dense_at=dense_at)

    def step_of(accs: list[Array], t: int) -> tuple[Array, list[Array]]:
        total, residuals = np.zeros(n), [acc.copy() for acc in accs]
        for acc, residual in zip(accs, residuals, strict=True):
            chosen = top(acc, k)
            total[chosen] += acc[chosen]
            residual[chosen] = 0.0
        return total, residuals

    against(lived, step_of)


def test_sparcml_selects_of_every_bucket() -> None:
    lived = run("sparcml", 2, 1, density=0.1, bucket=50)
    for rank, one in enumerate(lived):
        sent = (one.residual == 0) & (gradient(rank, 0, SHAPE) != 0)
        assert [int(piece.sum()) for piece in sent.split(50)] == [5, 5, 5, 5, 4]


@pytest.mark.parametrize("value", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["sparcml", "oktopk"])
def test_rounding_on_the_way_stays_in_residuals(name: str, value: str) -> None:
    lived = run(name, 3, 6, density=0.05, value=value)
    torch.testing.assert_close(*mass(lived), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("balance", [True, False])
def test_oktopk_is_algorithms_1_and_2_of_li_and_hoefler(size: int, balance: bool) -> None:
    k, steps, every = 12, 9, 4
    lived = run("oktopk", size, steps, density=0.05, threshold_every=every, balance=balance)
    local, reached = [0.0] * size, [0.0]

    def step_of(accs: list[Array], t: int) -> tuple[Array, list[Array]]:
        chosen = []
        for rank, acc in enumerate(accs):
            if t % every == 0:
                picked = top(acc, k)
                local[rank] = np.abs(acc[picked]).min()
            else:
                picked = np.flatnonzero(np.abs(acc) >= local[rank])
                count = len(picked)
                local[rank] *= 1.012 if count > 5 * k / 4 else 1 / 1.012 if count < 2 * k / 3 else 1.0
                if count > 4 * k / 3:
                    picked = top(acc, k)
                    local[rank] = np.abs(acc[picked]).min()
            chosen.append(picked)
        reduced = np.zeros(N)
        for acc, picked in zip(accs, chosen, strict=True):
            reduced[picked] += acc[picked]
        if t % every == 0:
            kept = top(reduced, k)
            reached[0] = np.abs(reduced[kept]).min()
        else:
            kept = np.flatnonzero(np.abs(reduced) >= reached[0])
            if len(kept) > 4 * k / 3:
                kept = top(reduced, k)
                reached[0] = np.abs(reduced[kept]).min()
            else:
                reached[0] *= 1.008 if len(kept) > 5 * k / 4 else 1 / 1.008 if len(kept) < 2 * k / 3 else 1.0
        total, residuals = np.zeros(N), [acc.copy() for acc in accs]
        total[kept] = reduced[kept]
        for residual, picked in zip(residuals, chosen, strict=True):
            residual[np.intersect1d(picked, kept)] = 0.0
        return total, residuals

    against(lived, step_of)


def test_oktopks_constants_are_those_of_its_code_for_vgg() -> None:
    known = sparsify.defaults("oktopk")
    assert (known["threshold_every"], known["regions_every"]) == (32, 64)
    assert (known["local_drift"], known["global_drift"]) == (1.012, 1.008)


def test_means_of_borders_do_not_overflow() -> None:
    """In the public code for VGG and the LSTM, n x P beyond 2^31 does."""
    n, chosen = 2**40, torch.arange(2**40 - 80, 2**40, 10)
    found = virtual.run(4, lambda comm: balanced_borders(chosen - comm.rank, n, comm))
    assert found[0] == ([0, n - 62, n - 42, n - 22, n], 3 * 3 * ANNOUNCED)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("exchange", [SplitReduceBalance(), SplitAllGather()], ids=["oktopk", "sparcml"])
def test_workers_that_selected_nothing_take_part(exchange: Any) -> None:
    """First nobody selects anything, then worker 1 only."""

    def body(comm: virtual.VirtualComm) -> list[list[float]]:
        state, totals = exchange.init(torch.zeros(50), Place(0, comm.rank, 0)), []
        for chosen in (0, 5 * (comm.rank == 1)):
            part = Sparse(torch.arange(chosen) * 10, torch.ones(chosen))
            total = torch.zeros(50)
            for one in exchange.exchange(part, 50, 5, comm, state).total:
                one.add_to(total)
            totals.append(total.nonzero().flatten().tolist())
        return totals

    assert virtual.run(4, body) == [[[], [0, 10, 20, 30, 40]]] * 4


def test_a_threshold_that_selects_too_many_is_taken_anew() -> None:
    lived = run("oktopk", 2, 8, make=lambda r, s, shape: gradient(r, s, shape) * 3.0**s, density=0.05)
    assert max(lived[0].selected) <= 16  # 4k/3


def test_overlaps_count_positions_between_borders() -> None:
    assert overlaps(3, 9, [0, 4, 8, 12]) == [1, 4, 1]
    assert overlaps(5, 5, [0, 4, 8]) == [0, 0]
    assert even_borders(7, 3) == [0, 2, 4, 7]
    assert even_borders(2, 4) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"name": "gtopk", "leak": "some"}, "no leak 'some'; there are: returned, published"),
        ({"name": "sparcml", "index": "delta16"}, "no index encoding 'delta16'; there are: int32, int64"),
        ({"name": "sparcml", "dense_at": 0.0}, "dense_at=0.0 is out of range"),
        ({"name": "sparcml", "bucket": 0}, "bucket=0 is out of range"),
        ({"name": "oktopk", "local_drift": 0.9}, "local_drift=0.9 is out of range"),
        ({"name": "oktopk", "threshold_every": 0}, "threshold_every=0 is out of range"),
    ],
)
def test_values_out_of_range_are_refused(choices: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sparsify.build(**choices)


# Bytes, of float32 gradients: words of 4.

ANNOUNCED = 8  # bytes of a length


def counted(name: str, size: int, make: Any, n: int, steps: int = 1, **choices: Any) -> int:
    lived = live(sparsify.build(name, **choices), size, steps, make, [(n,)], dtype=torch.float32)
    assert len({one.counted_bytes[-1] for one in lived}) >= 1
    return max(one.counted_bytes[-1] for one in lived)


def words(scheme: str, n: int, k: int, size: int) -> tuple[int, int]:
    """The published bandwidth terms in whole bytes."""
    least, most, _ = cost.published(scheme, n, k, size)
    return int(4 * least), int(4 * most)


@pytest.mark.parametrize("k", [16, 160])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("scheme", "name", "choices", "announced"),
    [
        ("dense", "dense", {}, 0),
        ("topka", "topk", {}, 0),
        ("gaussiank", "gaussiank", {}, 0),
        ("gtopk", "gtopk", {}, 0),
        ("randomk allgather", "randomk", {}, 0),
        ("randomk allreduce", "randomk", {"exchange": "allreduce", "shared": True}, 0),
        ("blockrandomk allgather", "blockrandomk", {}, 0),
        ("blockrandomk allreduce", "blockrandomk", {"exchange": "allreduce"}, 0),
        ("scalecom", "scalecom", {}, 0),
    ],
)
def test_counted_bytes_are_the_published_words(
    scheme: str, name: str, choices: dict[str, Any], announced: int, size: int, k: int
) -> None:
    n = 1600
    density = {} if name == "dense" else {"density": k / n}
    found = counted(name, size, gradient, n, **density, **choices)
    least, most = words(scheme, n, k, size)
    assert least == most == found - announced


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_sparcml_reaches_both_ends_of_its_published_words(size: int) -> None:
    """All workers choose alike and evenly: pairs. All choose differently: dense regions."""
    n, k = 3200, 160
    announced = 2 * ANNOUNCED * (size - 1)
    evenly = torch.zeros(n)
    evenly[:: n // k] = 1.0
    least, _ = words("topkdsa", n, k, size)
    alike = counted("sparcml", size, lambda r, s, shape: evenly, n, density=k / n)
    assert alike - announced == least
    k = n // 2
    own = [torch.arange(n).remainder(2).eq(rank % 2).float() for rank in range(size)]
    apart = counted("sparcml", size, lambda r, s, shape: own[r], n, density=0.5)
    assert apart - announced == words("topkdsa", n, k, size)[1]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_sparcml_is_dense_where_padded_pairs_would_be_longer(size: int) -> None:
    """All select the whole of one region: few in all, but everybody's message is as long as its owner's."""
    n = 3200
    k = n // size
    first = torch.arange(n).lt(k).float()
    found = counted("sparcml", size, lambda r, s, shape: first, n, density=k / n)
    away = 2 * k  # words of pairs; a worker that owns nothing of what it selected sends all of it
    assert found - 2 * ANNOUNCED * (size - 1) == 4 * (away + n * (size - 1) // size)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16])
def test_oktopks_exact_step_stays_within_the_published_words(size: int) -> None:
    """On random gradients. Beside the words: three announcements (proposed borders; lengths of pieces; how
    many are left), and the sums that the global threshold is taken from.
    """
    n, k = 3200, 160

    def body(comm: virtual.VirtualComm) -> tuple[int, list[int], torch.Tensor]:
        own = torch.Generator().manual_seed(comm.rank)
        acc, exchange = torch.randn(n, generator=own), SplitReduceBalance()
        chosen = acc.abs().topk(k).indices
        state = exchange.init(acc, Place(0, comm.rank, 0))
        delivery = exchange.exchange(Sparse(chosen, acc[chosen]), n, k, comm, state)
        everybodys = torch.cat(comm.all_gather(chosen)).unique()
        return delivery.sent_bytes, state.borders, everybodys

    for sent_bytes, borders, everybodys in virtual.run(size, body):
        owned = torch.diff(torch.searchsorted(everybodys, torch.tensor(borders)))
        sums = 4 * int(owned.max()) * (size - 1)
        announced = ANNOUNCED * (size - 1) * (size - 1) + 2 * ANNOUNCED * (size - 1)
        assert sent_bytes - sums - announced <= words("oktopk", n, k, size)[1]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_oktopk_reaches_the_published_upper_end_and_not_more(size: int) -> None:
    """Everybody's large values lie in region 0, at places of their own, and as many small ones in each of the
    other regions: worker 0 sends pairs to all owners, then most of what it owns, then its share.
    """
    n, k = 3200, 160
    share, length = k // size, n // size
    made = torch.zeros(size, n)
    for rank in range(size):
        made[rank, torch.arange(share) * size + rank] = 100.0
        for region in range(1, size):
            made[rank, region * length + torch.arange(share)] = 1.0
    found = counted("oktopk", size, lambda r, s, shape: made[r], n, steps=2, density=k / n)
    announced = 2 * ANNOUNCED * (size - 1)
    assert found - announced == words("oktopk", n, k, size)[1]


def test_oktopk_reaches_the_published_lower_end() -> None:
    """Two workers that select in their own halves only, a half of it large: nothing to send to owners."""
    n, k = 3200, 160
    made = torch.zeros(2, n)
    for rank in range(2):
        made[rank, rank * n // 2 + torch.arange(k)] = 1.0
        made[rank, rank * n // 2 + torch.arange(0, k, 2)] = 100.0
    found = counted("oktopk", 2, lambda r, s, shape: made[r], n, steps=2, density=k / n)
    assert found - 2 * ANNOUNCED == words("oktopk", n, k, 2)[0]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_oktopks_volume_settles_within_the_published_words(size: int) -> None:
    """On random gradients, whose residuals grow at first: a threshold is too low after a step already."""
    n, k, steps = 1600, 80, 30
    lived = live(sparsify.build("oktopk", density=k / n), size, steps, gradient, [(n,)], dtype=torch.float32)
    announced = 2 * ANNOUNCED * (size - 1)
    settled = [max(one.counted_bytes[step] for one in lived) - announced for step in range(15, steps)]
    assert statistics.median(settled) <= words("oktopk", n, k, size)[1]


def test_unknown_schemes_list_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no scheme 'ring'; there are: dense, topka, topkdsa, gtopk"):
        cost.published("ring", 1, 1, 1)


def test_the_cost_table_of_vgg16_on_8_workers() -> None:
    """n = 14,728,266, k = 14,728: megabytes as tabulated in the literature's forms."""
    n, k, size = 14_728_266, 14_728, 8
    table = {
        "dense": (103.1e6, 103.1e6),
        "topka": (824.8e3, 824.8e3),
        "topkdsa": (206e3, 51.7e6),
        "gtopk": (707e3, 707e3),
        "oktopk": (103e3, 309e3),
        "randomk allreduce": (103.1e3, 103.1e3),
        "blockrandomk allgather": (412.4e3, 412.4e3),
    }
    for scheme, (least, most) in table.items():
        found = cost.published(scheme, n, k, size)
        assert float(4 * found.least) == pytest.approx(least, rel=5e-3)
        assert float(4 * found.most) == pytest.approx(most, rel=5e-3)
