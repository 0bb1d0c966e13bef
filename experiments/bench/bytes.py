"""Bytes on the wire: predicted, counted and published."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import Parameter

import sparsify
from experiments.bench._runner import WRONG, Benchmark, Record
from experiments.bench._timing import choose_device_and_set_threads, describe_machine_and_code
from sparsify import cost
from sparsify.comm import virtual
from sparsify.method import Method
from sparsify.methods import REGISTRY as METHODS
from sparsify.methods import per_step_names
from sparsify.ranges import PositiveInt
from sparsify.types import BucketStep, num_selected
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import StepReport

WORKERS = (2, 4, 8, 16)
DENSITIES = (0.001, 0.01, 0.1)
STEPS = 3
WORD_BYTES = 4  # of the published costs
ROW_LENGTH = 100  # gradients are a matrix, as PowerSGD needs
PUBLISHED_SCHEMES = {  # by method, as `sparsify.cost.published_cost` names them
    "dense": "dense", "topk": "topka", "gaussiank": "gaussiank", "sparcml": "topkdsa", "gtopk": "gtopk",
    "oktopk": "oktopk", "randomk": "randomk allgather", "blockrandomk": "blockrandomk allgather",
    "scalecom": "scalecom",
}  # fmt: skip


def bytes(*, n: PositiveInt = 100_000, methods: str = "") -> Benchmark:
    """Compare bytes on the wire: as each method predicts, as the communicator counts, and as published.

    Every method sends one bucket of normal gradients, for several numbers of workers P and densities k/n.
    *promised* is what closed forms say, given how many elements each worker sent (a method's
    `predict_bytes`, by the forms of sparsify/cost.py); *counted* is what went through the communicator in the
    same step, on rank 0. They must be equal, or counted must lie in the promised range. *published* is the
    bandwidth term of the literature for a nominal k, in bytes of 4 per word (`sparsify.cost.published_cost`:
    Table 1 of Zhang's Stable Top-K slides, after Li and Hoefler 2022, and a few rows more); announcements of
    lengths come on top of it, and thresholds select about k.

    Args:
        n: number of elements, in rows of 100.
        methods: names of methods, with commas; by default all.
    """
    if n % ROW_LENGTH:
        raise ValueError(f"--n {n}: {n} is no multiple of {ROW_LENGTH}, the length of a row")
    names = parse_per_step_methods_or_all(methods)
    cases = [
        {"method": name, "workers": size, "density": density, "n": n}
        for name in names
        for size in WORKERS
        for density in (DENSITIES if has_density(name) else DENSITIES[:1])
    ]
    return Benchmark(
        machine=describe_machine_and_code(choose_device_and_set_threads("cpu")),
        cases=cases,
        measure=predict_and_count_bytes,
        header="method | P | k | sent | promised | counted | kept | published",
        row_format="{method} | {workers} | {k:,} | {sent:,} | {promised:,} | {counted:,} | {kept} | "
        "{published:,.0f}",
        summarise=lambda rows: {"n": n, "other_than_promised": sum(bool(row[WRONG]) for row in rows)},
    )


def parse_per_step_methods_or_all(methods: str) -> list[str]:
    """Return the methods that are named with commas; all where none is.

    Raises:
        ValueError: there is no such method, or it is a strategy of local steps.
    """
    known_names = per_step_names()
    names = methods.split(",") if methods else known_names
    for name in names:
        METHODS.check_name(name)
        if name not in known_names:
            raise ValueError(
                f"methods={name}: it averages every few steps, and this looks at the average of every step; "
                f"take some of {', '.join(known_names)}"
            )
    return names


def has_density(method: str) -> bool:
    """Tell whether the method has a density to be chosen."""
    return "density" in sparsify.defaults(method)


def build_global_method(name: str, density: float) -> Method:
    """Return the method over the whole model, with this density, where it takes these options."""
    options = {"density": density, "scope": "global"}
    defaults = sparsify.defaults(name)
    method: Method = sparsify.build(
        name, **{option: options[option] for option in options if option in defaults}
    )
    return method


def predict_and_count_bytes(case: Record) -> Iterator[Record]:
    """Yield the elements sent, the bytes predicted and the bytes counted in rank 0's last step."""
    name, workers, density, n = case.values()
    method = build_global_method(name, density)
    shape = (n // ROW_LENGTH, ROW_LENGTH)

    def run_steps(comm: virtual.VirtualComm) -> StepReport:
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(shape)))], comm)
        rng = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            aggregator.gradients.flat.copy_(torch.randn(n, generator=rng) * 0.01)
            report = aggregator.aggregate()
        return report

    reports = virtual.run(workers, run_steps)
    selected = [report.selected for report in reports]
    counted_bytes = reports[0].wire_bytes
    k = num_selected(n, method.density_at(0))
    prediction = method.predict_bytes(BucketStep((shape,), k, torch.float32, workers, STEPS - 1, selected))
    is_kept = prediction is not None and prediction.least <= counted_bytes <= prediction.most
    nominal_k = num_selected(n, density)
    published = None
    if name in PUBLISHED_SCHEMES:
        words = cost.published_cost(PUBLISHED_SCHEMES[name], n, nominal_k, workers)[:2]
        published = [float(WORD_BYTES * number) for number in words]
    yield {
        "k": nominal_k if has_density(name) else None,
        "sent": selected[0],
        "promised": None if prediction is None else [prediction.least, prediction.most],
        "counted": counted_bytes,
        "published": published,
        "kept": "yes" if is_kept else "NO",
        WRONG: ""
        if is_kept
        else f"{name}, P = {workers}, density {density:g}: {counted_bytes:,} bytes were counted",
    }
