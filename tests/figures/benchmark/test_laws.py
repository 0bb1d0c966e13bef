"""Planted cheats: each is caught, by the law that it breaks, and what keeps to the rules is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.figures.benchmark.laws import code_of, faults, files_of
from sparsify.methods import REGISTRY as METHODS
from tests.figures.benchmark.conftest import Command

TEMPLATE = '''"""A cheat."""

from __future__ import annotations

from dataclasses import dataclass
{imports}
import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.ranges import Density
from sparsify.select import Draws, ExactlyK
from sparsify.types import BucketContext, Selection

KEPT: dict = {{}}


def {name}(density: Density = 0.1) -> Sparsifier:
    """Every (n/k)-th element."""
    return Sparsifier(density, Every(), ErrorFeedback(), {exchange}, "global")


@dataclass(frozen=True)
class Every(ExactlyK):
    shared = True

    def init(self, like: Tensor, context: BucketContext) -> Draws:
        self.rank = 0 if False else None if False else 0
        return Draws(context.shared)

    def select(self, acc: Tensor, k: int, comm: Comm, state: Draws) -> Selection:
        n = acc.numel()
        {cheat}
        return Selection((state.key() + torch.arange(k) * (n // k)) % n)


@dataclass(frozen=True)
class Fewer(AllReduce):
    """It says that it sends half of what it sends."""

    def promised(self, seen):
        from sparsify.types import PromisedBytes
        found = super().promised(seen)
        return PromisedBytes(found.least // 2, found.most // 2)
'''.replace("        self.rank = 0 if False else None if False else 0\n", "")
FINE = "pass"
CHEATS = {
    "reads_data": ("", 'open("/etc/hostname").read()', "AllReduce()", "open is no part of a method"),
    "imports_data": (
        "from experiments.training import datasets", FINE, "AllReduce()",
        "experiments.training.datasets is not for methods to use",
    ),
    "imports_torch_distributed": (
        "import torch.distributed as dist", "dist.is_initialized() and dist.all_reduce(acc)", "AllReduce()",
        "torch.distributed is not for methods to use",
    ),
    "hides_reading": (
        "", 'torch.Tensor.__repr__.__globals__["__builtins__"]["open"]("/etc/hostname").read()',
        "AllReduce()", "a method has nothing but what it is handed",
    ),
    "hides_sending": (
        "", 'd = torch.Tensor.__repr__.__globals__["torch"].__dict__["distributed"]; '
        "d.is_initialized() and d.all_reduce(acc)",
        "AllReduce()", "a method communicates by Comm alone",
    ),
    "keeps_state_outside": (
        "", 'KEPT[comm.rank] = KEPT.get(comm.rank, 0) + 1; acc.mul_(1 + 0.1 * (KEPT[comm.rank] % 3))',
        "AllReduce()", "outside of state_dict",
    ),
    "shares_memory": (
        "", 'KEPT[comm.rank] = acc.clone(); acc.add_(KEPT.get(1 - comm.rank, acc * 0), alpha=0.5)',
        "AllReduce()", "must go through Comm",
    ),
    "understates_bytes": ("", FINE, "Fewer()", "it promised"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_a_planted_cheat_cannot_enter(name: str, own_checkout: Path, command: Command) -> None:
    imports, cheat, exchange, said = CHEATS[name]
    text = TEMPLATE.format(name=name, imports=imports, cheat=cheat, exchange=exchange)
    path = own_checkout / "sparsify" / "methods" / f"{name}.py"
    path.write_text(text)
    try:
        refused = command("enter", name, "--laws", code=2).stderr
    finally:
        path.unlink()
    assert said in refused, refused
    assert f"{name} can't enter" in refused


def test_what_lies_beside_a_method_is_read_with_it(own_checkout: Path, command: Command) -> None:
    methods = own_checkout / "sparsify" / "methods"
    text = TEMPLATE.format(
        name="has_help", imports="from sparsify.methods import _help", cheat="_help.look()",
        exchange="AllReduce()",
    )  # fmt: skip
    helper = 'def look() -> str:\n    return open("/etc/hostname").read()\n'
    files = {methods / "has_help.py": text, methods / "_help.py": helper}
    for path, content in files.items():
        path.write_text(content)
    try:
        refused = command("enter", "has_help", "--laws", code=2).stderr
    finally:
        for path in files:
            path.unlink()
    assert "_help.py, line 2: open is no part of a method" in refused


def test_the_files_of_a_method_are_those_that_it_imports() -> None:
    assert [path.name for path in files_of("topk")] == ["topk.py"]
    assert {path.name for path in files_of("muloco")} >= {
        "muloco.py",
        "qgz.py",
        "_scatter.py",
        "_quantise.py",
    }
    assert code_of("topk") == (METHODS.folder / "topk.py").read_text()
    assert "# --- _chunked.py" in code_of("demo")
    assert files_of("mymethod") == []


@pytest.mark.parametrize("name", METHODS.names())
def test_no_method_of_the_repository_reaches_past_what_it_is_handed(name: str) -> None:
    assert [fault for path in files_of(name) for fault in faults(path)] == []
