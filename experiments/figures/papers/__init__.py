"""The papers as data, a YAML file each: how it is cited, what it publishes, and what it states.

    bibtex       how the paper is cited
    published    id: {value, unit, where}: a number, or words where the paper gives none; where it was read,
                 and how. `value` may be a mapping: topk of {dense: 92.99, topk: 91.52} in top1 is
                 yoon2022.top1.topk
    statements   number: {says, where}, numbered through all papers. `says` is in our words, numbers as
                 published; `why` tells why nothing answers it, or what is left open; `first` lists the items
                 whose answers are read before the others'. Number 8 of yoon2022 is the statement yoon2022.8
    claims       name: what an item holds against its records, as fields of `analysis.claims.Claim`; in
                 place of paper, unit and source the id of what is published. What stands in braces differs
                 between like ones; {{link}} is the link that was found. The item says how its value is
                 computed: `make_claim(name, function, ...)`. `quantity` is the lasting name of that function
                 in the claim's rule (and of functions among its arguments, where there are some)
    words        item: its caption; item.part: other words on it, as a note below a table. A text, or several
                 that follow each other. What stands in braces is a fact of the item's, or a sentence on its
                 records (`analysis.pictures.captions.SENTENCES`)
    items        item: labels, looks and methods that its file reads (`item_settings`)
    rules        id: kind, tolerance and reason that several claims have (<<: *id)
    causes       what several claims follow from: their group (*id)

The items' claims name the statements that they answer, so no list of answers is kept here. A figure's file
belongs to the paper that its name begins with; a file with no more than a comment is of no paper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsify.ranges import describe_unknown

if TYPE_CHECKING:  # listing the papers needs no pandas
    from analysis.claims import Claim
    from analysis.stats import Estimate

FOLDER = Path(__file__).parent
REQUIRED_FIELDS = ("text", "unit", "source", "kind", "tolerance", "reason")  # of every claim


class Statement(NamedTuple):
    """Statement of a paper, in our words, with where it stands there."""

    id: str
    number: int
    text: str
    where: str
    reason_left_open: str
    items_answering_first: tuple[str, ...]


def paper_names() -> list[str]:
    """Return the names of the papers, by their files alone."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def bibtex_or_empty(paper: str) -> str:
    """Return the paper's citation; empty for what is no paper."""
    return str(_content(paper).get("bibtex", "")) if paper in paper_names() else ""


def citation_label_or_empty(paper: str) -> str:
    """Return a paper's name in texts: 'Yoon and Oh 2022'; empty for what is no paper."""
    bibtex = bibtex_or_empty(paper)
    authors, year = (re.search(rf"{part} = \{{([^}}]*)", bibtex) for part in ("author", "year"))
    if authors is None:
        return ""
    surnames = [author.partition(",")[0].strip() for author in authors[1].split(" and ")]
    others = " and others" if len(surnames) > 2 else "".join(f" and {name}" for name in surnames[1:])
    return f"{surnames[0]}{others} {year[1] if year else ''}".strip()


def items_in_paper_order(paper: str) -> list[str]:
    """Return the paper's items in the order of the paper, which is that of their captions."""
    return [name for name in _content(paper).get("words", {}) if "." not in name]


@cache
def statements_by_id() -> dict[str, Statement]:
    """Return the statements of all papers by their ids, in the order of their numbers."""
    statements = [
        Statement(
            f"{paper}.{number}",
            number,
            entry["says"],
            entry["where"],
            entry.get("why", ""),
            tuple(entry.get("first", ())),
        )
        for paper in paper_names()
        for number, entry in _content(paper).get("statements", {}).items()
    ]
    return {statement.id: statement for statement in sorted(statements, key=lambda other: other.number)}


def published_value(dotted_name: str) -> Any:
    """Return the published number of this id; of several things a mapping: 'yoon2022.top1'."""
    return _published_entry(dotted_name)[1]


def _published_entry(name: str) -> tuple[Mapping[str, Any], Any]:
    """Return the entry of a published number, and the number itself.

    Raises:
        KeyError: no paper publishes it.
    """
    paper, _, entry = name.partition(".")
    entries = _content(paper)["published"]
    if entry in entries:
        return entries[entry], entries[entry]["value"]
    entry, _, part = entry.rpartition(".")
    return entries[entry], entries[entry]["value"][part]


def claim_fields_by_name(paper: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of a paper's claims, by their names."""
    claims: Mapping[str, Mapping[str, Any]] = _content(paper).get("claims", {})
    return claims


def text_template_or_empty(dotted_name: str) -> str:
    """Return the words of this name, 'yoon2022.fig4', braces and all; empty where its paper has none."""
    paper, _, entry = dotted_name.partition(".")
    words = _content(paper).get("words", {}).get(entry, "") if paper in paper_names() else ""
    return words if isinstance(words, str) else " ".join(words)


def item_settings(dotted_name: str) -> Any:
    """Return what a paper's file holds for an item besides words, mostly settings: 'survey.methods'."""
    paper, _, entry = dotted_name.partition(".")
    return _content(paper)["items"][entry]


def make_claim(
    name: str,
    compute: Callable[..., Estimate | None],
    /,
    *arguments: Any,
    id: str = "",
    case: str = "",
    **fields: Any,
) -> Claim:
    """Return the claim of this name, 'shi2019.bound', with our value for it.

    Args:
        arguments: what `compute` takes besides the frames.
        id: by default the name in the paper's file, without the item before its first dot, and the case.
        case: tells like claims apart.
        fields: fields that the paper's file leaves open, and what stands in braces in its texts.

    Raises:
        ValueError: the paper's file has no such claim, or leaves out what nobody else gives.
    """
    from analysis.claims import Claim  # listing the papers needs no pandas

    paper, _, entry = name.partition(".")
    entries = claim_fields_by_name(paper)
    if entry not in entries:
        raise ValueError(describe_unknown(f"claim of {paper}.yaml", entry, list(entries)))
    texts = {field: text.format(**fields) for field, text in entries[entry].items() if isinstance(text, str)}
    claim: dict[str, Any] = {"paper": None, **entries[entry], **texts}
    if "published" in claim:
        published, number = _published_entry(claim.pop("published"))
        claim |= {"paper": number, "unit": published.get("unit", ""), "source": published["where"]}
    claim |= {field: value for field, value in fields.items() if field in Claim.__dataclass_fields__}
    claim["answers"] = tuple(claim.get("answers", ()))
    missing = [field for field in REQUIRED_FIELDS if field not in claim]
    if missing:
        raise ValueError(f"the claim {name} lacks {', '.join(missing)}: give it in papers/{paper}.yaml")
    own_name = entry.partition(".")[2] or entry
    return Claim(id=id or f"{own_name}.{case}".rstrip("."), compute=compute, arguments=arguments, **claim)


def make_claims_by_method(
    name: str,
    compute: Callable[..., Estimate | None],
    methods: Iterable[str],
    /,
    *arguments: Any,
    **fields: Any,
) -> list[Claim]:
    """Return the claim of this name for each method, which is its case and the first that `compute` takes.

    Args:
        arguments, fields: as in `make_claim`.
    """
    from analysis.pictures.style import method_style  # as above

    labels = {method: method_style(method).label for method in methods}
    return make_claims_by_case(name, compute, labels, *arguments, **fields)


def make_claims_by_case(
    name: str,
    compute: Callable[..., Estimate | None],
    labels: Mapping[str, str],
    /,
    *arguments: Any,
    **fields: Any,
) -> list[Claim]:
    """Return a claim for each of these cases, which `compute` takes first.

    Braces may hold {method}, the case, and its {label}.
    """
    return [
        make_claim(
            name, compute, case, *arguments, **{"case": case, "method": case, "label": label, **fields}
        )
        for case, label in labels.items()
    ]


@cache
def _content(paper: str) -> Mapping[str, Any]:
    from msgspec import yaml  # by libyaml, in a tenth of the time; listing the papers needs no reader

    return yaml.decode((FOLDER / f"{paper}.yaml").read_bytes()) or {}
