"""Why SLURM does not begin a job, or refuses it, for a person: will it pass by itself, and what to change."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import msgspec
import yaml

NOT_BY_ITSELF, UNTIL_RELEASED = "does not pass by itself", "until somebody releases it"


class Remedies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """remedies.yaml, which explains it."""

    refuses: dict[str, str]
    waits: dict[str, str]
    shared: str
    held: str

    def field(self, reason: str) -> str | None:
        """The field to change where this reason does not pass by itself."""
        found = (field for pattern, field in self.waits.items() if re.fullmatch(pattern, reason))
        return next(found, None)


@cache
def load_remedies() -> Remedies:
    """What is known of SLURM's words."""
    text = Path(__file__).with_name("remedies.yaml").read_text()
    return msgspec.convert(yaml.safe_load(text), Remedies)


def explain_waiting(reason: str) -> str:
    """A waiting job's reason for a person: one that can't pass by itself is called so, with the remedy."""
    known, word = load_remedies(), reason.partition(",")[0]  # what follows names nodes
    if word in ("None", ""):
        return "its turn comes"
    if re.fullmatch(known.held, word):
        return f"{reason}, {UNTIL_RELEASED}: `scontrol release` does, or `cancel` and submit again"
    if field := known.field(word):
        return f"{reason}, which {NOT_BY_ITSELF}: `cancel` it, change {field}, and submit again"
    if re.fullmatch(known.shared, word):
        return f"{reason}: as jobs under the same limit end, unless it asks for more than that by itself"
    return reason


def explain_refusal(answer: str) -> str:
    """A sentence for what sbatch printed, with the field to change."""
    known, reasons = load_remedies(), [line for line in answer.splitlines() if line.strip()]
    said = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in reasons)
    words = re.findall(r"\w+", said)
    advice = next((f"change {field}" for word in words if (field := known.field(word))), None)
    if advice is None and any(re.fullmatch(known.shared, word) for word in words):
        advice = "submit again when some of the jobs under this limit have ended, or fewer at a time"
    if advice is None:
        fields = (field for sign, field in known.refuses.items() if sign in said.lower())
        advice = next((f"change {field}" for field in fields), "")
    return f"SLURM refused the job: {said}" + (f"; {advice}" if advice else "")
