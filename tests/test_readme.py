"""What the README and the pages of docs/ say works: their links, commands, code and numbers."""

from __future__ import annotations

import ast
import csv
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

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
from sparsify.comm import virtual
from tests.analysis.shipped import shipped as shipped_files
from tests.conftest import ROOT, fine, process
from tests.sparsify import worker_functions
from tests.sparsify.laws import live, mass
from tests.sparsify.worker_functions import on_processes

MOST_WORDS = 1200  # of the README: everybody finds everything from one page
ROW = 3  # words
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
}
README, METHODS, ITEMS = PAGES["README.md"], PAGES["docs/methods.md"], PAGES["docs/figures.md"]
BLOCKS = [
    (page, kind, block)
    for page, text in PAGES.items()
    for kind, block in re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)
]
LINES = [
    (page, line.strip())
    for page, kind, block in BLOCKS
    if not kind
    for line in block.replace("\\\n", "").splitlines()
]
LINKS = sorted(
    {(page, target) for page, text in PAGES.items() for target in re.findall(r"\]\(([^)\s]+)\)", text)}
)
WITH_RUNS = ("run", "plan", "submit", "sweep", "reproduce")  # commands whose words describe runs


def anchors(text: str) -> set[str]:
    """The names by which GitHub links to a page's headings."""
    found: list[str] = []
    for heading in re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE
    ):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def python_block(containing: str) -> str:
    found: str
    (found,) = [block for _, kind, block in BLOCKS if kind == "python" and containing in block]
    return found


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_every_page_is_in_both_indexes() -> None:
    for index, prefix in (("README.md", "docs/"), ("docs/README.md", "")):
        linked = {target.partition("#")[0] for page, target in LINKS if page == index}
        missing = {f"{prefix}{path.name}" for path in DOCS.glob("*.md") if path.name != "README.md"} - linked
        assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_every_page_begins_with_what_it_is_for(page: str) -> None:
    title, empty, sentence, *_ = PAGES[page].splitlines()
    assert title.startswith("# ")
    assert not empty
    assert sentence
    assert sentence[0] not in "#`|-!"


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_links_lead_somewhere(page: str, target: str) -> None:
    if target.startswith("https://"):
        return
    name, _, anchor = target.partition("#")
    path = (ROOT / page).parent / name if name else ROOT / page
    assert path.exists()
    if anchor:
        assert anchor in anchors(path.read_text())


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cluster=mine`, a copy of the file that the README copies, where the user has not made it yet."""
    if (ROOT / "conf/local/cluster/mine.yaml").exists():
        return
    (tmp_path / "cluster").mkdir()
    shutil.copy(ROOT / "conf/cluster/generic_slurm.yaml", tmp_path / "cluster/mine.yaml")
    monkeypatch.setenv("SPARSIFY_CONF", str(tmp_path))


COMMANDS = sorted({line for _, line in LINES if line.startswith("python -m experiments ")})
INLINE = sorted(set(re.findall(r"`python -m experiments ([a-z][^`]*)`", "".join(PAGES.values()))))


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line: str) -> None:
    """Their words are, that is; the commands themselves are run by other tests."""
    command, *words = shlex.split(line, comments=True)[3:]
    understood(command, words)
    if command in WITH_RUNS:
        assert name_and_configs([word for word in words if word[0] != "-"])


@pytest.mark.parametrize("line", INLINE)
def test_commands_within_sentences_take_these_options(line: str) -> None:
    command, *words = shlex.split(line.partition(" | ")[0])
    understood(command, words)


def understood(command: str, words: list[str]) -> None:
    assert command in commands.names()
    commands.parser_of(command).parsed([word for word in words if word != "--help"])


def test_the_functions_that_a_run_passes_through_are_there() -> None:
    names = re.findall(
        r"^[0-9]+\. `([a-z_.]+)\.(\w+)(?:\.\w+)?`", PAGES["docs/reading-the-code.md"], flags=re.MULTILINE
    )
    assert len(names) >= 10
    for module, name in names:
        path = ROOT.joinpath(*module.split("."))
        found = [path.with_suffix(".py"), ROOT / "experiments" / Path(*module.split(".")).with_suffix(".py")]
        (text,) = (file.read_text() for file in found if file.exists())
        assert re.search(rf"^(def|class) {name}\b", text, flags=re.MULTILINE), (module, name)


def test_messages_are_still_said() -> None:
    """Some words in a row of each one, or all of a short one, stand in the code as they stand here."""
    said = code_strings()
    for message in re.findall(r"^- `([^`]+)`", PAGES["docs/messages.md"], flags=re.MULTILINE):
        words = message.split()
        row = min(ROW, len(words))
        assert any(" ".join(words[at : at + row]) in said for at in range(len(words) - row + 1)), message


def code_strings() -> str:
    """All text within the code, f-strings with their gaps closed."""
    found = []
    for folder in ("sparsify", "slurm", "analysis", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            found += [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    return "\n".join(found)


def test_make_targets_exist() -> None:
    code = [*re.findall(r"`(make [^`]+)`", "".join(PAGES.values())), *(line for _, line in LINES)]
    named = {target for line in code for target in re.findall(r"^make ([a-z][a-z0-9-]*)", line)}
    named -= {"reproduce-"}  # `make reproduce-<item>`
    assert "reproduce-fig4" in named
    for target in sorted(named):
        done = process("make", "-n", target)
        assert done.returncode == 0, (target, done.stderr)
        if target.startswith("reproduce-"):
            assert target.removeprefix("reproduce-") in figures.items()


def test_benchmarks_exist() -> None:
    there = {path.stem for path in (ROOT / "experiments" / "bench").iterdir()}
    named = set(re.findall(r"BENCH=([a-z]+)", "".join(PAGES.values())))
    assert "select" in named
    assert named <= there


def test_make_help_lists_every_target() -> None:
    done = fine(process("make", "help"))
    for target in ("help", "reproduce-%", "test", "lint", "figures", "collect", "bench", "clean"):
        assert f"make {target}" in done.stdout


def test_the_diffs_put_topk_into_a_plain_loop_and_into_ddp(tmp_path: Path) -> None:
    """Before and after, on two gloo processes: after, the workers train together, and well."""
    for found in on_processes(worker_functions.readme_diffs, 2, tmp_path):
        diffs = {name.rpartition(" ")[0] for name in found} - {""}
        own = {f"docs/own-training.md {name}" for name in ("train", "train_ddp", "train_sharded")}
        assert diffs == {"README.md train", *own}
        for name in diffs:
            before, after = found[f"{name} before"], found[f"{name} after"]
            assert after[0] < 0.5 * found["untrained"][0]  # this worker's loss
            assert after[1] == 1  # same weights on both
            assert before[1] == name.endswith("train_ddp")


def test_the_method_snippet_obeys_the_laws() -> None:
    names: dict[str, Any] = {}
    exec(compile(python_block("def comb"), "comb.py", "exec", dont_inherit=True), names)
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


def test_what_records_shows_in_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))  # what is shipped, and no more
    exec(python_block("analysis.load()"), {})
    assert "topk density=0.01" in capsys.readouterr().out


def test_a_method_added_as_a_file_can_be_named_at_once(tmp_path: Path) -> None:
    from sparsify.core.spec import Registry

    (tmp_path / "comb.py").write_text(python_block("def comb"))
    registry = Registry("method", "none", tmp_path)
    assert registry.names() == ["comb"]
    assert registry.defaults("comb") == {"density": 0.001, "scope": "global"}
    assert registry.summary("comb").startswith("Comb-k: every (n/k)-th element")


def test_the_table_of_methods_has_them_all() -> None:
    listed = re.findall(r"^\| `([a-z0-9_]+)` \|", METHODS, flags=re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert shipped_files("sparsify/methods") <= set(listed) <= set(sparsify.names())


@pytest.mark.registering
def test_the_verdicts_are_those_that_the_shipped_records_give() -> None:
    folders = Folders()
    rows = shipped_verdicts(folders)
    assert README.partition(BEGIN)[2].partition(END)[0].strip() == readme_verdicts(rows).strip()
    assert (folders.shipped / VERDICTS).read_text() == as_csv(rows)
    assert (folders.shipped / VERDICTS_PAGE).read_text() == verdicts_page(rows)


def shipped() -> list[dict[str, str]]:
    """verdicts.csv, line by line."""
    return list(csv.DictReader((Folders().shipped / VERDICTS).read_text().splitlines()))


def test_no_shipped_verdict_is_firmer_than_its_runs() -> None:
    for row in shipped():
        if row["verdict"] in DECISIVE:
            assert int(row["n"]) >= ENOUGH[row["of"]], row
            assert row["low"], row
            assert row["high"], row
            assert row["registered"] != "post hoc", row
            if row["launches"]:  # of a time
                assert int(row["launches"]) >= ENOUGH["launches"], row
                assert int(row["occasions"]) >= ENOUGH_OCCASIONS, row
        assert "nan" not in {row["ours"].lower(), row["low"].lower(), row["high"].lower()}, row


def test_the_findings_are_those_of_the_report() -> None:
    told = re.findall(r"^\d\. \*\*(.+?)\.\*\*", README, flags=re.MULTILINE)
    assert told == [finding.says for finding in findings()]
    assert all((ROOT / "results/shipped/figures" / f"{each.picture}.png").is_file() for each in findings())


def test_the_chosen_verdicts_remain_when_all_are_tested_together_and_one_is_unfavourable() -> None:
    shown = README.partition(BEGIN)[2].partition(END)[0]
    rows = [
        line
        for line in shown.splitlines()
        if line.startswith(tuple(f"| {mark} " for mark, _ in MARKS.values()))
    ]
    assert len(rows) == len(chosen()) == 8
    remaining = {row["id"]: row["adjusted"] for row in shipped()}
    words = [remaining[one.claim] for one in chosen()]
    assert set(words) <= set(DECISIVE)
    assert set(words) & set(OUT_OF_BAND)


class Said(NamedTuple):
    """Words of the README, and the claim whose shipped verdict they tell."""

    words: str
    claim: str


SAID = (
    Said("59.0 points of top-1 [51.9, 65.3] below Top-k", "fig3-level.randomk-ends-below"),
    Said("5.4 [4.4, 6.3] below dense with Top-k", "fig3.dense-ends-above"),
    Said("10.1 points [9.4, 10.9]", "why-gap.denser"),
    Said("7.27 times [7.16, 7.38] as long", "speed-logs.ratio.top-k-dense"),
    Said("23.8 times shorter [21.2, 26.7]", "fig4-fast.torch-longer-than-fused"),
    Said("1.15 [1.13, 1.17]", "speed-fast.torch-over-dense"),
    Said("7.7 times [7.5, 7.9] as fast", "crossover-measured.narrow.vgg16-32.topk-fused"),
    Said("1.10 times [1.09, 1.11] the loss", "local-loss.as-good-at-30.30"),
    Said("DeMo at 1.08 [1.07, 1.09]", "local-loss.demo-as-good"),
    Said("0.206 nats [0.197, 0.216]", "local-why.no-momentum-needed"),
)


@pytest.mark.parametrize("said", SAID, ids=lambda said: said.claim)
def test_the_results_in_words_are_the_shipped_ones(said: Said) -> None:
    """To the digits that the words have; of what is longer by so many percent, the ratio is told."""
    assert said.words in " ".join(README.split())
    (row,) = [row for row in shipped() if row["id"] == said.claim]
    found = [float(row[column]) for column in ("ours", "low", "high") if row[column]]
    if row["unit"] == "%":
        found = [1 + number / 100 for number in found]
    numbers = re.findall(r"\d+\.\d+", said.words)
    assert len(numbers) in (1, len(found))
    assert row["adjusted"] in DECISIVE, "README tells only what remains when all are tested together"
    for number, value in zip(numbers, found, strict=False):
        assert number == f"{value:.{len(number.partition('.')[2])}f}"


def test_every_shipped_page_is_linked() -> None:
    pages = {path.name for path in (Folders().shipped / "figures").glob("*.md")}
    linked = {Path(target).name for page, target in LINKS if page.startswith("docs/")}
    assert pages
    assert pages <= linked


def test_the_findings_from_logs_are_those_of_the_tables() -> None:
    topk, dense, older = (JOB[key] for key in (("A100", "topk"), ("A100", "dense"), ("V100", "topk")))
    times = [of(job) for job in (topk, dense) for of in (_step_ms, published_iteration_ms)]
    ratio = published_iteration_ms(topk) / published_iteration_ms(dense), times[0] / times[2]
    late = [100 * rederived.lateness_line(job).correlation[0] ** 2 for job in (topk, older)]
    text = " ".join(ITEMS.split())
    for words in (
        "takes {:.0f} ms instead of {:.0f} and dense {:.1f} instead of {:.1f}".format(*times),
        f"{100 * rederived.waiting_share(topk)[0]:.0f} % of Top-k's communication on the A100s is waiting",
        "explains {:.0f} % of its variance there, but {:.0f} % on the V100s".format(*late),
        "dense is not {:.2f} times as fast as Top-k but {:.2f} times".format(*ratio),
    ):
        assert words in text


def _step_ms(job: int) -> float:
    return step_ms(job).value


def test_every_item_that_is_shipped_has_a_row() -> None:
    assert set(re.findall(r"`make reproduce-([a-z0-9-]+)`", ITEMS)) == set(figures.shipped())


def test_a_virtual_rank_can_run_a_plain_module() -> None:
    """docs/command-line.md promises the exact mathematics of P workers in one process."""

    def body(comm: virtual.VirtualComm) -> torch.Tensor:
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(comm.rank)
        return comm.all_reduce(model.weight.detach().clone())

    assert all(torch.equal(weight, torch.full((1, 2), 6.0)) for weight in virtual.run(4, body))
