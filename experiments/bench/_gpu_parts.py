"""What a GPU's first minutes are spent on, in this order, and what was promised of them.

At toy size for a rehearsal on a CPU.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from experiments.config import data_root

SIZES = "14700000 25600000 345000000"  # VGG-16, ResNet-50, BERT-Large
AUTO_SIZES = f"64 4096 16384 32768 65536 131072 1048576 4194304 {SIZES}"
TOY_SIZES = "20000 40000 80000"
TOY_LIMIT_MIN = 5.0  # on two idle cores
Need = Callable[[], str | None]  # why a part can't be run here; None where it can


@dataclass(frozen=True)
class GpuPart:
    """One command, run as a process of its own; and a small one for rehearsals.

    Args:
        real: its words: of `python -m experiments`; or of Python, where they begin with -.
        expected_min: estimated.
        limit_min: after which it is told to end.
        resumable: told to end, it saves, and goes on from there when it is run again.
        under: a program that it is run by, with its words.
        needs: what it needs here; with CIFAR-10 only the real one.
    """

    name: str
    shows: str
    real: str
    expected_min: float
    limit_min: float
    toy: str
    toy_min: float = 0.2
    resumable: bool = False
    under: str = ""
    needs: tuple[Need, ...] = ()
    cifar10: bool = False

    def minutes(self, rehearsal: bool) -> tuple[float, float]:
        """Minutes that it should take, and its limit."""
        return (self.toy_min, TOY_LIMIT_MIN) if rehearsal else (self.expected_min, self.limit_min)

    def command(self, rehearsal: bool) -> list[str]:
        """The words of the process."""
        words = shlex.split(self.toy if rehearsal else self.real)
        module = words if words[0].startswith("-") else ["-m", "experiments", *words]
        return [*([] if rehearsal else shlex.split(self.under)), sys.executable, *module]

    def missing(self, rehearsal: bool) -> str | None:
        """The reason why it can't be run here."""
        needs = self.needs if rehearsal or not self.cifar10 else (*self.needs, has_cifar10)
        return next((why for need in needs if (why := need())), None)


def package(name: str) -> Need:
    """A Python package."""
    return lambda: None if find_spec(name) else f"the Python package {name} is not installed"


def program(name: str) -> Need:
    """A program."""
    return lambda: None if shutil.which(name) else f"{name} is not installed, or not on PATH"


def has_cifar10() -> str | None:
    """Offline, nothing can be downloaded in a GPU's minutes."""
    found = data_root.has(data_root.root_of(None), "cifar10")
    return None if found else "CIFAR-10 was not found: set DATA_ROOT to the folder that holds it"


def sanitised(tool: str) -> GpuPart:
    """The kernels under one tool of compute-sanitizer."""
    return GpuPart(
        tool, f"compute-sanitizer's {tool} over every kernel, small",
        "bench kernels --n 100000 --check --force", 1.5, 4,
        "bench kernels --n 20000 --check --force --device cpu",
        # Without torch's cache each tensor is an allocation of its own, whose ends are watched.
        under=f"env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool {tool} --error-exitcode 1",
        needs=(program("compute-sanitizer"),),
    )  # fmt: skip


def iterations(precision: str) -> GpuPart:
    """20 iterations of the paper's VGG-16 with the fused selection; a CPU has no tf32."""
    return GpuPart(
        f"paper-{precision}",
        f"20 iterations of the paper profile in {precision}, 8 virtual workers x 128: breakdown and profile",
        f"bench iterations {FUSED} data.fallback=digits precision={precision}", 0.8, 3,
        f"bench iterations --iterations 4 {TOY_FUSED}",
    )  # fmt: skip


def figure(item: str, expected_min: float, limit_min: float, toy_words: str) -> GpuPart:
    """Runs, picture and verdicts of a figure."""
    return GpuPart(
        item, f"{item} in profile=paper: runs, picture, verdicts",
        f"reproduce {item} profile=paper", expected_min, limit_min,
        f"reproduce {item} profile=smoke {toy_words}", toy_min=0.3, resumable=True, cifar10=True,
    )  # fmt: skip


def training(precision: str, expected_min: float) -> GpuPart:
    """A whole training of the paper."""
    return GpuPart(
        f"training-{precision}", f"VGG-16 for 138 epochs in {precision}, 8 virtual workers x 128",
        f"run {FUSED} timing.mode=production precision={precision}", expected_min, 60,
        f"run {TOY_FUSED} timing.mode=production", resumable=True, cifar10=True,
    )  # fmt: skip


VIRTUAL = "cluster=virtual"  # as in profile=paper
FUSED = f"recipe=yoon2022 profile=paper {VIRTUAL} method=topk select=fused"
TOY_FUSED = f"profile=smoke task=cnn_digits {VIRTUAL} method=topk"
TOY = "--repeats 3 --device cpu"
FALLBACK = "--rows add eager fused fallback"

PARTS = (
    GpuPart("roofs", "versions, and the roofs: GB/s of a copy, an in-place add, a read",
         f"bench roofs --n {SIZES}", 0.3, 2, f"bench roofs --n {TOY_SIZES} {TOY}"),
    GpuPart("tests", 'make test ARGS="-m gpu"', "-m pytest -q -m gpu", 2, 5,
         "-m pytest -q -m gpu tests/sparsify/test_gpu.py", needs=(package("pytest"), package("hypothesis"))),
    GpuPart("kernels", "every kernel in a CUDA graph, device and host time in two columns",
         f"bench kernels --n {SIZES}", 1, 3, f"bench kernels --n {TOY_SIZES} {TOY}"),
    GpuPart("select", "BENCH=select: whole steps side by side with cold caches",
         f"bench select --n {SIZES} --density 0.001", 2, 4,
         "bench select --n 20000 --repeats 2 --flush 1 --device cpu --rows copy fused numpy eager"),
    GpuPart("launch", "BENCH=launch: what a fused step costs the host", "bench launch", 0.3, 2,
         "bench launch --n 20000 --repeats 20"),
    GpuPart("auto", "BENCH=auto: is select=auto ever slower than torch.topk?",
         f"bench auto --n {AUTO_SIZES} --density 0.001 0.01 --seconds 1.5", 1, 3,
         "bench auto --n 64 20000 --density 0.01 --seconds 0.1 --device cpu"),
    GpuPart("fallback", "the fallback forced: is it right, and how long does it take?",
         f"bench kernels --n 14700000 25600000 {FALLBACK}", 0.5, 2,
         f"bench kernels --n 20000 40000 {TOY} {FALLBACK}"),
    sanitised("memcheck"),
    sanitised("racecheck"),
    iterations("fp32"),
    iterations("tf32"),
    figure("fig4", 3, 8, VIRTUAL),
    figure("fig4-fast", 3, 8, VIRTUAL),
    figure("speed", 5, 12, VIRTUAL),
    figure("speed-fast", 3, 8, f"{VIRTUAL} overlap=false"),
    training("fp32", 8),
    training("tf32", 4),
    GpuPart("trainings", "fig3 (and fig2) in profile=paper: 9 trainings, as far as time allows",
         "reproduce fig3 profile=paper", 70, 240, "reproduce fig3 profile=smoke", toy_min=0.6,
         resumable=True, cifar10=True),
)  # fmt: skip


@dataclass(frozen=True)
class GpuPromise:
    """A number that a GPU must reach.

    Args:
        bound: it is to be at most this, or at least where `at_least`.
        predicted: before the first GPU, from counts of bytes, launches and instructions.
        part: that measures it.
        at: where it is in the object that the part prints last; without, the minutes of the whole command
            over all its calls, start and validation included.
    """

    text: str
    bound: float
    unit: str
    predicted: str
    part: str
    at: tuple[str | int, ...] = ()
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        """Tell whether a value is within the bound."""
        return value >= self.bound if self.at_least else value <= self.bound

    def read(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The number with its spread, from what became of the part; None where it is not in there."""
        value: Any = row["found"]
        if not self.at:
            value = None if row["reused"] else row["spent_s"] / 60
        for step in self.at:
            by_step: dict[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value or ()))
            value = by_step.get(step)
        return value if isinstance(value, dict) or value is None else {"median": value, "n": 1}


ADD, EAGER = "fused_over_add", "eager_over_fused"
PERCENT, EPOCHS = ("compression_percent",), ("epochs_138_min",)
# Predicted in ratios of a copy, which takes as long as the add or longer: 12 bytes an element, both of them.
PROMISES = (
    GpuPromise("fused step / in-place add, 14.7M", 1.6, "x", "1.7; 1.36 as one kernel", "kernels",
               ("cases", 0, ADD)),
    GpuPromise("fused step / in-place add, 25.6M", 1.35, "x", "1.47; 1.25 as one kernel", "kernels",
               ("cases", 1, ADD)),
    GpuPromise("fused step / in-place add, 345M", 1.2, "x", "1.13; 1.11 as one kernel", "kernels",
               ("cases", 2, ADD)),
    GpuPromise("torch.topk's step / fused step, 25.6M", 6, "x", "5 to 6, less if torch.topk is at the roof",
               "kernels", ("cases", 1, EAGER), at_least=True),
    GpuPromise("torch.topk's step / fused step, 345M", 6, "x", "6.0 to 6.5", "kernels", ("cases", 2, EAGER),
               at_least=True),
    GpuPromise("host time of a fused step", 30, "us", "112 by Triton's launcher, less by kept kernels",
               "launch", ("host_us",)),
    # Where auto is torch the ratio is 1 but for noise, of which the smallest of many is taken.
    GpuPromise("torch / auto, the smallest of all sizes", 0.95, "x", "1", "auto", ("least_torch_over_auto",),
               at_least=True),
    GpuPromise("compression in % of FP + BP, fp32", 3, "%", "2.4 to 3.2", "paper-fp32", PERCENT),
    GpuPromise("compression in % of FP + BP, tf32", 6, "%", "6 to 8", "paper-tf32", PERCENT),
    GpuPromise("138 epochs of VGG-16, fp32, from 20 iterations", 8, "min", "7", "paper-fp32", EPOCHS),
    GpuPromise("138 epochs of VGG-16, tf32, from 20 iterations", 4, "min", "3", "paper-tf32", EPOCHS),
    GpuPromise("138 epochs of VGG-16, fp32, the whole command", 8, "min", "7", "training-fp32"),
    GpuPromise("138 epochs of VGG-16, tf32, the whole command", 4, "min", "3", "training-tf32"),
)  # fmt: skip
