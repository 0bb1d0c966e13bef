"""A pool of processes ends without complaint, whatever signal ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT, environment_for, python

SCRIPT = """
import os, signal, sys
from analysis.records.process_pool import open_process_pool

if __name__ == "__main__":
    number = signal.Signals[sys.argv[1]]
    try:
        with open_process_pool(1) as pool:
            pool.submit(abs, 1).result()
            os.kill(os.getpid(), number)
            pool.submit(abs, 1).result()
    except KeyboardInterrupt:
        print("interrupted", signal.getsignal(number) is signal.SIG_DFL)
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_pool_as_ctrl_c_does_and_nothing_complains(tmp_path: Path, number: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = python(str(script), number, env=environment_for(tmp_path, PYTHONPATH=str(ROOT)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted True\n", "")
