"""Records for everyone: the provenance without what says on whose machine they were made, see public.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from analysis.records import schema
from analysis.records.frames import Frames, largest_tensor_by_run, map_provenance, select_runs

PUBLIC_FACTS: dict[str, Any] = msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes())


def drop_undrawn_rows(frames: Frames) -> Frames:
    """Return the frames without the rows of steps, spans and looks that are too many to ship.

    Of trainings that are there for their curve, epochs suffice: 60 trainings of 3,519 steps on 8 ranks would
    be 50 MB, and looks that no figure draws as much. All rows stay in the checkout that ran the trainings.
    """
    runs = frames.runs
    if not len(runs):
        return frames
    is_curve = runs["train.validate"].eq("epoch") & runs["timing.mode"].ne("as_published")
    timed = select_runs(frames, runs["key"][~is_curve])
    return frames._replace(steps=timed.steps, spans=timed.spans, looks=select_drawn_looks(frames.looks))


def select_drawn_looks(looks: pd.DataFrame) -> pd.DataFrame:
    """Return the looks of each run at the whole model and at its largest tensor.

    Of other tensors, sizes and the last histograms are returned.
    """
    if not len(looks):
        return looks
    largest = looks["key"].map(largest_tensor_by_run(looks))
    tensor = looks["of"].str.split("/").str[0]  # regions of it are "tensor/elements"
    is_last = looks["step"].eq(looks.groupby("key")["step"].transform("max"))
    is_kept = tensor.eq(schema.ALL) | tensor.eq(largest) | looks["what"].eq("size")
    drawn_looks: pd.DataFrame = looks[is_kept | (looks["what"].eq("histogram") & is_last)]
    drawn_looks = drawn_looks.reset_index(drop=True)
    return drawn_looks


def strip_private_provenance(frames: Frames) -> Frames:
    """Return these frames with the provenance of each run as `anonymize_provenance` makes it."""
    return map_provenance(frames, anonymize_provenance)


def anonymize_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a provenance that public.yaml lists, with numbers in place of hosts' names."""
    facts = msgspec.convert(provenance, schema.Provenance)
    machine = facts.machine or schema.MachineFacts()
    hosts = [*machine.hosts, *(worker.host for worker in machine.workers), facts.host]
    names = dict.fromkeys(host for host in hosts if host)
    numbered = {name: f"host{number}" for number, name in enumerate(names, 1)}
    public_facts: dict[str, Any] = _replace_names(_select_listed(provenance, PUBLIC_FACTS), numbered)
    return public_facts


def _select_listed(value: Any, listed: Mapping[str, Any] | None) -> Any:
    """Return the part of a value that is listed; all of it where its parts are not listed one by one."""
    if listed is None:
        return value
    if isinstance(value, list):
        return [_select_listed(part, listed) for part in value]
    if isinstance(value, Mapping):
        return {name: _select_listed(fact, listed[name]) for name, fact in value.items() if name in listed}
    return None  # no such fact


def _replace_names(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value with these names replaced wherever they stand."""
    if isinstance(value, Mapping):
        return {key: _replace_names(part, names) for key, part in value.items()}
    if isinstance(value, list):
        return [_replace_names(part, names) for part in value]
    if isinstance(value, str) and names:
        words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])({words})(?![\w-])", lambda match: names[match[1]], value)
    return value
