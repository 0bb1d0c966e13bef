"""Files of figures and tables, named <paper>_<item>.py, each with its runs, its drawing, its claims.

The file is the item <paper>/<item>, for short <item>. Files of one's own lie beside the others: of
thesis_density.py the item is thesis/density, for short density. `load` makes a `Figure` of it.

What an item holds against its records is data of its paper, papers/<paper>.yaml: the text, the paper's
number, the rule, and the statements that it answers. The item says how its own value is computed:

    def claims() -> list[Claim]:
        return [make_claim("yoon2022.fig4.compression-dominates", dominance, "topk")]

Its caption is there, too, under `words`; what that leaves open in braces the item's `facts` give. Everywhere
else the claim goes by its id, fig4.compression-dominates, so its text may be reworded. Claims of one family
are one entry: `make_claims_by_method(name, function, METHODS)`. Figures of one's own may write
`Claim(text=..., ...)`, which without an id has one that its text gives, and `caption`.
"""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path
from types import ModuleType

from experiments.figures import papers
from experiments.figures.figure import PROFILES as PROFILES
from experiments.figures.figure import PUBLISHED as PUBLISHED
from experiments.figures.figure import Figure, file_prefix
from sparsify.core.spec import BrokenFile, import_entry
from sparsify.ranges import describe_unknown

FOLDER = Path(__file__).parent
MAIN_PAPER = "yoon2022"  # the paper that this project began with
BEYOND_PAPERS = "Beyond the papers"


def files_by_item() -> dict[str, Path]:
    """Return the file of each item, by the item's name.

    An item has its short name unless another one has that, too; an item of the repository keeps it. A file
    whose name starts with _ is shared by items.
    """
    files = _files_by_full_name()
    short_names = [full_name.partition("/")[2] for full_name in files]
    paper_names = papers.paper_names()
    files_by_item = {}
    for full_name, path in files.items():
        paper, _, short_name = full_name.partition("/")
        is_clear = short_names.count(short_name) == 1 or paper in paper_names
        files_by_item[short_name if is_clear else full_name] = path
    return files_by_item


def repository_items() -> list[str]:
    """Return the items whose file begins with the name of a file of papers/; the others are a user's own."""
    paper_names = papers.paper_names()
    return [item for item, path in files_by_item().items() if _paper_of_file(path) in paper_names]


def items_in_reading_order() -> list[str]:
    """Return all items: those of the main paper in its order, of the others, of none, one's own."""
    papers_by_item = {item: _paper_of_file(path) for item, path in files_by_item().items()}
    ordered = list[str]()
    for paper in sorted(
        papers.paper_names(), key=lambda name: (name != MAIN_PAPER, not papers.bibtex_or_empty(name), name)
    ):
        of_paper = [item for item in papers_by_item if papers_by_item[item] == paper]
        order = papers.items_in_paper_order(paper)
        ordered += sorted(of_paper, key=lambda item: order.index(item) if item in order else len(order))
    return [*ordered, *(item for item in papers_by_item if item not in ordered)]


def paper_label_or_empty(item: str) -> str:
    """Return how a text names the paper of an item: 'Yoon and Oh 2022'; empty of one's own."""
    paper = _paper_of_file(files_by_item()[item])
    return papers.citation_label_or_empty(paper) or (BEYOND_PAPERS if paper in papers.paper_names() else "")


def find_item(name: str) -> str:
    """Return the item that somebody asks for, by its short or its whole name.

    Raises:
        ValueError: no item has this name, which lists what there is; or two have this short name.
    """
    files = _files_by_full_name()
    matches = {full: path for full, path in files.items() if name in (full, full.partition("/")[2])}
    if not matches:
        raise ValueError(describe_unknown("item", name, list(files_by_item())))
    if len(matches) > 1:
        raise ValueError(
            f"item {name!r} is in two files, {' and '.join(map(str, matches.values()))}: ask for "
            f"{' or '.join(matches)}, or rename one"
        )
    (match,) = matches.values()
    return next(item for item, path in files_by_item().items() if path == match)


def item_of_file_prefix_or_itself(prefix: str) -> str:
    """Return the item whose files' names begin with the prefix; without one the prefix itself."""
    return next((item for item in files_by_item() if file_prefix(item) == prefix), prefix)


def load(item: str) -> Figure:
    """Return a figure by its short or its whole name, its file checked.

    Raises:
        BrokenFile: its file can't be imported, or is not as `figures.figure` describes.
        ValueError: there is none.
    """
    files = files_by_item()
    name = item if item in files else find_item(item)
    return _figure(name, import_entry(f"{__name__}.{files[name].stem}"))


@cache
def _figure(name: str, module: ModuleType) -> Figure:
    return Figure(name, module)


def claim_rule_digests() -> dict[str, str]:
    """Return the digest of each claim's rule by the claim's id, which runs register when they begin.

    Of all items whose files can be read.
    """
    rules = dict[str, str]()
    for item in files_by_item():
        with contextlib.suppress(BrokenFile):  # whoever asks for that item is told
            figure = load(item)
            figure.check_claims()
            rules |= figure.claim_rule_digests()
    return rules


def _paper_of_file(path: Path) -> str:
    return path.stem.partition("_")[0]


def _files_by_full_name() -> dict[str, Path]:
    """Return the file of each item, by its whole name."""
    return {
        f"{_paper_of_file(path)}/{path.stem.partition('_')[2].replace('_', '-')}": path
        for path in sorted(FOLDER.glob("[!_]*_*.py"))
    }
