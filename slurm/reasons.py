"""Sentences on why SLURM does not begin a job, or refuses it: whether it passes, and what to change."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import msgspec
import yaml

NOT_BY_ITSELF = "does not pass by itself"
UNTIL_RELEASED = "until somebody releases it"


class RemedyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields to change by SLURM's reasons, from remedies.yaml, which explains them."""

    field_by_refusal_words: dict[str, str]
    field_by_waiting_reason: dict[str, str]
    shared_limit_reasons: str
    topology_reasons: str
    why_by_held_reason: dict[str, str]

    def field_to_change(self, reason: str) -> str | None:
        """Return the field to change where this reason does not pass by itself; else None."""
        for pattern, field in self.field_by_waiting_reason.items():
            if re.fullmatch(pattern, reason):
                return field
        return None


@cache
def load_remedy_table() -> RemedyTable:
    """Return the content of remedies.yaml."""
    text = Path(__file__).with_name("remedies.yaml").read_text()
    return msgspec.convert(yaml.safe_load(text), RemedyTable)


def explain_pending_reason(reason: str) -> str:
    """Return a waiting job's reason for a person; one that can't pass by itself is followed by its remedy."""
    remedies = load_remedy_table()
    word = reason.partition(",")[0]  # what follows names nodes
    if word in ("None", ""):
        return "its turn comes"
    for pattern, why in remedies.why_by_held_reason.items():
        if re.fullmatch(pattern, word):
            cause = f" ({why})" if why else ""
            release = "`scontrol release` does, or `cancel` and submit again"
            return f"{reason}{cause}, {UNTIL_RELEASED}: {release}"
    field = remedies.field_to_change(word)
    if field:
        return f"{reason}, which {NOT_BY_ITSELF}: `cancel` it, change {field}, and submit again"
    if re.fullmatch(remedies.topology_reasons, word):
        return (
            f"{reason}: it begins when enough nodes that lie together in the network are free; where there "
            "are never so many, `cancel` it, ask for fewer nodes (workers, cluster.workers_per_node) or "
            "leave --segment, --switches and --nodelist out of cluster.sbatch, and submit again"
        )
    if re.fullmatch(remedies.shared_limit_reasons, word):
        return f"{reason}: as jobs under the same limit end, unless it asks for more than that by itself"
    return reason


def explain_sbatch_refusal(answer: str) -> str:
    """Return a sentence for the answer of an sbatch that refused a job, with the field to change."""
    remedies = load_remedy_table()
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in answer.splitlines()]
    message = "; ".join(line for line in lines if line.strip())
    words = re.findall(r"\w+", message)
    fields = [*filter(None, map(remedies.field_to_change, words))]
    advice = ""
    if not fields and any(re.fullmatch(remedies.shared_limit_reasons, word) for word in words):
        advice = "; submit again when some of the jobs under this limit have ended, or fewer at a time"
    else:
        fields += [
            field for sign, field in remedies.field_by_refusal_words.items() if sign in message.lower()
        ]
        if fields:
            advice = f"; change {fields[0]}"
    return f"SLURM refused the job: {message}{advice}"
