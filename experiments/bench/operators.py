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

VGG16_PARAMETERS = 14_728_266  # of Yoon and Oh's VGG-16 for CIFAR-10
DEFAULT_REPEATS = {"cuda": 50, "cpu": 10}
WARM_UP_CALLS = 3  # the first calls allocate, and load kernels


def operators(
    *,
    device: str = "",
    n: int = VGG16_PARAMETERS,
    density: float = 0.001,
    repeats: int = 0,
    threads: int = 1,
    only: Sequence[str] = (),
) -> int:
    """Time the operators that choose elements: top-k, a sort, a random permutation, the k-th value.

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
    if device not in DEFAULT_REPEATS:
        raise ValueError(f"--device {device}: cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} finds no GPU here; say --device cpu")
    k = int(density * n)
    if not 0 < k <= n:
        raise ValueError(f"--n {n} --density {density}: k would be {k}, and must be in 1 ... n")
    if repeats < 0:
        raise ValueError(f"--repeats {repeats}: must be 1 or more")
    torch.set_num_threads(threads)
    calls = make_operator_calls(n, k, device)
    unknown = set(only) - set(calls)
    if unknown:
        raise ValueError(f"--only {', '.join(sorted(unknown))}: there are: {', '.join(calls)}")
    repeats = repeats or DEFAULT_REPEATS[device]
    facts = {
        "bench": "operators", "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": threads, "n": n, "k": k, "repeats": repeats,
    }  # fmt: skip
    for name in only or calls:
        times_ms = time_call_ms(calls[name], repeats, device == "cuda")
        median_ms = statistics.median(times_ms)
        numbers = {
            "median_ms": median_ms,
            "mad_ms": statistics.median([abs(ms - median_ms) for ms in times_ms]),
            "min_ms": min(times_ms),
            "max_ms": max(times_ms),
        }
        rounded = {key: round(ms, 4) for key, ms in numbers.items()}
        print(json.dumps({**facts, "operator": name, **rounded}), flush=True)
    return 0


def make_operator_calls(n: int, k: int, device: str) -> dict[str, Callable[[], object]]:
    """Return a call of each operator; selections are by magnitude, as the published code's are."""
    torch.manual_seed(0)
    magnitudes = torch.randn(n, device=device).abs()
    return {
        "topk": lambda: torch.topk(magnitudes, k),
        "topk_unsorted": lambda: torch.topk(magnitudes, k, sorted=False),
        "sort": lambda: torch.sort(magnitudes, descending=True),
        "kthvalue": lambda: torch.kthvalue(magnitudes, n - k + 1),
        "randperm": lambda: torch.randperm(n, device=device),
        "read": lambda: magnitudes.sum(),  # the time of merely reading all elements
    }


def time_call_ms(call: Callable[[], object], repeats: int, is_cuda: bool) -> list[float]:
    """Return milliseconds of each call: on a GPU between events, without the host's part; else by a clock."""
    for _ in range(WARM_UP_CALLS):
        call()
    if not is_cuda:
        times_ms = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            call()
            times_ms.append(1e3 * (time.perf_counter() - start_s))
        return times_ms
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for before, after in events:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def main() -> int:
    """Run the benchmark by its path, where the rest of the project can't be imported."""
    parser = argparse.ArgumentParser(description=(operators.__doc__ or "").partition("\n")[0])
    for name, default in (operators.__kwdefaults__ or {}).items():
        kind = {"nargs": "+"} if name == "only" else {"type": type(default)}
        parser.add_argument(f"--{name}", default=default, **kind)
    try:
        return operators(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
