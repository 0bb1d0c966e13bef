"""Host time of one fused step on CUDA: acc += grad and its k largest, launched in two ways, side by side.

make bench BENCH=launch [ARGS="--repeats 2000"]

*ordinary*: every launch is Triton's own, kernel[grid](...). *kept*: compiled kernels are kept and launched
directly, as `select=fused` does (sparsify/kernels/launches.py). Both take a step in every repetition, in
random order. Without a GPU, kernels are compiled for compute capability 9.0 and the launcher does nothing, so
that what is timed is Python alone; with one, kernels are started, and the device is idle when a step begins.

The last line is one JSON object; the same line is appended to results/bench/launch.jsonl.
"""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from analysis.files import write_atomic
from analysis.records import now
from experiments.bench._case import spread
from experiments.bench._side_by_side import no_collection
from experiments.config import code_version
from experiments.config.folders import Folders
from experiments.worker.provenance import cpu_model

N, DENSITY, REPEATS = 100_010, 0.01, 1000  # n hardly matters to the host
WARM_UP = 20  # the first steps compile, and keep
TARGET_US = 30


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=launch", description=__doc__.partition("\n")[0])
    words.add_argument("--n", type=positive, default=N, help="elements")
    words.add_argument("--repeats", type=positive, default=REPEATS, help="steps of each kind that are timed")
    words.add_argument("--ship", action="store_true", help="copy the record into results/shipped")
    asked = words.parse_args()
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    took = measure(asked.n, asked.repeats, cuda)
    ratios = [a / b for a, b in zip(took["ordinary"], took["kept"], strict=True)]
    line = {
        "bench": "launch",
        "device": torch.cuda.get_device_name() if cuda else f"{cpu_model()}, 1 thread",
        "launcher": "the driver's" if cuda else "does nothing; no GPU",
        **versions(),
        "n": asked.n,
        "k": int(DENSITY * asked.n),
        "target_us": TARGET_US,
        "host_us": spread(took["kept"]),
        "ordinary_host_us": spread(took["ordinary"]),
        "ordinary_over_kept": spread(ratios),
    }
    print(table(line))
    record = {"at": now(), "kind": "launch", **code_version.origin(), **line}
    folders = Folders()
    append(folders.results / "bench" / "launch.jsonl", record)
    if asked.ship:
        append(folders.shipped / "bench" / "launch.jsonl", record)
    print(json.dumps(line))
    return 0


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of 1 or more")
    return int(text)


def measure(n: int, repeats: int, cuda: bool) -> dict[str, list[float]]:
    """Microseconds of the host for each step of each kind."""
    from sparsify.kernels import gpu  # Triton takes its time to import

    if not cuda:
        from experiments.bench._absent_gpu import replace_gpu

        replace_gpu()
    device, k = "cuda" if cuda else "cpu", int(DENSITY * n)
    acc, grad = torch.zeros(n, device=device), torch.zeros(n, device=device)
    kernels = dict[str, gpu.Gpu]()
    for name in ("ordinary", "kept"):
        kernels[name] = gpu.Gpu(acc)
        kernels[name].launch.keep = name == "kept"
    took: dict[str, list[float]] = {name: [] for name in kernels}
    order = random.Random(0)
    with no_collection():
        for turn in range(-WARM_UP, repeats):
            for name in order.sample(list(kernels), len(kernels)):
                if cuda:
                    torch.cuda.synchronize()
                began = time.perf_counter()
                kernels[name].topk(acc, grad, k)
                us = 1e6 * (time.perf_counter() - began)
                if turn >= 0:
                    took[name].append(us)
    return took


def versions() -> dict[str, str]:
    import triton

    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def table(line: dict[str, Any]) -> str:
    def cells(found: dict[str, Any]) -> str:
        return f"{found['median']:.1f} | [{found['low']:.1f}, {found['high']:.1f}] | {found['n']}"

    head = (
        f"Host time of one fused step, n = {line['n']:,}, k = {line['k']:,}; launcher: {line['launcher']}; "
        f"{line['device']}; torch {line['torch']}, Triton {line['triton']}, Python {line['python']}"
    )
    return (
        f"{head}\n\n| launches | median, us | {line['host_us']['spread']} | n |\n|---|---|---|---|\n"
        f"| ordinary | {cells(line['ordinary_host_us'])} |\n| kept | {cells(line['host_us'])} |\n"
        f"| ordinary / kept | {cells(line['ordinary_over_kept'])} |\n"
    )


def append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    write_atomic(path, before + json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
