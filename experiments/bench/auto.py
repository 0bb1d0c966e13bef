"""Which searches `select=auto` takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from experiments.bench import Device
from experiments.bench._runner import Bench, Record, ratio, rounded, spread
from experiments.bench._side_by_side import turns
from experiments.bench._timing import Clock, TimedCall, device_of, facts, in_turn, lacking
from experiments.training import networks
from sparsify.kernels import GroupKernel, SelectionKernel, make_group_kernel, make_kernel, min_fused_numel
from sparsify.ranges import NonNegativeFloat, PositiveFraction, PositiveInt
from sparsify.types import num_selected

SIZES = (64, 1024, 4096, 8192, 16_384, 32_768, 131_072, 1_048_576, 4_194_304, 25_600_000)
DENSITIES = (0.001, 0.01, 0.1)
KERNELS = ("torch", "auto", "fused")
LEAST, MOST = 5, 200  # repetitions
SETTLING = 2  # untimed repetitions: buffers are made, kernels compiled
HELD = 11  # floats per element: residual, gradients, sum; magnitudes and what torch.topk allocates

Search = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int]], object]  # of sums, gradients, ks


def auto(
    *,
    n: Sequence[PositiveInt] = (),
    layers: bool = False,
    density: Sequence[PositiveFraction] = DENSITIES,
    seconds: NonNegativeFloat = 2.5,
    device: Device | None = None,
    threads: PositiveInt | None = None,
) -> Bench:
    """Searches of tiny to very large buckets, side by side: is `select=auto` ever slower than torch's?

    In every case torch, auto and fused search the same sums, in random order, and ratios are taken within
    each repetition. A time is the wall clock's, from an idle device until it is idle again: so a launch costs
    what it costs a host that waits for it. Caches are as the search before has left them. Last come the
    layers of VGG-16, which a GPU's auto searches all at once, and the others one by one.

    Below some size `auto` is torch. The last line, one JSON object, says below which; and from which size on
    fused was faster than torch at every density that was measured, which it should be.

    Args:
        n: elements; by default ten sizes from 64 to 25.6 million, and --layers.
        layers: those of VGG-16.
        density: k/n.
        seconds: after which a case stops repeating.
        device: cuda where there is one.
        threads: CPU threads; torch's by default.
    """
    on = device_of(device, threads)
    sizes: list[tuple[int, ...]] = [(size,) for size in n or (() if layers else SIZES)]
    if layers or not n:
        with torch.device("meta"):
            sizes.append(tuple(p.numel() for p in networks.vgg16(3, 32, 10).parameters()))
    buckets = {(sum(each), len(each)): each for each in sizes}
    return Bench(
        about=facts(on),
        head="medians [spread]",
        cases=[{"n": size, "buckets": count, "density": each} for size, count in buckets for each in density],
        setting={"seconds": seconds},
        measure=lambda case: [measure(buckets[case["n"], case["buckets"]], case["density"], on, seconds)],
        heading="n | buckets | density | auto is | torch, ms | auto, ms | fused, ms | torch / auto | "
        "torch / fused | repetitions",
        row="{n:,} | {buckets} | {density:g} | {kernels[auto]} | {torch_ms[median]:.3g} | "
        "{auto_ms[median]:.3g} | {fused_ms[median]:.3g} | {torch_over_auto:.2f} | {torch_over_fused:.2f} | "
        "{torch_ms[n]}",
        last=lambda rows: summary(
            [row for row in rows if "kernels" in row], min_fused_numel(torch.empty(0, device=on))
        ),
    )


def measure(sizes: Sequence[int], density: float, device: torch.device, seconds: float) -> Record:
    """The samples of one case, their medians, and ratios within repetitions."""
    n = sum(sizes)
    if why := lacking(4 * HELD * n, device):
        return {"why": why}
    gc.collect()
    generator = torch.Generator(device).manual_seed(0)
    # Several gradients take turns: a processor that meets the same one again has learnt where it branches.
    residual, *grads = (
        [torch.randn(size, generator=generator, device=device) for size in sizes] for _ in range(1 + turns(n))
    )
    accs = list(map(torch.empty_like, residual))
    ks = [num_selected(size, density) for size in sizes]
    searches, names, why_not = ready(residual)

    def call(search: Search) -> TimedCall:
        taken = cycle(grads)
        return lambda: search(accs, next(taken), ks)

    def restore() -> None:
        for acc, owed in zip(accs, residual, strict=True):
            acc.copy_(owed)

    samples = in_turn(
        {name: call(search) for name, search in searches.items()}, Clock(device, "wall"), MOST,
        before=restore, warm_up=SETTLING, least=LEAST, seconds=seconds,
    )  # fmt: skip
    return {
        "k": sum(ks),
        "kernels": names,
        **{f"{name}_ms": spread([*samples[name].values()]) if name in samples else None for name in KERNELS},
        **{f"torch_over_{name}": ratio(samples["torch"], samples.get(name)) for name in ("auto", "fused")},
        "why_not_fused": why_not,
        "samples_ms": {name: [rounded(ms) for ms in taken.values()] for name, taken in samples.items()},
    }


def ready(likes: list[Tensor]) -> tuple[dict[str, Search], dict[str, str], str | None]:
    """The search of each row, and its kernels by name; and why there is none for `fused`, if so."""
    alone, why = dict[str, list[SelectionKernel]](), None
    for row in KERNELS:
        try:
            alone[row] = [make_kernel(like, row) for like in likes]
        except ValueError as error:  # of `fused` alone
            why = str(error)
    searches: dict[str, Search] = {row: partial(one_by_one, kernels) for row, kernels in alone.items()}
    names = {row: " and ".join(sorted({kernel.name for kernel in kernels})) for row, kernels in alone.items()}
    together = make_group_kernel(likes, alone["auto"])
    if len(likes) > 1 and type(together) is not GroupKernel:
        searches["auto"], names["auto"] = together.topk, together.name
    return searches, names, why


def one_by_one(
    kernels: Sequence[SelectionKernel], accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]
) -> None:
    """Search one bucket after the other."""
    for kernel, acc, grad, k in zip(kernels, accs, grads, ks, strict=True):
        kernel.topk(acc, grad, k)


def summary(found: list[Record], pays_from: int) -> Record:
    """The last line."""
    names = ("n", "buckets", "density", "kernels", "torch_over_auto", "torch_over_fused")
    return {
        "fused_from": pays_from,
        "fused_pays_from": crossing(found),
        "least_torch_over_auto": min((record["torch_over_auto"]["median"] for record in found), default=None),
        "cases": [{name: record[name] for name in names} for record in found],
    }


def crossing(found: list[Record]) -> int | None:
    """The least n from which on fused was faster than torch in every case; None where it was not at the
    largest, or is not to be had.
    """
    alone = [(record["n"], record["torch_over_fused"]) for record in found if record["buckets"] == 1]
    slower = max((n for n, torch_over in alone if not torch_over or torch_over["median"] <= 1), default=0)
    return min((n for n, _ in alone if n > slower), default=None)
