"""Fast selection on CPUs, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify import kernels
from sparsify.kernels import SelectionKernel, TorchKernel, native
from sparsify.kernels.native import VECTOR_LEVELS, NativeKernel
from tests.conftest import python
from tests.sparsify.kernels.oracle import (
    INPUTS,
    K,
    check_above,
    check_topk,
    check_views,
    keys_of,
    largest,
    normal,
    threads,
)
from tests.sparsify.laws import METHODS, build, check_alike, live, searching

N = 40_000  # large enough that a bound is guessed
HAS_COMPILER = kernels.native_unavailable_reason() is None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no compiler")
MAKE = dict[str, Callable[..., SelectionKernel]]()
if HAS_COMPILER:
    for level in VECTOR_LEVELS[: VECTOR_LEVELS.index(native.best_vector_level()) + 1]:
        MAKE[f"native {level}"] = partial(NativeKernel, max_level=level)
every_kernel = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
Make = Callable[..., SelectionKernel]


@every_kernel
def test_the_k_largest_are_found_whatever_the_data(make: Make) -> None:
    for shaped in INPUTS.values():
        x = shaped(N)
        for k in (1, K, 4000, N - 1, N):
            check_topk(make(x), torch.zeros_like(x), x, k)
            check_topk(make(x), x, None, k)


@every_kernel
def test_the_residual_is_added_to(make: Make) -> None:
    kernel = make(normal(N))
    acc = normal(N, 1)
    for step in range(4):
        check_topk(kernel, acc, normal(N, step), 40)
        acc.index_fill_(0, largest(acc, 40), 0)  # as error feedback does
    assert kernel.stats().steps == 4
    assert kernel.stats().fallbacks == 0
    assert 160 <= kernel.stats().candidates < 160 * 10


@every_kernel
def test_narrow_gradients_of_any_bits_are_read_exactly(make: Make) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        everything = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)  # every bit pattern
        found = make(everything).topk(torch.zeros(2**16), everything, 2**16)
        assert torch.equal(found.values.nan_to_num(0.5), everything.float().nan_to_num(0.5))


@every_kernel
def test_any_length(make: Make) -> None:
    for n in (1, 2, 15, 17, 63, 65, 4095, 4096, 4097, 8193, 16_383, 16_384, 16_385, 70_001, 131_073):
        for k in {1, min(n, 7), n // 3, n}:
            check_topk(make(normal(n)), normal(n, 1), normal(n, 2), k)


@every_kernel
def test_nothing_is_chosen_of_nothing(make: Make) -> None:
    acc = normal(N)
    check_topk(make(acc), acc, normal(N, 1), 0)
    empty = torch.empty(0)
    check_topk(make(empty), empty, empty, 0)
    for k in (-1, N + 1):
        with pytest.raises(ValueError, match="can't be chosen"):
            make(acc).topk(acc, None, k)


@every_kernel
def test_a_wrong_bound_costs_time_and_nothing_else(make: Make) -> None:
    acc = normal(N, 1)
    grad = normal(N, 2)
    ordered = keys_of(acc + grad).sort(descending=True).values.tolist()
    # Nothing reaches it, one less than k, just k, all.
    for bound, has_fallback in ((ordered[0] + 1, True), (ordered[38], True), (ordered[39], False), (0, None)):
        kernel = make(acc, forced_bound=bound)
        check_topk(kernel, acc.clone(), grad, 40)
        if has_fallback is not None:  # some kernels have room for all
            assert kernel.stats().fallbacks == has_fallback


@needs_compiler
def test_more_candidates_than_there_is_room_for_cost_time_and_nothing_else() -> None:
    acc = INPUTS["mostly zero"](N) + 1e-3  # the sample misses the plateau below the few
    kernel = NativeKernel(acc, forced_bound=int(keys_of(torch.tensor([1e-3]))))
    check_topk(kernel, acc, torch.zeros(N), 40)
    assert kernel.stats().fallbacks == 1


@needs_compiler
def test_many_ties_cost_time_in_the_first_step_only() -> None:
    """Then there is room for them."""
    n = 2**20 + 5
    for number in (1, 2):
        with threads(number):
            acc = torch.zeros(n)
            kernel = NativeKernel(acc)
            for step in range(3):  # 4.5 % are as large as the 1000th
                check_topk(kernel, acc.zero_(), (0.75 * normal(n, step)).round(), 1000)
            assert kernel.stats().fallbacks == 1


@every_kernel
def test_views_may_begin_anywhere_and_gradients_leave_gaps(make: Make) -> None:
    check_views(make, normal, has_gaps=False)


@every_kernel
def test_threads_do_not_change_the_result(make: Make) -> None:
    n = 2**20 + 37
    grad = normal(n, 2).square() * 0.1
    for number in (1, 2, 3):
        with threads(number):
            acc = normal(n, 1)
            kernel = make(acc)
            check_topk(kernel, acc, grad, 2100)
            check_topk(kernel, acc, (grad * 10).round(), 2100)
            check_above(kernel, acc, grad, 4.0)


@pytest.mark.parametrize("make", [*MAKE.values(), TorchKernel], ids=[*MAKE, "torch"])
def test_all_beyond_a_threshold_are_found(make: Make) -> None:
    kernel = make(normal(N))
    for threshold in (-1.0, -0.0, 0.0, 0.5, 2.0, 4.1, float("inf"), float("nan"), torch.tensor(2.0)):
        for name in ("few values", "mostly zero", "normal", "not finite", "all not a number"):
            for strict in (False, True):
                check_above(kernel, INPUTS[name](N), torch.zeros(N), threshold, strict)
    for dtype in (torch.float32, torch.float64):
        acc = torch.tensor([0.1, 0.1 + 1e-9, 0.2], dtype=dtype)
        if not isinstance(kernel, NativeKernel) or dtype == torch.float32:
            check_above(make(acc), acc, None, 0.1, strict=True)
    if not isinstance(kernel, TorchKernel):  # torch refuses to compare with what float32 can't hold
        check_above(kernel, INPUTS["not finite"](N), None, 1e300)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from([*INPUTS]),
    st.integers(1, 60_000),
    st.floats(0, 1) | st.floats(0, 0.01),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@every_kernel
def test_anything(make: Make, name: str, n: int, share: float, dtype: torch.dtype) -> None:
    grad = INPUTS[name](n).nan_to_num(0.5).to(dtype)  # a sum of NaN may be any NaN
    acc = normal(n, 1)
    kernel = make(grad)
    for _ in range(2):
        check_topk(kernel, acc, grad, int(share * n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_who_searches_does_not_change_what_a_method_does(dtype: torch.dtype) -> None:
    """No two magnitudes are equal here, so not even the tie rule does."""
    for name in METHODS:
        fused, plain = (
            live(build(name, 0.05, "layer"), 3, steps=5, dtype=dtype, select=select)
            for select in (searching(dtype), "torch")
        )
        check_alike(fused, plain)


def test_small_buckets_are_left_to_torch_unless_fused_is_asked_for() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        is_native = dtype != torch.float64 and HAS_COMPILER
        for n in (0, 1, kernels.NATIVE_MIN_NUMEL - 1):
            assert isinstance(kernels.make_kernel(torch.empty(n, dtype=dtype)), TorchKernel)
        large = torch.empty(kernels.NATIVE_MIN_NUMEL, dtype=dtype)
        assert isinstance(kernels.make_kernel(large), NativeKernel if is_native else TorchKernel)
        assert isinstance(kernels.make_kernel(large, "torch"), TorchKernel)
        if is_native:
            assert isinstance(kernels.make_kernel(large[:1], "fused"), NativeKernel)
        else:
            with pytest.raises(ValueError, match="select=fused does not work here"):
                kernels.make_kernel(large[:1], "fused")


def test_a_choice_that_does_not_work_is_told() -> None:
    like = torch.empty(10, device="meta")
    assert isinstance(kernels.make_kernel(like, "auto"), TorchKernel)
    assert type(kernels.make_group_kernel([torch.empty(10)], [], "torch")) is kernels.GroupKernel
    for choice, sentence in (("quick", "torch, fused"), ("fused", "or select=torch")):
        with pytest.raises(ValueError, match=sentence):
            kernels.make_kernel(like, choice)


@needs_compiler
def test_what_the_library_would_misread_is_refused() -> None:
    acc = normal(N)
    kernel = NativeKernel(acc)
    for wrong, grad in (
        (acc, acc[1:]),
        (acc, acc.double()),
        (acc.double(), acc),
        (acc.bfloat16(), acc),
        (acc.view(2, -1), None),
        (acc[::2], None),
    ):
        with pytest.raises(ValueError, match="this kernel takes"):
            kernel.topk(wrong, grad, 40)
        with pytest.raises(ValueError, match="this kernel takes"):
            kernel.above_threshold(wrong, grad, 1.0)
    assert torch.equal(acc, normal(N))


def test_a_gpu_where_triton_fails_is_told() -> None:
    """As on a node without a compiler, or an old GPU. There is none here at all, which fails as well."""
    if torch.cuda.is_available():
        assert kernels.triton_unavailable_reason(torch.device("cuda", 0)) is None
    told = kernels.triton_unavailable_reason(torch.device("meta"))
    assert str(told).startswith("Triton's kernels do not work on meta: ")


WITHOUT_COMPILER = """
import logging, torch
logging.basicConfig(format="%(message)s", level=logging.INFO)
from sparsify import kernels
for n, choice in ((2**20, "auto"), (2**20, "auto"), (2**13, "auto"), (10, "fused")):
    try:
        print(kernels.make_kernel(torch.empty(n), choice).name)
    except ValueError as error:
        print(error)
"""


def test_without_a_compiler_torch_searches_which_is_told_once_and_fused_is_refused(tmp_path: Path) -> None:
    around = {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}  # where others' libraries are not
    done = python("-c", WITHOUT_COMPILER, env={**around, "PATH": str(tmp_path), "OMP_NUM_THREADS": "1"})
    *auto, fused = done.stdout.splitlines()
    assert auto == ["torch", "torch", "torch"]
    assert fused.startswith("select=fused does not work here: no compiler")
    (line,) = [line for line in done.stderr.splitlines() if "selecting" in line]
    assert "no compiler" in line
