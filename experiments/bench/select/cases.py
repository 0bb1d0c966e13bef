"""What the benchmark of selections is asked to measure: its rows and its cases."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from experiments.bench import _gradients as gradients
from experiments.bench._case import Case
from experiments.bench._steps import ROWS
from experiments.bench.select.records import DENSITY, LARGE_N, NORMAL
from sparsify.ranges import unknown

SIZES = (270_000, 11_200_000, 14_700_000, 25_600_000, 138_000_000, 345_000_000)
DENSITIES = (0.0001, 0.001, 0.01, 0.1)
REAL = "real"  # all gradients.NETWORKS
DISTRIBUTIONS = (*gradients.SYNTHETIC, gradients.FIRST_TIED, *gradients.NETWORKS)
OTHERS_AT = 14_700_000  # elements, for the other distributions
STANDARD = Case(LARGE_N, DENSITY, NORMAL)  # of the last line


def rows_of(asked: argparse.Namespace) -> list[str]:
    for name in asked.rows or ():
        if name not in ROWS:
            raise ValueError(unknown("row", name, list(ROWS)))
    return [name for name in ROWS if name in (asked.rows or ROWS)]


def cases(asked: argparse.Namespace) -> list[Case]:
    """What is to be measured; every combination of the words, or the default plan without any."""
    for n in asked.n or ():
        if n < 1:
            raise ValueError(f"--n {n}: must be 1 or more")
    for density in asked.density or ():
        if not 0 < density <= 1:
            raise ValueError(f"--density {density}: must lie in (0, 1]")
    names: list[str] = []
    for name in asked.distribution or ():
        names += gradients.NETWORKS if name == REAL else [name]
    for name in names:
        if name not in DISTRIBUTIONS:
            known = [*DISTRIBUTIONS, REAL]
            raise ValueError(unknown("distribution", name, known))
    if not (asked.n or asked.density or names):
        return unique([
            *(Case(size, DENSITY, NORMAL) for size in SIZES),
            *(Case(LARGE_N, density, NORMAL) for density in DENSITIES),
            *(Case(own_size(name, OTHERS_AT), DENSITY, name) for name in DISTRIBUTIONS if name != NORMAL),
        ])  # fmt: skip
    return unique(
        Case(own_size(name, n), density, name)
        for n in asked.n or (LARGE_N,)
        for density in asked.density or (DENSITY,)
        for name in names or (NORMAL,)
    )


def unique(plan: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(plan))


def own_size(distribution: str, n: int) -> int:
    """Real gradients have a size of their own."""
    return gradients.NETWORKS[distribution][1] if distribution in gradients.NETWORKS else n
