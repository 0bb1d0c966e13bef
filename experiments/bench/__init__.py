"""Benchmarks: one file each, with a function of its own name; the folder is the list.

`make bench BENCH=NAME ARGS="..."` is `python -m experiments bench NAME ...`. As of a command, the function's
signature is the options and its docstring the help. It returns a `Benchmark` (`_runner`): cases, how one is
measured, and how its rows are shown; the runner measures, records, goes on and prints for all of them.
Several benchmarks share the files that start with _.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sparsify.core.spec import Registry

REGISTRY = Registry("benchmark", __name__, Path(__file__).parent)

Device = Literal["cpu", "cuda"]
SIZES = (14_700_000, 25_600_000, 345_000_000)  # VGG-16, ResNet-50, BERT-Large
