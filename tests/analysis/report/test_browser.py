"""The report in a real browser, without a screen: what a reader clicks, types and sees."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.claims import VerdictWord
from analysis.report import pages
from analysis.report.content import JudgedClaim
from analysis.report.runs import SHIPPED, THIS_MACHINE, RunPage, build_run_pages
from tests.analysis import synthetic
from tests.analysis.report.test_pages import HOSTILE, item, run, verdict

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (requirements/dev.txt)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Chromium: tests/analysis/report/install-chromium installs it"
    ),
]
PAGES = ("index", "pages/verdicts", "pages/runs", "pages/methods", "pages/item-fig9-laptop")
PHONE = {"width": 390, "height": 844}
PATIENCE_MS = 10_000
FAILED = "#" + run(HOSTILE).id  # the address of the run that failed
METHODS = ("topk", "dense")
WORDS: dict[str, VerdictWord] = {
    "d": "reproduced", "b": "not reproduced", "c": "not comparable", "a": "reproduced",
}  # fmt: skip
MANY = 250  # rows, of which a page of the table shows 100


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report on invented records, with hostile texts in all places."""
    root = tmp_path_factory.mktemp("report")
    configs = (make(method) for make in (synthetic.config, synthetic.learning_config) for method in METHODS)
    frames = synthetic.frames_with(root / "runs", *configs)
    runs = [*build_run_pages(frames, SHIPPED), replace(run(HOSTILE), items=("fig9-laptop",))]
    for seed in range(MANY - len(runs)):
        config = synthetic.config("topk", seed=seed)
        top1 = {"val_top1": float(seed)}
        runs.append(RunPage(f"{seed:012x}", f"topk-{seed}", THIS_MACHINE, "ok", config, outcomes=top1))
    site = pages.ReportSite(root / "site")
    site.clear_stale_files_and_copy_assets()
    for each in runs:
        site.write_data_script(f"run/{each.id}", each.page_content())
    judged = [
        JudgedClaim.from_verdict(verdict(f"claim-{name} points {HOSTILE}", word))
        for name, word in WORDS.items()
    ]
    figure = replace(item(HOSTILE, root), judged=tuple(judged), runs=(FAILED[1:],), damage="")
    pages.write_report_pages(site, [figure], [("topk", HOSTILE, "")], [HOSTILE], runs)
    return site.folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        is_root = os.geteuid() == 0  # whom Chromium's own sandbox does not take
        chromium = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] * is_root)
        yield chromium
        chromium.close()


class Reader:
    """A reader of the report, who notes every complaint of the browser and every request beyond the disk."""

    def __init__(self, context: Any, folder: Path) -> None:
        self.folder = folder
        self.complaints = list[str]()
        context.set_default_timeout(PATIENCE_MS)
        self.page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.complaints.append(request.url))
        self.page.add_init_script("window.alert = console.error")

    def check_silent(self) -> None:
        assert [text for text in self.complaints if not text.startswith(("file:", "data:", "about:"))] == []

    def open(self, name: str, fragment: str = "") -> Any:
        """Open a page by its name, and what stands behind # in its address; return it once it rests."""
        self.page.goto("about:blank")  # where only what is behind # differs, a page is not read again
        self.page.goto(f"file://{self.folder}/{name}.html{fragment}")
        self.page.locator("main:not([aria-busy=true])").wait_for()
        return self.page

    def press(self, *names: str) -> None:
        """Click buttons one after the other."""
        for name in names:
            self.page.get_by_role("button", name=name).click()

    def column(self, number: int) -> list[str]:
        """Return the texts of a column of the rows that are seen."""
        cells = self.page.locator(f"main tbody tr:visible td:nth-child({number})")
        return [text.strip() for text in cells.all_inner_texts()]

    def claims(self) -> str:
        """Return the letters of the claims that are seen, in their order."""
        return "".join(text.split()[0][-1] for text in self.column(4))

    def count(self) -> str:
        """Return how many rows of how many the page says it shows."""
        return str(self.page.locator("form.filters output").inner_text())


@contextmanager
def reading(browser: Any, folder: Path, **settings: Any) -> Iterator[Reader]:
    """Let somebody read the report in `folder`, without a complaint of the browser."""
    context = browser.new_context(**settings)
    reader = Reader(context, folder)
    yield reader
    context.close()
    reader.check_silent()


@pytest.fixture
def reader(browser: Any, report: Path) -> Iterator[Reader]:
    with reading(browser, report) as reader:
        yield reader


def test_verdicts_are_sorted_by_a_click_and_by_keys(reader: Reader) -> None:
    page = reader.open("index")
    page.get_by_role("link", name="1 not reproduced").click()
    page.wait_for_load_state()
    assert reader.claims() == "b"
    reader.open("pages/verdicts")
    assert reader.claims() == "dba"  # what was decided
    reader.open("pages/verdicts", "#word=every")
    assert reader.claims() == "dbac"
    reader.press("Claim")
    assert reader.claims() == "abcd"
    page.keyboard.press("Enter")  # the button has the focus
    assert reader.claims() == "dcba"
    assert page.locator("[aria-sort=descending]").inner_text().startswith("Claim")
    reader.press("Verdict")
    assert reader.claims()[0] == "b"  # the least favourable first


def test_verdicts_are_filtered_and_the_address_restores_it(reader: Reader) -> None:
    page = reader.open("pages/verdicts")
    page.get_by_label("Verdict", exact=True).select_option("reproduced")
    assert reader.claims() == "da"
    page.get_by_label("Search").fill("CLAIM-A points")
    assert (reader.claims(), reader.count()) == ("a", "1 of 4")
    reader.open("pages/verdicts", "#" + page.url.partition("#")[2])
    assert reader.claims() == "a"
    assert page.get_by_label("Search").input_value() == "CLAIM-A points"
    page.evaluate("location.hash = '#word=reproduced&sort=claim'")  # another address, typed
    page.get_by_text("2 of 4").wait_for()
    assert reader.claims() == "ad"


def test_runs_are_filtered_sorted_and_paged(reader: Reader) -> None:
    page = reader.open("pages/runs")
    assert reader.count() == f"{MANY} of {MANY}"
    assert len(reader.column(2)) == 100
    reader.press("Next", "Next")
    assert len(reader.column(2)) == MANY - 200
    reader.press("Top-1", "Top-1")
    assert reader.column(3)[:2] == [str(MANY - 6), str(MANY - 7)]
    page.get_by_label("State").select_option("failed")
    assert reader.count() == f"1 of {MANY}"
    reader.open("pages/runs", "#origin=shipped&q=topk")
    assert reader.count() == f"2 of {MANY}"


def test_words_typed_on_any_page_find_figures_and_runs(reader: Reader) -> None:
    page = reader.open("index")
    page.get_by_label("Find figures and runs").fill("claim-b points")
    page.keyboard.press("Enter")
    page.get_by_text("1 figure: ").wait_for()
    assert page.locator("#figures a").get_attribute("href") == "item-fig9-laptop.html"
    assert reader.count() == f"0 of {MANY}"
    page.get_by_label("Search").fill("top-k shipped")  # a label of figures
    assert reader.count() == f"2 of {MANY}"
    assert page.locator("#figures").is_hidden()


def test_an_open_page_is_read_again_once_the_report_is_written_again(
    browser: Any, report: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(report, tmp_path / "site")
    with reading(browser, folder) as reader:
        page = reader.open("pages/runs", "#q=topk-1")
        page.wait_for_function("document.querySelector('script[src*=written]') === null")  # it has looked
        runs = folder / "data" / "runs.js"
        runs.write_text(runs.read_text().replace("topk-1", "topk-one"))
        (folder / "data" / "written.js").write_text(pages.render_data_script("written", "later"))
        page.get_by_text(f"0 of {MANY}").wait_for()


def compare(reader: Reader, query: str, *rows: int) -> Any:
    """Compare the runs of these rows; return the page."""
    page = reader.open("pages/runs", f"#origin=shipped&sort=top1{query}")
    for row in rows:
        page.get_by_role("checkbox").nth(row).check()
    page.get_by_role("link", name="Compare").click()
    page.get_by_role("heading", name="What came out").wait_for()
    return page


def test_two_runs_are_compared_outcomes_first(reader: Reader) -> None:
    page = compare(reader, "", 0, 2, 3)  # the third takes the place of the first
    headings = page.get_by_role("heading", level=2).all_inner_texts()
    assert headings == ["What came out", "What was asked for", "Where it was measured"]
    assert "Bytes a worker sends a step" in page.locator("section").first.inner_text()
    page = compare(reader, "&q=topk", 0, 1)  # a training on virtual ranks, and processes that were timed
    assert "differ in" in page.locator("p.damage").inner_text()


@pytest.fixture
def timeline(reader: Reader) -> Any:
    """Return the timeline on the page of a run that was timed."""
    page = reader.open("pages/runs", "#origin=shipped&q=serialised+topk&sort=step_ms")
    page.locator("td.label a").first.click()
    shown = page.locator("svg.timeline")
    shown.wait_for()
    return shown


def view(timeline: Any) -> tuple[float, float]:
    return float(timeline.get_attribute("data-from")), float(timeline.get_attribute("data-to"))


def test_a_timeline_zooms_and_moves_by_wheel_drag_keys_and_buttons(reader: Reader, timeline: Any) -> None:
    page = reader.page
    whole = view(timeline)
    timeline.hover()
    page.mouse.wheel(0, -1)  # which scrolls, as everywhere
    assert view(timeline) == whole
    end = timeline.get_attribute("data-to")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.locator(f"svg.timeline:not([data-to='{end}'])").wait_for()
    near = view(timeline)
    assert near[1] < whole[1]
    page.mouse.down()
    page.mouse.move(0, 0)
    page.mouse.up()
    assert view(timeline)[0] > near[0]
    timeline.press("0")
    assert view(timeline) == whole
    timeline.press("+")
    start, end = view(timeline)
    assert 2 * (end - start) == pytest.approx(whole[1] - whole[0], rel=1e-3)
    timeline.press("ArrowRight")
    assert view(timeline)[0] > start
    reader.press("Show the whole step")
    assert view(timeline) == whole


def test_a_timeline_has_a_lane_for_each_rank_and_says_what_is_under_the_pointer(
    reader: Reader, timeline: Any
) -> None:
    assert timeline.locator("text.name").all_text_contents() == ["rank 0", "rank 1"]
    timeline.locator("rect[data-phase=backward]").first.hover()
    shown = reader.page.locator("output.told").inner_text()
    assert re.fullmatch(r"rank 0: backward \(BP\), \S+ ms, from \S+ ms", shown)
    assert reader.page.get_by_role("heading", name="Phases").is_visible()


def test_a_failed_run_shows_why_and_the_end_of_its_log_and_what_is_no_run_says_so(reader: Reader) -> None:
    page = reader.open("pages/run", FAILED)
    for place in ("p.damage", "pre"):
        assert HOSTILE[:40] in page.locator(place).first.inner_text()
    reader.open("pages/run", "#../../etc")
    assert page.get_by_role("heading", name="No such run").is_visible()
    reader.complaints.clear()  # of files that are not there


def test_keys_lead_past_the_navigation_and_everything_that_can_be_used_has_a_name(reader: Reader) -> None:
    for name in PAGES:
        page = reader.open(name)
        nameless = page.evaluate(
            """[...document.querySelectorAll('a, button, input, select, img, svg[role], [role=region]')]
            .filter((one) => !one.hidden && !one.getAttribute('aria-label') && !one.getAttribute('alt')
              && !one.textContent.trim() && !one.labels?.length && !one.querySelector('img[alt]')
            ).map((one) => one.outerHTML)"""
        )
        assert nameless == [], name
        page.keyboard.press("Tab")
        assert page.locator(":focus").inner_text() == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.locator(":focus").get_attribute("id") == "main"


def test_light_or_dark_as_the_reader_has_it_and_as_the_button_says(browser: Any, report: Path) -> None:
    is_light = "parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]) > 128"
    for scheme, other in (("light", "Dark"), ("dark", "Light")):
        with reading(browser, report, color_scheme=scheme) as reader:
            page = reader.open("index")
            assert page.evaluate(is_light) == (scheme == "light")
            reader.press(other)
            reader.open("pages/verdicts")  # it is remembered
            assert page.evaluate(is_light) == (other == "Light")


def test_on_a_phone_no_page_is_wider_than_the_screen(browser: Any, report: Path) -> None:
    one = f"{0:012x}"
    addresses = [(name, "") for name in PAGES]
    addresses += [
        ("pages/run", f"#{one}"),
        ("pages/run", FAILED),
        ("pages/compare", f"#a={one}&b={FAILED[1:]}"),
    ]
    with reading(browser, report, viewport=PHONE, has_touch=True) as reader:
        for name, fragment in addresses:
            page = reader.open(name, fragment)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], (name, fragment)
