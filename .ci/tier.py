"""Run a tier of the tests, and fail when it computes half as long again as budget.yaml allows.

Computing counts, not waiting: how long a test waits depends on what else the machine does.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import yaml

CORES = 2  # of the machine for which the budget is meant
BEYOND = 1.5


def main(tier: str, arguments: str) -> int:
    """Return the exit code of `make TIER`, or 1 if it was too slow."""
    budget_s = yaml.safe_load(Path("budget.yaml").read_text())["seconds"][tier]
    began = time.monotonic()
    code = subprocess.run(["make", tier, f"ARGS={arguments}"], check=False).returncode
    wall_s = time.monotonic() - began
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    computing_s = (usage.ru_utime + usage.ru_stime) / CORES
    print(f"{tier}: {wall_s:.0f} s, of which {CORES} cores compute {computing_s:.0f} s; budget: {budget_s} s")
    if code == 0 and computing_s > BEYOND * budget_s:
        print(f"{tier} has grown beyond {BEYOND} times its budget: see the seconds by folder above")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
