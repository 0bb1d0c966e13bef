"""The kernels that `select=auto` chooses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.bench import Device
from experiments.bench._runner import (
    Benchmark,
    Record,
    round_to_significant_digits,
    summarise_turn_ratios,
    summarise_turn_times,
)
from experiments.bench._select_comparison import num_alternating_gradients
from experiments.bench._timing import (
    Call,
    CallTimer,
    choose_device_and_set_threads,
    describe_machine_and_code,
    explain_lack_of_memory,
    time_calls_in_turns,
)
from experiments.training import networks
from sparsify.kernels import GroupKernel, SelectionKernel, make_group_kernel, make_kernel, min_fused_numel
from sparsify.ranges import NonNegativeFloat, PositiveFraction, PositiveInt
from sparsify.types import num_selected

SIZES = (64, 1024, 4096, 8192, 16_384, 32_768, 131_072, 1_048_576, 4_194_304, 25_600_000)
DENSITIES = (0.001, 0.01, 0.1)
CHOICES = ("torch", "auto", "fused")  # of select=
MIN_REPEATS = 5
MAX_REPEATS = 200
SETTLING_TURNS = 2  # untimed: buffers are made, kernels compiled
HELD_FLOATS = 11  # per element: residual, gradients, sum; magnitudes and what torch.topk allocates

Search = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int]], object]  # of sums, gradients, ks


def auto(
    *,
    n: Sequence[PositiveInt] = (),
    layers: bool = False,
    density: Sequence[PositiveFraction] = DENSITIES,
    seconds: NonNegativeFloat = 2.5,
    device: Device | None = None,
    threads: PositiveInt | None = None,
) -> Benchmark:
    """Time the searches of `select=auto`, torch and `select=fused` side by side, in tiny to large buckets.

    In every case torch, auto and fused search the same sums, in random order, and ratios are taken within
    each repetition. A time is the wall clock's, from an idle device until it is idle again: so a launch costs
    what it costs a host that waits for it. Caches are as the search before has left them. Last come the
    layers of VGG-16, which a GPU's auto searches all at once, and the others one by one.

    Below some size `auto` is torch. The last line, one JSON object, says below which; and from which size on
    fused was faster than torch at every density that was measured, which it should be.

    Args:
        n: numbers of elements; by default ten sizes from 64 to 25.6 million, and --layers.
        layers: search the layers of VGG-16.
        density: k/n.
        seconds: time after which a case stops repeating.
        device: cpu or cuda; by default cuda where there is a GPU.
        threads: CPU threads; by default torch's number.
    """
    torch_device = choose_device_and_set_threads(device, threads)
    groups: list[tuple[int, ...]] = [(size,) for size in n or (() if layers else SIZES)]
    if layers or not n:
        with torch.device("meta"):
            groups.append(tuple(p.numel() for p in networks.vgg16(3, 32, 10).parameters()))
    bucket_sizes = {(sum(sizes), len(sizes)): sizes for sizes in groups}
    return Benchmark(
        machine=describe_machine_and_code(torch_device),
        description="medians [spread]",
        cases=[
            {"n": size, "buckets": count, "density": share}
            for size, count in bucket_sizes
            for share in density
        ],
        settings={"seconds": seconds},
        measure=lambda case: [
            time_searches(bucket_sizes[case["n"], case["buckets"]], case["density"], torch_device, seconds)
        ],
        header="n | buckets | density | auto is | torch, ms | auto, ms | fused, ms | torch / auto | "
        "torch / fused | repetitions",
        row_format="{n:,} | {buckets} | {density:g} | {kernels[auto]} | {torch_ms[median]:.3g} | "
        "{auto_ms[median]:.3g} | {fused_ms[median]:.3g} | {torch_over_auto:.2f} | {torch_over_fused:.2f} | "
        "{torch_ms[n]}",
        summarise=lambda rows: summarise_sizes(
            [row for row in rows if "kernels" in row], min_fused_numel(torch.empty(0, device=torch_device))
        ),
    )


def time_searches(sizes: Sequence[int], density: float, device: torch.device, seconds: float) -> Record:
    """Return the times of every choice of `select=` in one case, and ratios within repetitions."""
    n = sum(sizes)
    why = explain_lack_of_memory(4 * HELD_FLOATS * n, device)
    if why:
        return {"why": why}
    gc.collect()
    rng = torch.Generator(device).manual_seed(0)
    # Several gradients take turns: a processor that meets the same one again has learnt where it branches.
    residual, *gradients = (
        [torch.randn(size, generator=rng, device=device) for size in sizes]
        for _ in range(1 + num_alternating_gradients(n))
    )
    accs = list(map(torch.empty_like, residual))
    ks = [num_selected(size, density) for size in sizes]
    searches, kernel_names, why_not_fused = make_search_choices(residual)

    def make_call(search: Search) -> Call:
        turns = cycle(gradients)
        return lambda: search(accs, next(turns), ks)

    samples = time_calls_in_turns(
        {name: make_call(search) for name, search in searches.items()},
        CallTimer(device, "wall"),
        MAX_REPEATS,
        prepare=lambda name: torch._foreach_copy_(accs, residual),
        warm_up=SETTLING_TURNS,
        min_turns=MIN_REPEATS,
        max_seconds=seconds,
    ).wall_ms_by_call
    return {
        "k": sum(ks),
        "kernels": kernel_names,
        **{f"{name}_ms": summarise_turn_times(samples.get(name)) for name in CHOICES},
        **{
            f"torch_over_{name}": summarise_turn_ratios(samples["torch"], samples.get(name))
            for name in ("auto", "fused")
        },
        "why_not_fused": why_not_fused,
        "samples_ms": {
            name: [round_to_significant_digits(ms) for ms in times.values()]
            for name, times in samples.items()
        },
    }


class SearchChoices(NamedTuple):
    """The search of each choice of `select=` that can be had here."""

    search_by_choice: dict[str, Search]
    kernel_names_by_choice: dict[str, str]
    why_not_fused: str | None


def make_search_choices(likes: list[Tensor]) -> SearchChoices:
    """Return the searches of buckets like these, one by one or, on a GPU, all at once."""
    searches = dict[str, Search]()
    names = dict[str, str]()
    why_not_fused = None
    for choice in CHOICES:
        try:
            kernels = [make_kernel(like, choice) for like in likes]
        except ValueError as error:  # of `fused` alone
            why_not_fused = str(error)
            continue
        searches[choice] = partial(search_one_by_one, kernels)
        names[choice] = " and ".join(sorted({kernel.name for kernel in kernels}))
        if choice == "auto" and len(likes) > 1:
            group_kernel = make_group_kernel(likes, kernels)
            if type(group_kernel) is not GroupKernel:
                searches[choice] = group_kernel.topk
                names[choice] = group_kernel.name
    return SearchChoices(searches, names, why_not_fused)


def search_one_by_one(
    kernels: Sequence[SelectionKernel], accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]
) -> None:
    """Search one bucket after the other."""
    for kernel, acc, grad, k in zip(kernels, accs, grads, ks, strict=True):
        kernel.topk(acc, grad, k)


def summarise_sizes(rows: list[Record], min_fused_n: int) -> Record:
    """Return from which size on fused is taken, from which on it pays, and the ratios of all cases."""
    fields = ("n", "buckets", "density", "kernels", "torch_over_auto", "torch_over_fused")
    return {
        "fused_from": min_fused_n,
        "fused_pays_from": find_least_n_where_fused_pays(rows),
        "least_torch_over_auto": min((row["torch_over_auto"]["median"] for row in rows), default=None),
        "cases": [{field: row[field] for field in fields} for row in rows],
    }


def find_least_n_where_fused_pays(rows: list[Record]) -> int | None:
    """Return the least n from which on fused was faster than torch in every case.

    It is None where fused was slower at the largest n, or can't be had.
    """
    ratios = [(row["n"], row["torch_over_fused"]) for row in rows if row["buckets"] == 1]
    slower = max((n for n, ratio in ratios if not ratio or ratio["median"] <= 1), default=0)
    return min((n for n, _ in ratios if n > slower), default=None)
