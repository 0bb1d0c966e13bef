"""How long do the operators take that choose elements: top-k, a sort, a random permutation, the k-th value?

One file that needs nothing but torch, and runs on Python 3.8 and torch 1.8.1, so that the operator of a
published measurement can be timed on the same node as today's. Prints a JSON line for each operator.
    singularity/exec yoon2022 experiments/bench/operators.py
"""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch

VGG16 = 14_728_266  # parameters of Yoon and Oh's VGG-16 for CIFAR-10
DENSITY = 0.001
REPEATS = {"cuda": 50, "cpu": 10}
WARM_UP = 3  # the first calls allocate, and load kernels


def operators(n: int, k: int, device: str) -> dict[str, Callable[[], object]]:
    """Name -> a call; selections are by magnitude, as the published code's are, of normal numbers."""
    torch.manual_seed(0)
    magnitudes = torch.randn(n, device=device).abs()
    return {
        "topk": lambda: torch.topk(magnitudes, k),
        "topk_unsorted": lambda: torch.topk(magnitudes, k, sorted=False),
        "sort": lambda: torch.sort(magnitudes, descending=True),
        "kthvalue": lambda: torch.kthvalue(magnitudes, n - k + 1),
        "randperm": lambda: torch.randperm(n, device=device),
        "read": lambda: magnitudes.sum(),  # what merely reading all elements takes
    }


def times(call: Callable[[], object], repeats: int, cuda: bool) -> list[float]:
    """Milliseconds of each call: CUDA events on a GPU, so that the host's part is left out; else a clock."""
    for _ in range(WARM_UP):
        call()
    if not cuda:
        took = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            took.append(1e3 * (time.perf_counter() - began))
        return took
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for before, after in marks:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in marks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    parser.add_argument("--n", type=int, default=VGG16, help="elements")
    parser.add_argument("--density", type=float, default=DENSITY)
    parser.add_argument("--repeats", type=int, help="calls that are timed")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--only", nargs="+", metavar="OPERATOR", help="these operators only")
    words = parser.parse_args()
    device = words.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no GPU here; say --device cpu")
    k = int(words.density * words.n)
    if not 0 < k <= words.n:
        parser.error(f"--n {words.n} --density {words.density}: k would be {k}, and must be in 1 ... n")
    if words.repeats is not None and words.repeats < 1:
        parser.error(f"--repeats {words.repeats}: must be 1 or more")
    repeats = words.repeats or REPEATS[device]
    torch.set_num_threads(words.threads)
    calls = operators(words.n, k, device)
    if unknown := set(words.only or ()) - set(calls):
        parser.error(f"--only {', '.join(sorted(unknown))}: there are: {', '.join(calls)}")
    facts = {
        "bench": "operators",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": words.threads,
        "n": words.n,
        "k": k,
        "repeats": repeats,
    }
    for name in words.only or calls:
        took = times(calls[name], repeats, device == "cuda")
        median = statistics.median(took)
        spread = statistics.median([abs(each - median) for each in took])
        line = {
            **facts,
            "operator": name,
            "median_ms": round(median, 4),
            "mad_ms": round(spread, 4),  # median absolute deviation
            "min_ms": round(min(took), 4),
            "max_ms": round(max(took), 4),
        }
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
