"""The Triton kernels against a stable sort. Without a GPU they run in Triton's interpreter: in a process of
their own, since Triton must know that before it is imported, and torch imports it at odd moments. By hand:
TRITON_INTERPRET=1 pytest tests/sparsify/kernels/test_gpu_kernels.py
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsify import kernels
from sparsify.core import host_sync
from sparsify.kernels import Eager
from sparsify.types import SearchStats, Sparse
from tests.conftest import python, there
from tests.sparsify.kernels.interpreter import patching_once

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = {"tile": 256, "sample": 512}  # the interpreter is slow
N, K = 1500, 30  # N is no multiple of a tile
# The interpreter's numpy warns of NaN and overflow, and that Triton 3.6 takes arrays of one for numbers.
QUIET = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array with ndim:DeprecationWarning"
)

if CUDA or INTERPRETED:  # else the import would settle how Triton works in this process
    from sparsify.kernels import gpu


@pytest.fixture(scope="module", autouse=True)
def less_slow() -> Iterator[None]:
    with patching_once() if INTERPRETED else nullcontext():
        yield


def own(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=own(seed))


def laplace(n: int) -> Tensor:
    uniform = torch.rand(n, generator=own(1)) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999))


def sparse(n: int, nonzeros: int) -> Tensor:
    return torch.zeros(n).scatter_(0, torch.randperm(n, generator=own(2))[:nonzeros], normal(nonzeros))


def special(n: int) -> Tensor:
    made = normal(n)
    made[5:9], made[100:103], made[700] = torch.inf, -torch.inf, torch.nan
    return made


CASES: dict[str, Callable[[int], Tensor]] = {
    "normal": normal,
    "laplace": laplace,
    "few values": lambda n: torch.randint(-2, 3, (n,), generator=own(3)).float(),
    "mostly zero": lambda n: sparse(n, n // 20),
    "fewer nonzeros than k": lambda n: sparse(n, K // 2),
    "all equal": lambda n: torch.full((n,), -0.3),
    "all zero": torch.zeros,
    "both zeros": lambda n: torch.zeros(n) * normal(n).sign(),
    "one": lambda n: sparse(n, 1),
    "infinite and not a number": special,
    "denormal": lambda n: normal(n) * 2.0**-140,
    "ascending": lambda n: normal(n).sort().values,
    "large to small": lambda n: normal(n).abs().sort(descending=True).values,
    "all scales": lambda n: (
        normal(n).sign() * 10 ** torch.linspace(-38, 38, n)[torch.randperm(n, generator=own(4))]
    ),
    "dead end": lambda n: torch.cat([normal(n // 3), torch.zeros(n - n // 3)]),
}


INF, LARGEST, NORMAL = 0x7F800000, 0x7F7FFFFF, 0x00800000  # keys: of Inf, of the largest and least usual


def keyed(n: int, least: int, most: int, seed: int = 0) -> Tensor:
    """(n,) of both signs, whose keys are from `least` to `most`."""
    keys = torch.randint(least, most + 1, (n,), generator=own(seed))
    return (
        (keys - (torch.randint(2, (n,), generator=own(seed + 1)) << 31)).to(torch.int32).view(torch.float32)
    )


def mixed(n: int, *some: tuple[int, int, int], rest: Tensor | None = None) -> Tensor:
    """(n,): of each (count, least, most) so many keys, anywhere among the rest, by default normal."""
    found = normal(n, 9) if rest is None else rest.clone()
    places, first = torch.randperm(n, generator=own(10)), 0
    for number, (count, least, most) in enumerate(some):
        found[places[first : first + count]] = keyed(count, least, most, number)
        first += count
    return found


# What a bracket of the k-th can be in doubt about: numbers that no comparison or subtraction holds for, with
# the k-th among them, just above or just below.
BRACKETS: dict[str, Callable[[int, int], Tensor]] = {
    "all infinite": lambda n, k: keyed(n, INF, INF),
    "all not a number": lambda n, k: keyed(n, INF + 1, 2**31 - 1),
    "all the same not a number": lambda n, k: keyed(n, 0x7FC00000, 0x7FC00000),
    "infinite or not a number": lambda n, k: keyed(n, INF, INF + 1),
    "just k infinite": lambda n, k: mixed(n, (k, INF, INF)),
    "one infinite fewer than k": lambda n, k: mixed(n, (k - 1, INF, INF)),
    "half of them infinite": lambda n, k: mixed(n, (n // 2, INF, INF)),
    "just k not a number": lambda n, k: mixed(n, (k, INF + 1, 2**31 - 1)),
    "one not a number fewer than k": lambda n, k: mixed(n, (k - 1, INF + 1, 2**31 - 1)),
    "infinite the k-th, not a number above": lambda n, k: mixed(
        n, (k // 2, INF + 1, 2**31 - 1), (k, INF, INF)
    ),
    "finite the k-th, infinite above": lambda n, k: mixed(n, (k // 2, INF, INF), (k, LARGEST - 1, LARGEST)),
    "one not a number among zeros": lambda n, k: mixed(n, (1, INF + 1, 2**31 - 1), rest=torch.zeros(n)),
    "one infinite among zeros": lambda n, k: mixed(n, (1, INF, INF), rest=torch.zeros(n)),
    "not a number, infinite, denormal, zero": lambda n, k: mixed(
        n, (k // 4, INF + 1, 2**31 - 1), (k // 4, INF, INF), (k // 4, 1, NORMAL - 1), rest=torch.zeros(n)
    ),
    "all denormal": lambda n, k: keyed(n, 1, NORMAL - 1),
    "all the least": lambda n, k: keyed(n, 1, 1),
    "denormal the k-th": lambda n, k: mixed(
        n, (k // 2, NORMAL, NORMAL), (k, NORMAL - 2, NORMAL - 1), rest=keyed(n, 0, 2)
    ),
    "the least among zeros": lambda n, k: mixed(n, (k // 2, 1, 1), rest=keyed(n, 0, 0)),
    "any bits": lambda n, k: keyed(n, 0, 2**31 - 1),
}
# What goes wrong on purpose: the bound, the room for candidates.
FORCED: dict[str, dict[str, int]] = {
    "as it comes": {},
    "no bound": {"bound": 0},
    "bound too high": {"bound": 0x7F000000},
    "bound too low and no room": {"bound": 1, "capacity": 2 * K},
    "little room": {"capacity": K},
}
# Every case as it comes, and every way to go wrong for some.
COMBINED = [(case, "as it comes") for case in CASES] + [
    (case, forced)
    for case in ("normal", "few values", "infinite and not a number")
    for forced in list(FORCED)[1:]
]


def expected(acc: Tensor, k: int) -> Tensor:
    """(k,) ascending: the first k by (bits of |acc| descending, index ascending)."""
    keys = acc.contiguous().view(torch.int32) & 0x7FFFFFFF
    return keys.sort(descending=True, stable=True).indices[:k].sort().values


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, for NaN equals nothing."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def check(kernel: Any, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
    want = acc.clone() if grad is None else acc + grad
    indices, values = kernel.topk(acc, grad, k)
    assert same(acc, want)
    assert indices.dtype == torch.int32
    assert indices.shape == values.shape == (k,)
    assert torch.equal(indices.long().sort().values, expected(want, k))
    assert same(values, want[indices.long()])
    return Sparse(indices, values)


def small(like: Tensor, **options: int) -> Any:
    return gpu.Gpu(like, **{**SMALL, **options})


@QUIET
class TestTop:
    __test__ = CUDA or INTERPRETED

    @pytest.mark.parametrize(("case", "forced"), COMBINED)
    def test_the_k_largest_are_found_whatever_the_data_and_the_guess(self, case: str, forced: str) -> None:
        acc = CASES[case](N).to(DEVICE)
        check(small(acc, **FORCED[forced]), acc, None, K)

    @pytest.mark.parametrize("case", BRACKETS)
    def test_no_bracket_is_in_doubt(self, case: str) -> None:
        """Among candidates, and among all where they are too many; as the residual, and as the gradient."""
        made = BRACKETS[case](N // 2, K).to(DEVICE)
        for options in {}, {"capacity": 4 * K}:
            kernel = small(made, sample=64, **options)
            check(kernel, made.clone(), None, K)
            check(kernel, torch.zeros_like(made), made, K)

    @pytest.mark.parametrize("k", [0, 1, 700, N])
    def test_any_k(self, k: int) -> None:
        acc, grad = normal(N).to(DEVICE), normal(N, 1).to(DEVICE)
        kernel = small(acc)
        check(kernel, acc, grad, k)
        assert kernel.stats().steps == 1

    @pytest.mark.parametrize("n", [1, 31, 257, 1024])
    def test_any_length(self, n: int) -> None:
        acc = normal(n).to(DEVICE)
        for k in {1, n // 2, n}:
            check(small(acc), acc, normal(n, k).to(DEVICE), k)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("case", ["normal", "all scales", "infinite and not a number", "denormal"])
    def test_gradients_of_any_type_are_added_once_rounded(self, dtype: torch.dtype, case: str) -> None:
        acc, grad = normal(N, 5).to(DEVICE), CASES[case](N).to(DEVICE, dtype)
        check(small(grad), acc, grad, K)

    @pytest.mark.parametrize(("start", "step"), [(1, 1), (3, 1), (0, 2), (1, 3)])
    def test_views_may_begin_anywhere_and_leave_gaps(self, start: int, step: int) -> None:
        whole, grads = normal(3 * N + 3).to(DEVICE), normal(3 * N + 3, 1).to(DEVICE)
        kept = whole.clone()
        acc, grad = whole[start:][::step][:N], grads[start:][::step][:N]
        for forced in ("as it comes", "bound too high"):
            check(small(acc, **FORCED[forced]), acc, grad, K)
            kept[start:][::step][:N] = acc
            assert torch.equal(whole, kept)

    def test_a_right_guess_needs_no_fallback_and_wrong_ones_do(self) -> None:
        def fallbacks(data: Tensor, **options: int) -> int:
            kernel = small(data, **options)
            check(kernel, data, None, K)
            fallbacks: int = kernel.stats().fallbacks
            return fallbacks

        for case in ("normal", "laplace", "all scales"):
            assert fallbacks(CASES[case](N).to(DEVICE)) == 0
        for forced in ("bound too high", "bound too low and no room", "little room"):
            assert fallbacks(normal(N).to(DEVICE), **FORCED[forced]) == 1
        for value in (0.0, 1.0):
            assert fallbacks(torch.full((N,), value, device=DEVICE)) == 0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_any_number_of_equal_magnitudes_at_the_border_needs_no_fallback(self, dtype: torch.dtype) -> None:
        """As in first steps, where residuals are 0: sums are gradients of few bits, many of them equal."""
        n, k = 60_000, 600
        grad = (normal(n, 7) / 8 + normal(n, 8).sign()).to(dtype).to(DEVICE)
        kernel = small(grad, tile=2048, sample=2048)
        for levels in (8, 1):
            coarse = (grad * levels).round() / levels if levels > 1 else grad.clamp(-1.25, 1.25)
            acc = torch.zeros(n, device=DEVICE)
            check(kernel, acc, coarse, k)
            border = acc.abs().kthvalue(n - k + 1).values
            assert int((acc.abs() == border).sum()) > 2 * k
        assert kernel.stats().fallbacks == 0
        assert kernel.candidates.indices.numel() < n

    def test_a_sample_is_enough_and_differs_from_step_to_step(self) -> None:
        """With less room than elements, so that it is the guess that is used."""
        acc = torch.zeros(20 * N, device=DEVICE)
        kernel, seen = small(acc, tile=2048), list[Any]()
        for _ in range(3):
            acc.copy_(normal(20 * N))
            check(kernel, acc, None, 20 * K)
            seen.append(kernel.stats().candidates - sum(seen))
        assert kernel.candidates.indices.numel() < acc.numel()
        assert kernel.stats() == SearchStats(3, 0, sum(seen), 60 * K)
        assert all(20 * K < count < 100 * K for count in seen)
        assert len(set(seen)) > 1

    def test_what_no_sample_has_seen_is_found_without_a_fallback(self) -> None:
        """The k-th is many octaves above the sample's largest, in the last bin, with others of all scales."""
        acc = normal(20 * N)
        acc[torch.randperm(20 * N, generator=own(6))[:20]] = 10 ** torch.linspace(3, 30, 20)
        acc = acc.to(DEVICE)
        kernel = small(acc, tile=2048)
        for k in (1, 10, 19):
            check(kernel, acc, None, k)
        assert kernel.stats().fallbacks == 0

    def test_k_may_change_and_results_are_ones_own(self) -> None:
        acc = normal(N).to(DEVICE)
        kernel = small(acc)
        first = check(kernel, acc, None, 3)
        kept = Sparse(first.indices.clone(), first.values.clone())
        for k in (1000, 5):
            check(kernel, acc, normal(N, k).to(DEVICE), k)
        assert torch.equal(first.indices, kept.indices)
        assert torch.equal(first.values, kept.values)
        assert kernel.stats().steps == 3

    def test_a_part_of_the_bucket_is_searched_as_well(self) -> None:
        acc = normal(N).to(DEVICE)
        kernel = small(acc)
        for length in (0, 1, 300, N - 1):
            part = acc[N - length :]
            check(kernel, part, None, length // 7)
            found = kernel.above(part, None, 1.0)
            assert torch.equal(found.indices.long(), (part.abs() >= 1).nonzero().squeeze(1))

    def test_a_trial_meets_the_fallback_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trouble, search = kernels.trouble_with_gpu.__wrapped__, gpu.Gpu.topk
        fallbacks = []

        def counting(kernel: gpu.Gpu, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
            found = search(kernel, acc, grad, k)
            fallbacks.append(kernel.stats().fallbacks)
            if is_broken and kernel.forced >= 0:
                found.indices[0] = found.indices[1]
            return found

        monkeypatch.setattr(kernels, "TRIED", 20_000)
        monkeypatch.setattr(gpu.Gpu, "topk", counting)
        is_broken = False
        assert trouble(DEVICE) is None
        assert fallbacks == [0, 0, 1, 2]
        is_broken = True
        assert "other elements than torch.topk" in str(trouble(DEVICE))

    def test_buffers_are_small(self) -> None:
        n = 25_600_000  # ResNet-50
        kernel = gpu.Gpu(torch.empty(n, device=DEVICE))
        for density in (0.0001, 0.001, 0.01):
            kernel._make_room(gpu.room(n, gpu.surely(density * gpu.SAMPLE), gpu.SAMPLE))
            held = kernel.launch.buffers.values()
            assert sum(buffer.numel() for buffer in held) <= 0.1 * n

    def test_what_it_was_not_made_for_is_refused(self) -> None:
        acc = normal(N).to(DEVICE)
        kernel = small(acc)
        longer = torch.cat([acc, acc])
        for wrong, grad in [(longer, None), (acc.double(), None), (acc, acc.double()), (acc, acc[1:])]:
            with pytest.raises(ValueError, match="made for up to 1500"):
                kernel.topk(wrong, grad, K)
        for k in (-1, N + 1):
            with pytest.raises(ValueError, match=f"k={k}"):
                kernel.topk(acc, None, k)
        assert gpu.obstacle(acc.double())
        with pytest.raises(ValueError, match=r"this is torch\.float64; or take select=torch"):
            small(acc.double())
        with pytest.raises(ValueError, match=r"at most 2,143,289,344 elements.*2,147,483,648: take a"):
            small(torch.empty(2**31, device="meta"))

    def test_a_gpu_that_is_too_old_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        old: Any = SimpleNamespace(
            dtype=torch.float32, numel=lambda: 1, is_cuda=True, device=torch.device("cuda", 3)
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert gpu.obstacle(old) == "Triton's kernels need compute capability 8.0, and cuda:3 has 7.5"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert gpu.obstacle(old) is None

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def test_anything(self, data: st.DataObject) -> None:
        """Few values, of any bits, so that there are ties of all kinds."""
        words = st.integers(-(2**31), 2**31 - 1)
        palette = torch.tensor(data.draw(st.lists(words, min_size=1, max_size=40)), dtype=torch.int32)
        n = data.draw(st.integers(1, 400))
        acc = palette[torch.randint(len(palette), (n,), generator=own(n))].view(torch.float32).to(DEVICE)
        grad = normal(n).to(DEVICE) if data.draw(st.booleans()) else None
        options = {}
        if data.draw(st.booleans()):
            options["bound"] = data.draw(st.sampled_from([*(palette & 0x7FFFFFFF).tolist(), 0, 2**31 - 1]))
        if data.draw(st.booleans()):
            options["capacity"] = data.draw(st.integers(1, n))
        options["sample"] = data.draw(st.sampled_from([32, 64, 512]))
        kernel, k = small(acc, **options), data.draw(st.integers(1, n))
        # A sum of a NaN and a number may be any NaN: of the same bits only where the same device adds.
        if grad is not None:
            acc = acc.nan_to_num(0.5)
        check(kernel, acc, grad, k)


@QUIET
class TestBeyond:
    __test__ = CUDA or INTERPRETED

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0, 1e300, math.inf, math.nan])
    @pytest.mark.parametrize("case", ["few values", "infinite and not a number"])
    def test_what_is_beyond_is_found_in_order(self, case: str, threshold: float, strict: bool) -> None:
        acc, grad = CASES[case](N).to(DEVICE), torch.zeros(N, device=DEVICE)
        if threshold > 1e38:  # torch can't compare with what float32 can't hold
            want = (acc.abs() >= math.inf).nonzero().squeeze(1) if not strict else torch.empty(0).long()
            want = want.to(DEVICE)
        else:
            want = Eager(acc).above(acc.clone(), grad, threshold, strict).indices
        found, kernel = acc + grad, small(acc)
        waits = host_sync.num_syncs()
        indices, values = kernel.above(acc, grad, threshold, strict)
        assert host_sync.num_syncs() == waits + 1
        assert indices.dtype == torch.int32
        assert torch.equal(indices.long(), want)
        assert same(values, found[want])
        assert same(acc, found)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients_are_added_once(self, dtype: torch.dtype) -> None:
        acc, grad = normal(N).to(DEVICE), normal(N, 1).to(DEVICE, dtype)
        want = acc + grad
        indices, values = small(acc).above(acc, grad, 1.0)
        assert torch.equal(acc, want)
        assert torch.equal(indices.long(), (want.abs() >= 1).nonzero().squeeze(1))
        assert torch.equal(values, want[indices.long()])

    def test_thresholds_on_the_device_are_rounded_as_torch_rounds_them(self) -> None:
        acc = torch.tensor([0.1, -0.1, 0.2, 0.0], device=DEVICE)
        for threshold in (torch.tensor(0.1, dtype=torch.float64, device=DEVICE), torch.tensor(0.1), 0.1):
            assert small(acc).above(acc, None, threshold).indices.tolist() == [0, 1, 2]
            assert small(acc).above(acc, None, threshold, strict=True).indices.tolist() == [2]

    def test_a_gap_between_elements_is_stepped_over(self) -> None:
        acc = normal(2 * N).to(DEVICE)[::2]
        want = (acc.abs() >= 1).nonzero().squeeze(1)
        found = small(acc).above(acc, None, 1.0)
        assert torch.equal(found.indices.long(), want)
        assert torch.equal(found.values, acc[want])

    def test_of_nothing_nothing_is_beyond(self) -> None:
        acc = torch.empty(0, device=DEVICE)
        assert small(acc).above(acc, None, 0.0).indices.numel() == 0
        assert small(acc).topk(acc, None, 0).indices.numel() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnTheDevice:
    LONG = 3_000_017  # tiles and samples of the usual size

    def test_the_usual_sizes(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            acc, grad = normal(self.LONG).cuda(), normal(self.LONG, 1).to("cuda", dtype)
            kernel = gpu.Gpu(acc)
            for k in (1, 3_000, 30_000, 1_000_000):
                check(kernel, acc, grad, k)
            assert kernel.stats().fallbacks == 0

    @pytest.mark.parametrize("case", CASES)
    def test_the_usual_sizes_whatever_the_data(self, case: str) -> None:
        acc = CASES[case](self.LONG).cuda()
        check(gpu.Gpu(acc), acc, None, 30_000)

    def test_the_host_does_not_wait(self) -> None:
        acc, grad = normal(self.LONG).cuda(), normal(self.LONG, 1).cuda()
        kernel = gpu.Gpu(acc)
        kernel.topk(acc, grad, 3_000)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for k in (3_000, 3_001):
                kernel.topk(acc, grad, k)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_a_captured_step_does_what_the_step_does(self) -> None:
        acc, grad = normal(self.LONG).cuda(), normal(self.LONG, 1).cuda()
        kernel, k = gpu.Gpu(acc), 3_000
        start = acc.clone()
        kernel.topk(acc, grad, k)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = kernel.topk(acc, grad, k)
        acc.copy_(start)
        for _ in range(3):
            want = acc + grad
            graph.replay()
            assert torch.equal(acc, want)
            assert torch.equal(found.indices.long().sort().values, expected(want, k))
            assert torch.equal(found.values, want[found.indices.long()])
        assert kernel.stats().steps == 4

    def test_nothing_of_size_n_is_allocated_once_it_is_warm(self) -> None:
        acc, grad = normal(self.LONG).cuda(), normal(self.LONG, 1).cuda()
        kernel = gpu.Gpu(acc)
        kernel.topk(acc, grad, 3_000)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            kernel.topk(acc, grad, 3_000)
        assert torch.cuda.max_memory_allocated() - before < 10 * 8 * 3_000


def passed_in_the_interpreter(file: str) -> int:
    """How many tests of this file pass there; none may fail."""
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", file)
    done = python(*words, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout_s=3600)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    passed = there(re.search(r"(\d+) passed", done.stdout))
    return int(passed[1])


class TestWithoutGpu:
    """What a machine without a GPU can say."""

    __test__ = not (CUDA or INTERPRETED)

    def test_all_of_this_in_the_interpreter(self) -> None:
        assert passed_in_the_interpreter(__file__) > len(COMBINED)
