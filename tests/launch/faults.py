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
from functools import partial
from pathlib import Path

from tests.conftest import take_signals
from tests.launch import trouble_here, trouble_there
from tests.launch.troubled import Outcome, weights


def row(does: str, outcomes: Sequence[Outcome]) -> str:
    """Return a line of the table."""
    wrong = Counter(", ".join(outcome.faults) for outcome in outcomes if outcome.faults)
    numbers = [
        sum(outcome.interrupted for outcome in outcomes),
        sum(outcome.said != "" for outcome in outcomes),
        len(outcomes) - wrong.total(),
        "; ".join(f"{times} x {what}" for what, times in wrong.items()),
        sum(outcome.left for outcome in outcomes),
    ]
    return f"| {does} | {len(outcomes)} | {' | '.join(map(str, numbers))} |"


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
    for seed in range(trouble_here.SEEDS):
        weights(seed, trouble_here.BATCH_SIZE)  # only one at a time can be computed in this process
    has_failed = False
    print(HEAD, "|---" * HEAD.count(" |") + "|", sep="\n")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for word in words or USUAL:
            name, _, times = word.partition("=")
            numbers = range(int(times))
            if name in trouble_here.TROUBLES:
                does = trouble_here.TROUBLES[name].does
                outcomes = [*pool.map(partial(trouble_here.run, name, Path(folder)), numbers)]
            else:
                does = str(trouble_there.TROUBLES[name][0].__doc__)
                outcomes = trouble_there.runs(name, numbers, Path(folder) / name)
            print(row(does, outcomes), flush=True)
            for said in {outcome.said for outcome in outcomes} - {""}:
                print(f"    {said}", file=sys.stderr, flush=True)
            has_failed |= any(outcome.faults or outcome.left for outcome in outcomes)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
