"""Versions and roofs: how fast does this device's memory copy, add in place, and read?

make bench BENCH=roofs [ARGS="--n 25600000"]
"""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from experiments.bench._case import spread
from experiments.bench._in_turn import captured, device_ms
from experiments.bench.select.__main__ import device_of
from experiments.worker.memory import free_bytes
from experiments.worker.provenance import cpu_model, state, versions

SIZES = (14_700_000, 25_600_000, 345_000_000)
REPEATS = {"cpu": 11, "cuda": 50}
BYTES = {"copy": 8, "add": 12, "read": 4}  # per element
HELD = 8  # bytes per element


def calls(n: int, device: torch.device) -> dict[str, Callable[[], object]]:
    source, target = torch.full((n,), 1e-3, device=device), torch.zeros(n, device=device)
    return {
        "copy": lambda: target.copy_(source),
        "add": lambda: target.add_(source),
        "read": lambda: source.sum(),
    }


def measure(n: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """GB/s of each."""
    made = calls(n, device)
    if device.type == "cuda":
        made = {name: captured(call) for name, call in made.items()}
    samples = device_ms(made, 1 + repeats, device)
    found: dict[str, Any] = {"n": n}
    for name, taken in samples.items():
        found[name] = spread([1e-6 * BYTES[name] * n / ms for turn, ms in taken.items() if turn])
    return found


def facts(device: torch.device) -> dict[str, Any]:
    """What the numbers are of; no host's name."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_model(),
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else None,
        "cuda": torch.version.cuda,
        "versions": {"python": sys.version.split()[0], **versions()},
        "state": state(device),
    }


def checked_device(words: argparse.ArgumentParser, asked: argparse.Namespace) -> torch.device:
    """The device that was asked for; ends with a sentence where it, or the repetitions, can't be had."""
    if asked.repeats is not None and asked.repeats < 1:
        words.error(f"--repeats {asked.repeats}: must be 1 or more")
    try:
        device = device_of(asked)
    except ValueError as error:
        words.error(str(error))
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=roofs", description=__doc__.partition("\n")[0])
    words.add_argument("--n", type=int, nargs="+", default=SIZES, help="elements, float32")
    words.add_argument("--repeats", type=int, help=f"default {REPEATS}")
    words.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    asked = words.parse_args()
    for n in asked.n:
        if n < 1:
            words.error(f"--n {n}: must be 1 or more")
    device = checked_device(words, asked)
    about = facts(device)
    print(json.dumps(about, indent=1))
    print("\n| n | copy, GB/s | in-place add, GB/s | read, GB/s |\n|---:|---:|---:|---:|")
    cases = []
    for n in asked.n:
        if HELD * n > free_bytes(device):
            print(f"| {n:,} | does not fit into memory | | |")
            continue
        case = measure(n, asked.repeats or REPEATS[device.type], device)
        cases.append(case)
        cells = [f"{case[name]['median']} [{case[name]['low']}, {case[name]['high']}]" for name in BYTES]
        print(f"| {n:,} | {' | '.join(cells)} |", flush=True)
    print(json.dumps({"bench": "roofs", **about, "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
