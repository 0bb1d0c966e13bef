"""One file per figure or table, named <paper>_<item>.py: its runs, its drawing, its claims.

The file is the item <paper>/<item>, for short <item>. Files of one's own lie beside the others: of
thesis_density.py the item is thesis/density, for short density.

What an item holds against its records is data of its paper, papers/<paper>.yaml: the text, the paper's
number, the rule, and the statements that it answers. The item says how its own value is computed:

    def claims() -> list[Claim]:
        return [claim("yoon2022.fig4.compression-dominates", dominance, "topk")]  # dominance(frames, "topk")

Its caption is there, too, under `words`; what that leaves open in braces the item's `facts` give. Everywhere
else the claim goes by its id, fig4.compression-dominates, so its text may be reworded. Claims of one family
are one entry: `of_methods(name, function, METHODS)`. Figures of one's own may write `Claim(text=..., ...)`,
which without an id has one that its text gives, and `caption`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from experiments.figures import _contract, papers
from experiments.figures._contract import PROFILES as PROFILES
from sparsify.core.spec import BrokenFile, import_entry
from sparsify.ranges import describe_unknown

FOLDER = Path(__file__).parent
MAIN = "yoon2022"  # the paper that this project began with
BEYOND = "Beyond the papers"
PUBLISHED = "published"  # stands in place of a profile where an item has no runs of ours

if TYPE_CHECKING:  # listing the items must not wait for pandas
    from collections.abc import Sequence

    from analysis.claims import Claim, Verdict
    from analysis.records.frames import Frames
    from analysis.tables import Table


def items() -> dict[str, str]:
    """Item -> module, from the file names alone; a file that starts with _ is shared by items.

    An item has its short name here unless another one has that, too; what the repository ships keeps it.
    """
    files = _files()
    shorts = [full.partition("/")[2] for full in files]
    known, found = papers.names(), {}
    for full, path in files.items():
        paper, _, short = full.partition("/")
        is_clear = shorts.count(short) == 1 or paper in known
        found[short if is_clear else full] = f"{__name__}.{path.stem}"
    return found


def shipped() -> list[str]:
    """The items of the papers that the repository reproduces; the others are a user's own."""
    known = papers.names()
    return [item for item, module in items().items() if _paper(module) in known]


def in_reading_order() -> list[str]:
    """All items: those of the main paper in its order, of the others, of none, one's own."""
    known, found = items(), list[str]()
    for paper in sorted(papers.names(), key=lambda name: (name != MAIN, not papers.bibtex(name), name)):
        own = [item for item, module in known.items() if _paper(module) == paper]
        first = papers.order(paper)
        found += sorted(own, key=lambda item: first.index(item) if item in first else len(first))
    return [*found, *(item for item in known if item not in found)]


def paper(item: str) -> str:
    """How a text names the paper of an item: 'Yoon and Oh 2022'; empty of one's own."""
    own = _paper(items()[item])
    return papers.called(own) or (BEYOND if own in papers.names() else "")


def find(word: str) -> str:
    """The item that somebody asks for, by its short or its whole name.

    Raises:
        ValueError: there is none, which lists what there is; or two have this short name.
    """
    files, known = _files(), items()
    having = {full: path for full, path in files.items() if word in (full, full.partition("/")[2])}
    if not having:
        raise ValueError(describe_unknown("item", word, list(known)))
    if len(having) > 1:
        raise ValueError(
            f"item {word!r} is in two files, {' and '.join(map(str, having.values()))}: ask for "
            f"{' or '.join(having)}, or rename one"
        )
    (path,) = having.values()
    return next(item for item, module in known.items() if module == f"{__name__}.{path.stem}")


def file_name(item: str) -> str:
    """Beginning of the names of an item's files."""
    return item.replace("/", "-")


def stem(item: str, profile: str) -> str:
    """The name of its files, of a picture in one profile."""
    return file_name(item) if profile == PUBLISHED else f"{file_name(item)}-{profile}"


def of_file(name: str) -> str:
    """The item whose files begin so."""
    return next((item for item in items() if file_name(item) == name), name)


def load(item: str) -> ModuleType:
    """An item's module, which has the parts that `_contract.Figure` and `_contract.OptionalParts` describe.

    Raises:
        BrokenFile: its file can't be imported, or is not as described.
    """
    known = items()
    module = import_entry(known[item] if item in known else known[find(item)])
    _contract.check(module)
    return module


def check(item: str) -> None:
    """Refuse an item whose file has a mistake that would be seen only after its runs.

    Raises:
        BrokenFile: which one.
    """
    _contract.check_claims(item, load(item))


def has_runs(item: str) -> bool:
    """Whether it is drawn from runs, and not from tables of published facts that the repository carries."""
    return any(load(item).runs(profile) for profile in PROFILES)


def profiles(item: str) -> tuple[str, ...]:
    """The profiles in which it can be drawn."""
    return PROFILES if has_runs(item) else (PUBLISHED,)


def bibtex(item: str) -> str:
    """Citation of the paper of an item; empty where it is of none."""
    return str(getattr(load(item), "BIBTEX", papers.bibtex(_paper(items()[item]))))


def claims(item: str) -> list[Claim]:
    """The claims of an item, each with its whole id."""
    figure = load(item)
    return _contract.identified(item, figure.claims()) if hasattr(figure, "claims") else []


def scale(item: str) -> Mapping[str, Any]:
    """What its paper ran, as columns of the records; nothing where it does not say."""
    found: Mapping[str, Any] = getattr(load(item), "SCALE", {})
    return found


def rules() -> dict[str, str]:
    """The digest of each claim's rule, by the claim's id, of all items whose files can be read: what runs
    register when they begin.
    """
    found = dict[str, str]()
    for item in items():
        with contextlib.suppress(BrokenFile):  # whoever asks for that item is told
            check(item)
            found |= {claim.id: claim.rule(scale(item)) for claim in claims(item)}
    return found


def judge(item: str, frames: Frames) -> list[Verdict]:
    """A verdict on every claim of an item. `frames` holds the item's own runs and no others."""
    from analysis.claims import judge as judge_claims
    from experiments.tasks import chance

    return judge_claims(claims(item), frames, scale(item), chance)


def caption(item: str, frames: Frames, profile: str) -> str:
    """The words of its file or of its paper on the picture, else the place where its runs were made."""
    from analysis.pictures import captions

    figure = load(item)
    if hasattr(figure, "caption"):
        return str(figure.caption(frames, profile))
    if text := papers.words(f"{_paper(items()[item])}.{item}"):
        return captions.filled(text, frames, figure.facts(frames) if hasattr(figure, "facts") else {})
    return captions.setting(frames) if len(frames.runs) else ""


def in_words(item: str, frames: Frames) -> list[str]:
    """What the runs of an item show, in plain sentences, beside what its paper says of the same."""
    from analysis.pictures import summary

    figure = load(item)
    return summary.in_words(frames, figure.theirs() if hasattr(figure, "theirs") else {})


def tables(item: str, frames: Frames) -> list[Table]:
    """The numbers behind a picture; empty where its file has no `table`."""
    figure = load(item)
    found: Table | list[Table] = figure.table(frames) if hasattr(figure, "table") else []
    return found if isinstance(found, list) else [found]


def page(
    item: str, frames: Frames, profile: str, picture: str, verdicts: list[Verdict], numbers: Sequence[Table]
) -> str:
    """The item as Markdown: picture, caption, verdicts, tables of numbers, the reasons of the tolerances."""
    from analysis import tables as written
    from analysis import verdicts as judged
    from analysis.evidence import links_found

    found = links_found(frames)
    parts = [f"# {item}: {load(item).TITLE}{f' (found: {found})' if found else ''}\n"]
    if len(frames.runs) > 0 or profile == PUBLISHED:
        parts += [f"![{item}]({picture}.png)\n", f"{caption(item, frames, profile)}\n"]
    rows = [(item, verdict) for verdict in verdicts]
    parts += ["## Verdicts\n", judged.as_table(rows).markdown() if rows else f"{judged.NOTHING}\n"]
    if numbers:
        parts += ["## Numbers\n", written.markdown(numbers)]
    if verdicts:
        parts += ["## How each number was read, and when it counts as reproduced\n", judged.notes(verdicts)]
    return "\n".join(parts)


def _paper(module: str) -> str:
    """The first part of a file's name."""
    return module.rpartition(".")[2].partition("_")[0]


def _files() -> dict[str, Path]:
    """Whole name -> file."""
    return {
        f"{path.stem.partition('_')[0]}/{path.stem.partition('_')[2].replace('_', '-')}": path
        for path in sorted(FOLDER.glob("[!_]*_*.py"))
    }
