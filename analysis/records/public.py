"""Records for everyone: the provenance without what says on whose machine they were made, see public.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from analysis.records import schema
from analysis.records.frames import Frames, map_provenance

PUBLIC_FACTS: dict[str, Any] = msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes())


def strip_private_facts(frames: Frames) -> Frames:
    """Return these frames without what is private in their provenance."""
    return map_provenance(frames, public_provenance)


def public_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that public.yaml lists, with hosts numbered in their order."""
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
