"""The report in a real browser, without a screen: what a reader clicks, types and sees."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.claims import Word
from analysis.records.parquet import newest_frames
from analysis.records.store import Store
from analysis.report import pages
from analysis.report.content import Item, Judged
from analysis.report.runs import HERE, SHIPPED, RunPage, of_frames
from tests.analysis import synthetic
from tests.analysis.report.test_pages import HOSTILE, verdict

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (requirements/dev.txt)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: tests/analysis/report/install-chromium installs it"
)
PAGES = ("index", "pages/verdicts", "pages/runs", "pages/methods", "pages/item-fig9-laptop")
PHONE = {"width": 390, "height": 844}
PATIENCE_MS = 10_000
MANY = 250  # rows, of which a page of the table shows 100
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 70 30"><rect width="70" height="30"/></svg>'


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on invented records, with hostile texts in all places."""
    root = tmp_path_factory.mktemp("report")
    store = Store(root / "runs")
    synthetic.timed(store, synthetic.config("topk"))
    synthetic.timed(store, synthetic.config("dense"))
    for method in ("dense", "topk"):
        synthetic.learned(store, synthetic.learning_config(method))
    frames, _ = newest_frames(store, store.runs(), root / "kept")
    runs = [*of_frames(frames, SHIPPED)]
    hostile = {"method": {"name": HOSTILE}, "task": {"name": HOSTILE}, "workers": 2}
    runs.append(RunPage("f" * 16, HOSTILE, HERE, "failed", hostile, why=f"out of memory {HOSTILE}",
                    logs=({"name": "rank0", "lines": ["Traceback", HOSTILE]},), items=("fig9-laptop",),
                    provenance={HOSTILE: HOSTILE}))  # fmt: skip
    for place in range(MANY - len(runs)):
        config = {**synthetic.config("topk"), "seed": place}
        runs.append(
            RunPage(f"{place:012x}", f"topk-{place}", HERE, "ok", config, outcomes={"val_top1": float(place)})
        )
    site = pages.Site(root / "site")
    site.begin()
    for run in runs:
        site.data(f"run/{run.id}", run.details())
    (root / "fig9-laptop.svg").write_text(SVG)
    words: dict[str, Word] = {
        "d": "reproduced", "b": "not reproduced", "c": "not comparable", "a": "reproduced",
    }  # fmt: skip
    rows = [verdict(f"claim-{name} points {HOSTILE}", word) for name, word in words.items()]
    item = Item("fig9", "fig9-laptop", f"Title {HOSTILE}", HOSTILE, judged=tuple(map(Judged.of, rows)),
                        files={"svg": str(root / "fig9-laptop.svg")}, runs=("f" * 16,))  # fmt: skip
    pages.write(site, [item], [("topk", HOSTILE, "")], [HOSTILE], runs)
    return site.folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        is_root = os.geteuid() == 0  # whom Chromium's own sandbox does not take
        found = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if is_root else [])
        yield found
        found.close()


class Reader:
    """A reader of the report, who notes every complaint of the browser and every request beyond the disk."""

    def __init__(self, browser: Any, folder: Path, **how: Any) -> None:
        self.folder, self.complaints = folder, list[str]()
        self.context = browser.new_context(**how)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._asked_by_script)
        self.page.on("request", self._asked)

    def _asked_by_script(self, dialog: Any) -> None:
        self.complaints.append(dialog.message)
        dialog.dismiss()

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.complaints.append(request.url)

    def open(self, name: str, behind: str = "") -> Any:
        """A page by its name, and what stands behind # in its address; once it has come to rest."""
        self.page.goto("about:blank")  # where only what is behind # differs, a page is not read again
        self.page.goto(f"file://{self.folder}/{name}.html{behind}")
        self.page.locator("main:not([aria-busy=true])").wait_for()
        return self.page

    def column(self, number: int) -> list[str]:
        """The texts of a column of the rows that are seen."""
        cells = self.page.locator(f"main tbody tr:visible td:nth-child({number})")
        return [text.strip() for text in cells.all_inner_texts()]


@pytest.fixture
def reader(browser: Any, report: Path) -> Iterator[Reader]:
    found = Reader(browser, report)
    yield found
    found.context.close()
    assert found.complaints == []


def claims(reader: Reader) -> str:
    return "".join(text.split()[0][-1] for text in reader.column(4))


def test_verdicts_are_sorted_by_a_click_and_by_keys(reader: Reader) -> None:
    reader.open("pages/verdicts")
    assert claims(reader) == "dba"  # what was decided
    page = reader.open("pages/verdicts", "#word=every")
    assert claims(reader) == "dbac"
    page.get_by_role("button", name="Claim").click()
    assert claims(reader) == "abcd"
    page.keyboard.press("Enter")  # the button has the focus
    assert claims(reader) == "dcba"
    assert page.get_by_role("columnheader", name="Claim").get_attribute("aria-sort") == "descending"
    assert page.url.endswith("#word=every&sort=claim&down=1")
    page.get_by_role("button", name="Verdict").click()
    assert reader.column(1)[0].endswith("not reproduced")  # the least favourable first


def test_verdicts_are_filtered_and_the_address_restores_it(reader: Reader) -> None:
    page = reader.open("pages/verdicts")
    page.get_by_label("Verdict", exact=True).select_option("reproduced")
    assert claims(reader) == "da"
    page.get_by_label("Search").fill("CLAIM-A points")
    assert claims(reader) == "a"
    assert page.get_by_role("status").inner_text() == "1 of 4"
    address = page.url.partition("#")[2]
    reader.open("pages/verdicts", f"#{address}")
    assert claims(reader) == "a"
    assert page.get_by_label("Search").input_value() == "CLAIM-A points"
    page.evaluate("location.hash = '#word=reproduced&sort=claim'")  # another address, typed
    page.wait_for_function("document.querySelector('output').textContent === '2 of 4'")
    assert claims(reader) == "ad"


def test_counts_on_the_first_page_lead_to_their_verdicts(reader: Reader) -> None:
    page = reader.open("index")
    page.get_by_role("link", name="1 not reproduced").click()
    page.wait_for_load_state()
    assert claims(reader) == "b"


def test_runs_are_filtered_sorted_and_paged(reader: Reader) -> None:
    page = reader.open("pages/runs")
    status = page.locator("form output")
    assert status.inner_text() == f"{MANY} of {MANY}"
    assert len(reader.column(2)) == 100
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Next").click()
    assert len(reader.column(2)) == MANY - 200
    page.get_by_role("button", name="Top-1").click()
    page.get_by_role("button", name="Top-1").click()
    top1 = [float(text) for text in reader.column(3)[:100]]
    assert top1 == sorted(top1, reverse=True)
    page.get_by_label("State").select_option("failed")
    assert status.inner_text() == f"1 of {MANY}"
    reader.open("pages/runs", "#origin=shipped&q=topk")
    assert status.inner_text() == f"2 of {MANY}"


def test_words_typed_on_any_page_find_figures_and_runs(reader: Reader) -> None:
    page = reader.open("index")
    page.get_by_label("Find figures and runs").fill("claim-b points")
    page.keyboard.press("Enter")
    page.get_by_text("1 figure: ").wait_for()
    assert page.locator("#figures a").get_attribute("href") == "item-fig9-laptop.html"
    assert page.locator("form.filters output").inner_text() == f"0 of {MANY}"
    page.get_by_label("Search").fill("top-k shipped")  # a label of figures
    assert page.locator("form.filters output").inner_text() == f"2 of {MANY}"
    assert page.locator("#figures").is_hidden()


def test_an_open_page_is_read_again_once_the_report_is_written_again(
    browser: Any, report: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "site"
    shutil.copytree(report, folder)
    reader = Reader(browser, folder)
    page = reader.open("pages/runs", "#q=topk-1")
    page.wait_for_function("document.querySelector('script[src*=written]') === null")  # it has been looked at
    runs = folder / "data" / "runs.js"
    runs.write_text(runs.read_text().replace("topk-1", "topk-one"))
    (folder / "data" / "written.js").write_text(pages.script("written", "later"))
    page.get_by_text(f"0 of {MANY}").wait_for()
    assert page.url.endswith("#q=topk-1")
    reader.context.close()
    assert reader.complaints == []


def test_two_runs_are_compared_outcomes_first(reader: Reader) -> None:
    page = reader.open("pages/runs", "#origin=shipped&sort=top1")
    ticks = page.get_by_role("checkbox")
    for place in (0, 2, 3):  # the third takes the place of the first
        ticks.nth(place).check()
    assert page.locator("input:checked").count() == 2
    assert "pick=" in page.url
    page.get_by_role("link", name="Compare").click()
    page.get_by_role("heading", name="What came out").wait_for()
    headings = page.get_by_role("heading", level=2).all_inner_texts()
    assert headings == ["What came out", "What was asked for", "Where it was measured"]
    first = page.locator("section").first
    assert "Bytes a worker sends a step" in first.inner_text()


def test_only_what_virtual_ranks_timed_is_called_simulated(reader: Reader) -> None:
    page = reader.open("pages/runs", "#origin=shipped&sort=top1&q=topk")
    for place in (0, 1):  # a training on virtual ranks, and processes that were timed
        page.get_by_role("checkbox").nth(place).check()
    page.get_by_role("link", name="Compare").click()
    page.get_by_role("heading", name="What came out").wait_for()
    assert page.get_by_role("cell", name="Step (ms)", exact=True).is_visible()
    assert "differ in" in page.locator("p.damage").inner_text()


def timeline_of(reader: Reader) -> tuple[Any, Any]:
    page = reader.open("pages/runs", "#origin=shipped&q=serialised+topk&sort=step_ms")
    page.locator("td.label a").first.click()
    shown = page.locator("svg.timeline")
    shown.wait_for()
    return page, shown


def view(shown: Any) -> tuple[float, float]:
    return float(shown.get_attribute("data-from")), float(shown.get_attribute("data-to"))


def test_a_timeline_zooms_and_moves_by_wheel_drag_keys_and_buttons(reader: Reader) -> None:
    page, shown = timeline_of(reader)
    whole = view(shown)
    shown.scroll_into_view_if_needed()
    box = shown.bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + 30)
    page.mouse.move(*middle)
    page.mouse.wheel(0, -1)  # which scrolls, as everywhere
    assert view(shown) == whole
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function(
        "(to) => Number(document.querySelector('svg.timeline').dataset.to) < to", arg=whole[1]
    )
    near = view(shown)
    assert near[1] - near[0] < whole[1] - whole[0]
    page.mouse.down()
    page.mouse.move(middle[0] - 60, middle[1])
    page.mouse.up()
    assert view(shown)[0] > near[0]
    shown.focus()
    page.keyboard.press("0")
    assert view(shown) == whole
    page.keyboard.press("+")
    by_keys = view(shown)
    assert by_keys[1] - by_keys[0] == pytest.approx((whole[1] - whole[0]) / 2, rel=1e-3)
    page.keyboard.press("ArrowRight")
    assert view(shown)[0] > by_keys[0]
    page.get_by_role("button", name="Show the whole step").click()
    assert view(shown) == whole


def test_a_timeline_has_a_lane_for_each_rank_and_says_what_is_under_the_pointer(reader: Reader) -> None:
    page, shown = timeline_of(reader)
    assert shown.locator("text.name").all_text_contents() == ["rank 0", "rank 1"]
    backward = shown.locator("rect[data-phase=backward]").first
    backward.hover()
    assert re.fullmatch(
        r"rank 0: backward \(BP\), \S+ ms, from \S+ ms", page.locator("output.told").inner_text()
    )
    assert page.get_by_role("heading", name="Phases").is_visible()


def test_a_failed_run_shows_why_and_the_end_of_its_log(reader: Reader) -> None:
    page = reader.open("pages/run", f"#{'f' * 16}")
    assert "out of memory" in page.locator("p.damage").inner_text()
    assert HOSTILE.replace("\u2028", "") in page.locator("pre").first.inner_text().replace("\u2028", "")


def test_an_address_that_names_no_run_is_told_so(browser: Any, report: Path) -> None:
    reader = Reader(browser, report)
    for address in ("#../../etc", "#0123456789ab0000"):
        page = reader.open("pages/run", address)
        assert page.get_by_role("heading", name="No such run").is_visible()
    reader.context.close()


def test_the_first_key_leads_past_the_navigation(reader: Reader) -> None:
    page = reader.open("index")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_everything_that_can_be_used_has_a_name_and_pictures_have_words(reader: Reader) -> None:
    for name in PAGES:
        page = reader.open(name)
        nameless = page.evaluate(
            """[...document.querySelectorAll('a, button, input, select, img, svg[role], [role=region]')]
            .filter((one) => !one.hidden && !one.getAttribute('aria-label') && !one.getAttribute('alt')
              && !one.textContent.trim() && !one.labels?.length && !one.querySelector('img[alt]')
            ).map((one) => one.outerHTML)"""
        )
        assert nameless == [], name
        assert page.locator("h1").count() == 1


def brightness(page: Any) -> float:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_light_or_dark_as_the_reader_has_it_and_as_the_button_says(browser: Any, report: Path) -> None:
    for scheme, other in (("light", "dark"), ("dark", "light")):
        reader = Reader(browser, report, color_scheme=scheme)
        page = reader.open("index")
        was = brightness(page)
        assert (was > 128) == (scheme == "light")
        page.get_by_role("button", name=other.capitalize()).click()
        assert (brightness(page) > 128) == (other == "light")
        assert (brightness(reader.open("pages/verdicts")) > 128) == (other == "light")  # it is remembered
        reader.context.close()
        assert reader.complaints == []


def test_on_a_phone_no_page_is_wider_than_the_screen(browser: Any, report: Path) -> None:
    reader = Reader(browser, report, viewport=PHONE, has_touch=True)
    run = next((report / "data" / "run").glob("?" * 12 + ".js")).stem
    runs = [
        ("pages/run", f"#{run}"),
        ("pages/run", f"#{'f' * 16}"),
        ("pages/compare", f"#a={run}&b={'f' * 16}"),
    ]
    for name, behind in [*((name, "") for name in PAGES), *runs]:
        page = reader.open(name, behind)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
    reader.context.close()
    assert reader.complaints == []
