"""The process of a `Follower`: for every turn that it reads, one step of torch.topk, and a line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from experiments.bench._case import Case, Timed
from experiments.bench._side_by_side import SETTLING, SideBySide, same_magnitudes
from experiments.bench._steps import ROWS


def main() -> int:
    words = argparse.ArgumentParser()
    words.add_argument("n", type=int)
    words.add_argument("density", type=float)
    words.add_argument("distribution")
    words.add_argument("threads", type=int)
    words.add_argument("flush", type=int)
    words.add_argument("kept", type=Path)
    asked = words.parse_args()
    torch.set_num_threads(asked.threads)
    case = Case(asked.n, asked.density, asked.distribution)
    lines = {"eager": Timed(ROWS["eager"])}
    bench = SideBySide(case, lines, set(), asked.flush, asked.kept, torch.device("cpu"))
    done = -SETTLING - 1
    for line in sys.stdin:
        for turn in range(done + 1, int(line) + 1):
            if turn > -SETTLING:
                bench.go_on()
            bench.begin(turn)
        done = int(line)
        chosen = bench.step("eager")
        ((_, wall_ms, cpu_ms),) = bench.clock.read()
        assert chosen is not None
        answer = {
            "wall_ms": wall_ms,
            "cpu_ms": cpu_ms,
            "selected": chosen.indices.numel(),
            "differs": not same_magnitudes(chosen, bench.best),
        }
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
