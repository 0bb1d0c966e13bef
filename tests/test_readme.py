"""The README and the pages of docs/ are right: their links, commands, code and numbers work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsify
from analysis.significance import holm_significance_level, read_significance_level_or_default
from analysis.verdicts import verdicts_csv, verdicts_page_markdown
from experiments import commands, figures
from experiments.commands._findings import load_findings
from experiments.commands.collect import (
    README_BEGIN,
    README_END,
    VERDICTS,
    VERDICTS_PAGE,
    judge_shipped_figures,
    readme_verdicts_markdown,
)
from experiments.config.folders import ResultFolders
from experiments.figures.runs import requested_runs
from tests.analysis.tracked_files import tracked_modules
from tests.conftest import ROOT, fine, process
from tests.sparsify import worker_functions
from tests.sparsify.laws import live, mass
from tests.sparsify.worker_functions import on_processes

DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
}
ALL_PAGES = "".join(PAGES.values())
README = PAGES["README.md"]
ITEMS = PAGES["docs/figures.md"]
BLOCKS = [
    (page, kind, block)
    for page, text in PAGES.items()
    for kind, block in re.findall(r"(?s)```(\w*)\n(.*?)```", text)
]
LINES = [
    (page, line.strip())
    for page, kind, block in BLOCKS
    if not kind
    for line in block.replace("\\\n", "").splitlines()
]
LINKS = {(page, target) for page, text in PAGES.items() for target in re.findall(r"\]\(([^)\s]+)\)", text)}
WITH_RUNS = ("run", "plan", "submit", "sweep", "reproduce")  # commands whose words describe runs


def anchors(text: str) -> set[str]:
    """Return the names by which GitHub links to a page's headings."""
    found: list[str] = []
    for heading in re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?s)```.*?```", "", text)):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def python_block(containing: str) -> str:
    block: str
    (block,) = [block for _, kind, block in BLOCKS if kind == "python" and containing in block]
    return block


def test_links_lead_somewhere() -> None:
    for page, target in LINKS:
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        is_elsewhere = target.startswith("https://")
        assert is_elsewhere or path.exists(), (page, target)
        assert is_elsewhere or not anchor or anchor in anchors(path.read_text()), (page, target)


def test_commands_are_understood() -> None:
    """Parse the words of all commands; other tests carry them out."""
    start = "python -m experiments "
    lines = {line.removeprefix(start) for _, line in LINES if line.startswith(start)}
    inline = set(re.findall(rf"`{start}([a-z][^`]*)`", ALL_PAGES))
    for line in lines | inline:
        shipped = line.replace("cluster=mine", "cluster=generic_slurm")  # whose copy the README calls mine
        command, *words = shlex.split(shipped.partition(" | ")[0], comments=True)
        assert command in commands.command_names(), line
        commands.make_parser(command).parse_words([word for word in words if word != "--help"])
        if line in lines and command in WITH_RUNS:
            assert requested_runs([word for word in words if word[0] != "-"]), line


def test_what_contributing_names_is_in_the_files_linked_beside_it() -> None:
    """Each row of its table, and each point below it, is looked up where it links to code."""
    for passage in re.findall(r"(?m)^(?:\| .*|- .*(?:\n  .*)*)$", PAGES["CONTRIBUTING.md"]):
        paths = [ROOT / name for name in re.findall(r"\]\(([^)\s#]+)", passage)]
        files = [path for path in paths if path.is_file() and path.suffix != ".md"]
        folders = [path for path in paths if path.is_dir()]
        files += [file for folder in folders for file in folder.rglob("*.[py]*") if file.suffix != ".pyc"]
        text = "\n".join(file.read_text() for file in files)
        names = re.findall(r"`([A-Za-z]+_\w+|[A-Z][a-z]+[A-Z]\w+|[A-Z]{2,})(?:=\w*|\(\))?`", passage)
        assert not text or all(re.search(rf"\b{name}\b", text) for name in names), (names, passage)


def test_make_targets_and_benchmarks_exist_and_the_help_lists_them() -> None:
    code = [*re.findall(r"`(make [^`]+)`", ALL_PAGES), *(line for _, line in LINES)]
    named = {target for line in code for target in re.findall(r"^make ([a-z][a-z0-9-]*)", line)}
    named -= {"reproduce-"}  # `make reproduce-<item>`
    fine(process("make", "-n", *sorted(named)))
    listed = fine(process("make", "help")).stdout
    items = {f"reproduce-{item}" for item in figures.files_by_item()}
    assert named <= items | set(re.findall(r"(?m)^  make (\S+) ", listed))
    for name in re.findall(r"BENCH=([a-z]+)", ALL_PAGES):
        assert (ROOT / "experiments" / "bench" / f"{name}.py").exists()
    rows = "\n".join(re.findall(r"(?m)^\| `make bench .*$", PAGES["docs/measuring.md"]))
    missing = {name for name in tracked_modules("experiments/bench") if not re.search(rf"[=`]{name}`", rows)}
    assert not missing - {"gpu_first"}, f"{missing} need a row in docs/measuring.md"


def test_the_diffs_put_topk_into_a_plain_loop_and_into_ddp(tmp_path: Path) -> None:
    """Run before and after on two gloo processes: after, the workers train together, and well."""
    for found in on_processes(worker_functions.readme_diffs, 2, tmp_path):
        diffs = {name.rpartition(" ")[0] for name in found} - {""}
        own = {f"docs/own-training.md {name}" for name in ("train", "train_ddp", "train_sharded")}
        assert diffs == {"README.md train", *own}
        for name in diffs:
            loss, has_same_weights = found[f"{name} after"]
            assert loss < 0.5 * found["untrained"][0]
            assert has_same_weights == 1
            assert found[f"{name} before"][1] == name.endswith("train_ddp")


def test_the_method_snippet_obeys_the_laws() -> None:
    names: dict[str, Any] = {}
    exec(compile(python_block("def comb"), "comb.py", "exec", dont_inherit=True), names)
    lived = live(names["comb"](density=0.1), 3, steps=6)
    torch.testing.assert_close(*mass(lived))
    for rank in lived:
        assert rank.wire_bytes == rank.counted_bytes
        assert rank.selected == [22] * 6
        torch.testing.assert_close(rank.updates, lived[0].updates, rtol=0, atol=0)


def test_what_records_shows_in_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))  # what is shipped, and no more
    exec(python_block("analysis.load()"), {})
    assert "topk density=0.01" in capsys.readouterr().out


def test_tables_have_all_methods_and_all_items_and_shipped_pages() -> None:
    listed = re.findall(r"(?m)^\| `([a-z0-9_]+)` \|", PAGES["docs/methods.md"])
    assert tracked_modules("sparsify/methods") <= set(listed) <= set(sparsify.names())
    assert set(re.findall(r"`make reproduce-([a-z0-9-]+)`", ITEMS)) == set(figures.repository_items())
    pages = {path.name for path in (ResultFolders().shipped / "figures").glob("*.md")}
    assert pages <= {Path(target).name for page, target in LINKS if page.startswith("docs/")}


@pytest.mark.registering
def test_the_verdicts_are_those_that_the_shipped_records_give() -> None:
    folders = ResultFolders()
    rows = judge_shipped_figures(folders)
    shown = README.partition(README_BEGIN)[2].partition(README_END)[0]
    assert shown.strip() == readme_verdicts_markdown(rows).strip()
    level = holm_significance_level(verdict for _, verdict in rows)
    assert read_significance_level_or_default(folders.shipped) == level
    assert (folders.shipped / VERDICTS).read_text() == verdicts_csv(rows)
    assert (folders.shipped / VERDICTS_PAGE).read_text() == verdicts_page_markdown(rows)


def test_the_findings_are_those_of_the_report() -> None:
    told = re.findall(r"(?m)^\d\. \*\*(.+?)\.\*\*", README)
    assert told == [finding.says for finding in load_findings()]
    assert all(
        (ROOT / "results/shipped/figures" / f"{each.picture}.png").is_file() for each in load_findings()
    )
