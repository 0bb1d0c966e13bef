"""Triton kernels that search several buckets at once, against the oracle.

Without a GPU they run in Triton's interpreter, in a process of their own, as those of test_gpu_kernels.py do,
which starts both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsify import kernels
from sparsify.kernels import TorchKernel
from sparsify.types import SparseVector
from tests.sparsify.kernels.oracle import INPUTS, K, check_add, check_joint, generator
from tests.sparsify.kernels.test_gpu_kernels import (
    CUDA,
    DEVICE,
    INTERPRETED,
    QUIET,
    draw,
    given_data,
    strict,
)
from tests.sparsify.laws import build, check_alike, live

__all__ = ["strict"]  # a fixture is found by its name in this module
SMALL: dict[str, Any] = {"block_numel": 256, "min_blocks_per_program": 1}  # the interpreter is slow
N = 600  # three shares

if CUDA or INTERPRETED:  # else the import would settle how Triton works in this process
    from sparsify.kernels.triton_group_search import TritonGroupKernel


@QUIET
class TestTogether:
    __test__ = CUDA or INTERPRETED

    @pytest.mark.parametrize("is_added", [True, False])
    def test_the_k_largest_of_every_bucket_are_found_whatever_the_data(self, is_added: bool) -> None:
        """All of 300, none of them; one element; just one tile, and one more."""
        made = [draw(n) for n in (300, 300, 1, 1, 256, 257)]
        ks = [300, 0, 1, 0, 5, 5]
        for name in INPUTS:
            made.append(given_data(name, N))
            ks.append(300 if name.startswith("all") else K)
        accs = list(map(torch.zeros_like, made)) if is_added else made
        kernel = TritonGroupKernel(made, **SMALL)
        check_joint(kernel, accs, made if is_added else [], ks)
        assert kernel.stats().steps == len(made)
        assert kernel.stats().selected == sum(ks)

    def test_gradients_may_come_in_pieces_of_any_type_and_all_may_change_between_two_calls(self) -> None:
        """Another k, another gradient, none; a residual that was replaced, one at any address."""
        memory = draw(1000, 3)
        accs = [draw(n) for n in (300, 1, 64)]
        whole, single, half = (draw(n, 1) for n in (300, 1, 64))
        kernel = TritonGroupKernel(accs, **SMALL)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_joint(kernel, accs, [grad.to(dtype) for grad in (whole, single, half)], [7, 1, 3])
        for grads, ks in (
            ([whole[:120], whole[120:120], whole[120:], single, half], [7, 1, 3]),
            ([whole[:1], whole[1:].half(), single.bfloat16(), half], [9, 0, 3]),
            ([whole, single, torch.cat([half, half])[::2]], [300, 0, 0]),
            ([memory[501:801], single, half], [9, 1, 1]),
            ([], [2, 1, 2]),
        ):
            check_joint(kernel, accs, grads, ks)
        check_joint(kernel, [draw(300, 4), *accs[1:]], [whole, single, half], [9, 1, 1])
        check_joint(kernel, [memory[601:901], *accs[1:]], [], [2, 1, 2])

    def test_parts_are_added_in_order_to_memories_of_any_sizes(self) -> None:
        """As torch adds them, to the bit; those of a part that come first are not those that lie first."""
        space = 1500 + 1 + 700
        parts = []
        for k, kind, dtype in (
            (space, torch.int32, torch.float32),
            (0, torch.int32, torch.float32),
            (1025, torch.int64, torch.float32),
            (3, torch.int32, torch.bfloat16),
        ):
            indices = torch.randperm(space, generator=generator(k))[:k]
            parts.append(SparseVector(indices.to(DEVICE, kind), draw(k, k).to(dtype)))
        kernel = TritonGroupKernel([draw(n) for n in (1500, 1, 700)], **SMALL)
        for sizes in ([space], [1500, 1, 700], [0, 1, 0, 0, 2000, 199, 1, 0], [1] * 11 + [space - 11]):
            memories = [draw(size, 9) for size in sizes]
            for alpha, clears in ((1 / 3, False), (-0.3, True), (1.0, False)):
                check_add(kernel, memories, parts, alpha, clears)

    def test_memories_that_take_turns_are_described_but_no_more_of_them_are_kept(self) -> None:
        kernel = TritonGroupKernel([draw(30), draw(40)], **SMALL)
        memory = torch.zeros(700, device=DEVICE)
        one = torch.ones(1, device=DEVICE)
        for _ in range(2):
            for own in memory.split(70):
                kernel.add([own], [SparseVector(one.int(), one)])
        assert len(kernel.memory_tables) <= 8
        assert memory.view(10, 70).sum(0).nonzero().tolist() == [[1]]
        assert memory.sum() == 20

    def test_what_the_kernels_would_misread_is_refused(self) -> None:
        first, second = draw(8), draw(9)
        kernel = TritonGroupKernel([first, second], **SMALL)
        for wrong in ([first], [second, first], [first.double(), second], [first, draw(18)[::2]]):
            with pytest.raises(ValueError, match="this kernel was made for"):
                kernel.topk(wrong, [], [1] * len(wrong))
        with pytest.raises(ValueError, match="can't be chosen"):
            kernel.topk([first, second], [], [9, 1])
        for pieces in ([first[:7]], [first, first], [first.view(2, 4)]):
            with pytest.raises(ValueError, match="gradients of 17 elements"):
                kernel.topk([first, second], [*pieces, second], [1, 1])
        with pytest.raises(ValueError, match="memories of 17 elements"):
            kernel.add([draw(16)], [])
        with pytest.raises(ValueError, match=r"at most 2,143,289,344 elements together.*2,200,000,000"):
            TritonGroupKernel([torch.empty(1, device=DEVICE).expand(1_100_000_000)] * 2)

    def test_a_trial_tells_what_does_not_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trouble = kernels.triton_group_unavailable_reason.__wrapped__
        monkeypatch.setattr(kernels, "TRIAL_NUMEL", 2000)
        assert trouble(DEVICE) is None
        search = TritonGroupKernel.topk
        add = TritonGroupKernel.add

        def searching_wrongly(self: Any, accs: Any, grads: Any, ks: Any) -> SparseVector:
            found: SparseVector = search(self, accs, grads, ks)
            if len(grads) > len(accs):
                found.indices[-1] = found.indices[-2]
            return found

        def adding_the_first(self: Any, into: Any, parts: Any, *others: Any, **options: Any) -> None:
            add(self, into, parts[:1], *others, **options)

        with monkeypatch.context() as patch:
            patch.setattr(TritonGroupKernel, "topk", searching_wrongly)
            assert "other elements than torch.topk" in str(trouble(DEVICE))
        monkeypatch.setattr(TritonGroupKernel, "add", adding_the_first)
        assert "do not add as torch does" in str(trouble(DEVICE))

    def test_large_buckets_are_searched_by_themselves(self) -> None:
        accs = [draw(n) for n in (300, 700, 64, 900)]
        for most in (500, 5):
            joint = TritonGroupKernel(accs, list(map(TorchKernel, accs)), most)
            check_joint(joint, accs, [torch.cat(accs)[:1000], torch.cat(accs)[1000:]], [7, 9, 3, 1])
            check_joint(joint, accs, [], [7, 9, 3, 1])
        assert TritonGroupKernel(accs, [], 500).stats().steps == 0

    def test_a_method_does_the_same_as_bucket_by_bucket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        method = build("topk", 0.05, "layer")
        arguments: dict[str, Any] = {"steps": 2, "dtype": torch.float32, "device": DEVICE.type}
        alone = live(method, 2, select="torch", together=False, **arguments)
        make_group_kernel = "sparsify.wrappers.engine.make_group_kernel"
        monkeypatch.setattr(
            make_group_kernel, lambda likes, each, choice: TritonGroupKernel(likes, each, 10**6)
        )
        check_alike(live(method, 2, **arguments), alone)

    @pytest.mark.gpu
    def test_a_gpu_takes_them_after_a_trial(self) -> None:
        assert kernels.triton_group_unavailable_reason(DEVICE) is None
        sizes = [1, 63, 512, 36_864, 589_824, 2_359_296]
        accs = [draw(n) for n in sizes]
        assert isinstance(kernels.make_group_kernel(accs, []), TritonGroupKernel)
        kernel = TritonGroupKernel(accs)
        for step in range(3):
            check_joint(kernel, accs, [draw(n, step) for n in sizes], [max(1, n // 1000) for n in sizes])
