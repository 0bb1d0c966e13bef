"""Local steps, beside the inner optimizer alone, and their exchange beside fused Top-k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

import sparsify
from experiments.bench._launches import (
    LaunchPlan,
    TimedVariant,
    run_launches,
    summarise_launch_median_ratios,
    summarise_launch_medians,
)
from experiments.bench._runner import Benchmark, Record
from experiments.bench._targets import BenchmarkTarget
from experiments.bench._timing import describe_single_thread_cpu_machine
from experiments.training.language.networks import GPT
from sparsify.comm import Comm
from sparsify.ranges import PositiveFraction, PositiveInt
from sparsify.wrappers.aggregator import Aggregator

Part = Literal["exchange", "step"]
NEVER = 10**9  # steps of a round that does not end
HEADS = 5
CONTEXT = 64
TURNS_FACTOR = {"exchange": 1, "step": 10}  # a difference of one percent is looked for between steps
COMPARED_PAIRS = (
    ("sparseloco", "topk, global"),
    ("sparseloco", "topk, layer"),
    ("local step", "inner step"),
)
TARGETS = (  # at the default size
    BenchmarkTarget(("sparseloco / topk, global",), 2.0),
    BenchmarkTarget(("sparseloco / topk, layer",), 2.0),
    BenchmarkTarget(("local step / inner step",), 1.01),
)


def local(
    *,
    parts: Sequence[Part] = ("exchange", "step"),
    layers: PositiveInt = 8,
    width: PositiveInt = 320,
    vocabulary: PositiveInt = 1000,
    density: PositiveFraction = 1 / 64,
    launches: PositiveInt = 5,
    turns: PositiveInt = 20,
) -> Benchmark:
    """Time local steps beside what they replace, for a decoder of 10 M parameters.

    *exchange*: SparseLoCo's exchange, with its search for NaN and Inf, beside `aggregate` of Top-k of as many
    elements by the fused kernel, where k is that of the whole model and where it is that of each tensor.
    *step*: a step of AdamW within a round, beside AdamW's own.

    One worker of one thread, so that nothing is waited for. A launch is a fresh process; in it all rows take
    turns, in random order, and its ratio is the median of those within a turn. What is reported is the median
    over launches of CPU time, with the smallest and the largest; wall time is recorded beside it.

    The last lines say which targets are met, at the default size.

    Args:
        parts: exchange, step.
        layers: number of layers of the decoder.
        width: width of its layers, a multiple of 5.
        vocabulary: number of tokens of its embedding.
        density: k/n, of each chunk of SparseLoCo.
        launches: number of launches.
        turns: turns of each exchange in a launch; a step has ten times as many.
    """
    size = {"layers": layers, "width": width, "vocabulary": vocabulary, "density": density}
    is_default = [*size.values()] == [8, 320, 1000, 1 / 64]

    def measure(case: Record) -> Iterator[Record]:
        part = case["part"]
        make_plan = plan_exchanges if part == "exchange" else plan_inner_and_local_steps
        reports = run_launches(
            make_plan, launches, 1, turns * TURNS_FACTOR[part], uses_virtual_comm=True, **size
        )
        samples_by_launch = [report["samples_ms"] for report in reports]
        for name, base in COMPARED_PAIRS:
            if name in samples_by_launch[0]:
                yield {
                    "row": name, "beside": base, "n": reports[0]["n"],
                    "cpu_ms": summarise_launch_medians(samples_by_launch, name),
                    "beside_ms": summarise_launch_medians(samples_by_launch, base),
                    "ratio": summarise_launch_median_ratios(samples_by_launch, name, base),
                    "samples_ms": [(samples[name], samples[base]) for samples in samples_by_launch],
                }  # fmt: skip

    return Benchmark(
        machine=describe_single_thread_cpu_machine("1 thread a process"),
        description=f"{launches} launches; ratios are medians over launches [smallest, largest]",
        cases=[{"part": part, **size} for part in parts],
        settings={"launches": launches, "turns": turns},
        measure=measure,
        header="row | beside | n | CPU, ms | beside, ms | ratio | launches",
        row_format="{row} | {beside} | {n:,} | {cpu_ms[median]:.3g} | {beside_ms[median]:.3g} | "
        "{ratio:.3f} | {ratio[n]}",
        summarise=lambda rows: {f"{row['row']} / {row['beside']}": row["ratio"] for row in rows},
        targets=lambda result: TARGETS if is_default else (),
    )


def plan_exchanges(comm: Comm, options: Any) -> LaunchPlan:
    """Plan to time SparseLoCo's exchange after one step of SGD, and Top-k of such gradients."""
    rng = torch.Generator().manual_seed(options.launch)
    model = make_decoder(options)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = sparsify.sparseloco(every=1, density=options.density)
    optimizer = sparsify.distribute(inner, model, strategy, comm, select="fused")

    def step_locally() -> None:
        set_random_gradients(model, rng)
        optimizer.step_locally()

    variants = {"sparseloco": TimedVariant(optimizer.exchange_if_due, step_locally)}
    for scope in ("global", "layer"):
        method = sparsify.build("topk", density=options.density, scope=scope)
        parameters = make_decoder(options).named_parameters()
        aggregator = Aggregator(method, parameters, comm, select="fused")
        fill = partial(aggregator.gradients.flat.normal_, generator=rng)
        variants[f"topk, {scope}"] = TimedVariant(aggregator.aggregate, fill)
    return LaunchPlan(variants, lambda: {"n": count_parameters(model)})


def plan_inner_and_local_steps(comm: Comm, options: Any) -> LaunchPlan:
    """Plan to time AdamW's step, alone and within a round, on the same parameters and moments.

    Where these lie in memory makes more of a difference than what is compared. The learning rate is 0, as the
    wrapper refuses parameters that another optimizer changes.
    """
    model = make_decoder(options)
    set_random_gradients(model, torch.Generator().manual_seed(options.launch))
    unwrapped = torch.optim.AdamW(model.parameters(), lr=0.0)
    inner = torch.optim.AdamW(model.parameters(), lr=0.0)
    optimizer = sparsify.distribute(inner, model, sparsify.sparseloco(every=NEVER), comm)
    optimizer.step()
    unwrapped.state = inner.state
    variants = {"inner step": TimedVariant(unwrapped.step), "local step": TimedVariant(optimizer.step)}
    return LaunchPlan(variants, lambda: {"n": count_parameters(model)})


def make_decoder(options: Any) -> nn.Module:
    """Return a decoder with the same parameters at each call."""
    torch.manual_seed(0)
    return GPT(options.vocabulary, CONTEXT, options.width, options.layers, HEADS)


def set_random_gradients(model: nn.Module, rng: torch.Generator) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=rng)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
