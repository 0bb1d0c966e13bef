"""What the README says works: its links, commands, code and numbers."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsify
from analysis.stats import ENOUGH
from analysis.verdicts import as_csv, counts_table
from experiments import commands, figures
from experiments.commands._ship import BEGIN, END, VERDICTS, VERDICTS_PAGE, shipped_verdicts, verdicts_page
from experiments.config import compose
from experiments.config.folders import Folders
from experiments.config.grid import expand
from sparsify.comm import virtual
from tests import worker_functions
from tests.conftest import ROOT
from tests.laws import live, mass
from tests.worker_functions import on_processes

README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
LINES = [line.strip() for kind, block in BLOCKS if not kind for line in block.splitlines()]


def python_block(containing: str) -> str:
    found: str
    (found,) = [block for kind, block in BLOCKS if kind == "python" and containing in block]
    return found


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README + CONTRIBUTING))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("python -m experiments")])
def test_commands_are_understood(line: str) -> None:
    """Their words are, that is; the commands themselves are run by other tests."""
    command, *words = shlex.split(line, comments=True)[3:]
    assert command in commands.names()
    for word in words:
        if word in figures.items() or word.startswith("--"):
            continue
        for point in expand([w for w in words if "=" in w]):
            compose.resolve(point)


def test_make_targets_exist() -> None:
    named = {word.rstrip("`;,:.") for word in re.findall(r"make ([a-z][a-z0-9-]+)", README)}
    named -= {"reproduce-"}  # `make reproduce-<item>`
    for target in named:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (target, done.stderr)
        if target.startswith("reproduce-"):
            assert target.removeprefix("reproduce-") in figures.items()


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("help", "reproduce-%", "test", "lint", "figures", "collect", "bench", "clean"):
        assert f"make {target}" in done.stdout


def test_the_diffs_put_topk_into_a_plain_loop_and_into_ddp(tmp_path: Path) -> None:
    """Before and after, on two gloo processes: after, the workers train together, and well."""
    for found in on_processes(worker_functions.readme_diffs, 2, tmp_path):
        for name in ("train", "train_ddp"):
            before, after = found[f"{name} before"], found[f"{name} after"]
            assert after[0] < 0.5 * found["untrained"][0]  # this worker's loss
            assert after[1] == 1  # same weights on both
            assert before[1] == (name == "train_ddp")


def test_the_method_snippet_obeys_the_laws() -> None:
    names: dict[str, Any] = {}
    exec(python_block("def comb"), names)
    for size in (1, 3, 4):
        lived = live(names["comb"](density=0.1), size, steps=6)
        torch.testing.assert_close(*mass(lived))
        for rank in lived:
            assert rank.wire_bytes == rank.counted_bytes
            assert rank.selected == [22] * 6
            assert all(torch.equal(a, b) for a, b in zip(rank.updates, lived[0].updates, strict=True))
    whole = live(names["comb"](density=1.0), 3, steps=1)
    mean = torch.stack([rank.gradients[0] for rank in whole]).mean(dim=0)
    torch.testing.assert_close(whole[0].updates[0], mean)


def test_a_method_added_as_a_file_can_be_named_at_once(tmp_path: Path) -> None:
    from sparsify.registry import Registry

    (tmp_path / "comb.py").write_text(python_block("def comb"))
    registry = Registry("method", "none", tmp_path)
    assert registry.names() == ["comb"]
    assert registry.defaults("comb") == {"density": 0.001, "scope": "global"}
    assert registry.summary("comb").startswith("Comb-k: every (n/k)-th element")


def test_the_table_of_methods_has_them_all() -> None:
    listed = re.findall(r"^\| `([a-z_]+)` \|", README, flags=re.MULTILINE)
    assert sorted(listed) == sparsify.names()


def test_the_verdict_table_is_the_one_that_the_shipped_records_give() -> None:
    folders = Folders()
    rows = shipped_verdicts(folders)
    between = README.partition(BEGIN)[2].partition(END)[0].strip()
    assert between == counts_table(rows).strip()
    assert (folders.shipped / VERDICTS).read_text() == as_csv(rows)
    assert (folders.shipped / VERDICTS_PAGE).read_text() == verdicts_page(rows)


def test_no_shipped_verdict_is_firmer_than_its_runs() -> None:
    decisive = {"reproduced", "partly", "not reproduced", "holds", "does not hold", "re-derived"}
    shipped = list(csv.DictReader((Folders().shipped / VERDICTS).read_text().splitlines()))
    assert shipped
    for row in shipped:
        if row["verdict"] in decisive:
            assert int(row["n"]) >= ENOUGH[row["of"]], row
            assert row["low"], row
            assert row["high"], row
        assert "nan" not in {row["ours"].lower(), row["low"].lower(), row["high"].lower()}, row


def test_every_item_of_the_readme_exists() -> None:
    assert set(re.findall(r"`make reproduce-([a-z0-9-]+)`", README)) == set(figures.items())


def test_a_virtual_rank_can_run_a_plain_module() -> None:
    """The README promises the exact mathematics of P workers in one process."""

    def body(comm: virtual.VirtualComm) -> torch.Tensor:
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(comm.rank)
        return comm.all_reduce(model.weight.detach().clone())

    assert all(torch.equal(weight, torch.full((1, 2), 6.0)) for weight in virtual.run(4, body))
