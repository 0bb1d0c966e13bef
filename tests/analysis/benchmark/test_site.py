"""The pages, of invented cells: complete, escaped, and readable without scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from analysis.benchmark import site
from analysis.benchmark.cells import LEVEL_WORDS, Cell
from analysis.benchmark.files import EntryFile
from analysis.benchmark.statement import EntryStatement, EntryTaskStatement, LawResult, TuningTrial
from analysis.records.frames import empty_frames
from tests.analysis.benchmark.cells import cell

EVIL = "<script>alert(1)</script>"


def entered(name: str, about: str = "What it does.", lr: float = 0.1) -> EntryFile:
    trials = [TuningTrial(rate, {}, f"at {rate}") for rate in (1.0, 0.5, 2.0)]
    task = EntryTaskStatement("a task", trials, lr, {"method.decay": 0.9}, {4: []}, {4: {}}, {4: {}})
    said = EntryStatement(
        1, "", "laptop", name, about, "topk", {"method": "topk", "method.density": 0.01}, {}, {}, {}, [],
        [LawResult("all state is saved", True), LawResult("nothing is lost", False, "a reason")], "",
        {"gpt-ptb": task},
    )  # fmt: skip
    runs = pd.DataFrame({"key": [trial.key for trial in trials], "task.lr": [0.1, 0.05, 0.2]})
    runs[["train.validate", "cluster.where", "variant"]] = ""
    return EntryFile(said, empty_frames()._replace(runs=runs), Path(f"{name}.entry"))


def content(cells: Sequence[Cell], names: Sequence[str] = ("dense", "topk")) -> site.BenchmarkPagesContent:
    return site.BenchmarkPagesContent(
        "laptop", [entered(name) for name in names], cells,
        [site.LinkDescription("internet_100m_50ms", "100 Mbit/s", ", 0.099 found", "A long link.", "Found.")],
        [site.TaskDescription("gpt-ptb", "a task")], [4],
        {"topk": [site.EntryClaimRow("a claim", "4.67", "1.2", "holds")]},
        "# Rules\n\n1. **One** rule", ["a note"],
    )  # fmt: skip


DENSE = cell("dense", word="baseline")


def written(folder: Path, shown: site.BenchmarkPagesContent) -> dict[str, str]:
    """Write the pages; return their texts by name."""
    first = site.write_site_replacing_folder(folder / "site", shown)
    return {path.name: path.read_text() for path in first.parent.glob("*.html")}


def test_every_page_is_there_and_every_link_leads_to_one_and_texts_are_escaped(tmp_path: Path) -> None:
    shown = content([DENSE, cell()])._replace(
        entries=[entered("dense", EVIL), entered("topk")],
        notes=[EVIL],
        rules=f"{EVIL}\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n",
    )
    pages = written(tmp_path, shown)
    assert {*pages} == {
        "index.html", "rules.html", "words.html", "link-internet_100m_50ms.html",
        "entry-dense.html", "entry-topk.html",
    }  # fmt: skip
    for name, text in pages.items():
        assert "<script>alert" not in text
        for address in re.findall(r'(?:href|src)="([^"#]+?)(?:#[^"]*)?"', text):
            assert address.startswith("data:") or (tmp_path / "site" / address).is_file(), (name, address)
        assert {*re.findall(r'href="#([^"]+)"', text)} <= {*re.findall(r'id="([^"]+)"', text)}, name
    assert "<td>2</td>" in pages["rules.html"]


def test_every_word_is_shown_with_its_level_and_explained(tmp_path: Path) -> None:
    cells = [DENSE, *(cell(f"entry-{number}", word=word) for number, word in enumerate(LEVEL_WORDS[1:]))]
    pages = written(tmp_path, content(cells, [each.entry for each in cells]))
    for word in LEVEL_WORDS[1:]:
        assert f"</span> {word}</span>" in pages["link-internet_100m_50ms.html"]
        assert f"<dt>{word}</dt>" in pages["words.html"]
    assert "faster in 1 of 1" in pages["index.html"]
    assert "100 Mbit/s, 0.099 found" in pages["index.html"]
    assert "✓</span> faster in 1" in pages["entry-entry-0.html"]


def test_a_best_rate_at_the_end_of_those_tried_is_told(tmp_path: Path) -> None:
    for lr, text in ((0.1, "0.05 to 0.2<"), (0.2, "0.2; it is the highest of them<")):
        shown = content([DENSE])._replace(entries=[entered("dense", lr=lr)])
        assert text in written(tmp_path, shown)["entry-dense.html"]


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="no benchmark was written there"):
        written(tmp_path, content([DENSE]))
