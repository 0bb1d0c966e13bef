"""The Triton kernels that search several buckets at once, against a stable sort. Without a GPU they run in
Triton's interpreter, in a process of their own, as those of test_gpu_kernels.py do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsify import kernels
from sparsify.types import Sparse
from tests.sparsify.kernels.test_gpu_kernels import (
    CUDA,
    DEVICE,
    INTERPRETED,
    QUIET,
    expected,
    normal,
    passed_in_the_interpreter,
    same,
)
from tests.sparsify.laws import build, live

SMALL = {"tile": 256, "fewest": 1}  # the interpreter is slow
N = 600  # three shares

if CUDA or INTERPRETED:  # else the import would settle how Triton works in this process
    from sparsify.kernels.segments import GpuSegments


def special(n: int) -> Tensor:
    made = normal(n)
    made[5:9], made[100:103], made[500] = torch.inf, -torch.inf, torch.nan
    return made


CASES: dict[str, tuple[Tensor, int]] = {
    "one element": (torch.tensor([0.5]), 1),
    "one zero": (torch.zeros(1), 1),
    "one element, none chosen": (torch.tensor([0.5]), 0),
    "all": (normal(300), 300),
    "none": (normal(300), 0),
    "just one tile": (normal(256), 5),
    "one more than a tile": (normal(257), 5),
    "normal": (normal(N), 30),
    "few values": ((2 * normal(N)).round(), 300),
    "all equal": (torch.full((N,), -0.3), 400),
    "all zero": (torch.zeros(N), 7),
    "both zeros": (torch.zeros(N) * normal(N).sign(), 300),
    "fewer nonzeros than k": (normal(N) * (torch.arange(N) % 100 == 0), 30),
    "only the last": (torch.zeros(N).index_fill_(0, torch.tensor([N - 1]), 1.0), 1),
    "infinite and not a number": (special(N), 20),
    "all not a number": (torch.full((N,), torch.nan), 300),
    "denormal": (normal(N) * 2.0**-140, 30),
    "all scales": (normal(N).sign() * 10 ** torch.linspace(-38, 38, N), 30),
}


def check(kernel: Any, accs: list[Tensor], grads: list[Tensor | None], ks: list[int]) -> list[Sparse]:
    want = [
        acc.clone() if grad is None else acc + grad.float() for acc, grad in zip(accs, grads, strict=True)
    ]
    found: list[Sparse] = kernel.topk(accs, grads, ks)
    assert len(found) == len(accs)
    for part, acc, sums, k in zip(found, accs, want, ks, strict=True):
        assert same(acc, sums)
        assert part.indices.dtype == torch.int32
        assert part.indices.shape == part.values.shape == (k,)
        assert torch.equal(part.indices.long().sort().values, expected(sums, k))
        assert same(part.values, sums[part.indices.long()])
    return found


@QUIET
class TestTogether:
    __test__ = CUDA or INTERPRETED

    def test_the_k_largest_of_every_bucket_are_found_whatever_the_data(self) -> None:
        accs = [acc.to(DEVICE) for acc, _ in CASES.values()]
        ks = [k for _, k in CASES.values()]
        kernel = GpuSegments(accs, **SMALL)
        check(kernel, accs, [None] * len(accs), ks)
        assert kernel.stats().steps == len(CASES)
        assert kernel.stats().selected == sum(ks)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_gradients_are_added_in_float32(self, dtype: torch.dtype) -> None:
        sizes = [300, 1, 64]
        accs = [normal(n).to(DEVICE) for n in sizes]
        grads = [normal(n, 1).to(DEVICE, dtype) for n in sizes]
        check(GpuSegments(accs, **SMALL), accs, [*grads], [7, 1, 3])

    def test_what_changes_between_two_calls_is_noticed(self) -> None:
        """Another k, another gradient, none; a residual that was replaced, one at any address."""
        memory = normal(1000, 3).to(DEVICE)
        accs, grads = [normal(300).to(DEVICE), normal(70).to(DEVICE)], [memory[:300], memory[320:390]]
        kernel = GpuSegments(accs, **SMALL)
        check(kernel, accs, [*grads], [3, 5])
        check(kernel, accs, [*grads], [9, 1])
        check(kernel, [normal(300, 4).to(DEVICE), accs[1]], [memory[501:801], grads[1]], [9, 1])
        check(kernel, [memory[601:901], accs[1]], [None, None], [2, 2])
        check(kernel, accs, [memory[::3][:300], grads[1].half()], [2, 2])

    def test_what_the_kernels_would_misread_is_refused(self) -> None:
        accs = [normal(8).to(DEVICE), normal(9).to(DEVICE)]
        kernel = GpuSegments(accs, **SMALL)
        for wrong in (accs[:1], accs[::-1], [accs[0].double(), accs[1]], [accs[0], normal(18)[::2]]):
            with pytest.raises(ValueError, match="this kernel was made for"):
                kernel.topk(wrong, [None] * len(wrong), [1] * len(wrong))
        with pytest.raises(ValueError, match="can't be chosen"):
            kernel.topk(accs, [None, None], [9, 1])
        with pytest.raises(ValueError, match="no Triton kernel"):
            GpuSegments([accs[0].double(), accs[1]])

    def test_a_method_does_the_same_as_bucket_by_bucket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []

        def small(likes: list[Tensor], choice: str) -> Any:
            made.append(GpuSegments(likes, **SMALL))
            return made[-1]

        arguments: dict[str, Any] = {"steps": 2, "dtype": torch.float32, "device": DEVICE.type}
        alone = live(build("topk", 0.05, "layer"), 2, select="torch", **arguments)
        monkeypatch.setattr("sparsify.method.joint_kernel_for", small)
        together = live(build("topk", 0.05, "layer"), 2, **arguments)
        for ours, theirs in zip(together, alone, strict=True):
            assert all(map(torch.equal, ours.updates, theirs.updates))
            assert torch.equal(ours.residual, theirs.residual)
        assert [kernel.stats().steps for kernel in made] == [2 * 4, 2 * 4]  # steps, buckets

    @pytest.mark.gpu
    def test_a_gpu_takes_them_after_a_trial(self) -> None:
        assert kernels.trouble_with_segments(DEVICE) is None
        likes = [torch.empty(n, device=DEVICE) for n in (100, 5000)]
        assert isinstance(kernels.joint_kernel_for(likes), GpuSegments)
        sizes = [1, 63, 512, 36_864, 589_824, 2_359_296]
        accs = [normal(n).to(DEVICE) for n in sizes]
        kernel = GpuSegments(accs)
        for step in range(3):
            grads = [normal(n, step).to(DEVICE) for n in sizes]
            check(kernel, accs, [*grads], [max(1, n // 1000) for n in sizes])


class TestWithoutGpu:
    """What a machine without a GPU can say."""

    __test__ = not (CUDA or INTERPRETED)

    def test_all_of_this_in_the_interpreter(self) -> None:
        assert passed_in_the_interpreter(__file__) == 7

    def test_on_a_cpu_buckets_are_searched_one_by_one(self) -> None:
        assert kernels.joint_kernel_for([torch.empty(10), torch.empty(100_000)]) is None
