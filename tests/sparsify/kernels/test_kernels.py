"""Fast selection on CPUs, against the oracle: all magnitudes sorted, equal ones by their indices."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsify import kernels
from sparsify.kernels import Eager, Kernel, native
from sparsify.kernels.native import LEVELS, Native, Unavailable
from sparsify.kernels.vectorised import Vectorised
from tests.conftest import python
from tests.sparsify.laws import METHODS, build, live, searching

N = 40_000  # large enough that a bound is guessed


def has_compiler() -> bool:
    try:
        native.library()
    except Unavailable:
        return False
    return True


MAKE: dict[str, Callable[..., Kernel]] = {"numpy": Vectorised}
if has_compiler():
    BEST = LEVELS.index(native.best_level())
    MAKE |= {
        f"native {level}": lambda like, bound=None, level=level: Native(like, level, bound)
        for level in LEVELS[: BEST + 1]
    }
every_kernel = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def keys(x: Tensor) -> Tensor:
    """The bits of |x| as an integer."""
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[x.dtype]
    return x.contiguous().view(integer) & torch.iinfo(integer).max


def oracle(acc: Tensor, k: int) -> Tensor:
    """(k,) indices, ascending."""
    return keys(acc).sort(descending=True, stable=True).indices[:k].sort().values


def same_bits(one: Tensor, other: Tensor) -> bool:
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[one.dtype]
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def check(kernel: Kernel, acc: Tensor, grad: Tensor | None, k: int) -> None:
    expected = acc.clone() if grad is None else acc + grad.to(acc.dtype)
    found = kernel.topk(acc, grad, k)
    assert same_bits(acc, expected)
    assert found.indices.dtype == torch.int32
    assert torch.equal(found.indices.long(), oracle(expected, k))
    assert same_bits(found.values, expected[found.indices.long()])


def normal(n: int = N, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sparse_of(x: Tensor) -> Tensor:
    return x * (x.abs() > 2.5)


def with_specials(x: Tensor) -> Tensor:
    x[[5, 1000, 30_000]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return x


SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "heavy tails": lambda x: x**5,
    "few values": lambda x: (2 * x).round(),
    "all equal": lambda x: torch.full_like(x, -3.5),
    "all zero": torch.zeros_like,
    "negative zeros": lambda x: torch.full_like(x, -0.0),
    "mostly zero": sparse_of,
    "one hot": lambda x: torch.zeros_like(x).index_fill_(0, torch.tensor([len(x) // 3]), -7.0),
    "ascending": lambda x: x.abs().sort().values,
    "descending": lambda x: x.abs().sort(descending=True).values,
    "denormal": lambda x: x * 1e-42,
    "tiny": lambda x: x * 1e-38,
    "huge": lambda x: x.clamp(-3, 3) * 1e38,
    "layers from 1e-8 to 1e4": lambda x: x * torch.logspace(-8, 4, 8).repeat_interleave(len(x) // 8),
    "one layer has it all": lambda x: x * (torch.arange(len(x)) < len(x) // 50),
    "not finite": with_specials,
    "all NaN": lambda x: torch.full_like(x, float("nan")),
}


@pytest.mark.parametrize("k", [1, 40, 4000, N - 1, N])
@pytest.mark.parametrize("shaped", SHAPED.values(), ids=SHAPED)
@every_kernel
def test_the_k_largest_are_found_whatever_the_data(
    make: Callable[..., Kernel], shaped: Callable[[Tensor], Tensor], k: int
) -> None:
    x = shaped(normal())
    check(make(x), torch.zeros_like(x), x, k)
    check(make(x), x, None, k)


@every_kernel
def test_the_residual_is_added_to(make: Callable[..., Kernel]) -> None:
    kernel, acc = make(normal()), normal(seed=1)
    for step in range(4):
        check(kernel, acc, normal(seed=step), 40)
        acc.index_fill_(0, oracle(acc, 40), 0)  # as error feedback does
    assert kernel.stats().steps == 4
    assert kernel.stats().fallbacks == 0
    assert 160 <= kernel.stats().candidates < 160 * 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_kernel
def test_narrow_gradients_are_summed_in_float32(make: Callable[..., Kernel], dtype: torch.dtype) -> None:
    grad = normal().to(dtype)  # many ties
    check(make(grad), normal(seed=1), grad, 400)
    check(make(grad), torch.zeros(N), grad, 400)
    everything = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)  # every bit pattern
    zeros = torch.zeros(2**16)
    found = make(everything).topk(zeros, everything, 2**16)
    assert torch.equal(found.values.nan_to_num(0.5), everything.float().nan_to_num(0.5))


def test_float64_is_searched_too() -> None:
    x = normal().double() * 1e-300
    check(Vectorised(x), torch.zeros_like(x), x, 40)
    assert isinstance(kernels.kernel_for(x, "fused"), Vectorised)


@pytest.mark.parametrize(
    "n", [1, 2, 15, 17, 63, 65, 4095, 4096, 4097, 8193, 16_383, 16_384, 16_385, 70_001, 131_073]
)
@every_kernel
def test_any_length(make: Callable[..., Kernel], n: int) -> None:
    for k in {1, min(n, 7), n // 3, n}:
        check(make(normal(n)), normal(n, 1), normal(n, 2), k)


@every_kernel
def test_nothing_is_chosen_of_nothing(make: Callable[..., Kernel]) -> None:
    acc, grad = normal(), normal(seed=1)
    assert make(acc).topk(acc, grad, 0).indices.numel() == 0
    assert torch.equal(acc, normal() + grad)
    empty = torch.empty(0)
    assert make(empty).topk(empty, empty, 0).values.numel() == 0
    for k in (-1, N + 1):
        with pytest.raises(ValueError, match="can't be chosen"):
            make(acc).topk(acc, grad, k)


@pytest.mark.parametrize("guess", ["nothing reaches it", "all reach it", "just k", "one less than k"])
@every_kernel
def test_a_wrong_bound_costs_time_and_nothing_else(make: Callable[..., Kernel], guess: str) -> None:
    acc, grad, k = normal(seed=1), normal(seed=2), 40
    ordered = keys(acc + grad).sort(descending=True).values
    bound = {
        "nothing reaches it": int(ordered[0]) + 1,
        "all reach it": 0,
        "just k": int(ordered[k - 1]),
        "one less than k": int(ordered[k - 2]),
    }[guess]
    kernel = make(acc, bound=bound)
    check(kernel, acc, grad, k)
    if guess != "all reach it":  # some kernels have room for so many
        assert kernel.stats().fallbacks == (guess != "just k")


@pytest.mark.skipif(not has_compiler(), reason="no compiler")
def test_more_candidates_than_there_is_room_for_cost_time_and_nothing_else() -> None:
    acc = sparse_of(normal(seed=1)) + 1e-3  # the sample misses the plateau below the few
    kernel = Native(acc, bound=int(keys(torch.tensor([1e-3]))))
    check(kernel, acc, torch.zeros(N), 40)
    assert kernel.stats().fallbacks == 1


@pytest.mark.skipif(not has_compiler(), reason="no compiler")
@pytest.mark.parametrize("threads", [1, 2])
def test_many_ties_cost_time_in_the_first_step_only(threads: int) -> None:
    """Then there is room for them."""
    n, before = 2**20 + 5, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        acc = torch.zeros(n)
        kernel = Native(acc)
        for step in range(4):  # 4.5 % are as large as the 1000th
            check(kernel, acc.zero_(), (0.75 * normal(n, step)).round(), 1000)
        assert kernel.stats().fallbacks == 1
    finally:
        torch.set_num_threads(before)


@every_kernel
def test_views_at_any_address_and_with_gaps(make: Callable[..., Kernel]) -> None:
    grad, wide = normal(2 * N), torch.zeros(2 * N + 3)
    check(make(grad[:N]), wide[3 : N + 3], grad[1 : N + 1], 40)
    gaps = wide[1 : 2 * N + 1 : 2].zero_()
    between = wide[2 : 2 * N + 2 : 2].clone()
    check(make(grad[:N]), gaps, grad[::2], 40)
    assert torch.equal(wide[2 : 2 * N + 2 : 2], between)


@pytest.mark.parametrize("threads", [1, 2, 3])
@every_kernel
def test_threads_do_not_change_the_result(make: Callable[..., Kernel], threads: int) -> None:
    n, before = 2**21 + 37, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        acc, grad = normal(n, 1), normal(n, 2).square() * 0.1
        kernel = make(acc)
        check(kernel, acc, grad, 2100)
        check(kernel, acc, (grad * 10).round(), 2100)
        found = kernel.above(acc, grad, 4.0)
        assert torch.equal(found.indices.long(), (acc.abs() >= 4.0).nonzero().squeeze(1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "threshold", [-1.0, -0.0, 0.0, 0.5, 2.0, 4.1, float("inf"), float("nan"), torch.tensor(2.0)], ids=str
)
@pytest.mark.parametrize("make", [*MAKE.values(), Eager], ids=[*MAKE, "torch"])
def test_all_beyond_a_threshold_are_found(
    make: Callable[..., Kernel], threshold: float | Tensor, strict: bool
) -> None:
    kernel = make(normal())
    for shaped in ("few values", "mostly zero", "normal", "not finite", "all NaN"):
        acc, grad = SHAPED[shaped](normal(seed=1)), torch.zeros(N)
        expected = (acc.abs() > threshold) if strict else (acc.abs() >= threshold)
        found = kernel.above(acc, grad, threshold, strict)
        assert torch.equal(found.indices.long(), expected.nonzero().squeeze(1))
        assert torch.equal(found.values, acc[expected])


@every_kernel
def test_a_plain_number_is_rounded_as_the_bucket_is(make: Callable[..., Kernel]) -> None:
    for dtype in (torch.float32, torch.float64):
        acc = torch.tensor([0.1, 0.1 + 1e-9, 0.2], dtype=dtype)
        kernel = make(acc)
        if isinstance(kernel, Native) and dtype != torch.float32:
            continue
        found = kernel.above(acc, None, 0.1, strict=True)
        assert found.indices.tolist() == (acc > 0.1).nonzero().squeeze(1).tolist()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 60_000),
    share=st.floats(0, 1) | st.floats(0, 0.01),
    scale=st.sampled_from([1e-38, 1e-4, 1.0, 1e30]),
    shaped=st.sampled_from(["normal", "heavy tails", "few values", "mostly zero", "denormal"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 100),
)
@every_kernel
def test_fuzzed(
    make: Callable[..., Kernel],
    n: int,
    share: float,
    scale: float,
    shaped: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    grad = (SHAPED[shaped](normal(n, seed)) * scale).to(dtype)
    acc = SHAPED[shaped](normal(n, seed + 1000)) * scale
    kernel = make(grad)
    for _ in range(2):
        check(kernel, acc, grad, int(share * n))


@every_kernel
def test_a_settled_step_allocates_nothing_of_size_n(make: Callable[..., Kernel]) -> None:
    """numpy's memory is traced, which torch's dispatcher does not see."""
    n = 400_000
    acc, grad = normal(n), normal(n, 1)
    kernel = make(acc)
    kernel.topk(acc, grad, 400)
    tracemalloc.start()
    try:
        kernel.topk(acc, grad, 400)
        kernel.above(acc, grad, 20.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The sample (65,536 numbers, a few times over) and what is made of the candidates.
    assert peak < n * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_who_searches_does_not_change_what_a_method_does(name: str, dtype: torch.dtype) -> None:
    """No two magnitudes are equal here, so not even the tie rule does."""
    fused, plain = (
        live(build(name, 0.05, "layer"), 3, steps=8, dtype=dtype, select=select)
        for select in (searching(dtype), "torch")
    )
    for one, other in zip(fused, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.updates, other.updates, strict=True))
        assert torch.equal(one.residual, other.residual)
        assert one.selected == other.selected
        assert one.host_syncs == other.host_syncs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_small_buckets_are_left_to_torch_unless_fused_is_asked_for(dtype: torch.dtype) -> None:
    border = kernels.NATIVE_FROM if dtype != torch.float64 and has_compiler() else kernels.NUMPY_FROM
    for n in (0, 1, border - 1):
        assert isinstance(kernels.kernel_for(torch.empty(n, dtype=dtype)), Eager)
    large = torch.empty(border, dtype=dtype)
    assert isinstance(kernels.kernel_for(large), Native if border == kernels.NATIVE_FROM else Vectorised)
    if has_compiler():
        assert not isinstance(kernels.kernel_for(torch.empty(1, dtype=dtype), "fused"), Eager)


def test_the_choice_is_obeyed_and_a_wrong_one_is_told() -> None:
    like = torch.empty(10)
    assert isinstance(kernels.kernel_for(like, "torch"), Eager)
    if has_compiler():
        assert isinstance(kernels.kernel_for(like, "fused"), Native)
    with pytest.raises(ValueError, match="torch, fused"):
        kernels.kernel_for(like, "quick")
    with pytest.raises(ValueError, match="or select=torch"):
        kernels.kernel_for(torch.empty(10, device="meta"), "fused")
    assert isinstance(kernels.kernel_for(torch.empty(10, device="meta"), "auto"), Eager)


@pytest.mark.skipif(not has_compiler(), reason="no compiler")
def test_what_the_library_would_misread_is_refused() -> None:
    kernel, acc = Native(normal()), normal()
    pairs = [(acc, acc[1:]), (acc, acc.double()), (acc.double(), acc), (acc.bfloat16(), acc)]
    for wrong, grad in [*pairs, (acc.view(2, -1), None)]:
        with pytest.raises(ValueError, match="this kernel takes"):
            kernel.topk(wrong, grad, 40)
        with pytest.raises(ValueError, match="this kernel takes"):
            kernel.above(wrong, grad, 1.0)
    assert torch.equal(acc, normal())


def test_a_gpu_where_triton_fails_is_told() -> None:
    """As on a node without a compiler, or an old GPU. There is none here at all, which fails as well."""
    if torch.cuda.is_available():
        assert kernels.trouble_with_gpu(torch.device("cuda", 0)) is None
    told = kernels.trouble_with_gpu(torch.device("meta"))
    assert str(told).startswith("Triton's kernels do not work on meta: ")


WITHOUT_COMPILER = """
import logging, torch
logging.basicConfig(format="%(message)s", level=logging.INFO)
from sparsify import kernels
for n, choice in ((2**20, "auto"), (2**20, "auto"), (2**13, "auto"), (10, "fused")):
    try:
        print(kernels.kernel_for(torch.empty(n), choice).name)
    except ValueError as error:
        print(error)
"""


def test_without_a_compiler_numpy_searches_which_is_told_once_and_fused_is_refused(tmp_path: Path) -> None:
    around = {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}  # where others' libraries are not
    done = python("-c", WITHOUT_COMPILER, env={**around, "PATH": str(tmp_path), "OMP_NUM_THREADS": "1"})
    *auto, fused = done.stdout.splitlines()
    assert auto == ["numpy", "numpy", "torch"]
    assert fused.startswith("select=fused does not work here: no compiler")
    (line,) = [line for line in done.stderr.splitlines() if "selecting" in line]
    assert "no compiler" in line


def test_keys_order_as_magnitudes_do() -> None:
    x = torch.tensor([0.0, -1e-45, 1.0, -2.0, float("inf"), float("nan")])
    assert keys(x).tolist() == sorted(keys(x).tolist())
    assert native.bound_key(1.0, strict=False) == int(keys(torch.ones(1)))
    assert native.bound_key(1e300, strict=False) == int(np.float32("inf").view(np.uint32))
