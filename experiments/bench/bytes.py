"""Bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import Parameter

import sparsify
from experiments.bench._runner import WRONG, Bench, Record
from experiments.bench._timing import device_of, facts
from sparsify import cost
from sparsify.comm import virtual
from sparsify.method import Method
from sparsify.methods import REGISTRY as METHODS
from sparsify.methods import per_step_names
from sparsify.ranges import PositiveInt
from sparsify.types import BucketStep, num_selected
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import StepReport

WORKERS, DENSITIES, STEPS = (2, 4, 8, 16), (0.001, 0.01, 0.1), 3
ROW = 100  # gradients are a matrix, as PowerSGD needs
SCHEMES = {
    "dense": "dense", "topk": "topka", "gaussiank": "gaussiank", "sparcml": "topkdsa", "gtopk": "gtopk",
    "oktopk": "oktopk", "randomk": "randomk allgather", "blockrandomk": "blockrandomk allgather",
    "scalecom": "scalecom",
}  # fmt: skip


def bytes(*, n: PositiveInt = 100_000, methods: str = "") -> Bench:
    """Bytes on the wire: as each method promises, as the communicator counts, and as the literature has them.

    Every method sends one bucket of normal gradients, for several numbers of workers P and densities k/n.
    *promised* is what closed forms say, given how many elements each worker sent (a method's
    `predict_bytes`, by the forms of sparsify/cost.py); *counted* is what went through the communicator in the
    same step, on rank 0. They must be equal, or counted must lie in the promised range. *published* is the
    bandwidth term of the literature for a nominal k, in bytes of 4 per word (`sparsify.cost.published_cost`:
    Table 1 of Zhang's Stable Top-K slides, after Li and Hoefler 2022, and a few rows more); announcements of
    lengths come on top of it, and thresholds select about k.

    Args:
        n: elements, in rows of 100.
        methods: names, with commas; all by default.
    """
    if n % ROW:
        raise ValueError(f"--n {n}: {n} is no multiple of {ROW}, the length of a row")
    names = named(methods)
    cases = [
        {"method": name, "workers": size, "density": density, "n": n}
        for name in names
        for size in WORKERS
        for density in (DENSITIES if has_density(name) else DENSITIES[:1])
    ]
    return Bench(
        about=facts(device_of("cpu")),
        cases=cases,
        measure=measure,
        heading="method | P | k | sent | promised | counted | kept | published",
        row="{method} | {workers} | {k:,} | {sent:,} | {promised:,} | {counted:,} | {kept} | "
        "{published:,.0f}",
        last=lambda rows: {"n": n, "other_than_promised": sum(bool(row[WRONG]) for row in rows)},
        end=lambda line: [f"{line['other_than_promised']} of these promised other bytes than were counted"],
    )


def named(methods: str) -> list[str]:
    """The methods that are named with commas; all where none is.

    Raises:
        ValueError: there is no such method, or it is a strategy of local steps.
    """
    known = per_step_names()
    names = methods.split(",") if methods else known
    for name in names:
        METHODS.check_name(name)
        if name not in known:
            raise ValueError(
                f"methods={name}: it averages every few steps, and this looks at the average of every step; "
                f"take some of {', '.join(known)}"
            )
    return names


def has_density(method: str) -> bool:
    """Tell whether the method has a density to be chosen."""
    return "density" in sparsify.defaults(method)


def built(method: str, density: float) -> Method:
    """The method over the whole model, with this density, where it has these to be chosen."""
    known, wanted = sparsify.defaults(method), {"density": density, "scope": "global"}
    found: Method = sparsify.build(method, **{name: wanted[name] for name in wanted if name in known})
    return found


def measure(case: Record) -> Iterator[Record]:
    """Elements sent, bytes promised and bytes counted in the last of some steps, on rank 0."""
    name, size, density, n = case.values()
    method = built(name, density)
    shape = (n // ROW, ROW)

    def body(comm: virtual.VirtualComm) -> StepReport:
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(shape)))], comm)
        own = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            aggregator.gradients.flat.copy_(torch.randn(n, generator=own) * 0.01)
            report = aggregator.aggregate()
        return report

    reports = virtual.run(size, body)
    selected, counted = [report.selected for report in reports], reports[0].wire_bytes
    k = num_selected(n, method.density_at(0))
    promise = method.predict_bytes(BucketStep((shape,), k, torch.float32, size, STEPS - 1, selected))
    is_kept = promise is not None and promise.least <= counted <= promise.most
    yield {
        "k": num_selected(n, density) if has_density(name) else None,
        "sent": selected[0],
        "promised": None if promise is None else [promise.least, promise.most],
        "counted": counted,
        "published": published(name, n, num_selected(n, density), size, 4),
        "kept": "yes" if is_kept else "NO",
        WRONG: "" if is_kept else f"{name}, P = {size}, density {density:g}: {counted:,} bytes were counted",
    }


def published(name: str, n: int, k: int, size: int, word: int = 1) -> list[float] | None:
    """The literature's words, of so many bytes, least and most; None where it has none."""
    if name not in SCHEMES:
        return None
    return [float(word * words) for words in cost.published_cost(SCHEMES[name], n, k, size)[:2]]
