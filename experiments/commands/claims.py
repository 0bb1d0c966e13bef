from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from analysis import verdicts
from analysis.claims import UNDECIDED, Verdict
from analysis.records import parquet
from analysis.records.frames import Frames, empty_frames
from analysis.tables import Table
from experiments import figures
from experiments.commands._drawing import find_records, read_or_none
from experiments.commands._messages import iterate_with_progress
from experiments.commands._terminal import print_table
from experiments.config.folders import ResultFolders
from experiments.figures import papers
from experiments.figures.figure import Figure

GROUP = "results"
NOT_JUDGED = "not judged"
BEST_FIRST = ("paper", "laptop", figures.PUBLISHED)  # whose verdicts count; smoke shows that it runs


class Answer(NamedTuple):
    """A statement, and one claim that answers it."""

    number: int
    word: str
    claim: str
    paper: str
    ours: str
    because: str


def claims() -> int:
    """Every statement of the papers, and what became of it; the last line is JSON (make claims)."""
    import pandas as pd

    folders = ResultFolders()
    shipped = read_or_none(lambda: parquet.read_parquet(folders.shipped)) or empty_frames()
    items = iterate_with_progress(figures.shipped_items(), "figures")
    judged = {item: judged_of(figures.load(item), folders, shipped) for item in items}
    lines = list(lines_of(papers.statements().values(), judged))
    print_table(Table("", pd.DataFrame(lines, columns=Answer._fields)))
    print(json.dumps(counted(lines)))
    return 0


def judged_of(figure: Figure, folders: ResultFolders, shipped: Frames) -> list[Verdict]:
    """Return verdicts on a figure by its best profile that is stored; without one, by no runs."""
    for profile in BEST_FIRST:
        if profile in figure.profiles and (found := find_records(figure, profile, folders, shipped)):
            return figure.judge(found.frames)
    return figure.judge(empty_frames())


def lines_of(
    statements: Iterable[papers.Statement], judged: Mapping[str, Sequence[Verdict]]
) -> Iterator[Answer]:
    """The claims of all items that answer each statement; of one that is left open, why."""
    for statement in statements:
        items = [*statement.first, *sorted(set(judged) - set(statement.first))]
        answers = [
            (item, verdict)
            for item in items
            for verdict in judged[item]
            if statement.id in verdict.claim.answers
        ]
        for item, verdict in answers:
            yield Answer(
                statement.number,
                verdict.word,
                f"{item}: {verdict.claim.text}",
                verdicts.published_text(verdict.claim),
                verdicts.measured_text(verdict),
                verdict.explanation or verdict.reason,
            )
        if statement.why or not answers:
            yield Answer(statement.number, NOT_JUDGED, statement.says, "", "", statement.why)


def counted(lines: Sequence[Answer]) -> dict[str, object]:
    return {
        "statements": len({line.number for line in lines}),
        "rows": len(lines),
        "measured or re-derived": sum(line.word not in (NOT_JUDGED, *UNDECIDED) for line in lines),
        "verdicts": dict(Counter(line.word for line in lines).most_common()),
    }
