"""QSGD, TernGrad, signSGD, EF-signSGD and PowerSGD against their papers' algorithms in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsify
from sparsify.comm import virtual
from sparsify.parts import Place
from sparsify.quantise import Message, in_blocks
from tests.laws import Lived, live, mass

CPU = torch.device("cpu")
SEED = 3  # of tests.laws.live
SHAPES = [(40, 5), (5,), (7, 3), (1,)]


def grads(lived: list[Lived], step: int) -> list[np.ndarray]:
    return [one.gradients[step].numpy() for one in lived]


def given(*values: list[float]):
    """Every worker's gradient, the same in all steps."""
    return lambda rank, step, shape: torch.tensor(values[rank % len(values)]).double().view(shape)


def uniform(rank: int, n: int, steps: int) -> list[np.ndarray]:
    """What rank `rank` draws for its first bucket."""
    own = Place(SEED, rank, 0).generator(CPU)
    return [torch.empty(n, dtype=torch.float64).uniform_(generator=own).numpy() for _ in range(steps)]


def stochastic_level(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    """l = floor |x|, or l + 1 with probability |x| - l; then the sign. How u is used is ours to say."""
    level = np.floor(np.abs(x))
    p = np.abs(x) - level
    up = np.where(x >= 0, u >= 1 - p, u < p)
    return np.sign(x) * (level + up)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 3, 8, 227])
def test_codes_survive_packing_and_take_their_bits(n: int, bits: int) -> None:
    message = Message.like(torch.empty(n), block=100, bits=bits)
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


# QSGD


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize(("bits", "levels"), [(2, 1), (4, 7), (8, 127)])
def test_qsgd_is_the_papers_quantisation(bits: int, levels: int, norm: str) -> None:
    """Alistarh et al. 2017, section 3: Q_s(v_i) = |v| sgn(v_i) xi_i, for every bucket of its own."""
    block, steps = 64, 4  # 227 elements: three blocks and a rest
    lived = live(sparsify.build("qsgd", bits=bits, block=block, norm=norm), 3, steps)
    draws = [uniform(rank, 227, steps) for rank in range(3)]
    for step in range(steps):
        total = np.zeros(227)
        for rank, g in enumerate(grads(lived, step)):
            for start in range(0, 227, block):
                v, u = g[start : start + block], draws[rank][step][start : start + block]
                size = np.float32(np.abs(v).max() if norm == "max" else np.sqrt((v**2).sum()))
                total[start : start + block] += size * stochastic_level(levels * v / size, u) / levels
        # The same operations in another order, in float64
        np.testing.assert_allclose(lived[0].updates[step], total / 3, rtol=1e-12, atol=1e-12)


def test_qsgd_has_the_published_defaults() -> None:
    assert sparsify.defaults("qsgd") == {
        "scope": "global", "bits": 4, "block": 512, "norm": "l2", "feedback": "none",
    }  # fmt: skip
    lived = live(sparsify.build("qsgd"), 2, 1, shapes=[(2000,)])
    assert lived[0].wire_bytes == [2000 // 2 + 4 * 4]  # four blocks


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


def test_qsgd_with_feedback_is_stable_only_for_enough_levels() -> None:
    """Its error is at most min(n / s^2, sqrt(n) / s) of what it rounds: with s = 7 and 512 elements, 3.2."""

    def owed(**hyperparameters: object) -> float:
        method = sparsify.build("qsgd", feedback="gradient", **hyperparameters)
        lived = live(method, 1, 40, shapes=[(64, 64)])[0]
        return float(lived.residual.norm() / lived.gradients[0].norm())

    assert owed() > 50
    assert owed(block=48) < 1
    assert owed(norm="max") < 1
    assert owed(bits=8) < 1


# TernGrad


@pytest.mark.parametrize("sigma", ["about_zero", "about_mean"])
def test_terngrad_is_the_papers_quantisation(sigma: str) -> None:
    """Wen et al. 2017, eqs. 1 to 3, with gradient clipping, eq. 9: c = 2.5."""
    steps = 4
    lived = live(sparsify.build("terngrad", sigma=sigma, scope="global"), 3, steps)
    draws = [uniform(rank, 227, steps) for rank in range(3)]
    for step in range(steps):
        total = np.zeros(227)
        for rank, g in enumerate(grads(lived, step)):
            deviation = g.std() if sigma == "about_mean" else np.sqrt((g**2).mean())
            clipped = np.clip(g, -2.5 * deviation, 2.5 * deviation)
            s = np.float32(np.abs(clipped).max())
            # Clipped once more to s as it travels: rounding it to fp32 may have made it smaller.
            total += s * stochastic_level(np.clip(clipped / s, -1, 1), draws[rank][step])
        np.testing.assert_allclose(lived[0].updates[step], total / 3, rtol=1e-12, atol=1e-12)


def test_terngrad_sends_two_bits_for_each_element() -> None:
    """GRACE's sends 8."""
    assert sparsify.defaults("terngrad")["clip"] == 2.5
    assert live(sparsify.build("terngrad"), 2, 1, shapes=[(1001,)])[0].wire_bytes == [-(-1001 // 4) + 4]


def test_terngrad_as_published_erases_what_has_no_deviation() -> None:
    """A tensor of one element, or of equal ones; about zero they have one."""
    for shape, values in (((1,), [3.0]), ((4,), [3.0] * 4)):
        published, intended = (
            live(sparsify.build("terngrad", sigma=sigma), 2, 3, given(values), [shape])[0].updates
            for sigma in ("about_mean", "about_zero")
        )
        assert not torch.stack(published).any()
        assert (torch.stack(intended) == 3).all()


def test_terngrad_clips_to_so_many_sigma() -> None:
    values = [100.0] + [0.0] * 99  # sigma = 10
    for clip, sent in ((2.5, 25.0), (float("inf"), 100.0)):
        update = live(sparsify.build("terngrad", clip=clip), 1, 1, given(values), [(100,)])[0].updates[0]
        assert update.tolist() == [sent] + [0.0] * 99


# signSGD


def test_signsgd_is_the_majority_vote() -> None:
    """Bernstein et al. 2018, algorithm 3: sign of the sum over workers of sign(g)."""
    for size in (1, 3, 4):
        lived = live(sparsify.build("signsgd"), size, 3)
        for step in range(3):
            votes = sum(np.sign(g) for g in grads(lived, step))
            assert np.array_equal(lived[0].updates[step].numpy(), np.sign(votes))


def test_the_sign_of_zero_is_one_and_a_tie_moves_nothing() -> None:
    lived = live(
        sparsify.build("signsgd"), 2, 1, given([0.0, -0.0, -2.0, 5.0], [0.0, 0.0, 1.0, 1e-30]), [(4,)]
    )
    assert lived[0].updates[0].tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(("name", "scale"), [("signsgd", 0), ("efsignsgd", 4)])
def test_a_sign_takes_one_bit(name: str, scale: int) -> None:
    assert live(sparsify.build(name), 2, 1, shapes=[(1001,)])[0].wire_bytes == [126 + scale]


# EF-signSGD


@pytest.mark.parametrize("feedback", ["learning_rate", "gradient"])
def test_efsignsgd_is_algorithm_1(feedback: str) -> None:
    """Karimireddy et al. 2019, algorithm 1, on three workers whose messages are averaged."""
    lr, steps = 0.1, 5
    lived = live(sparsify.build("efsignsgd", scope="global", feedback=feedback), 3, steps, lr=lr)
    e = [np.zeros(227) for _ in range(3)]
    for step in range(steps):
        deltas = []
        for rank, g in enumerate(grads(lived, step)):
            p = lr * g + e[rank]
            deltas.append(np.abs(p).sum() / p.size * np.sign(p))
            e[rank] = p - deltas[rank]
        # Scales travel as fp32
        np.testing.assert_allclose(lr * lived[0].updates[step], sum(deltas) / 3, rtol=1e-5, atol=1e-8)
    for rank, one in enumerate(lived):
        np.testing.assert_allclose(lr * one.residual, e[rank], rtol=1e-4, atol=1e-7)


def test_efsignsgd_loses_nothing_to_the_rounding_of_its_scale() -> None:
    """The residual is what the others did not get, to the last bit of float64, though scales are fp32."""
    seen, accounted = mass(live(sparsify.build("efsignsgd"), 3, 20))
    torch.testing.assert_close(accounted, seen, rtol=0, atol=1e-12)


# PowerSGD


def gram_schmidt(p: np.ndarray) -> np.ndarray:
    p = p.copy()
    for i in range(p.shape[1]):
        p[:, i] /= np.linalg.norm(p[:, i])
        for j in range(i + 1, p.shape[1]):
            p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
    return p


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_algorithms_1_and_2(rank: int) -> None:
    """Vogels et al. 2019, with their Gram-Schmidt: one matrix that is compressed, and a bias that is not."""
    m, n, size, steps = 30, 20, 3, 5
    lived = live(sparsify.build("powersgd", rank=rank), size, steps, shapes=[(m, n), (9,)])
    own = Place(SEED, 0, 0).shared.generator(CPU)
    q = torch.randn(n * rank, generator=own, dtype=torch.float64).view(n, rank).numpy()
    e = [np.zeros((m, n)) for _ in range(size)]
    for step in range(steps):
        flat = grads(lived, step)  # the bias comes first: buckets run from the last parameter to the first
        delta = [g[9:].reshape(m, n) + e[w] for w, g in enumerate(flat)]
        p = sum(delta_w @ q for delta_w in delta) / size
        p = gram_schmidt(p)
        q = sum(delta_w.T @ p for delta_w in delta) / size
        decompressed = p @ q.T
        e = [delta_w - decompressed for delta_w in delta]
        update = lived[0].updates[step].numpy()
        # Householder QR and Gram-Schmidt give the same columns up to sign, which cancels in P Q^T
        np.testing.assert_allclose(update[9:].reshape(m, n), decompressed, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(update[:9], sum(g[:9] for g in flat) / size, rtol=1e-12)
    for w, one in enumerate(lived):
        np.testing.assert_allclose(one.residual[9:].view(m, n), e[w], rtol=1e-9, atol=1e-9)
        assert not one.residual[:9].any()


def test_powersgd_sends_two_allreduces_for_a_bucket() -> None:
    """Of all P with what is not compressed, and of all Q; by a ring on two workers each sends what it has."""
    lived = live(sparsify.build("powersgd", rank=2), 2, 1, shapes=[(30, 20), (4, 5, 2, 3), (9,), (2, 2)])
    first, second = 2 * 30 + (4 * 30) + 9 + 4, 2 * 20  # 2 (4 + 30) 2 >= 120: not compressed by more than 2
    assert lived[0].wire_bytes == lived[0].counted_bytes == [8 * (first + second)]
    eager = live(sparsify.build("powersgd", min_compression_rate=1.0), 2, 1, shapes=[(4, 5, 2, 3)])
    assert eager[0].wire_bytes == [8 * 2 * (4 + 30)]


def test_powersgd_gives_a_matrix_of_low_rank_back() -> None:
    left, right = (
        torch.randn(s, generator=torch.Generator().manual_seed(0)).double() for s in ((30, 2), (2, 20))
    )
    lived = live(sparsify.build("powersgd", rank=2), 3, 1, lambda *where: left @ right, [(30, 20)])
    torch.testing.assert_close(lived[0].updates[0].view(30, 20), left @ right, rtol=1e-10, atol=1e-10)


def test_warm_start_converges_to_the_best_approximation() -> None:
    own = torch.Generator().manual_seed(1)
    u, _, vt = torch.linalg.svd(
        torch.randn((30, 20), generator=own, dtype=torch.float64), full_matrices=False
    )
    s = 0.5 ** torch.arange(20).double()
    matrix = (u * s) @ vt
    method = sparsify.build("powersgd", rank=2, feedback="none")
    lived = live(method, 2, 30, lambda *where: matrix, [(30, 20)])
    best = (u[:, :2] * s[:2]) @ vt[:2]
    errors = [float((update.view(30, 20) - best).norm()) for update in lived[0].updates]
    assert errors[0] > 0.1  # a random Q is not enough
    assert errors[-1] < 1e-9


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_powersgd_recovers_from_zeros(scope: str) -> None:
    """Gram-Schmidt would divide 0 by 0, or with an epsilon leave Q at 0 for ever."""
    method = sparsify.build("powersgd", scope=scope)

    def make(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        own = torch.Generator().manual_seed(rank)
        return torch.randn(shape, generator=own, dtype=torch.float64) * (step > 2)

    lived = live(method, 3, 30, make, [(30, 20), (9,)])
    assert all(torch.isfinite(update).all() for update in lived[0].updates)
    assert not torch.stack(lived[0].updates[:3]).any()
    seen, accounted = mass(lived)
    torch.testing.assert_close(accounted, seen, rtol=1e-10, atol=1e-10)
    applied = 3 * torch.stack(lived[0].updates).sum(dim=0)
    assert (applied - seen).norm() < 0.5 * seen.norm()  # most of 27 steps has arrived


def test_powersgd_starts_alike_on_all_workers_and_differs_between_buckets() -> None:
    method = sparsify.build("powersgd")
    like = torch.zeros(600)
    places = [Place(SEED, rank, bucket, ((30, 20),)) for rank, bucket in ((0, 0), (1, 0), (0, 1))]
    first, same, other = (method.init(like, place).second for place in places)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_powersgd_multiplies_narrow_gradients_in_single_precision() -> None:
    lived = live(sparsify.build("powersgd"), 3, 3, shapes=[(30, 20)], dtype=torch.bfloat16)
    assert lived[0].residual.dtype == torch.float32
    # P and Q of rank 2 in 4 bytes, by rings of three workers: 2 (P - 1) / P of them
    assert lived[0].wire_bytes == [sum(2 * (4 * 2 * rows) * 2 // 3 for rows in (30, 20))] * 3


# What all refuse, and what none needs


@pytest.mark.parametrize(
    ("name", "given_", "sentence"),
    [
        ("qsgd", {"bits": 3}, "no number of bits '3'; there are: 2, 4, 8"),
        ("qsgd", {"block": 0}, "block=0 is out of range"),
        ("qsgd", {"norm": "l1"}, "no norm 'l1'; there are: l2, max"),
        ("qsgd", {"feedback": "literal"}, "no feedback 'literal'; there are: none, gradient, learning_rate"),
        ("terngrad", {"clip": 0.0}, "clip=0.0 is out of range"),
        ("terngrad", {"sigma": "mean"}, "no sigma 'mean'; there are: about_zero, about_mean"),
        ("efsignsgd", {"feedback": "none"}, "no feedback 'none'; there are: learning_rate, gradient"),
        ("powersgd", {"rank": 0}, "rank=0 is out of range"),
        ("powersgd", {"min_compression_rate": 0.5}, "would send more than the gradient itself"),
        ("powersgd", {"feedback": "literal"}, "no feedback 'literal'"),
        ("signsgd", {"scope": "block"}, "no scope 'block'"),
    ],
)
def test_what_cannot_be_is_refused(name: str, given_: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sparsify.build(name, **given_)


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "signsgd", "efsignsgd", "powersgd"])
def test_the_host_never_waits(name: str) -> None:
    assert all(one.host_syncs == [0, 0] for one in live(sparsify.build(name), 2, 2))


def test_workers_round_at_random_each_for_itself() -> None:
    def body(comm: virtual.VirtualComm) -> torch.Tensor:
        method = sparsify.build("qsgd")
        state = method.quantise.init(torch.ones(600), Place(0, comm.rank, 0))
        return method.quantise.encode(torch.ones(600), state)

    first, second = virtual.run(2, body)
    assert not torch.equal(first, second)
