"""The report's files: escaped, the same for the same records, and complete by themselves."""

from __future__ import annotations

import html
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from analysis.claims import Claim, Verdict, Word
from analysis.report import pages
from analysis.report.content import Behind, Item, Judged, Lead, Numbers
from analysis.report.runs import HERE, RunPage, page_id
from analysis.stats import Value
from analysis.tables import Table

HOSTILE = "</script><img src=x onerror=alert(1)>\"'`${1}javascript:alert(1)\u2028&amp;"


def verdict(text: str, word: Word = "not reproduced") -> Verdict:
    """A verdict in which every text is this one."""
    claim = Claim(text, text, text, text, "ordering", 0.0, text, lambda frames: None)
    return Verdict(claim, Value(2.0, n=3, of=text), word, text, text, text)


def item(text: str, folder: Path) -> Item:
    picture = folder / "fig9-laptop.svg"
    picture.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    return Item(
        name="fig9",
        stem="fig9-laptop",
        title=text,
        caption=f"*{text}*",
        source=text,
        remarks=(text,),
        commands=(text,),
        facts={text: text},
        judged=(Judged.of(verdict(text)),),
        tables=(Numbers(text, Table(text, pd.DataFrame({text: [text]}), {text: text}, text).html()),),
        files={"svg": str(picture)},
        bibtex=text,
        runs=("0123456789ab",),
        damage=text,
        paper=text,
    )


def finding(text: str, item: Item) -> Lead:
    return Lead(text, item, (Behind(text, item.judged[0], item),))


def run(text: str) -> RunPage:
    return RunPage(
        id=page_id(text, text),
        run=text,
        origin=HERE,
        state="failed",
        config={"method": {"name": text}, "task": {"name": text}, "workers": text},
        why=text,
        items=(text,),
        provenance={text: text},
        logs=({"name": text, "lines": [text]},),
        commands=(text,),
    )


def written(text: str, folder: Path) -> dict[str, str]:
    """The pages and data of a report in which every text is this one."""
    folder.mkdir(parents=True, exist_ok=True)
    site = pages.Site(folder / "report")
    site.begin()
    site.data(f"run/{run(text).id}", run(text).details())
    one = item(text, folder)
    pages.write(site, [one], [(text, text, "")], [text], [run(text)], [finding(text, one)])
    return {str(path.relative_to(site.folder)): path.read_text()
            for path in sorted(site.folder.rglob("*")) if path.suffix in (".html", ".js")}  # fmt: skip


def test_no_text_becomes_markup_or_ends_a_script(tmp_path: Path) -> None:
    found = written(HOSTILE, tmp_path)
    harmless = written("harmless", tmp_path / "other")
    for name, page in found.items():
        if name.endswith(".html"):
            tags = re.findall(r"<[a-zA-Z!/][^>]*>", page)
            assert [re.match(r"</?\w*", tag)[0] for tag in tags] == [  # type: ignore[index]
                re.match(r"</?\w*", tag)[0]  # type: ignore[index]
                for tag in re.findall(r"<[a-zA-Z!/][^>]*>", harmless[name])
            ], name
            assert HOSTILE not in page
        elif name.startswith("data/"):
            assert "<" not in page
            assert "\u2028" not in page


def test_what_was_escaped_is_what_is_read(tmp_path: Path) -> None:
    found = written(HOSTILE, tmp_path)
    assert HOSTILE in html.unescape(found["pages/item-fig9-laptop.html"])
    name, columns = json.loads("[" + found["data/runs.js"].removeprefix("report.received(...[")[:-3])
    assert (name, columns["run"], columns["why"]) == ("runs", [HOSTILE], [HOSTILE])


def test_links_lead_to_files_of_the_report_and_nowhere_else(tmp_path: Path) -> None:
    found = written("harmless", tmp_path)
    report = tmp_path / "report"
    for name, page in found.items():
        for link in re.findall(r'(?:href|src)="([^"]*)"', page) if name.endswith(".html") else []:
            assert not re.match(r"[a-z]+:|//", link) or link == "data:,", link
            target = (report / name).parent / link.partition("#")[0]
            assert link == "data:," or link.startswith("#") or target.is_file(), (name, link)


def test_scripts_make_no_markup_of_texts_and_ask_nothing_of_a_network() -> None:
    for path in (pages.SOURCE / pages.ASSETS).glob("*.js"):
        text = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
                     "fetch(", "XMLHttpRequest", "WebSocket", "sendBeacon"):  # fmt: skip
            assert word not in text, (path.name, word)
        assert set(re.findall(r"https?://[^\"]*", text)) <= {"http://www.w3.org/2000/svg"}


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    assert written("harmless", tmp_path / "a") == written("harmless", tmp_path / "b")


def test_an_earlier_report_leaves_nothing_behind_and_other_files_stay(tmp_path: Path) -> None:
    report = tmp_path / "report"
    written("harmless", tmp_path)
    (report / "data" / "run" / "old.js").write_text("old")
    (report / "mine.txt").write_text("mine")
    written("harmless", tmp_path)
    assert not (report / "data" / "run" / "old.js").exists()
    assert (report / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("run", "key", "same"),
    [
        ("topk-cnn-8w-virtual-0123456789ab", "0123456789ab", True),
        ("alternating-0123456789ab", "0123456789ab/topk-fused", True),
        ("alternating-0123456789ab", "0123456789ab/../topk", False),
        ("../../x-0123456789ab", "../0123456789ab", False),
        ("another-name", "0123456789ab", False),
    ],
)
def test_a_page_is_named_by_its_key_or_a_digest_never_by_a_text(run: str, key: str, same: bool) -> None:
    found = page_id(run, key)
    assert re.fullmatch(r"[0-9a-f]{12}(-[a-z0-9]+)*|[0-9a-f]{16}", found)
    assert (found == key.replace("/", "-")) == same


def test_what_is_kept_is_given_again_as_long_as_what_it_was_made_from_is_the_same(tmp_path: Path) -> None:
    site, one = pages.Site(tmp_path / "report"), item("text", tmp_path)
    site.begin()
    site.keep("fig9", "before", [msgspec.to_builtins(one)])
    site.begin()
    assert site.kept("fig9", "before", list[Item]) == [one]
    assert site.kept("fig9", "after", list[Item]) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "content",
    [
        "{", '{"made_from": "before"}', '{"made_from": "before", "content": [5]}', "[" * 100_000, b"\xff",
        '{"made_from": "before", "content": [{"name": "a"}]}', "FIFO", "link to itself",
    ],
)  # fmt: skip
def test_what_was_kept_and_is_no_such_thing_is_made_again(content: str | bytes, tmp_path: Path) -> None:
    site = pages.Site(tmp_path / "report")
    site.keep("fig9", "before", [])
    path = tmp_path / "report" / "kept" / "fig9.json"
    path.unlink()
    if content == "FIFO":
        os.mkfifo(path)
    elif content == "link to itself":
        path.symlink_to(path.name)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert site.kept("fig9", "before", list[Item]) is None


def test_a_report_that_was_stopped_before_its_pages_is_gone_on_with(tmp_path: Path) -> None:
    pages.Site(tmp_path).keep("fig9", "before", [1])
    assert pages.Site(tmp_path).kept("fig9", "before", list[int]) == [1]


def test_a_runs_row_is_kept_whole() -> None:
    row = replace(run("text"), outcomes={"val_loss": float("inf")}, parts={}, provenance={}, logs=())
    assert row.leaves  # which is none of its fields
    assert msgspec.convert(msgspec.to_builtins(row), RunPage) == row


def test_numbers_that_json_lacks_become_null() -> None:
    nan, inf = float("nan"), float("inf")
    assert (
        pages.script("x", {"a": [nan, 1.5], "b": -inf})
        == 'report.received(...["x",{"a":[null,1.5],"b":null}]);\n'
    )


def test_a_caption_is_emphasised_and_escaped() -> None:
    assert pages.emphasised("*Simulated* <times>") == "<em>Simulated</em> &lt;times&gt;"


def test_an_interval_stays_on_one_line() -> None:
    text = pages.unbroken("71.76 % [71.1, 72.41] (n = 5 runs)")
    assert text.replace("\N{NO-BREAK SPACE}", "_") == "71.76 % [71.1,_72.41] (n_=_5_runs)"
    assert pages.unbroken("regardless of scheme") == "regardless of scheme"
