"""DGC and AdaComp against transcriptions of their algorithms, and the traps of their public code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import sparsify
from sparsify import cost, host
from sparsify.aggregate import num_selected
from sparsify.comm import virtual
from sparsify.methods.adacomp import AdaComp, Bins, num_codes, read, write
from sparsify.methods.dgc import DgcSample
from sparsify.parts import DENSE_AT_DENSITY_1, NOTHING_IS_LOST, Place
from tests.laws import gradient, live, mass

Array = NDArray[np.float64]
DGC_SHAPES = [(40, 5), (5,), (7, 3), (1,)]
BIN_SHAPES = [(8, 4, 3, 3), (7,), (30, 37)]  # 288 = 5 x 50 + 38; 7; 1110 = 2 x 500 + 110


def tensors_of(shapes: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], slice]]:
    """Each tensor's place in the flat gradient, where the last tensor comes first."""
    found, start = [], 0
    for shape in shapes[::-1]:
        found.append((shape, slice(start, start + int(np.prod(shape)))))
        start = found[-1][1].stop
    return found


def gradients_of(lived: Any) -> Array:
    """(steps, ranks, n)."""
    return np.stack([[g.numpy() for g in one.gradients] for one in lived], axis=1)


# ---- DGC


def dgc_by_the_paper(grads: Array, density: float, nesterov: bool, masking: bool, m: float) -> list[Array]:
    """Algorithm 4 with exact thresholds; vectors are averaged, with ordinary momentum."""
    steps, workers, n = grads.shape
    u, v, dense_u, updates = np.zeros((workers, n)), np.zeros((workers, n)), np.zeros(n), []
    for t in range(steps):
        update = np.zeros(n)
        for shape, at in tensors_of(DGC_SHAPES):
            if len(shape) == 1:
                mean = grads[t, :, at].mean(0)
                dense_u[at] = m * (dense_u[at] + mean) if nesterov else m * dense_u[at] + mean
                update[at] = dense_u[at] + mean if nesterov else dense_u[at]
                continue
            for worker in range(workers):
                g, uw, vw = grads[t, worker, at], u[worker, at], v[worker, at]
                uw[:] = m * (uw + g) if nesterov else m * uw + g
                vw += uw + g if nesterov else uw
                sent = np.argsort(-abs(vw))[: num_selected(len(g), density)]
                update[at][sent] += vw[sent] / workers
                vw[sent] = 0
                if masking:
                    uw[sent] = 0
        updates.append(update)
    return updates


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_is_the_papers_algorithm(nesterov: bool, masking: bool) -> None:
    method = sparsify.build("dgc", density=0.05, sample=1.0, nesterov=nesterov, masking=masking)
    lived = live(method, 3, steps=8, shapes=DGC_SHAPES)
    updates = dgc_by_the_paper(gradients_of(lived), 0.05, nesterov, masking, 0.9)
    for got, expected in zip(lived[0].updates, updates, strict=True):
        # Float64; sums of 3 and products in another order.
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-13)


def choose(acc: torch.Tensor, k: int, selector: DgcSample | None = None, steps: int = 1) -> list[Any]:
    """(indices, host synchronisations) of each step, of one worker."""

    def body(comm: virtual.VirtualComm) -> list[Any]:
        part = selector or DgcSample()
        state, found = part.init(acc, Place(0, 0, 0)), []
        for _ in range(steps):
            before = host.waits()
            found.append((part.select(acc, k, comm, state).indices, host.waits() - before))
        return found

    return virtual.run(1, body)[0]


@pytest.mark.parametrize("k", [100, 1000, 25_000])
@pytest.mark.parametrize("power", [1, 3])
def test_a_sampled_threshold_gives_the_largest_and_about_k_of_them(k: int, power: int) -> None:
    """Published: between k and 1.3 k the first k by position are sent, and not the largest."""
    acc = gradient(0, 0, (100_001,)).float() ** power
    for chosen, waits in choose(acc, k, steps=10):
        assert 0.8 * k <= len(chosen) <= k
        assert set(chosen.tolist()) == set(acc.abs().topk(len(chosen)).indices.tolist())
        assert 1 <= waits <= 11


def test_what_is_cut_is_cut_by_magnitude() -> None:
    """1100 candidates for k = 1000, the smallest of which come first."""
    acc = torch.full((100_000,), 1e-6)
    acc[:100] = 1.0
    acc[-1000:] = 2.0
    for chosen, _ in choose(acc, 1000, DgcSample(sample=0.5), steps=5):
        assert chosen.min() >= 99_000
        assert len(chosen) == 1000


def test_the_threshold_is_lowered_until_enough_reach_it() -> None:
    acc = gradient(0, 0, (20_000,))
    few = [len(chosen) for chosen, _ in choose(acc, 20, DgcSample(adaptations=0), steps=50)]
    enough = [len(chosen) for chosen, _ in choose(acc, 20, steps=50)]
    assert min(few) < 0.8 * 20 <= min(enough)
    # A gap that ten factors of 0.8 do not bridge ends the search, and what was found is sent.
    gap = torch.full((20_000,), 1e-9)
    gap[:3] = torch.tensor([1.0, 2.0, 3.0])
    assert all(waits <= 11 and len(chosen) <= 20 for chosen, waits in choose(gap, 20, steps=200))


def test_small_tensors_get_an_exact_top_k() -> None:
    """Those of 2 / density elements at most, of which the sample would be all."""
    acc = gradient(0, 0, (2000,))
    for chosen, waits in choose(acc, 1):
        assert chosen.tolist() == [int(acc.abs().argmax())]
        assert waits == 0


def test_zeros_are_no_candidates() -> None:
    acc = torch.zeros(100_000)
    assert [(len(chosen), waits) for chosen, waits in choose(acc, 100)] == [(0, 1)]
    acc[77_777] = -1e-12
    assert choose(acc, 100)[0][0].tolist() == [77_777]


def test_dgcs_defaults_are_the_published_ones() -> None:
    expected = {"density": 0.001, "scope": "layer", "momentum": 0.9, "sample": 0.01, "adaptations": 10}
    assert expected.items() <= sparsify.defaults("dgc").items()
    method = sparsify.build("dgc", density_warmup=[0.25, 0.0625, 0.015625, 0.004, 0.001])
    assert [method.density_at(epoch) for epoch in range(6)] == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    assert method.momentum_inside
    assert not sparsify.build("dgc", momentum=0.0).momentum_inside


@pytest.mark.parametrize("dense_vectors", [True, False])
@pytest.mark.parametrize("masking", [True, False])
def test_without_momentum_nothing_is_lost(masking: bool, dense_vectors: bool) -> None:
    method = sparsify.build(
        "dgc", density=0.05, momentum=0.0, masking=masking, dense_vectors=dense_vectors, sample=0.5
    )
    assert NOTHING_IS_LOST not in method.broken_laws()
    seen, accounted = mass(live(method, 4, steps=12))
    torch.testing.assert_close(accounted, seen, rtol=1e-10, atol=1e-10)


def test_nesterovs_form_is_excused_from_a_dense_first_step_and_needs_it() -> None:
    method = sparsify.build("dgc", density=1.0, nesterov=True)
    assert DENSE_AT_DENSITY_1 in method.broken_laws()
    lived = live(method, 2, steps=1)
    mean = torch.stack([one.gradients[0] for one in lived]).mean(dim=0)
    torch.testing.assert_close(lived[0].updates[0], 1.9 * mean)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_vectors_are_averaged_whole_with_ordinary_momentum(dtype: torch.dtype) -> None:
    lived = live(sparsify.build("dgc", density=0.01), 2, steps=6, shapes=[(500,)], dtype=dtype)
    assert lived[0].selected == [500] * 6
    assert lived[0].counted_bytes == [cost.all_reduce(500 * dtype.itemsize, 2).sent_bytes] * 6
    u = torch.zeros(500, dtype=torch.float64)
    for step, update in enumerate(lived[0].updates):
        u = 0.9 * u + torch.stack([one.gradients[step] for one in lived]).double().mean(dim=0)
        # bfloat16: the mean is rounded once and the result once more, to 8 bits; the momentum is not.
        close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2**-6, "atol": 2**-6}
        torch.testing.assert_close(update.double(), u, **close)


def test_vectors_are_sparsified_like_the_rest_on_request() -> None:
    method = sparsify.build("dgc", density=0.01, dense_vectors=False)
    assert live(method, 2, shapes=[(500,)])[0].selected == [5] * 5


def test_clipping_is_local_and_by_the_square_root_of_the_workers() -> None:
    method = sparsify.build("dgc", clip_norm=1.0)

    def body(comm: virtual.VirtualComm) -> float:
        grad = gradient(comm.rank, 0, (100,))
        method.prepare(grad, comm)
        return float(grad.norm())

    assert virtual.run(4, body) == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("values", [{"sample": 0.0}, {"sample": 2.0}, {"adaptations": -1}, {"momentum": 1.0}])
def test_what_cannot_be_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        sparsify.build("dgc", **values)


# ---- AdaComp


def adacomp_by_the_paper(grads: Array, conv_bin: int, other_bin: int) -> list[Array]:
    steps, workers, n = grads.shape
    e, updates = np.zeros((workers, n)), []
    for t in range(steps):
        update = np.zeros(n)
        for shape, at in tensors_of(BIN_SHAPES):
            length = conv_bin if len(shape) > 2 else other_bin
            size = at.stop - at.start
            for worker in range(workers):
                g = grads[t, worker, at]
                G = e[worker, at] + g
                H = G + g
                bins = [slice(a, min(a + length, size)) for a in range(0, size, length)]
                maxima = [abs(G[one]).max() for one in bins]
                scale = np.float64(np.float32(np.mean(maxima)))
                Q = np.zeros(size)
                for one, most in zip(bins, maxima, strict=True):
                    sent = (abs(H[one]) >= most) & (most > 0)
                    Q[one][sent] = np.where(G[one][sent] < 0, -scale, scale)
                e[worker, at] = G - Q
                update[at] += Q / workers
        updates.append(update)
    return updates


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("bins", [(50, 500), (9, 64), (63, 17)])
def test_adacomp_is_the_papers_algorithm(bins: tuple[int, int], scope: str) -> None:
    method = sparsify.build("adacomp", scope=scope, conv_bin=bins[0], other_bin=bins[1])
    lived = live(method, 3, steps=6, shapes=BIN_SHAPES)
    for got, expected in zip(lived[0].updates, adacomp_by_the_paper(gradients_of(lived), *bins), strict=True):
        # Float64; divided by 3 before the sum or after.
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-13, atol=1e-15)


def test_adacomps_defaults_are_the_published_ones() -> None:
    assert sparsify.defaults("adacomp") == {"scope": "layer", "conv_bin": 50, "other_bin": 500}


def encoded(acc: torch.Tensor, shapes: tuple[tuple[int, ...], ...], **bins: int) -> tuple[Any, Bins]:
    """The message of a first step, and the state."""
    method = AdaComp(**bins)
    state = method.init(acc, Place(0, 0, 0, shapes))
    return write(method.select(acc, acc, state), acc, state), state


@pytest.mark.parametrize(("shape", "width"), [((8, 4, 3, 3), 1), ((288,), 2), ((63,), 1), ((64,), 2)])
def test_a_code_takes_one_byte_where_the_bin_is_small_enough(shape: tuple[int, ...], width: int) -> None:
    acc = gradient(0, 0, shape).flatten()
    message, state = encoded(acc, (shape,))
    part = read(message, acc.dtype, state)
    assert len(message) == 4 + width * len(part.indices)
    # In the first step G = g and H = 2 g: what exceeds half of its bin's maximum is sent.
    bins = acc.abs().split(50 if len(shape) > 2 else 500)
    large = torch.cat([2 * one >= one.max() for one in bins]).nonzero().squeeze(1)
    assert torch.equal(part.indices, large)
    scale = torch.stack([one.max() for one in bins]).mean().float().double()
    assert torch.equal(part.values, acc[large].sign() * scale)


def test_of_a_bin_of_zeros_nothing_is_sent() -> None:
    """0 >= 0 holds for all of it."""
    acc = torch.zeros(200).double()
    acc[70] = -8.0
    message, state = encoded(acc, ((2, 2, 50),))
    part = read(message, acc.dtype, state)
    assert num_codes(message, state) == 4  # a mark for each empty bin
    assert part.indices.tolist() == [0, 70, 100, 150]
    assert part.values.tolist() == [0, -2.0, 0, 0]  # the mean of the four maxima
    lived = live(sparsify.build("adacomp"), 2, make=lambda rank, step, shape: torch.zeros(shape).double())
    assert not any(update.any() for update in lived[0].updates)


def test_a_bin_is_empty_too_where_its_largest_is_about_to_shrink() -> None:
    method, grad = AdaComp(), torch.tensor([-4.0, 0.1, 0.2]).double()
    state = method.init(grad, Place(0, 0, 0, ((3,),)))
    state.residual.copy_(torch.tensor([14.0, 0.0, 0.0]))
    acc = state.residual + grad  # 10; |H| = 6
    part = read(write(method.select(acc, grad, state), acc, state), acc.dtype, state)
    assert part.indices.tolist() == [0]
    assert part.values.tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_host_synchronisations_however_many_tensors(dtype: torch.dtype) -> None:
    lived = live(sparsify.build("adacomp", scope="global"), 3, shapes=BIN_SHAPES * 5, dtype=dtype)
    assert all(one.host_syncs == [2] * 5 for one in lived)


@pytest.mark.parametrize("values", [{"conv_bin": 0}, {"other_bin": 2**14 - 1 + 1}])
def test_bins_that_offsets_cannot_reach_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        sparsify.build("adacomp", **values)
