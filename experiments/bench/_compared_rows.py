"""The rows of benchmarks of selections, whole steps and peers: descriptions, styles, the standard case."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import yaml

from analysis.pictures.style import MethodStyle

SELECT_FILE = yaml.safe_load(Path(__file__).with_name("select_rows.yaml").read_text())
SELECT_ROWS = SELECT_FILE["rows"]
BYTE_TERMS = SELECT_FILE["terms"]
STEP_ROWS = yaml.safe_load(Path(__file__).with_name("step_rows.yaml").read_text())
PEER_ROWS = yaml.safe_load(Path(__file__).with_name("peer_rows.yaml").read_text())
STYLES = {name: MethodStyle(*row["style"]) for name, row in (SELECT_ROWS | STEP_ROWS | PEER_ROWS).items()}
AROUND_ROWS = {
    "add": "the in-place add: acc += grad",
    "aggregate": "`distribute(topk)`: check and averaging",
    "around": "the same with `zero_grad`, and with gradients accumulated by autograd",
}
FLOORS = {"add": "in-place add", "copy": "copy"}  # rows that no step can be faster than
DDP = "ddp"  # the row that whole steps are divided by
NETWORK_TITLES = {"linears": "linear layers of 64 x 64", "resnet50": "ResNet-50", "vgg16": "VGG-16"}


class SelectionCase(NamedTuple):
    """A case of the benchmark of selections."""

    n: int
    density: float
    distribution: str

    def __str__(self) -> str:
        return f"n = {self.n:,}, density {self.density:g}, {self.distribution}"


STANDARD_SELECTION_CASE = SelectionCase(25_600_000, 0.001, "normal")
PageSize: TypeAlias = Literal["huge", "small", "default"]
PAGE_SIZES: tuple[PageSize, ...] = ("huge", "small", "default")


class FusedCase(NamedTuple):
    """A case of the benchmark of the fused selection over torch.topk."""

    gradient: str
    n: int
    density: float
    pages: PageSize

    def __str__(self) -> str:
        return f"{self.gradient}, n = {self.n:,}, density {self.density:g}, {self.pages} pages"


README_CASE = FusedCase("vgg16", 14_728_266, 0.001, "default")
