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
from experiments.commands._drawing import find_figure_records, read_or_report_damage
from experiments.commands._messages import iterate_with_progress
from experiments.commands._terminal import print_table
from experiments.config.folders import ResultFolders
from experiments.figures import papers
from experiments.figures.figure import Figure

GROUP = "results"
NOT_JUDGED = "not judged"
PROFILES_BEST_FIRST = ("paper", "laptop", figures.PUBLISHED)  # smoke only shows that everything runs


class StatementAnswer(NamedTuple):
    """A statement, and one claim that answers it."""

    number: int
    word: str
    claim: str
    paper: str
    ours: str
    because: str


def claims() -> int:
    """List every statement of the papers with the verdicts on it: `make claims`.

    The last line of the output is JSON.
    """
    import pandas as pd

    folders = ResultFolders()
    shipped = read_or_report_damage(lambda: parquet.read_parquet(folders.shipped)) or empty_frames()
    items = iterate_with_progress(figures.repository_items(), "figures")
    verdicts_by_item = {item: judge_best_profile(figures.load(item), folders, shipped) for item in items}
    answers = list(list_answers(papers.statements_by_id().values(), verdicts_by_item))
    print_table(Table("", pd.DataFrame(answers, columns=StatementAnswer._fields)))
    print(json.dumps(summarize_answer_counts(answers)))
    return 0


def judge_best_profile(figure: Figure, folders: ResultFolders, shipped: Frames) -> list[Verdict]:
    """Return verdicts on a figure by its best profile that is stored; without one, by no runs."""
    for profile in PROFILES_BEST_FIRST:
        if profile in figure.profiles:
            records = find_figure_records(figure, profile, folders, shipped)
            if records:
                return figure.judge(records.frames)
    return figure.judge(empty_frames())


def list_answers(
    statements: Iterable[papers.Statement], verdicts_by_item: Mapping[str, Sequence[Verdict]]
) -> Iterator[StatementAnswer]:
    """Yield the claims of all items that answer each statement; of one without an answer, the reason."""
    for statement in statements:
        is_answered = False
        other_items = sorted(set(verdicts_by_item) - set(statement.items_answering_first))
        for item in (*statement.items_answering_first, *other_items):
            for verdict in verdicts_by_item[item]:
                if statement.id in verdict.claim.answers:
                    is_answered = True
                    yield StatementAnswer(
                        statement.number,
                        verdict.word,
                        f"{item}: {verdict.claim.text}",
                        verdicts.paper_value_text(verdict.claim),
                        verdicts.our_value_text(verdict),
                        verdict.explanation or verdict.reason,
                    )
        if statement.reason_left_open or not is_answered:
            yield StatementAnswer(
                statement.number, NOT_JUDGED, statement.text, "", "", statement.reason_left_open
            )


def summarize_answer_counts(answers: Sequence[StatementAnswer]) -> dict[str, object]:
    """Return the numbers of statements, of answers, and of each verdict."""
    return {
        "statements": len({answer.number for answer in answers}),
        "rows": len(answers),
        "measured or re-derived": sum(answer.word not in (NOT_JUDGED, *UNDECIDED) for answer in answers),
        "verdicts": dict(Counter(answer.word for answer in answers).most_common()),
    }
