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

from analysis.claims import Claim, Verdict, VerdictWord
from analysis.report import pages
from analysis.report.content import Finding, HtmlTable, ItemPage, JudgedClaim, SupportingClaim
from analysis.report.runs import THIS_MACHINE, RunPage, run_page_id
from analysis.stats import Estimate
from analysis.tables import Table

HOSTILE = "</script><img src=x onerror=alert(1)>\"'`${1}javascript:alert(1)\u2028&amp;"


def verdict(text: str, word: VerdictWord = "not reproduced") -> Verdict:
    """Return a verdict in which every text is this one."""
    claim = Claim(text, text, text, text, "ordering", 0.0, text, lambda frames: None)
    return Verdict(claim, Estimate(2.0, n=3, sample_kind=text), word, text, text, text)


def item(text: str, folder: Path) -> ItemPage:
    picture = folder / "fig9-laptop.svg"
    picture.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    table = Table(text, pd.DataFrame({text: [text]}), {text: text}, text)
    return ItemPage(
        "fig9", "fig9-laptop", text, f"*{text}*", text, (text,), (text,), facts={text: text},
        judged=(JudgedClaim.from_verdict(verdict(text)),), tables=(HtmlTable(text, table.to_html()),),
        files={"svg": str(picture)}, bibtex=text, runs=("0123456789ab",), damage=text, paper=text,
        summary=(text,), made_s=1.0,
    )  # fmt: skip


def run(text: str) -> RunPage:
    return RunPage(
        run_page_id(text, text), text, THIS_MACHINE, "failed", why=text, items=(text,),
        provenance={text: text},
        config={"method": {"name": text}, "task": {"name": text}, "workers": text},
        logs=({"name": text, "lines": [text]},), commands=(text,),
    )  # fmt: skip


def written(text: str, folder: Path) -> dict[str, str]:
    """Return the pages and data of a report in which every text is this one."""
    folder.mkdir(parents=True, exist_ok=True)
    site = pages.ReportSite(folder / "report")
    site.clear_stale_files_and_copy_assets()
    row, one = run(text), item(text, folder)
    site.write_data_script(f"run/{row.id}", row.page_content())
    finding = Finding(text, one, (SupportingClaim(text, one.judged[0], one),))
    pages.write_report_pages(site, [one], [(text, text, "")], [text], [row], [finding])
    return {str(path.relative_to(site.folder)): path.read_text()
            for path in site.folder.rglob("*") if path.suffix in (".html", ".js")}  # fmt: skip


def tags(page: str) -> list[str]:
    return re.findall(r"<(/?\w*|!)[^>]*>", page)


def test_no_text_becomes_markup_or_ends_a_script_and_what_was_escaped_is_read(tmp_path: Path) -> None:
    found = written(HOSTILE, tmp_path)
    harmless = written("harmless", tmp_path / "other")
    for name, page in found.items():
        if name.endswith(".html"):
            assert tags(page) == tags(harmless[name]), name
            assert HOSTILE not in page
        elif name.startswith("data/"):
            assert not {"<", "\u2028"} & {*page}
    assert HOSTILE in html.unescape(found["pages/item-fig9-laptop.html"])
    name, columns = json.loads("[" + found["data/runs.js"].removeprefix("report.received(...[")[:-3])
    assert (name, columns["run"], columns["why"]) == ("runs", [HOSTILE], [HOSTILE])


def test_the_first_page_begins_with_this_machines_newest_picture_or_says_how_to_get_one(
    tmp_path: Path,
) -> None:
    older = replace(item("older", tmp_path), facts={"runs": "3 launches"})
    newer = replace(older, title="newer", made_s=2.0, num_more_runs=2, commands=("draw", "make"))
    shipped = replace(older, made_s=0.0)
    finding = Finding("found", shipped, ())
    for items, parts in (
        ([older, newer], ("This machine", ">newer<", "<b>older</b>", "3 launches", "2 more runs make it",
                          "make --all", "What was found, shipped with the repository", "<h3>found")),
        ([older], ("This machine", "To measure again", "older --force")),
        ([shipped], ("make reproduce-fig4", "What was found</h2>")),
    ):  # fmt: skip
        site = pages.ReportSite(tmp_path / "report")
        site.clear_stale_files_and_copy_assets()
        page = pages.write_report_pages(site, items, [], [], [], [finding]).read_text()
        places = [page.find(part) for part in parts]
        assert -1 not in places
        assert places == sorted(places), parts


def test_links_lead_to_files_of_the_report_and_nowhere_else(tmp_path: Path) -> None:
    for name, page in written("harmless", tmp_path).items():
        for link in re.findall(r'(?:href|src)="([^"]*)"', page) if name.endswith(".html") else []:
            target = (tmp_path / "report" / name).parent / link.partition("#")[0]
            assert link == "data:," or link.startswith("#") or target.is_file(), (name, link)


def test_a_page_is_named_by_its_key_or_a_digest_never_by_a_text() -> None:
    for run, key, name in (
        ("topk-cnn-8w-virtual-0123456789ab", "0123456789ab", "0123456789ab"),
        ("alternating-0123456789ab", "0123456789ab/topk-fused", "0123456789ab-topk-fused"),
        ("alternating-0123456789ab", "0123456789ab/../topk", "[0-9a-f]{16}"),
        ("../../x-0123456789ab", "../0123456789ab", "[0-9a-f]{16}"),
        ("another-name", "0123456789ab", "[0-9a-f]{16}"),
    ):
        assert re.fullmatch(name, run_page_id(run, key))


@pytest.mark.timeout(20)
def test_what_was_kept_is_given_again_or_where_it_is_no_such_thing_made_again(tmp_path: Path) -> None:
    one = item("text", tmp_path)
    pages.ReportSite(tmp_path).store_for_next_report("fig9", "before", [msgspec.to_builtins(one)])
    site = pages.ReportSite(tmp_path)  # the first was stopped before its pages
    site.clear_stale_files_and_copy_assets()
    assert site.load_kept_from_last_report("fig9", "before", list[ItemPage]) == [one]
    assert site.load_kept_from_last_report("fig9", "after", list[ItemPage]) is None
    path = tmp_path / "kept" / "fig9.json"
    for content in (
        b"{", b'{"made_from": "before"}', b'{"made_from": "before", "content": [5]}', b"[" * 100_000, b"\xff",
        b'{"made_from": "before", "content": [{"name": "a"}]}',
    ):  # fmt: skip
        path.write_bytes(content)
        assert site.load_kept_from_last_report("fig9", "before", list[ItemPage]) is None, content[:50]
    for make in (os.mkfifo, lambda path: path.symlink_to(path.name)):
        path.unlink()
        make(path)
        assert site.load_kept_from_last_report("fig9", "before", list[ItemPage]) is None


def test_texts_and_numbers_are_written_as_pages_read_them() -> None:
    content = {"a": [float("nan"), 1.5], "b": -float("inf")}  # of which JSON lacks two
    assert pages.render_data_script("x", content) == 'report.received(...["x",{"a":[null,1.5],"b":null}]);\n'
    assert pages.emphasize_asterisks("*Simulated* <times>") == "<em>Simulated</em> &lt;times&gt;"
    unbroken = pages.insert_no_break_spaces("71.76 % [71.1, 72.41] (n = 5 runs) by scheme")
    assert unbroken.replace("\N{NO-BREAK SPACE}", "_") == "71.76 % [71.1,_72.41] (n_=_5_runs) by scheme"
