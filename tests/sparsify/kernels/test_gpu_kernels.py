"""Triton kernels against the oracle.

Without a GPU they run in Triton's interpreter, in a process of their own, since Triton must know that before
it is imported, and torch imports it at odd moments. By hand:

    TRITON_INTERPRET=1 pytest tests/sparsify/kernels/test_gpu_kernels.py
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparsify import kernels
from sparsify.core import host_sync
from sparsify.types import SearchStats, SparseVector
from tests.conftest import python, there
from tests.sparsify.kernels.interpreter import checking_memory, patching_once
from tests.sparsify.kernels.oracle import (
    INPUTS,
    K,
    check_above,
    check_found,
    check_topk,
    check_views,
    generator,
    normal,
)

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")
N = 1500  # no multiple of a tile
# The interpreter's numpy warns of NaN and overflow, and that Triton 3.6 takes arrays of one for numbers.
QUIET = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array with ndim:DeprecationWarning"
)

if CUDA or INTERPRETED:  # else the import would settle how Triton works in this process
    from sparsify.kernels import triton_search


@pytest.fixture(scope="module", autouse=True)
def strict() -> Iterator[None]:
    """Let the interpreter check what programs access, several of which share what there is to do."""
    if not INTERPRETED:
        yield
        return
    with patching_once(), checking_memory(), mock.patch.multiple(triton_search, BLOCK=256, WORD_BLOCK=16):
        yield


# What goes wrong on purpose: the bound, the room for candidates; and whether normal data notice.
FORCED: dict[str, tuple[dict[str, int], int]] = {
    "as it comes": ({}, 0),
    "no bound": ({"forced_bound": 0}, 0),
    "bound too high": ({"forced_bound": 0x7F000000}, 1),
    "bound too low and no room": ({"forced_bound": 1, "forced_capacity": 2 * K}, 1),
    "little room": ({"forced_capacity": K}, 1),
}


def given_data(name: str, n: int = N) -> Tensor:
    return INPUTS[name](n).to(DEVICE)


def draw(n: int = N, seed: int = 0) -> Tensor:
    return normal(n, seed).to(DEVICE)


def small(like: Tensor, **options: int) -> Any:
    """Return a kernel of small tiles and samples, for the interpreter is slow."""
    return triton_search.TritonKernel(like, **{"block_numel": 256, "sample_numel": 512, **options})


@QUIET
class TestTop:
    __test__ = CUDA or INTERPRETED

    @pytest.mark.parametrize("name", INPUTS)
    def test_the_k_largest_are_found_whatever_the_data(self, name: str) -> None:
        """Among candidates, and among all where they are too many; as the residual, and as the gradient."""
        made = given_data(name, N // 2)
        check_topk(small(made, sample_numel=64, forced_capacity=4 * K), made.clone(), None, K)
        kernel = small(made)
        check_topk(kernel, torch.zeros_like(made), made, K)
        if name in ("heavy tails", "all scales", "all zero", "all equal"):
            assert kernel.stats().fallbacks == 0

    @pytest.mark.parametrize("forced", FORCED)
    def test_a_wrong_guess_costs_a_fallback_and_nothing_else(self, forced: str) -> None:
        options, num_fallbacks = FORCED[forced]
        for name in ("few values", "not finite", "normal"):
            acc = given_data(name)
            kernel = small(acc, **options)
            check_topk(kernel, acc, None, K)
        assert kernel.stats().fallbacks == num_fallbacks

    def test_any_k_of_any_length_with_gradients_of_any_type(self) -> None:
        """Search the whole bucket and a part; earlier results stay as they are."""
        for n in (1, 31, 257, 1024, N):
            kernel = small(draw(n))
            results = []
            for k, dtype in {0: None, 1: torch.float32, n // 2: torch.bfloat16, n: torch.float16}.items():
                grad = None if dtype is None else given_data("all scales", n).to(dtype)
                found = check_topk(kernel, draw(n, 5), grad, k)
                results.append((found, SparseVector(*map(torch.clone, found))))
                check_topk(kernel, draw(n)[n // 2 :], None, k // 2)
                check_above(kernel, draw(n)[n // 2 :], None, 1.0)
            for found, kept in results:
                assert all(map(torch.equal, found, kept))
            assert kernel.stats().steps == 2 * len(results)

    def test_views_may_begin_anywhere_and_leave_gaps(self) -> None:
        check_views(small, draw)
        check_views(lambda like: small(like, forced_bound=0x7F000000), draw)

    def test_any_number_of_equal_magnitudes_at_the_border_needs_no_fallback(self) -> None:
        """As in first steps, where residuals are 0: sums are gradients of few bits, many of them equal."""
        n = 60_000
        k = 600
        grad = draw(n, 7) / 8 + draw(n, 8).sign()
        for coarse in ((8 * grad).round().half() / 8, grad.bfloat16().clamp(-1.25, 1.25)):
            kernel = small(coarse, block_numel=2048, sample_numel=2048)
            acc = torch.zeros(n, device=DEVICE)
            check_topk(kernel, acc, coarse, k)
            border = acc.abs().kthvalue(n - k + 1).values
            assert (acc.abs() == border).sum() > 2 * k
            assert kernel.stats().fallbacks == 0
            assert kernel.launch.buffers["indices"].numel() < n

    def test_a_sample_is_enough_and_differs_from_step_to_step(self) -> None:
        """With less room than elements, so that it is the guess that is used."""
        acc = torch.zeros(20 * N, device=DEVICE)
        kernel = small(acc, block_numel=2048)
        seen = list[int]()
        for _ in range(3):
            acc.copy_(normal(20 * N))
            check_topk(kernel, acc, None, 20 * K)
            seen.append(kernel.stats().candidates - sum(seen))
        assert kernel.launch.buffers["indices"].numel() < acc.numel()
        assert kernel.stats() == SearchStats(3, 0, sum(seen), 60 * K)
        assert all(20 * K < count < 100 * K for count in seen)
        assert len(set(seen)) > 1

    def test_what_no_sample_has_seen_is_found_without_a_fallback(self) -> None:
        """The k-th is many octaves above the sample's largest, in the last bin, with others of all scales."""
        acc = normal(20 * N)
        acc[torch.randperm(20 * N, generator=generator(6))[:20]] = 10 ** torch.linspace(3, 30, 20)
        acc = acc.to(DEVICE)
        kernel = small(acc, block_numel=2048)
        for k in (1, 10, 19):
            check_topk(kernel, acc, None, k)
        assert kernel.stats().fallbacks == 0

    def test_a_trial_notices_a_fallback_that_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trouble = kernels.triton_unavailable_reason.__wrapped__
        search = triton_search.TritonKernel.topk

        def search_wrongly_if_forced(
            kernel: triton_search.TritonKernel, acc: Tensor, grad: Tensor | None, k: int
        ) -> SparseVector:
            found = search(kernel, acc, grad, k)
            if kernel.forced_bound >= 0:
                found.indices[0] = found.indices[1]
            return found

        monkeypatch.setattr(kernels, "TRIAL_NUMEL", 20_000)
        assert trouble(DEVICE) is None
        monkeypatch.setattr(triton_search.TritonKernel, "topk", search_wrongly_if_forced)
        assert "other elements than torch.topk" in str(trouble(DEVICE))

    def test_buffers_are_small(self) -> None:
        n = 25_600_000  # ResNet-50
        kernel = triton_search.TritonKernel(torch.empty(n, device=DEVICE))
        for density in (0.0001, 0.001, 0.01):
            kernel._ensure_candidate_capacity(
                triton_search.candidate_capacity(
                    n,
                    triton_search.upper_count_bound(density * triton_search.SAMPLE_NUMEL),
                    triton_search.SAMPLE_NUMEL,
                )
            )
            assert sum(map(Tensor.numel, kernel.launch.buffers.values())) <= 0.1 * n

    def test_what_it_was_not_made_for_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        acc = draw()
        kernel = small(acc)
        for wrong, grad in (
            (acc.repeat(2), None),
            (acc.double(), None),
            (acc, acc.double()),
            (acc, acc[1:]),
            (acc.view(2, -1), None),
        ):
            with pytest.raises(ValueError, match="made for up to 1500"):
                kernel.topk(wrong, grad, K)
        for k in (-1, N + 1):
            with pytest.raises(ValueError, match=f"k={k}"):
                kernel.topk(acc, None, k)
        with pytest.raises(ValueError, match=r"this is torch\.float64; or take select=torch"):
            small(acc.double())
        with pytest.raises(ValueError, match=r"at most 2,143,289,344 elements.*2,147,483,648: take a"):
            small(torch.empty(2**31, device="meta"))
        device = torch.device("cuda", 3)
        old: Any = SimpleNamespace(dtype=torch.float32, numel=lambda: 1, is_cuda=True, device=device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert (
            triton_search.unsupported_reason(old)
            == "Triton's kernels need compute capability 8.0, and cuda:3 has 7.5"
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert triton_search.unsupported_reason(old) is None


@QUIET
class TestBeyond:
    __test__ = CUDA or INTERPRETED

    @pytest.mark.parametrize("strict", [False, True])
    def test_what_is_beyond_is_found_in_order(self, strict: bool) -> None:
        for threshold in (0.0, 1.0, -1.0, 1e300, math.inf, math.nan):
            acc = given_data("few values" if threshold == 1.0 else "not finite")
            waits = host_sync.num_syncs()
            check_above(small(acc), acc, torch.zeros_like(acc), threshold, strict)
            assert host_sync.num_syncs() == waits + 1
        check_above(small(acc), draw(), draw(N, 1).bfloat16(), 1.0, strict)

        acc = torch.tensor([0.1, -0.1, 0.2, 0.0], device=DEVICE)
        for beyond in (torch.tensor(0.1, dtype=torch.float64, device=DEVICE), torch.tensor(0.1), 0.1):
            check_above(small(acc), acc, None, beyond, strict)

    def test_of_nothing_nothing_is_found(self) -> None:
        acc = torch.empty(0, device=DEVICE)
        check_above(small(acc), acc, None, 0.0)
        check_topk(small(acc), acc, None, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnTheDevice:
    LONG = 3_000_017  # tiles and samples of the usual size

    def test_the_usual_sizes(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            acc = draw(self.LONG)
            kernel = triton_search.TritonKernel(acc)
            for k in (1, 3_000, 30_000, 1_000_000):
                check_topk(kernel, acc, draw(self.LONG, 1).to(dtype), k)
            assert kernel.stats().fallbacks == 0
        for name in INPUTS:
            acc = given_data(name, self.LONG)
            check_topk(triton_search.TritonKernel(acc), acc, None, 30_000)

    def test_a_warm_step_neither_waits_for_the_device_nor_allocates_anything_of_size_n(self) -> None:
        acc = draw(self.LONG)
        kernel = triton_search.TritonKernel(acc)
        kernel.topk(acc, acc, 3_000)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for k in (3_000, 3_001):
                kernel.topk(acc, acc, k)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before < 10 * 8 * 3_000

    def test_a_captured_step_does_what_the_step_does(self) -> None:
        acc = draw(self.LONG)
        grad = draw(self.LONG, 1)
        kernel = triton_search.TritonKernel(acc)
        start = acc.clone()
        kernel.topk(acc, grad, 3_000)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = kernel.topk(acc, grad, 3_000)
        acc.copy_(start)
        for _ in range(3):
            expected = acc + grad
            graph.replay()
            check_found(found, acc, expected, 3_000)
        assert kernel.stats().steps == 4


@pytest.mark.skipif(CUDA or INTERPRETED, reason="for a machine without a GPU")
@pytest.mark.parametrize(
    ("name", "chosen", "least"),
    [
        ("gpu_kernels", "-k guess or whatever", 20),
        ("gpu_kernels", "-k not (guess or whatever)", 11),
        ("segments", "-m not gpu", 8),
        ("races", "-m not gpu", 2),
    ],
)
def test_triton_kernels_pass_in_the_interpreter(name: str, chosen: str, least: int) -> None:
    """All tests of them, as no GPU is here."""
    file = str(Path(__file__).with_name(f"test_{name}.py"))
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", chosen, file)
    done = python(*words, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout_s=3600)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    passed = there(re.search(r"(\d+) passed", done.stdout))
    assert int(passed[1]) >= least
