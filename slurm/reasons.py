"""Sentences on why SLURM does not begin a job, or refuses it: whether it passes, and what to change."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import msgspec
import yaml

NOT_BY_ITSELF = "does not pass by itself"
UNTIL_RELEASED = "until somebody releases it"


class Remedies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of remedies.yaml, which explains the fields."""

    refuses: dict[str, str]
    waits: dict[str, str]
    shared: str
    held: str

    def field_to_change(self, reason: str) -> str | None:
        """Return the field to change where this reason does not pass by itself; else None."""
        fields = (field for pattern, field in self.waits.items() if re.fullmatch(pattern, reason))
        return next(fields, None)


@cache
def load_remedies() -> Remedies:
    """Return the content of remedies.yaml."""
    text = Path(__file__).with_name("remedies.yaml").read_text()
    return msgspec.convert(yaml.safe_load(text), Remedies)


def explain_waiting(reason: str) -> str:
    """Return a waiting job's reason for a person; one that can't pass by itself is followed by its remedy."""
    remedies = load_remedies()
    word = reason.partition(",")[0]  # what follows names nodes
    if word in ("None", ""):
        return "its turn comes"
    if re.fullmatch(remedies.held, word):
        return f"{reason}, {UNTIL_RELEASED}: `scontrol release` does, or `cancel` and submit again"
    field = remedies.field_to_change(word)
    if field:
        return f"{reason}, which {NOT_BY_ITSELF}: `cancel` it, change {field}, and submit again"
    if re.fullmatch(remedies.shared, word):
        return f"{reason}: as jobs under the same limit end, unless it asks for more than that by itself"
    return reason


def explain_refusal(answer: str) -> str:
    """Return a sentence for the answer of an sbatch that refused a job, with the field to change."""
    remedies = load_remedies()
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in answer.splitlines()]
    message = "; ".join(line for line in lines if line.strip())
    words = re.findall(r"\w+", message)
    fields = [field for word in words if (field := remedies.field_to_change(word))]
    signs = [field for sign, field in remedies.refuses.items() if sign in message.lower()]
    advice = ""
    if fields:
        advice = f"; change {fields[0]}"
    elif any(re.fullmatch(remedies.shared, word) for word in words):
        advice = "; submit again when some of the jobs under this limit have ended, or fewer at a time"
    elif signs:
        advice = f"; change {signs[0]}"
    return f"SLURM refused the job: {message}{advice}"
