"""Local steps, beside the inner optimiser alone, and their exchange beside fused Top-k."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

import sparsify
from experiments.bench._runner import Bench, Record, rounded, spread
from experiments.bench._step_launches import CLOCKS, WARM_UP, Samples, taken
from experiments.bench._timing import device_of, facts, no_collection
from experiments.training.language.networks import GPT
from sparsify.comm import virtual
from sparsify.ranges import PositiveFraction, PositiveInt
from sparsify.wrappers.aggregator import Aggregator

Part = Literal["exchange", "step"]
NEVER = 10**9  # steps of a round that does not end
HEADS, CONTEXT = 5, 64
MORE = {"exchange": 1, "step": 10}  # times as many turns: of a step one percent is looked for
# What is wanted at the default size: row, what it is divided by, and the most that it may be.
TARGETS = (
    ("sparseloco", "topk, global", 2.0),
    ("sparseloco", "topk, layer", 2.0),
    ("local step", "inner step", 1.01),
)


class LocalAsked(NamedTuple):
    """What the process of a launch is told."""

    part: Part
    layers: int
    width: int
    vocabulary: int
    density: float
    turns: int
    launch: int


def local(
    *,
    parts: Sequence[Part] = ("exchange", "step"),
    layers: PositiveInt = 8,
    width: PositiveInt = 320,
    vocabulary: PositiveInt = 1000,
    density: PositiveFraction = 1 / 64,
    launches: PositiveInt = 5,
    turns: PositiveInt = 20,
) -> Bench:
    """What local steps cost beside what they replace, for a decoder of 10 M parameters.

    *exchange*: SparseLoCo's exchange, with its look for NaN and Inf, beside `aggregate` of Top-k of as many
    elements by the fused kernel, where k is that of the whole model and where it is that of each tensor.
    *step*: a step of AdamW within a round, beside AdamW's own.

    One worker of one thread, so that nothing is waited for. A launch is a fresh process; in it all rows take
    turns, in random order, and its ratio is the median of those within a turn. What is reported is the median
    over launches of CPU time, with the smallest and the largest; wall time is recorded beside it.

    The last lines say which targets are met, at the default size.

    Args:
        parts: exchange, step.
        layers: of the decoder.
        width: of its layers, a multiple of 5.
        vocabulary: tokens of its embedding.
        density: k/n, of each chunk of SparseLoCo.
        launches: processes.
        turns: of each exchange in a launch; ten times as many of each step.
    """
    about = facts(device_of("cpu"), threads=1)
    size = {"layers": layers, "width": width, "vocabulary": vocabulary}
    is_default = (layers, width, vocabulary, density) == (8, 320, 1000, 1 / 64)

    def measure(case: Record) -> Iterator[Record]:
        asked = [
            LocalAsked(case["part"], layers, width, vocabulary, density, turns, at) for at in range(launches)
        ]
        yield from rows_of([launched(one) for one in asked])

    return Bench(
        about=about | {"name": f"{about['cpu']}, 1 thread a process"},
        head=f"{launches} launches; ratios are medians over launches [smallest, largest]",
        cases=[{"part": part, **size, "density": density} for part in parts],
        setting={"launches": launches, "turns": turns},
        measure=measure,
        heading="row | beside | n | CPU, ms | beside, ms | ratio | launches",
        row="{row} | {beside} | {n:,} | {cpu_ms[median]:.3g} | {beside_ms[median]:.3g} | {ratio:.3f} | "
        "{ratio[n]}",
        last=lambda rows: {f"{row['row']} / {row['beside']}": row["ratio"] for row in rows},
        end=lambda line: verdicts(line) if is_default else (),
    )


def rows_of(launches: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
    """A row for each comparison that these launches made."""
    for name, beside, _ in TARGETS:
        pairs = [(one["samples_ms"].get(name), one["samples_ms"].get(beside)) for one in launches]
        if not all(all(pair) for pair in pairs):
            continue
        yield {
            "row": name, "beside": beside, "n": launches[0]["n"],
            "cpu_ms": spread([statistics.median(ours["cpu"]) for ours, _ in pairs]),
            "beside_ms": spread([statistics.median(theirs["cpu"]) for _, theirs in pairs]),
            "ratio": spread([
                statistics.median(map(truediv, ours["cpu"], theirs["cpu"])) for ours, theirs in pairs
            ]),
            "samples_ms": pairs,
        }  # fmt: skip


def verdicts(line: Record) -> list[str]:
    """A sentence for each target that was measured, by the medians."""
    said = []
    for name, beside, most in TARGETS:
        if found := line.get(f"{name} / {beside}"):
            met = "met" if found["median"] <= most else "MISSED"
            within = f"{found['median']:.4g} [{found['low']:.4g}, {found['high']:.4g}], n = {found['n']}"
            said.append(f"{name} / {beside}: at most {most:g} wanted, {within} measured: {met}")
    return said


def launched(asked: LocalAsked) -> Record:
    """What a fresh process found."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (asked, folder), nprocs=1)
        found: Record = json.loads((Path(folder) / "found.json").read_text())
    return found


def work(rank: int, asked: LocalAsked, folder: str) -> None:
    """The process of a launch."""
    torch.set_num_threads(1)
    (found,) = virtual.run(1, lambda comm: timed(asked, comm))
    (Path(folder) / "found.json").write_text(json.dumps(found))


def timed(asked: LocalAsked, comm: virtual.VirtualComm) -> Record:
    """All rows of a part, in each turn in another order."""
    ready = (exchanges if asked.part == "exchange" else steps)(asked, comm)
    order = random.Random(asked.launch)
    samples: Samples = {name: {clock: [] for clock in CLOCKS} for name in ready}
    with no_collection():
        for turn in range(-WARM_UP, asked.turns * MORE[asked.part]):
            for name in order.sample([*ready], len(ready)):
                prepare, do = ready[name]
                prepare()
                for clock, ms in zip(CLOCKS, taken(do), strict=True):
                    if turn >= 0:
                        samples[name][clock].append(rounded(ms))
    return {"n": sum(p.numel() for p in decoder(asked).parameters()), "samples_ms": samples}


Row = tuple[Callable[[], object], Callable[[], object]]  # what goes before, untimed, and what is timed


def exchanges(asked: LocalAsked, comm: virtual.VirtualComm) -> dict[str, Row]:
    """The exchange after one step of SGD, and Top-k of such gradients."""
    found, draws = dict[str, Row](), torch.Generator().manual_seed(asked.launch)
    model = decoder(asked)
    strategy = sparsify.sparseloco(every=1, density=asked.density)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimiser = sparsify.distribute(inner, model, strategy, comm, select="fused")

    def stepped() -> None:
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draws)
        optimiser.step_locally()

    found["sparseloco"] = stepped, optimiser.exchange_if_due
    for scope in ("global", "layer"):
        method = sparsify.build("topk", density=asked.density, scope=scope)
        aggregator = Aggregator(method, decoder(asked).named_parameters(), comm, select="fused")
        drawn = partial(aggregator.gradients.flat.normal_, generator=draws)
        found[f"topk, {scope}"] = drawn, aggregator.aggregate
    return found


def steps(asked: LocalAsked, comm: virtual.VirtualComm) -> dict[str, Row]:
    """AdamW's step, and the same within a round, of the same parameters and moments: where these lie in
    memory makes more of a difference than what is compared. The learning rate is 0, as the wrapper refuses
    parameters that another optimiser changes.
    """
    model, draws = decoder(asked), torch.Generator().manual_seed(asked.launch)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draws)
    alone, inner = (torch.optim.AdamW(model.parameters(), lr=0.0) for _ in range(2))
    optimiser = sparsify.distribute(inner, model, sparsify.sparseloco(every=NEVER), comm)
    optimiser.step()
    alone.state = inner.state
    return {"inner step": (lambda: None, alone.step), "local step": (lambda: None, optimiser.step)}


def decoder(asked: LocalAsked) -> nn.Module:
    """Alike whenever it is made."""
    torch.manual_seed(0)
    return GPT(asked.vocabulary, CONTEXT, asked.width, asked.layers, HEADS)
