"""What a GPU's first minutes are spent on, in this order; at toy size for a rehearsal on a CPU."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from experiments.config import data_root

PYTHON = sys.executable
SIZES = (14_700_000, 25_600_000, 345_000_000)  # VGG-16, ResNet-50, BERT-Large
AUTO_SIZES = (64, 4096, 16_384, 32_768, 65_536, 131_072, 1_048_576, 4_194_304, *SIZES)
TOY_SIZES = (20_000, 40_000, 80_000)
TOY_MIN, TOY_LIMIT_MIN = 0.2, 5.0  # on two idle cores
Need = Callable[[], str | None]  # why a part can't be run here; None where it can


class Planned(NamedTuple):
    """A command, and its minutes."""

    command: tuple[str, ...]
    expected_min: float  # estimated
    limit_min: float  # after which it is told to end
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True)
class Part:
    """One command, run as a process of its own; and a small one for rehearsals."""

    name: str
    shows: str
    real: Planned
    toy: Planned
    resumable: bool = False  # told to end, it saves, and goes on from there when it is run again
    leaves: tuple[str, ...] = ()  # patterns of the records that it leaves, below the results folder

    def planned(self, rehearsal: bool) -> Planned:
        return self.toy if rehearsal else self.real

    def missing(self, rehearsal: bool) -> str | None:
        """Why it can't be run here."""
        return next((why for need in self.planned(rehearsal).needs if (why := need())), None)


def package(name: str) -> Need:
    def need() -> str | None:
        return None if find_spec(name) else f"the Python package {name} is not installed"

    return need


def program(name: str) -> Need:
    return lambda: None if shutil.which(name) else f"{name} is not installed, or not on PATH"


def cifar10() -> str | None:
    """Offline, nothing can be downloaded in a GPU's minutes."""
    found = data_root.has(data_root.root_of(None), "cifar10")
    return None if found else "CIFAR-10 was not found: set DATA_ROOT to the folder that holds it"


def bench(name: str, *words: str) -> tuple[str, ...]:
    """The command of `make bench BENCH=name`."""
    return (PYTHON, "-m", f"experiments.bench.{name}", *words)


def experiments(*words: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "experiments", *words)


def sizes(numbers: tuple[int, ...]) -> tuple[str, ...]:
    return ("--n", *map(str, numbers))


def toy(command: tuple[str, ...], *needs: Need, expected_min: float = TOY_MIN) -> Planned:
    return Planned(command, expected_min, TOY_LIMIT_MIN, needs)


def sanitised(tool: str) -> Part:
    """The kernels under one tool of compute-sanitizer."""
    # Without torch's cache each tensor is an allocation of its own, whose ends are watched.
    watched = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", tool,
               "--error-exitcode", "1")  # fmt: skip
    needs = (program("compute-sanitizer"),)
    return Part(
        tool,
        f"compute-sanitizer's {tool} over every kernel, small",
        Planned((*watched, *bench("kernels", "--n", "100000", "--check")), 1.5, 4, needs),
        toy(bench("kernels", "--n", "20000", "--check", "--device", "cpu"), *needs),
    )


def iterations(precision: str) -> Part:
    """20 iterations of the paper's VGG-16 with the fused selection."""
    words = (*FUSED, "data.fallback=digits", f"precision={precision}")
    return Part(
        f"paper-{precision}",
        f"20 iterations of the paper profile in {precision}, 8 virtual workers x 128: breakdown and profile",
        Planned(bench("iterations", *words), 0.8, 3),
        toy(bench("iterations", "--iterations", "4", *TOY_FUSED)),  # a CPU has no tf32
        leaves=(f"bench/iterations/*-{precision}*",),
    )


def figure(item: str, expected_min: float, limit_min: float, *toy_words: str) -> Part:
    """Runs, picture and verdicts of a figure."""
    return Part(
        item,
        f"{item} in profile=paper: runs, picture, verdicts",
        Planned(experiments("reproduce", item, "profile=paper"), expected_min, limit_min, (cifar10,)),
        toy(experiments("reproduce", item, "profile=smoke", *toy_words), expected_min=0.3),
        resumable=True,
        leaves=(f"figures/{item}-*.md", f"figures/{item}-*.png"),
    )


def training(precision: str, expected_min: float) -> Part:
    words = ("timing.mode=production", f"precision={precision}")
    return Part(
        f"training-{precision}",
        f"VGG-16 for 138 epochs in {precision}, 8 virtual workers x 128",
        Planned(experiments("run", *FUSED, *words), expected_min, 60, (cifar10,)),
        toy(experiments("run", *TOY_FUSED, "timing.mode=production")),
        resumable=True,
    )


VIRTUAL = "cluster=virtual"  # as in profile=paper
FUSED = ("recipe=yoon2022", "profile=paper", VIRTUAL, "method=topk", "select=fused")
TOY_FUSED = ("profile=smoke", "task=cnn_digits", VIRTUAL, "method=topk")
TOY = ("--repeats", "3", "--device", "cpu")
FALLBACK = ("--rows", "add", "eager", "fused", "fallback")
TESTS = (package("pytest"), package("hypothesis"))

PARTS = (
    Part(
        "roofs",
        "versions, and the roofs: GB/s of a copy, an in-place add, a read",
        Planned(bench("roofs", *sizes(SIZES)), 0.3, 2),
        toy(bench("roofs", *sizes(TOY_SIZES), *TOY)),
    ),
    Part(
        "tests",
        'make test ARGS="-m gpu"',
        Planned((PYTHON, "-m", "pytest", "-q", "-m", "gpu"), 2, 5, TESTS),
        toy((PYTHON, "-m", "pytest", "-q", "-m", "gpu", "tests/sparsify/test_gpu.py"), *TESTS),
    ),
    Part(
        "kernels",
        "every kernel in a CUDA graph, device and host time in two columns",
        Planned(bench("kernels", *sizes(SIZES)), 1, 3),
        toy(bench("kernels", *sizes(TOY_SIZES), *TOY)),
    ),
    Part(
        "select",
        "BENCH=select: whole steps side by side with cold caches",
        Planned(bench("select", *sizes(SIZES), "--density", "0.001"), 2, 4),
        toy(bench("select", "--n", "20000", "--repeats", "2", "--flush", "1", "--device", "cpu",
                  "--rows", "copy", "fused", "numpy", "eager")),
        leaves=("bench/select-*.jsonl", "figures/select-*"),
    ),
    Part(
        "launch",
        "BENCH=launch: what a fused step costs the host",
        Planned(bench("launch"), 0.3, 2),
        toy(bench("launch", "--n", "20000", "--repeats", "20")),
        leaves=("bench/launch*",),
    ),
    Part(
        "auto",
        "BENCH=auto: is select=auto ever slower than torch.topk?",
        Planned(bench("auto", *sizes(AUTO_SIZES), "--density", "0.001", "0.01", "--seconds", "1.5"), 1, 3),
        toy(bench("auto", "--n", "64", "20000", "--density", "0.01", "--seconds", "0.1", "--device", "cpu")),
        leaves=("bench/auto-*.jsonl",),
    ),
    Part(
        "fallback",
        "the fallback forced: is it right, and how long does it take?",
        Planned(bench("kernels", *sizes(SIZES[:2]), *FALLBACK), 0.5, 2),
        toy(bench("kernels", *sizes(TOY_SIZES[:2]), *TOY, *FALLBACK)),
    ),
    sanitised("memcheck"),
    sanitised("racecheck"),
    iterations("fp32"),
    iterations("tf32"),
    figure("fig4", 3, 8, VIRTUAL),
    figure("fig4-fast", 3, 8, VIRTUAL),
    figure("speed", 5, 12, VIRTUAL),
    figure("speed-fast", 3, 8, VIRTUAL, "overlap=false"),
    training("fp32", 8),
    training("tf32", 4),
    Part(
        "trainings",
        "fig3 (and fig2) in profile=paper: 9 trainings, as far as time allows",
        Planned(experiments("reproduce", "fig3", "profile=paper"), 70, 240, (cifar10,)),
        toy(experiments("reproduce", "fig3", "profile=smoke"), expected_min=0.6),
        resumable=True,
        leaves=("figures/fig3-*.md",),
    ),
)  # fmt: skip
