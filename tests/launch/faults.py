"""What goes wrong with runs, done to real ones, here and on the development cluster, many times over:

    python -m tests.launch.faults                     100 runs
    python -m tests.launch.faults starter-kill=20 node=2

prints a table: of so many runs, how many ended whole, with every step recorded once and the very weights of a
run that nothing happened to, in how many something said why not, and whether a process was left.
tests/launch/test_slurm.py and test_local.py do one of a kind.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import take_signals
from tests.launch import trouble_here, trouble_there
from tests.launch.troubled import Outcome, weights


def row(does: str, outcomes: Sequence[Outcome]) -> str:
    whole = sum(not outcome.faults for outcome in outcomes)
    told = sum(bool(outcome.said) for outcome in outcomes)
    others = Counter(", ".join(outcome.faults) for outcome in outcomes if outcome.faults)
    wrong = "; ".join(f"{times} x {what}" for what, times in others.items())
    interrupted, left = sum(o.interrupted for o in outcomes), sum(o.left for o in outcomes)
    return f"| {does} | {len(outcomes)} | {interrupted} | {told} | {whole} | {wrong} | {left} |"


SIDE_BY_SIDE = 5  # runs on this machine; they wait for much
HEAD = (
    "| trouble | runs | interrupted | ended saying why | whole after being asked for again: each step once, "
    "same weights | otherwise | processes left |"
)
USUAL = (
    "starter-kill=12", "starter-term=6", "starter-hup=6", "starter-int=6", "group-int=8", "group-hup=4",
    "group-term=4", "twice=6", "worker=6", "reboot=6", "logs=5", "manifest=3", "results=4", "torchrun=4",
    "kill=4", "signal=3", "cancel=2", "node=2", "time=1", "task=4", "batch=4",
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    take_signals()
    wanted = [(name, int(times)) for name, _, times in (word.partition("=") for word in words or USUAL)]
    for seed in range(trouble_here.SEEDS):
        weights(seed, trouble_here.BATCH_SIZE)  # only one at a time can be computed in this process
    bad = False
    print(HEAD, "|---" * HEAD.count(" |") + "|", sep="\n")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        here = {
            name: [
                pool.submit(trouble_here.run, name, at, Path(folder, f"{name}-{at}")) for at in range(times)
            ]
            for name, times in wanted
            if name in trouble_here.TROUBLES
        }
        for name, times in wanted:
            if name in here:
                does = trouble_here.TROUBLES[name].does
                outcomes = [run.result() for run in here[name]]
            else:
                does = str(trouble_there.TROUBLES[name][0].__doc__)
                outcomes = trouble_there.runs(name, range(times), Path(folder) / name)
            print(row(does, outcomes), flush=True)
            for said in {outcome.said for outcome in outcomes if outcome.said}:
                print(f"    {said}", file=sys.stderr, flush=True)
            bad |= any(outcome.faults or outcome.left for outcome in outcomes)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
