"""Planted cheats: each is caught, by the law that it breaks, and what keeps to the rules is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.figures.benchmark import laws
from experiments.figures.benchmark.laws import (
    digest_text,
    find_forbidden_uses,
    find_method_files,
    is_todays_method_code,
    read_method_code,
)
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
from sparsify.select import RandomKeyStream, FixedCountSelector
from sparsify.types import BucketContext, Selection

KEPT: dict = {{}}


def {name}(density: Density = 0.1) -> Sparsifier:
    """Every (n/k)-th element."""
    return Sparsifier(density, Every(), ErrorFeedback(), {exchange}, "global")


@dataclass(frozen=True)
class Every(FixedCountSelector):
    shared = True

    def init(self, like: Tensor, context: BucketContext) -> RandomKeyStream:
        return RandomKeyStream(context.without_rank)

    def select(self, acc: Tensor, k: int, comm: Comm, state: RandomKeyStream) -> Selection:
        n = acc.numel()
        {cheat}
        return Selection((state.next_key() + torch.arange(k) * (n // k)) % n)


@dataclass(frozen=True)
class Fewer(AllReduce):
    """It says that it sends half of what it sends."""

    def predict_bytes(self, seen):
        from sparsify.types import PredictedBytes
        found = super().predict_bytes(seen)
        return PredictedBytes(found.least // 2, found.most // 2)
'''
FINE = "pass"
READING = 'open("/etc/hostname").read()'
GLOBALS = "torch.Tensor.__repr__.__globals__"
# Imports, what `select` does besides, the exchange, and what is said.
BY_ITS_TEXT = {
    "reads_data": ("", READING, "AllReduce()", "open is no part of a method"),
    "imports_data": (
        "from experiments.training import datasets", FINE, "AllReduce()",
        "experiments.training.datasets is not for methods to use",
    ),
    "imports_torch_distributed": (
        "import torch.distributed as dist", "dist.is_initialized() and dist.all_reduce(acc)", "AllReduce()",
        "torch.distributed is not for methods to use",
    ),
}  # fmt: skip
BY_WHAT_IT_DOES = {
    "hides_reading": (
        "", f'{GLOBALS}["__builtins__"]["open"]("/etc/hostname").read()',
        "AllReduce()", "a method has nothing but what it is handed",
    ),
    "hides_sending": (
        "", f'd = {GLOBALS}["torch"].__dict__["distributed"]; d.is_initialized() and d.all_reduce(acc)',
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


def written(name: str, imports: str, cheat: str, exchange: str) -> str:
    """Return the text of a method's file."""
    return TEMPLATE.format(name=name, imports=imports, cheat=cheat, exchange=exchange)


def refusal(name: str, files: dict[str, str], own_checkout: Path, command: Command) -> str:
    """Return what is said of a method with these files, which must not enter."""
    paths = {own_checkout / "sparsify" / "methods" / file: text for file, text in files.items()}
    for path, text in paths.items():
        path.write_text(text)
    try:
        refused = command("enter", name, "--laws", code=2).stderr
    finally:
        for path in paths:
            path.unlink()
    assert f"{name} can't enter" in refused
    return refused


def test_a_cheat_is_seen_in_the_text_of_a_method(tmp_path: Path) -> None:
    path = tmp_path / "cheat.py"
    path.write_text(written("fair", "", FINE, "AllReduce()"))
    assert [*find_forbidden_uses(path)] == []
    for name, (imports, cheat, exchange, said) in BY_ITS_TEXT.items():
        path.write_text(written(name, imports, cheat, exchange))
        (fault,) = find_forbidden_uses(path)
        assert said in fault


@pytest.mark.extended
@pytest.mark.parametrize("name", BY_WHAT_IT_DOES)
def test_a_cheat_is_seen_in_what_a_method_does(name: str, own_checkout: Path, command: Command) -> None:
    imports, cheat, exchange, said = BY_WHAT_IT_DOES[name]
    files = {f"{name}.py": written(name, imports, cheat, exchange)}
    assert said in refusal(name, files, own_checkout, command)


def test_what_lies_beside_a_method_is_read_with_it(own_checkout: Path, command: Command) -> None:
    text = written("has_help", "from sparsify.methods import _help", "_help.look()", "AllReduce()")
    files = {"has_help.py": text, "_help.py": f"def look() -> str:\n    return {READING}\n"}
    refused = refusal("has_help", files, own_checkout, command)
    assert "_help.py, line 2: open is no part of a method" in refused


def test_the_files_of_a_method_are_those_that_it_imports() -> None:
    imported = {"muloco.py", "qgz.py", "_quantise.py"}
    assert {path.name for path in find_method_files("muloco")} >= imported
    assert "# --- _chunked.py" in read_method_code("demo")
    assert is_todays_method_code("demo", read_method_code("demo"))
    assert not is_todays_method_code("demo", f"{read_method_code('demo')}\n")
    assert find_method_files("mymethod") == []
    assert not is_todays_method_code("mymethod", "")


def test_a_text_that_was_rewritten_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    today = read_method_code("demo")
    before = f"{today}\n"
    monkeypatch.setattr(laws, "REWRITTEN", tmp_path / "rewritten.yaml")
    laws.REWRITTEN.write_text(f"[{{before: '{digest_text(before)}', today: '{digest_text(today)}'}}]")
    assert is_todays_method_code("demo", before)


def test_no_method_of_the_repository_reaches_past_what_it_is_handed() -> None:
    paths = {path for name in METHODS.names() for path in find_method_files(name)}
    assert [fault for path in paths for fault in find_forbidden_uses(path)] == []
