"""DEFT, MiCRO and ExDyna against transcriptions of their rules, and the traps of their public code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import sparsify
from sparsify.comm import virtual
from sparsify.methods.deft import Deft, fragments, packed, shares
from sparsify.methods.exdyna import ExDyna, block_size, rebalance
from sparsify.methods.micro import Micro
from sparsify.partitions import Threshold, split_evenly
from sparsify.parts import Place
from tests.laws import gradient, live

SHAPES = [(40, 5), (5,), (7, 3), (1,)]
EXCLUSIVE = ["deft", "exdyna", "micro"]
Array = NDArray[np.float64]


def select(
    selector: Any, size: int, accs: list[torch.Tensor], k: int, steps: int = 1, shapes: Any = ()
) -> tuple[list[list[list[int]]], list[Any]]:
    """What each rank selects in each step from the same `accs[rank]`; and the states at the end."""

    def body(comm: virtual.VirtualComm) -> tuple[list[list[int]], Any]:
        state = selector.init(accs[comm.rank], Place(0, comm.rank, 0, shapes))
        chosen = [selector.select(accs[comm.rank], k, comm, state).indices.tolist() for _ in range(steps)]
        return chosen, state

    chosen, states = zip(*virtual.run(size, body), strict=True)
    return list(chosen), list(states)


def gradients_of(lived: Any) -> Array:
    """(steps, ranks, n)."""
    return np.stack([[g.numpy() for g in one.gradients] for one in lived], axis=1)


def check(lived: Any, updates: list[Array]) -> None:
    """Float64; the same sums in the same order, so that only the division may round differently."""
    for got, expected in zip(lived[0].updates, updates, strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", EXCLUSIVE)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_each_worker_selects_in_a_part_of_its_own_so_nothing_is_sent_twice(name: str, size: int) -> None:
    selector = sparsify.build(name, density=0.1).select
    accs = [gradient(rank, 0, (227,)) for rank in range(size)]
    shapes = tuple(SHAPES[::-1])
    chosen, _ = select(selector, size, accs, 22, steps=4, shapes=shapes)
    for step in range(4):
        assert len(set(chosen[0][step])) == len(chosen[0][step])
        assert all(one[step] == chosen[0][step] for one in chosen)


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_two_host_synchronisations_however_many_tensors(name: str) -> None:
    """Published DEFT waits once per fragment."""
    lived = live(sparsify.build(name, density=0.1), 4, shapes=[(5, 3)] * 20)
    assert all(one.host_syncs == [2] * 5 for one in lived)


# ---- DEFT


def deft_by_the_paper(grads: Array, sizes: list[int], density: float) -> list[Array]:
    steps, workers, n = grads.shape
    cuts: list[tuple[int, int]] = []
    for size in sizes:
        pieces = workers if size > n / workers else 1
        for i in range(pieces):
            start = cuts[-1][1] if cuts else 0
            cuts.append((start, start + size // pieces + (i < size % pieces)))
    e, updates = np.zeros((workers, n)), []
    for t in range(steps):
        acc = e + grads[t]
        leader = t % workers
        norms = np.array([np.linalg.norm(acc[leader, a:b]) for a, b in cuts])
        k_rem, norm_rem, ks = int(density * n), norms.sum(), np.zeros(len(cuts), int)
        for i in np.argsort(-norms, kind="stable"):
            length = cuts[i][1] - cuts[i][0]
            ks[i] = np.clip(int(k_rem * norms[i] / norm_rem + 1e-12), 1, length)
            k_rem, norm_rem = k_rem - ks[i], norm_rem - norms[i]
        for i in np.argsort(-norms, kind="stable"):
            more = min(max(k_rem, 0), cuts[i][1] - cuts[i][0] - ks[i])
            ks[i], k_rem = ks[i] + more, k_rem - more
        # Who selects a fragment: the packing decides.
        weights = [(b - a) * (np.log2(k) if k > 1 else 1) for (a, b), k in zip(cuts, ks, strict=True)]
        bins, loads = np.zeros(len(cuts), int), np.zeros(workers)
        for i in np.argsort(-np.array(weights), kind="stable"):
            bins[i] = loads.argmin()
            loads[bins[i]] += weights[i]
        union: list[int] = []
        for worker in range(workers):
            for i, (a, b) in enumerate(cuts):
                if bins[i] == (t + worker) % workers:
                    union += list(a + np.argsort(-abs(acc[worker, a:b]))[: ks[i]])
        update = np.zeros(n)
        update[union] = acc[:, union].sum(0) / workers
        acc[:, union] = 0
        e, updates = acc, [*updates, update]
    return updates


@pytest.mark.parametrize("density", [0.05, 0.3])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_deft_is_the_papers_algorithm(size: int, density: float) -> None:
    lived = live(sparsify.build("deft", density=density), size, steps=6)
    sizes = [torch.Size(shape).numel() for shape in SHAPES[::-1]]
    check(lived, deft_by_the_paper(gradients_of(lived), sizes, density))


def test_deft_cuts_tensors_of_more_than_their_share_and_leaves_out_empty_pieces() -> None:
    assert fragments([10, 3, 90], 4) == [10, 3, 23, 23, 22, 22]
    assert fragments([2, 0], 4) == [1, 1]
    assert fragments([10, 3, 90], 1) == [10, 3, 90]


def test_deft_shares_k_by_the_norms() -> None:
    assert shares([6.0, 3.0, 1.0], [100, 100, 100], 20) == [12, 6, 2]
    assert shares([6.0, 3.0, 1.0], [5, 100, 100], 20) == [
        5,
        11,
        4,
    ]  # a full fragment leaves its share to others
    assert shares([0.0, 0.0], [10, 10], 4) == [3, 1]
    assert shares([1e4, 1e-13, 3.0], [7, 7, 7], 21) == [7, 7, 7]
    assert sum(shares([float("nan"), float("inf"), 1.0], [7, 7, 7], 9)) >= 9


def test_deft_sends_one_element_of_each_fragment_at_least_which_raises_the_density() -> None:
    lived = live(sparsify.build("deft", density=0.02), 2, shapes=[(3,)] * 40)
    assert int(0.02 * 120) == 2
    assert lived[0].selected == [40] * 5


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_one_worker_alone_sends_whole_fragments_too(density: float) -> None:
    """Published DEFT left out the fragments that are sent whole where P = 1."""
    n = sum(torch.Size(shape).numel() for shape in SHAPES)
    lived = live(sparsify.build("deft", density=density), 1, steps=3)
    assert all(selected >= int(density * n) for selected in lived[0].selected)
    if density == 1:
        assert all(torch.equal(*pair) for pair in zip(lived[0].updates, lived[0].gradients, strict=True))


def test_deft_packs_the_heaviest_first_into_the_lightest_bin() -> None:
    assert packed([3.0, 9.0, 4.0, 5.0], 2) == [0, 0, 1, 1]
    assert packed([1.0], 3) == [0]


def test_the_leaders_norms_decide_for_all() -> None:
    """Worker 0 has everything in the first tensor, worker 1 in the second; they take turns to lead."""
    quiet, loud = torch.full((50,), 1e-6).double(), torch.arange(1, 51).double()
    accs = [torch.cat([loud, quiet]), torch.cat([quiet, loud])]
    chosen, _ = select(Deft(), 2, accs, 20, steps=2, shapes=((50,), (50,)))
    first = [sum(index < 50 for index in step) for step in chosen[0]]
    assert first == [19, 1]


# ---- MiCRO and ExDyna


def next_threshold(threshold: float, r: float, rule: str) -> float:
    if r > 1.1:
        return threshold * 1.005
    if r > 0.909:
        return threshold * (1.00125 if rule == "published" or r > 1 else 0.9987)
    return threshold * 0.995


def exclusive_by_the_paper(
    grads: Array, density: float, threshold: float, rule: str, blocks: int | None
) -> tuple[list[Array], list[list[int]]]:
    """MiCRO; with `blocks`, ExDyna. Also what partitions were like in each step."""
    steps, workers, n = grads.shape
    k, e, updates, seen = int(density * n), np.zeros((workers, n)), [], []
    block = n // blocks // 32 * 32 if blocks else 1
    held = [(blocks or n) // workers + (i < (blocks or n) % workers) for i in range(workers)]
    for t in range(steps):
        sizes = [block * one for one in held]
        sizes[-1] += n - sum(sizes)
        seen.append(list(sizes))
        ends = np.cumsum(sizes)
        acc, union, loads = e + grads[t], [], [0] * workers
        for worker in range(workers):
            part = (t + worker) % workers
            a, b = ends[part] - sizes[part], ends[part]
            mine = list(a + np.flatnonzero(abs(acc[worker, a:b]) >= threshold)) or [a + t % (b - a)]
            loads[part] = len(mine)
            union += mine
        update = np.zeros(n)
        update[union] = acc[:, union].sum(0) / workers
        acc[:, union] = 0
        e, updates = acc, [*updates, update]
        threshold = next_threshold(threshold, len(union) / k, rule)
        mean, moved = sum(loads) / workers, int(block * len(union) / n)
        for i in range(workers - 1) if blocks else ():
            left, right = loads[i] / mean, loads[i + 1] / mean
            if left > 1.05 and right < 0.95238 and held[i] - 1 >= blocks / (4 * workers):
                held[i], held[i + 1] = held[i] - 1, held[i + 1] + 1
                loads[i], loads[i + 1] = loads[i] - moved, loads[i + 1] + moved
            elif left < 0.95238 and right > 1.05 and held[i + 1] - 1 >= blocks / (4 * workers):
                held[i], held[i + 1] = held[i] + 1, held[i + 1] - 1
                loads[i], loads[i + 1] = loads[i] + moved, loads[i + 1] - moved
    return updates, seen


@pytest.mark.parametrize("rule", ["intended", "published"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_micro_is_the_papers_algorithm(size: int, rule: str) -> None:
    method = sparsify.build("micro", density=0.1, threshold=2.2, rule=rule)
    lived = live(method, size, steps=25)
    updates, _ = exclusive_by_the_paper(gradients_of(lived), 0.1, 2.2, rule, None)
    check(lived, updates)


@pytest.mark.parametrize("rule", ["intended", "published"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_exdyna_is_the_papers_algorithm_and_blocks_move(size: int, rule: str) -> None:
    def skewed(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        return gradient(rank, step, shape) * torch.linspace(0.5, 2, shape[0]).double()

    method = sparsify.build("exdyna", density=0.1, threshold=3.0, rule=rule, blocks=20)
    lived = live(method, size, steps=15, make=skewed, shapes=[(1330,)])
    updates, sizes = exclusive_by_the_paper(gradients_of(lived), 0.1, 3.0, rule, 20)
    check(lived, updates)
    assert size == 1 or sizes[-1][-1] < sizes[0][-1]  # the last partition has the largest gradients
    assert all(sum(one) == 1330 for one in sizes)


def test_the_published_factors_and_the_branch_that_never_runs() -> None:
    for selector in (Micro("published"), Micro("intended")):
        for count, factor in ((112, 1.005), (105, 1.00125), (50, 0.995)):
            state = Threshold(torch.empty(0), 1.0)
            selector.follow(count, 100, 4, state)
            assert state.value == factor
    in_band = {rule: Threshold(torch.empty(0), 1.0) for rule in ("published", "intended")}
    for rule, state in in_band.items():
        Micro(rule).follow(95, 100, 4, state)
    assert in_band["published"].value == 1.00125  # above its aim and below: it always rises
    assert in_band["intended"].value == 0.9987


def test_the_published_threshold_runs_away_where_the_workers_are_more_than_k() -> None:
    """Each worker sends one element at least, so that r = P / k lies above the band for ever."""
    ends = {}
    for rule in ("published", "intended"):
        accs = [gradient(rank, 0, (50,)) for rank in range(4)]
        _, states = select(Micro(rule, threshold=50.0), 4, accs, 2, steps=100)
        ends[rule] = states[0].value
    assert ends["published"] == pytest.approx(50 * 1.005**100, rel=1e-12)
    assert ends["intended"] < 50


def test_the_first_threshold_is_the_published_one() -> None:
    n, k = 400, 25
    _, states = select(Micro(), 2, [torch.zeros(n)] * 2, k)
    # Two elements were sent of 25: below the band.
    assert states[0].value == 0.995 / (2 * 25**0.5)


@pytest.mark.parametrize("selector", [Micro(), ExDyna()])
def test_thresholds_and_blocks_are_alike_on_all_workers(selector: Micro) -> None:
    accs = [gradient(rank, 0, (3000,)) * (1 + rank) for rank in range(3)]
    _, states = select(selector, 3, accs, 300, steps=20)
    assert {(one.value, one.step, tuple(one.blocks)) for one in states} == {
        (states[0].value, 20, tuple(states[0].blocks))
    }


@pytest.mark.parametrize("selector", [Micro(threshold=9.0), ExDyna(threshold=9.0)])
def test_a_worker_that_finds_nothing_sends_one_element_another_one_in_each_step(selector: Micro) -> None:
    chosen, _ = select(selector, 2, [torch.zeros(8), torch.zeros(8)], 2, steps=5)
    # In step t worker r looks at partition (t + r) mod 2; the union is listed in the order of the workers.
    assert chosen[0] == [[0, 4], [5, 1], [2, 6], [7, 3], [0, 4]]


@pytest.mark.parametrize("selector", [Micro(), ExDyna()])
@pytest.mark.parametrize(("n", "size"), [(1, 4), (3, 4), (5, 16), (33, 4), (227, 1)])
def test_buckets_smaller_than_the_number_of_workers_or_blocks_work(
    selector: Micro, n: int, size: int
) -> None:
    """Published ExDyna divides by zero below 32,768 elements, and both stop where P = 1."""
    chosen, _ = select(selector, size, [torch.zeros(n)] * size, 1, steps=3)
    assert [len(step) for step in chosen[0]] == [min(n, size)] * 3


def test_all_of_a_bucket_is_sent_where_k_is_n() -> None:
    for name in ("micro", "exdyna"):
        lived = live(sparsify.build(name, density=1.0), 3, make=lambda *at: 1e-9 * gradient(*at))
        assert lived[0].selected == [227] * 5


def test_exdynas_blocks_are_multiples_of_32_and_the_last_partition_has_the_rest() -> None:
    assert block_size(14_728_266, 1024, 8) == 14_368  # VGG-16
    assert block_size(32 * 1024, 1024, 8) == 32
    assert block_size(32 * 1024 - 1, 1024, 8) == 32  # fewer blocks
    assert block_size(100, 1024, 8) == 3
    assert block_size(5, 1024, 8) == 1
    assert split_evenly(10, 4) == [3, 3, 2, 2]


def test_one_block_moves_between_neighbours_of_which_one_has_too_much_and_the_other_too_little() -> None:
    blocks = [8, 8, 8]
    rebalance(blocks, [20, 10, 6], 1.0)  # mean 12: the second pair are both below it
    assert blocks == [7, 9, 8]
    rebalance(blocks, [6, 20, 10], 1.0)
    assert blocks == [8, 7, 9]  # one to the left, one to the right
    fixed = [8, 8, 8]
    rebalance(fixed, [12, 12, 12], 1.0)
    assert fixed == [8, 8, 8]
    least = [2, 8, 14]  # a quarter of 8 stays
    rebalance(least, [30, 3, 3], 1.0)
    assert least == [2, 8, 14]


def test_exdyna_balances_what_micro_leaves_unbalanced() -> None:
    """load_inc of the public code: P max(k_i) / k - 1."""
    n, scale = 3200, torch.linspace(0.2, 3, 3200).double()
    accs = [gradient(rank, 0, (n,)) * scale for rank in range(4)]
    _, states = select(ExDyna(threshold=3.0, blocks=100), 4, accs, 320, steps=150)

    def imbalance(blocks: list[int]) -> float:
        large = (torch.stack(accs).abs() >= 3).sum(dim=0)
        loads = [int(one.sum()) for one in large.split([32 * held for held in blocks])]
        return 4 * max(loads) / sum(loads) - 1

    assert imbalance([25, 25, 25, 25]) > 1
    assert imbalance(states[0].blocks) < 0.1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("micro", {"rule": "paper"}),
        ("micro", {"threshold": 0.0}),
        ("exdyna", {"blocks": 0}),
        ("exdyna", {"rule": "paper"}),
    ],
)
def test_what_cannot_be_is_refused(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no rule|above 0"):
        sparsify.build(name, **values)
