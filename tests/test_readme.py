"""What the README and the pages of docs/ say works: their links, commands, code and numbers."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsify
from analysis.claims import DECISIVE, OUT_OF_BAND
from analysis.occasions import ENOUGH_OCCASIONS
from analysis.published import rederived
from analysis.published.rederived import JOB, published_iteration_ms
from analysis.published.unvalidated import step_ms
from analysis.report.content import MARKS
from analysis.stats import ENOUGH
from analysis.verdicts import as_csv
from experiments import commands, figures
from experiments.commands._findings import chosen, findings
from experiments.commands.collect import (
    BEGIN,
    END,
    VERDICTS,
    VERDICTS_PAGE,
    readme_verdicts,
    shipped_verdicts,
    verdicts_page,
)
from experiments.config.folders import Folders
from experiments.figures.runs import name_and_configs
from sparsify.core.spec import Registry
from tests.analysis.shipped import shipped as shipped_files
from tests.conftest import ROOT, fine, process
from tests.sparsify import worker_functions
from tests.sparsify.laws import live, mass
from tests.sparsify.worker_functions import on_processes

MOST_WORDS = 1200  # of the README: everybody finds everything from one page
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


def test_pages_are_in_both_indexes_and_begin_with_what_they_are_for() -> None:
    assert len(README.split()) <= MOST_WORDS
    documents = {path.name for path in DOCS.glob("*.md")}
    for index, prefix in (("README.md", "docs/"), ("docs/README.md", "")):
        linked = {target.partition("#")[0] for page, target in LINKS if page == index}
        assert {f"{prefix}{name}" for name in documents - {"README.md"}} <= linked
    for name in documents:
        title, empty, sentence, *_ = PAGES[f"docs/{name}"].splitlines()
        assert title.startswith("# "), name
        assert not empty, name
        assert re.match(r"[^#`|!-]", sentence), name


def test_links_lead_somewhere() -> None:
    for page, target in LINKS:
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        is_elsewhere = target.startswith("https://")
        assert is_elsewhere or path.exists(), (page, target)
        assert is_elsewhere or not anchor or anchor in anchors(path.read_text()), (page, target)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide `cluster=mine`, a copy of the file that the README copies, where the user has none yet."""
    if (ROOT / "conf/local/cluster/mine.yaml").exists():
        return
    (tmp_path / "cluster").mkdir()
    shutil.copy(ROOT / "conf/cluster/generic_slurm.yaml", tmp_path / "cluster/mine.yaml")
    monkeypatch.setenv("SPARSIFY_CONF", str(tmp_path))


@pytest.mark.usefixtures("mine")
def test_commands_are_understood() -> None:
    """Parse the words of all commands; other tests carry them out."""
    start = "python -m experiments "
    lines = {line.removeprefix(start) for _, line in LINES if line.startswith(start)}
    inline = set(re.findall(rf"`{start}([a-z][^`]*)`", ALL_PAGES))
    assert lines
    for line in lines | inline:
        command, *words = shlex.split(line.partition(" | ")[0], comments=True)
        assert command in commands.names(), line
        commands.parser_of(command).parsed([word for word in words if word != "--help"])
        if line in lines and command in WITH_RUNS:
            assert name_and_configs([word for word in words if word[0] != "-"]), line


def test_the_functions_that_a_run_passes_through_are_there() -> None:
    reading = PAGES["docs/reading-the-code.md"]
    names = re.findall(r"(?m)^[0-9]+\. `([a-z_.]+)\.(\w+)(?:\.\w+)?`", reading)
    assert len(names) >= 10
    for module, name in names:
        paths = [
            (folder / module.replace(".", "/")).with_suffix(".py") for folder in (ROOT, ROOT / "experiments")
        ]
        (text,) = (path.read_text() for path in paths if path.exists())
        assert re.search(rf"(?m)^(def|class) {name}\b", text), (module, name)


def test_make_targets_and_benchmarks_exist_and_the_help_lists_them() -> None:
    code = [*re.findall(r"`(make [^`]+)`", ALL_PAGES), *(line for _, line in LINES)]
    named = {target for line in code for target in re.findall(r"^make ([a-z][a-z0-9-]*)", line)}
    named -= {"reproduce-"}  # `make reproduce-<item>`
    assert {"reproduce-fig4", "lint"} <= named
    fine(process("make", "-n", *sorted(named)))
    listed = fine(process("make", "help")).stdout
    for target in named:
        item = target.removeprefix("reproduce-")
        is_listed = re.search(rf"(?m)^  make {target} ", listed)
        assert item in figures.items() if item != target else is_listed, target
    benchmarks = set(re.findall(r"BENCH=([a-z]+)", ALL_PAGES))
    assert "select" in benchmarks
    assert benchmarks <= {path.stem for path in (ROOT / "experiments" / "bench").iterdir()}


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


def test_a_method_added_as_a_file_can_be_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "comb.py").write_text(python_block("def comb"))
    registry = Registry("method", "none", tmp_path)
    assert registry.names() == ["comb"]
    assert registry.defaults("comb") == {"density": 0.001, "scope": "global"}
    assert registry.summary("comb").startswith("Comb-k: every (n/k)-th element")


def test_what_records_shows_in_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))  # what is shipped, and no more
    exec(python_block("analysis.load()"), {})
    assert "topk density=0.01" in capsys.readouterr().out


def test_tables_have_all_methods_and_all_shipped_items_and_pages() -> None:
    listed = re.findall(r"(?m)^\| `([a-z0-9_]+)` \|", PAGES["docs/methods.md"])
    assert len(listed) == len(set(listed))
    assert shipped_files("sparsify/methods") <= set(listed) <= set(sparsify.names())
    assert set(re.findall(r"`make reproduce-([a-z0-9-]+)`", ITEMS)) == set(figures.shipped())
    pages = {path.name for path in (Folders().shipped / "figures").glob("*.md")}
    assert pages
    assert pages <= {Path(target).name for page, target in LINKS if page.startswith("docs/")}


@pytest.mark.registering
def test_the_verdicts_are_those_that_the_shipped_records_give() -> None:
    folders = Folders()
    rows = shipped_verdicts(folders)
    assert SHOWN.strip() == readme_verdicts(rows).strip()
    assert (folders.shipped / VERDICTS).read_text() == as_csv(rows)
    assert (folders.shipped / VERDICTS_PAGE).read_text() == verdicts_page(rows)


SHOWN = README.partition(BEGIN)[2].partition(END)[0]
SHIPPED = [*csv.DictReader((Folders().shipped / VERDICTS).read_text().splitlines())]


def test_no_shipped_verdict_is_firmer_than_its_runs() -> None:
    for row in SHIPPED:
        if row["verdict"] in DECISIVE:
            assert int(row["n"]) >= ENOUGH[row["of"]], row
            assert row["low"], row
            assert row["high"], row
            assert row["registered"] != "post hoc", row
            if row["launches"]:  # of a time
                assert int(row["launches"]) >= ENOUGH["launches"], row
                assert int(row["occasions"]) >= ENOUGH_OCCASIONS, row
        assert "nan" not in {row[column].lower() for column in ("ours", "low", "high")}, row


def test_the_findings_are_those_of_the_report() -> None:
    told = re.findall(r"(?m)^\d\. \*\*(.+?)\.\*\*", README)
    assert told == [finding.says for finding in findings()]
    assert all((ROOT / "results/shipped/figures" / f"{each.picture}.png").is_file() for each in findings())


def test_the_chosen_verdicts_remain_when_all_are_tested_together_and_one_is_unfavourable() -> None:
    marks = tuple(f"| {mark} " for mark, _ in MARKS.values())
    assert sum(line.startswith(marks) for line in SHOWN.splitlines()) == len(chosen()) == 8
    remaining = {row["id"]: row["adjusted"] for row in SHIPPED}
    verdicts = {remaining[claim.claim] for claim in chosen()}
    assert verdicts <= set(DECISIVE)
    assert verdicts & set(OUT_OF_BAND)


# Words of the README by the claim whose shipped verdict they tell.
TOLD = {
    "fig3-level.randomk-ends-below": "59.0 points of top-1 [51.9, 65.3] below Top-k",
    "fig3.dense-ends-above": "5.4 [4.4, 6.3] below dense with Top-k",
    "why-gap.denser": "10.1 points [9.4, 10.9]",
    "speed-logs.ratio.top-k-dense": "7.27 times [7.16, 7.38] as long",
    "fig4-fast.torch-longer-than-fused": "23.8 times shorter [21.2, 26.7]",
    "speed-fast.torch-over-dense": "1.15 [1.13, 1.17]",
    "crossover-measured.narrow.vgg16-32.topk-fused": "7.7 times [7.5, 7.9] as fast",
    "local-loss.as-good-at-30.30": "1.10 times [1.09, 1.11] the loss",
    "local-loss.demo-as-good": "DeMo at 1.08 [1.07, 1.09]",
    "local-why.no-momentum-needed": "0.206 nats [0.197, 0.216]",
}


def test_the_results_in_words_are_the_shipped_ones_to_their_digits() -> None:
    """Compare numbers as they are told: of what is longer by so many percent, the ratio."""
    rows = {row["id"]: row for row in SHIPPED}
    for claim, words in TOLD.items():
        row = rows[claim]
        assert words in " ".join(README.split())
        assert row["adjusted"] in DECISIVE, "README tells only what remains when all are tested together"
        values = [float(row[column]) for column in ("ours", "low", "high") if row[column]]
        if row["unit"] == "%":
            values = [1 + value / 100 for value in values]
        numbers = re.findall(r"\d+\.\d+", words)
        assert len(numbers) in (1, len(values)), claim
        for number, value in zip(numbers, values, strict=False):
            assert number == f"{value:.{len(number.partition('.')[2])}f}", claim


def test_the_findings_from_logs_are_those_of_the_tables() -> None:
    topk = JOB["A100", "topk"]
    dense = JOB["A100", "dense"]
    older = JOB["V100", "topk"]
    topk_ms = step_ms(topk).value
    ratio = published_iteration_ms(topk) / published_iteration_ms(dense)
    late, late_older = (100 * rederived.lateness_line(job).correlation[0] ** 2 for job in (topk, older))
    text = " ".join(ITEMS.split())
    for words in (
        f"takes {topk_ms:.0f} ms instead of {published_iteration_ms(topk):.0f}",
        f" and dense {step_ms(dense).value:.1f} instead of {published_iteration_ms(dense):.1f}",
        f"{100 * rederived.waiting_share(topk)[0]:.0f} % of Top-k's communication on the A100s is waiting",
        f"explains {late:.0f} % of its variance there, but {late_older:.0f} % on the V100s",
        f"dense is not {ratio:.2f} times as fast as Top-k but {topk_ms / step_ms(dense).value:.2f} times",
    ):
        assert words in text
