"""The README's part that the shipped records write: six verdicts, and how many there are of each word."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from analysis import captions, verdicts
from analysis.claims import REDUCED
from analysis.files import write_atomic
from analysis.report.content import MARKS
from experiments.config.folders import ROOT

README = ROOT / "README.md"
BEGIN = "<!-- verdicts: written by `python -m experiments collect --ship` -->"
END = "<!-- end of verdicts -->"
WIDTH = 120  # of a line of the README


class Chosen(NamedTuple):
    """A claim that the README shows, in fewer words, and its page in results/shipped/figures."""

    item: str
    claim: str
    short: str
    page: str


CHOSEN = (
    Chosen(
        "fig3", "Random-k (no feedback) ends clearly below Top-k in top-1",
        "Random-k ends below Top-k (small CNN)", "fig3-laptop.md",
    ),
    Chosen(
        "fig3", "Top-k ends close to dense in top-1",
        "Top-k ends close to dense (small CNN)", "fig3-laptop.md",
    ),
    Chosen(
        "fig4-logs",
        "compression dominates Top-k's iteration without validation, 8 A100 (margin over all else)",
        "selection dominates Top-k's iteration: its margin over all else (8 A100)", "fig4-logs.md",
    ),
    Chosen(
        "speed-logs", "time per iteration without validation, Top-k / dense",
        "an iteration with Top-k over a dense one, without validation in it (8 A100)", "speed-logs.md",
    ),
    Chosen(
        "fig4-fast", "compression with torch.topk takes longer than fused: how many times",
        "selection with torch.topk over the fused one (VGG-16, 2 workers, CPU)", "fig4-fast-laptop.md",
    ),
    Chosen(
        "speed", "dense over Top-k",
        "an iteration with Top-k over a dense one (VGG-16, 2 workers, CPU)", "speed-laptop.md",
    ),
)  # fmt: skip


def write_readme(rows: Sequence[verdicts.Row]) -> None:
    """Put the verdicts between the README's two markers."""
    head, _, rest = README.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    write_atomic(README, f"{head}{BEGIN}\n{readme_verdicts(rows)}{END}{tail}")


def readme_verdicts(rows: Sequence[verdicts.Row]) -> str:
    """The chosen claims as a Markdown table, as far as they are shipped, and a sentence that counts all."""
    found = {(item, verdict.claim.text): verdict for item, verdict in rows}
    lines = ["| verdict | claim | published | here |", "|---|---|---|---|"]
    for chosen in CHOSEN:
        if verdict := found.get((chosen.item, chosen.claim)):
            where = f" ({REDUCED})" if verdict.scale.startswith(REDUCED) else ""
            cells = (
                f"{MARKS[verdict.word][0]} {verdict.word}{where}",
                f"[{chosen.short}](results/shipped/figures/{chosen.page})",
                verdicts.paper_text(verdict.claim),
                verdicts.ours_text(verdict),
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{counted(rows)}\n"


def counted(rows: Iterable[verdicts.Row]) -> str:
    """How often each word was reached, as a sentence."""
    found = verdicts.counts(rows)
    words = captions.listed([f"{number} {word}" for word, number in found.items()])
    sentence = f"All {sum(found.values())} claims, those of one cause counted once: {words}."
    return textwrap.fill(sentence, WIDTH)
