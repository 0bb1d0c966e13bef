"""The Triton kernels that search several buckets at once, against a stable sort. Without a GPU they run in
Triton's interpreter, in a process of their own, as those of test_gpu_kernels.py do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsify import kernels
from sparsify.core import host_sync
from sparsify.kernels import Eager
from sparsify.types import Sparse
from tests.sparsify.kernels.test_gpu_kernels import (
    BRACKETS,
    CUDA,
    DEVICE,
    INTERPRETED,
    QUIET,
    expected,
    less_slow,
    normal,
    own,
    passed_in_the_interpreter,
    same,
)
from tests.sparsify.laws import build, live

__all__ = ["less_slow"]  # a fixture is found by its name in this module
SMALL: dict[str, Any] = {"tile": 256, "fewest": 1}  # the interpreter is slow
N = 600  # three shares

if CUDA or INTERPRETED:  # else the import would settle how Triton works in this process
    from sparsify.kernels.segments import GpuJoint, GpuSegments


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


def check(kernel: Any, accs: list[Tensor], grads: list[Tensor], ks: list[int]) -> Sparse:
    want = [acc.clone() for acc in accs]
    if grads:
        together = torch.cat([grad.float() for grad in grads])
        for sums, grad in zip(want, together.split([acc.numel() for acc in accs]), strict=True):
            sums += grad
    found: Sparse = kernel.topk(accs, grads, ks)
    assert found.indices.dtype == torch.int32
    assert found.indices.shape == found.values.shape == (sum(ks),)
    base = 0
    parts = zip(accs, want, found.indices.split(ks), found.values.split(ks), ks, strict=True)
    for acc, sums, indices, values, k in parts:
        assert same(acc, sums)
        own = indices.long() - base
        assert torch.equal(own.sort().values, expected(sums, k))
        assert same(values, sums[own])
        base += acc.numel()
    return found


def added(memories: list[Tensor], parts: list[Sparse], alpha: float) -> list[Tensor]:
    """What memories are after each part times alpha was added, by torch."""
    whole = torch.cat(memories)
    for indices, values in parts:
        whole[indices.long()] += values.float() * alpha
    return list(whole.split([memory.numel() for memory in memories]))


@QUIET
class TestTogether:
    __test__ = CUDA or INTERPRETED

    def test_the_k_largest_of_every_bucket_are_found_whatever_the_data(self) -> None:
        accs = [acc.to(DEVICE) for acc, _ in CASES.values()]
        ks = [k for _, k in CASES.values()]
        kernel = GpuSegments(accs, **SMALL)
        check(kernel, accs, [], ks)
        assert kernel.stats().steps == len(CASES)
        assert kernel.stats().selected == sum(ks)

    @pytest.mark.parametrize("is_added", [False, True])
    def test_no_bracket_is_in_doubt(self, is_added: bool) -> None:
        made = [build(N, 30).to(DEVICE) for build in BRACKETS.values()]
        accs = [torch.zeros_like(one) for one in made] if is_added else made
        check(GpuSegments(made, **SMALL), accs, made if is_added else [], [30] * len(made))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_gradients_are_added_in_float32(self, dtype: torch.dtype) -> None:
        sizes = [300, 1, 64]
        accs = [normal(n).to(DEVICE) for n in sizes]
        grads = [normal(n, 1).to(DEVICE, dtype) for n in sizes]
        check(GpuSegments(accs, **SMALL), accs, grads, [7, 1, 3])

    def test_gradients_may_come_in_pieces_of_any_type(self) -> None:
        accs = [normal(n).to(DEVICE) for n in (300, 1, 64)]
        whole, single, half = (normal(n, 1).to(DEVICE) for n in (300, 1, 64))
        kernel = GpuSegments(accs, **SMALL)
        check(kernel, accs, [whole[:120], whole[120:120], whole[120:], single, half], [7, 1, 3])
        check(kernel, accs, [whole[:1], whole[1:].half(), single.bfloat16(), half], [7, 0, 3])
        check(kernel, accs, [whole, single, torch.cat([half, half])[::2]], [300, 0, 0])

    def test_what_changes_between_two_calls_is_noticed(self) -> None:
        """Another k, another gradient, none; a residual that was replaced, one at any address."""
        memory = normal(1000, 3).to(DEVICE)
        accs, (long, short) = [normal(300).to(DEVICE), normal(70).to(DEVICE)], (memory[:300], memory[320:390])
        kernel = GpuSegments(accs, **SMALL)
        check(kernel, accs, [long, short], [3, 5])
        check(kernel, accs, [long, short], [9, 1])
        check(kernel, [normal(300, 4).to(DEVICE), accs[1]], [memory[501:801], short], [9, 1])
        check(kernel, [memory[601:901], accs[1]], [], [2, 2])
        check(kernel, accs, [memory[::3][:300], short.half()], [2, 2])

    @pytest.mark.parametrize("alpha", [1.0, -0.3, 1 / 3])
    def test_parts_are_added_in_order_to_memories_of_any_sizes(self, alpha: float) -> None:
        """As torch adds them, to the bit; those of a part that come first are not those that lie first."""
        likes = [normal(n).to(DEVICE) for n in (1500, 1, 700)]
        space = sum(like.numel() for like in likes)
        parts = [
            Sparse(
                torch.randperm(space, generator=own(seed))[:k].to(DEVICE, kind),
                normal(k, seed).to(DEVICE, dtype),
            )
            for seed, (k, kind, dtype) in enumerate(
                [
                    (space, torch.int32, torch.float32),
                    (0, torch.int32, torch.float32),
                    (1025, torch.int64, torch.float32),
                    (3, torch.int32, torch.bfloat16),
                ]
            )
        ]
        kernel = GpuSegments(likes, **SMALL)
        for sizes in ([space], [1500, 1, 700], [0, 1, 0, 0, 2000, 199, 1, 0], [1] * 11 + [space - 11]):
            memories = [normal(size, 9).to(DEVICE) for size in sizes]
            for clear in (False, True, False):
                before = [torch.zeros_like(memory) if clear else memory for memory in memories]
                want = added(before, parts, alpha)
                kernel.add(memories, parts, alpha, clear)
                assert all(map(same, memories, want))

    def test_memories_are_described_once_while_they_stay_where_they_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        likes, tables = [normal(30).to(DEVICE), normal(40).to(DEVICE)], list[Any]()
        to_device = host_sync.to_device

        def counting(numbers: Any, like: Tensor) -> Tensor:
            tables.append(numbers)
            return to_device(numbers, like)

        monkeypatch.setattr(host_sync, "to_device", counting)
        kernel = GpuSegments(likes, **SMALL)
        memory, one = torch.zeros(700, device=DEVICE), torch.ones(1, device=DEVICE)
        for _ in range(2):
            for start in range(7):
                kernel.add([memory[70 * start :][:70]], [Sparse(one.int(), one)])
        assert len(tables) == 7
        for start in range(600):  # no more of them are kept than of memories that take turns
            kernel.add([memory[start:][:70]], [])
        assert len(kernel.memories) <= 8
        assert memory.nonzero().flatten().tolist() == [70 * start + 1 for start in range(7)]
        assert memory.sum() == 14

    def test_what_the_kernels_would_misread_is_refused(self) -> None:
        accs = [normal(8).to(DEVICE), normal(9).to(DEVICE)]
        kernel = GpuSegments(accs, **SMALL)
        for wrong in (accs[:1], accs[::-1], [accs[0].double(), accs[1]], [accs[0], normal(18)[::2]]):
            with pytest.raises(ValueError, match="this kernel was made for"):
                kernel.topk(wrong, [], [1] * len(wrong))
        with pytest.raises(ValueError, match="can't be chosen"):
            kernel.topk(accs, [], [9, 1])
        for pieces in ([accs[0][:7]], [accs[0], accs[0]], [accs[0].view(2, 4)]):
            with pytest.raises(ValueError, match="gradients of 17 elements"):
                kernel.topk(accs, [*pieces, accs[1]], [1, 1])
        for wrong in (accs[:1], [normal(16)]):
            with pytest.raises(ValueError, match="memories of 17 elements"):
                kernel.add(wrong, [])
        with pytest.raises(ValueError, match=r"this is torch\.float64; or take select=torch"):
            GpuSegments([accs[0].double(), accs[1]])
        with pytest.raises(ValueError, match=r"at most 2,143,289,344 elements together.*2,200,000,000"):
            GpuSegments([torch.empty(1, device=DEVICE).expand(1_100_000_000)] * 2)

    def test_a_trial_tells_what_does_not_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trouble = kernels.trouble_with_segments.__wrapped__
        monkeypatch.setattr(kernels, "TRIED", 2000)
        assert trouble(DEVICE) is None
        search, add = GpuSegments.topk, GpuSegments.add

        def missing(self: Any, accs: Any, grads: Any, ks: Any) -> Sparse:
            found: Sparse = search(self, accs, grads, ks)
            if len(grads) > len(accs):
                found.indices[-1] = found.indices[-2]
            return found

        with monkeypatch.context() as patch:
            patch.setattr(GpuSegments, "topk", missing)
            assert "other elements than torch.topk" in str(trouble(DEVICE))
        monkeypatch.setattr(
            GpuSegments,
            "add",
            lambda self, into, parts, alpha, clears: add(self, into, parts[:1], alpha, clears),
        )
        assert "do not add as torch does" in str(trouble(DEVICE))

    def test_large_buckets_are_searched_by_themselves(self) -> None:
        accs = [normal(n).to(DEVICE) for n in (300, 700, 64, 900)]
        for most in (500, 5):
            joint = GpuJoint(accs, [Eager(acc) for acc in accs], most)
            check(joint, accs, [torch.cat(accs)[:1000], torch.cat(accs)[1000:]], [7, 9, 3, 1])
            check(joint, accs, [], [7, 9, 3, 1])
        assert GpuJoint(accs, [], 500).stats().steps == 0

    @pytest.mark.parametrize("most", [10**6, 20])
    def test_a_method_does_the_same_as_bucket_by_bucket(
        self, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = []

        def small(likes: list[Tensor], kernels: list[Any], choice: str) -> Any:
            made.append(GpuJoint(likes, kernels, most))
            return made[-1]

        arguments: dict[str, Any] = {"steps": 2, "dtype": torch.float32, "device": DEVICE.type}
        alone = live(build("topk", 0.05, "layer"), 2, select="torch", together=False, **arguments)
        monkeypatch.setattr("sparsify.doors.engine.joint_kernel_for", small)
        together = live(build("topk", 0.05, "layer"), 2, **arguments)
        for ours, theirs in zip(together, alone, strict=True):
            assert all(map(torch.equal, ours.updates, theirs.updates))
            assert torch.equal(ours.residual, theirs.residual)
        assert [kernel.stats().steps for kernel in made] == [2 * 4, 2 * 4] or most == 20  # steps, buckets

    @pytest.mark.gpu
    def test_a_gpu_takes_them_after_a_trial(self) -> None:
        assert kernels.trouble_with_segments(DEVICE) is None
        likes = [torch.empty(n, device=DEVICE) for n in (100, 5000)]
        assert isinstance(kernels.joint_kernel_for(likes, []), GpuJoint)
        sizes = [1, 63, 512, 36_864, 589_824, 2_359_296]
        accs = [normal(n).to(DEVICE) for n in sizes]
        kernel = GpuSegments(accs)
        for step in range(3):
            grads = [normal(n, step).to(DEVICE) for n in sizes]
            check(kernel, accs, grads, [max(1, n // 1000) for n in sizes])


class TestWithoutGpu:
    """What a machine without a GPU can say."""

    __test__ = not (CUDA or INTERPRETED)

    def test_all_of_this_in_the_interpreter(self) -> None:
        assert passed_in_the_interpreter(__file__) == 17

    def test_on_a_cpu_others_search(self) -> None:
        likes = [torch.empty(10), torch.empty(100_000)]
        assert type(kernels.joint_kernel_for(likes, [], "torch")) is kernels.JointKernel
