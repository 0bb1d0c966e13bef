"""Pages of the report, from templates, and the assets, pictures and data that they show.

    index.html             what became of the claims, and every figure
    pages/                 verdicts, a page per item, runs, a run, two runs side by side, methods
    assets/  files/  data/ styles and scripts; the figures' files; the runs, as scripts
    kept/                  what the next report need not make again

Pages are read from the disk, where a browser lets no page fetch a file: what scripts need are scripts. Every
text in them is escaped, by jinja2 in pages, by `render_data_script` in data, and the pages' scripts never
make markup of a text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from markupsafe import Markup, escape

from analysis.claims import DECISIVE, VERDICT_WORDS
from analysis.records.files import (
    MAX_LOG_BYTES,
    check_not_link,
    copy_regular_file,
    is_plain_file,
    is_plain_folder,
    read_bytes,
    remove_path,
)
from analysis.report.content import MARK_BY_WORD, Finding, ItemPage
from analysis.report.runs import (
    SHIPPED,
    THIS_MACHINE,
    RunPage,
    distinct_run_labels,
    list_settings_with_accuracy_points,
    phase_label_and_colours_by_name,
    run_table_columns,
)
from analysis.site import NavigationLink, StaticSite

SOURCE_FOLDER = Path(__file__).parent
NAVIGATION = [
    NavigationLink(name, f"pages/{name}.html", name.capitalize()) for name in ("verdicts", "runs", "methods")
]
ORIGIN_TITLES = {THIS_MACHINE: "of this machine", SHIPPED: "shipped with the repository"}
T = TypeVar("T")
MethodCard = tuple[str, str, str]  # its name, what it does, and why its file can't be read
PAGES, FILES, DATA, ASSETS, KEPT = PARTS = "pages", "files", "data", "assets", "kept"
RUN = "run"  # in DATA: a script for each run's page
MARKER_FILE = ".made-by-report"  # a file in each of these folders, without which it is not removed
FILE_KIND_TITLES = {
    "svg": "SVG", "pdf": "PDF", "png": "PNG", "csv": "CSV, the tables", "tex": "LaTeX, the tables",
    "md": "Markdown, all",
}  # fmt: skip
# What could end a script element, or a line in it.
SCRIPT_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class ReportSite(StaticSite):
    """The report's folder, and how its pages are made."""

    def __init__(self, folder: Path) -> None:
        """Take a folder.

        Raises:
            ValueError: it is a link, or has one of PARTS that no report made, and that a report would have to
                remove.
        """
        check_not_link(folder)
        for path in (folder / part for part in PARTS):
            if os.path.lexists(path) and not (is_plain_folder(path) and is_plain_file(path / MARKER_FILE)):
                raise ValueError(
                    f"{path} would have to be removed, and no report made it, as far as can be seen (it has "
                    f"no file {MARKER_FILE}): move it, or remove it if it is an older report's"
                )
        filters = {
            "emphasised": emphasize_asterisks,
            "sentence": capitalize_first,
            "unbroken": insert_no_break_spaces,
            "name": lambda path: Path(path).name,
        }
        super().__init__(
            folder,
            SOURCE_FOLDER / "templates",
            "Report",
            NAVIGATION,
            filters,
            marks=MARK_BY_WORD,
            names=FILE_KIND_TITLES,
            words=VERDICT_WORDS,
            decisive=DECISIVE,
        )

    def write_data_script(self, name: str, content: Any) -> Path:
        """Write a script of data, which hands `content` to the page that loads it."""
        return self.write_file(f"{DATA}/{name}.js", render_data_script(name.rpartition("/")[2], content))

    def clear_stale_files_and_copy_assets(self, unchanged_page_ids: Collection[str] = ()) -> None:
        """Remove the files that an earlier report left, and put the assets there.

        Args:
            unchanged_page_ids: of runs whose pages' data stay.
        """
        run_data = self.folder / DATA / RUN
        for part in PARTS:
            path = self.folder / part
            path.mkdir(parents=True, exist_ok=True)
            for stale in [*path.iterdir()] if part != KEPT else ():
                is_run_data = stale == run_data and is_plain_folder(stale)
                if stale.name != MARKER_FILE and not is_run_data:
                    remove_path(stale)
            (path / MARKER_FILE).touch()
        unchanged_names = {f"{page_id}.js" for page_id in unchanged_page_ids}
        for path in run_data.glob("*"):
            if path.name not in unchanged_names or not is_plain_file(path):
                remove_path(path)
        shutil.copytree(SOURCE_FOLDER / ASSETS, self.folder / ASSETS, dirs_exist_ok=True)

    def load_kept_from_last_report(self, name: str, source_digest: str, kind: type[T]) -> T | None:
        """Return what `store_for_next_report` kept; None where its source was another one, or without any."""
        try:
            kept = json.loads(read_bytes(self.folder / KEPT / f"{name}.json", MAX_LOG_BYTES))
            is_same = isinstance(kept, dict) and kept.get("made_from") == source_digest
            return msgspec.convert(kept["content"], kind) if is_same else None
        except (OSError, ValueError, LookupError, RecursionError):  # not there, or not whole: made again
            return None

    def store_for_next_report(self, name: str, source_digest: str, content: Any) -> None:
        """Keep plain data for the next report, also where this one is stopped before it begins to write."""
        (self.folder / KEPT).mkdir(parents=True, exist_ok=True)
        (self.folder / KEPT / MARKER_FILE).touch()
        self.write_file(f"{KEPT}/{name}.json", json.dumps({"made_from": source_digest, "content": content}))

    def has_data_of_all_runs(self, page_ids: Collection[str]) -> bool:
        """Return True where the data of all these runs' pages are there."""
        folder = self.folder / DATA / RUN
        if not is_plain_folder(folder):
            return not page_ids
        return {f"{page_id}.js" for page_id in page_ids} <= {
            path.name for path in folder.glob("*") if is_plain_file(path)
        }

    def digest_pages_and_data(self) -> str:
        """Return the SHA-256 of the names and contents of all pages and data."""
        hasher = hashlib.sha256()
        for path in sorted(path for part in (PAGES, DATA) for path in (self.folder / part).rglob("*.*")):
            hasher.update(path.name.encode() + path.read_bytes())
        return hasher.hexdigest()


def write_report_pages(
    site: ReportSite,
    items: Sequence[ItemPage],
    methods: Sequence[MethodCard],
    notes: Sequence[str],
    runs: Sequence[RunPage],
    findings: Sequence[Finding] = (),
) -> Path:
    """Write all pages, and return the path of the first one.

    The data of each run's page must have been written before, by `ReportSite.write_data_script`.

    Args:
        site: where to write; the data of a run's page are run/ID.
        items: in the order in which the first page shows them, those of a paper together.
        methods: for the page of methods.
        notes: what had to be left out, and why.
        runs: for the table of runs.
        findings: the first page begins with them.
    """
    for item in items:
        for file in item.files.values():
            copy_regular_file(Path(file), site.folder / FILES / Path(file).name)
        if item.bibtex:
            site.write_file(f"{FILES}/{item.stem}.bib", item.bibtex)
        judged = [(row, item.stem) for row in item.judged]
        site.write_page("item", f"item-{item.stem}", PAGES, item=item, judged=judged)
    rows = [(row, item.stem) for item in items for row in item.judged]
    rows.sort(key=lambda row: row[0].word not in DECISIVE)  # those of an item stay together
    count_by_word = Counter(row.word for row, _ in rows)
    counts = {word: count_by_word[word] for word in VERDICT_WORDS if count_by_word[word]}
    titles = {item.stem: item.title for item in items}
    site.write_page("verdicts", subfolder=PAGES, counts=counts, judged=rows, titles=titles)
    labels = distinct_run_labels(runs)
    site.write_data_script("runs", run_table_columns(runs, labels))
    site.write_data_script("methods", list_settings_with_accuracy_points(runs, labels))
    site.write_data_script("looks", phase_label_and_colours_by_name())
    site.write_data_script("figures", [_search_entry(item) for item in items])
    for page in ("runs", "run", "compare"):
        site.write_page(page, subfolder=PAGES)
    site.write_page("methods", subfolder=PAGES, methods=methods)
    first = site.write_page(
        "index",
        groups=[(paper, [*group]) for paper, group in groupby(items, key=lambda item: item.paper)],
        findings=findings,
        own=newest_own_item(items),
        counts=counts,
        origins=Counter(origin for _, origin in {(run.run, ORIGIN_TITLES[run.origin]) for run in runs}),
        rows=len(runs),
        notes=notes,
    )
    site.write_data_script(
        "written", site.digest_pages_and_data()
    )  # last, for pages that are open look at it, to be read again
    return first


def newest_own_item(items: Sequence[ItemPage]) -> ItemPage | None:
    """Return the item that this machine has measured last; None where it has measured none."""
    drawn = [item for item in items if item.made_s and {"svg", "png"} & {*item.files}]
    return max(drawn, key=lambda item: item.made_s, default=None)


def _search_entry(item: ItemPage) -> list[str]:
    """Return what a search finds of a figure: the name of its page, its title, and the words on its page."""
    words = [item.caption, item.paper, *(f"{row.text} {row.word}" for row in item.judged)]
    return [item.stem, item.title, " ".join(words)]


def render_data_script(name: str, content: Any) -> str:
    """Return a script that calls `report.received(name, content)`; NaN and infinities become null."""
    text = json.dumps(
        [name, _to_json_values(content)], ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    for sign, escaped in SCRIPT_ESCAPES.items():
        text = text.replace(sign, escaped)
    return f"report.received(...{text});\n"


def emphasize_asterisks(text: str) -> Markup:
    """Return a caption in which text between asterisks stands out."""
    return Markup(re.sub(r"\*([^*]+)\*", r"<em>\1</em>", str(escape(text))))


def insert_no_break_spaces(text: str) -> str:
    """Return a text in which a number and its unit, an interval, or brackets are not broken between lines."""
    return re.sub(
        r"\([^)]*\)|\[[^]]*\]|^[\d.,]+ \S+$", lambda part: part[0].replace(" ", "\N{NO-BREAK SPACE}"), text
    )


def capitalize_first(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def _to_json_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json_values(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_values(part) for part in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return None
    return value
