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
                 computed: `claim(name, function, ...)`. `quantity` is the lasting name of that function in
                 the claim's rule (and of functions among its arguments, where there are some)
    words        item: its caption; item.part: other words on it, as a note below a table. A text, or several
                 that follow each other. What stands in braces is a fact of the item's, or a sentence on its
                 records (`analysis.pictures.captions.SENTENCES`)
    items        item: labels, looks and methods that its file reads (`item`)
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
GIVEN = ("text", "unit", "source", "kind", "tolerance", "reason")  # of every claim


class Statement(NamedTuple):
    """Statement of a paper."""

    id: str
    number: int
    says: str
    where: str
    why: str = ""
    first: tuple[str, ...] = ()


def names() -> list[str]:
    """Return the names of the papers, by their files alone."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def bibtex(paper: str) -> str:
    """Return the paper's citation; empty for what is no paper."""
    return str(_content(paper).get("bibtex", "")) if paper in names() else ""


def called(paper: str) -> str:
    """Return a paper's name in texts: 'Yoon and Oh 2022'; empty for what is no paper."""
    cited = bibtex(paper)
    author, year = (re.search(rf"{part} = \{{([^}}]*)", cited) for part in ("author", "year"))
    if author is None:
        return ""
    names = [name.partition(",")[0].strip() for name in author[1].split(" and ")]
    several = " and others" if len(names) > 2 else "".join(f" and {name}" for name in names[1:])
    return f"{names[0]}{several} {year[1] if year else ''}".strip()


def order(paper: str) -> list[str]:
    """Return the paper's items in the order of the paper, which is that of their captions."""
    return [name for name in _content(paper).get("words", {}) if "." not in name]


@cache
def statements() -> dict[str, Statement]:
    """Id -> statement, of all papers, in the order of the numbers."""
    found = [
        Statement(f"{paper}.{number}", number, **said | {"first": tuple(said.get("first", ()))})
        for paper in names()
        for number, said in _content(paper).get("statements", {}).items()
    ]
    return {each.id: each for each in sorted(found, key=lambda each: each.number)}


def value(name: str) -> Any:
    """Return the published number of this id; of several things a mapping: 'yoon2022.top1'."""
    return _entry(name)[1]


def _entry(name: str) -> tuple[Mapping[str, Any], Any]:
    """Return all that is said of a published number, and the number itself.

    Raises:
        KeyError: no paper publishes it.
    """
    paper, _, entry = name.partition(".")
    known = _content(paper)["published"]
    if entry in known:
        return known[entry], known[entry]["value"]
    entry, _, part = entry.rpartition(".")
    return known[entry], known[entry]["value"][part]


def claims(paper: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of a paper's claims, by their names."""
    found: Mapping[str, Mapping[str, Any]] = _content(paper).get("claims", {})
    return found


def words(name: str) -> str:
    """Return the words of this name, 'yoon2022.fig4', braces and all; empty where its paper has none."""
    paper, _, entry = name.partition(".")
    said = _content(paper).get("words", {}).get(entry, "") if paper in names() else ""
    return said if isinstance(said, str) else " ".join(said)


def item(name: str) -> Any:
    """Return a paper's data on an item besides words: 'survey.methods'."""
    paper, _, entry = name.partition(".")
    return _content(paper)["items"][entry]


def claim(
    name: str, ours: Callable[..., Estimate | None], /, *of: Any, id: str = "", case: str = "", **own: Any
) -> Claim:
    """Return the claim of this name, 'shi2019.bound', with our value for it.

    Args:
        of: what `ours` takes besides the frames.
        id: by default the name in the paper's file, without the item before its first dot, and the case.
        case: tells like claims apart.
        own: fields that the paper's file leaves open, and what stands in braces in its texts.

    Raises:
        ValueError: the paper's file has no such claim, or leaves out what nobody else gives.
    """
    from analysis.claims import Claim  # listing the papers needs no pandas

    paper, _, entry = name.partition(".")
    if entry not in claims(paper):
        raise ValueError(describe_unknown(f"claim of {paper}.yaml", entry, list(claims(paper))))
    said = claims(paper)[entry]
    texts = {field: text.format(**own) for field, text in said.items() if isinstance(text, str)}
    fields: dict[str, Any] = {"paper": None, **said, **texts}
    if "published" in fields:
        entry_of, number = _entry(fields.pop("published"))
        fields |= {"paper": number, "unit": entry_of.get("unit", ""), "source": entry_of["where"]}
    fields |= {field: value for field, value in own.items() if field in Claim.__dataclass_fields__}
    fields["answers"] = tuple(fields.get("answers", ()))
    if missing := [field for field in GIVEN if field not in fields]:
        raise ValueError(f"the claim {name} lacks {', '.join(missing)}: give it in papers/{paper}.yaml")
    own_name = entry.partition(".")[2] or entry
    return Claim(id=id or f"{own_name}.{case}".rstrip("."), compute=ours, arguments=of, **fields)


def of_methods(
    name: str, ours: Callable[..., Estimate | None], methods: Iterable[str], /, *of: Any, **own: Any
) -> list[Claim]:
    """Return the claim of this name for each method, which is its case and the first that `ours` takes.

    Args:
        of, own: as in `claim`.
    """
    from analysis.pictures.style import method_style  # as above

    return claim_each(name, ours, {method: method_style(method).label for method in methods}, *of, **own)


def claim_each(
    name: str, ours: Callable[..., Estimate | None], labels: Mapping[str, str], /, *of: Any, **own: Any
) -> list[Claim]:
    """Return a claim for each of these cases, which `ours` takes first.

    Braces may hold {method}, the case, and its {label}.
    """
    return [
        claim(name, ours, case, *of, **{"case": case, "method": case, "label": label, **own})
        for case, label in labels.items()
    ]


@cache
def _content(paper: str) -> Mapping[str, Any]:
    from msgspec import yaml  # by libyaml, in a tenth of the time; listing the papers needs no reader

    return yaml.decode((FOLDER / f"{paper}.yaml").read_bytes()) or {}
