"""The operators that choose elements, in one file that needs nothing but torch.

It runs on Python 3.8 and torch 1.8.1, so that the operator of a published measurement can be timed on the
same node as today's:
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
from collections.abc import Callable, Sequence

import torch

VGG16 = 14_728_266  # parameters of Yoon and Oh's VGG-16 for CIFAR-10
REPEATS = {"cuda": 50, "cpu": 10}
WARM_UP = 3  # the first calls allocate, and load kernels


def operators(
    *,
    device: str = "",
    n: int = VGG16,
    density: float = 0.001,
    repeats: int = 0,
    threads: int = 1,
    only: Sequence[str] = (),
) -> int:
    """Times of the operators that choose elements: top-k, a sort, a random permutation, the k-th value.

    Prints a JSON line for each operator.

    Args:
        device: cpu or cuda; by default cuda where there is one.
        n: elements.
        density: k/n.
        repeats: calls that are timed; 10 on a CPU, 50 on a GPU by default.
        threads: CPU threads.
        only: these operators only.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in REPEATS:
        raise ValueError(f"--device {device}: cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} finds no GPU here; say --device cpu")
    k = int(density * n)
    if not 0 < k <= n:
        raise ValueError(f"--n {n} --density {density}: k would be {k}, and must be in 1 ... n")
    if repeats < 0:
        raise ValueError(f"--repeats {repeats}: must be 1 or more")
    torch.set_num_threads(threads)
    calls = calls_of(n, k, device)
    if unknown := set(only) - set(calls):
        raise ValueError(f"--only {', '.join(sorted(unknown))}: there are: {', '.join(calls)}")
    repeats = repeats or REPEATS[device]
    facts = {
        "bench": "operators", "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": threads, "n": n, "k": k, "repeats": repeats,
    }  # fmt: skip
    for name in only or calls:
        took = times(calls[name], repeats, device == "cuda")
        median = statistics.median(took)
        deviation = statistics.median([abs(each - median) for each in took])
        found = {"median_ms": median, "mad_ms": deviation, "min_ms": min(took), "max_ms": max(took)}
        rounded = {key: round(ms, 4) for key, ms in found.items()}
        print(json.dumps({**facts, "operator": name, **rounded}), flush=True)
    return 0


def calls_of(n: int, k: int, device: str) -> dict[str, Callable[[], object]]:
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
    """The same by its path, where the rest of the project can't be imported."""
    parser = argparse.ArgumentParser(description=(operators.__doc__ or "").partition("\n")[0])
    for name, default in (operators.__kwdefaults__ or {}).items():
        how = {"nargs": "+"} if name == "only" else {"type": type(default)}
        parser.add_argument(f"--{name}", default=default, **how)
    try:
        return operators(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
