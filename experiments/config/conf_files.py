"""Files of conf/ within bounds: whatever lies there is read soon, or refused in a sentence. Without Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from analysis.records.files import read_bytes
from sparsify.ranges import format_value

# The largest of ours has 1 KB, 40 values, and lists in a section of a section; none refers to another.
MAX_BYTES = 2**16
MAX_VALUES = 2000
MAX_DEPTH = 20
MAX_REFERENCES = 20
# What YAML reads in base 8 or 60: 010 is 8, and 1:30:00 is 5400.
NON_DECIMAL_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlSize(NamedTuple):
    """The size of a part of a file, with each alias replaced by the part that it stands for."""

    num_values: int = 1
    depth: int = 0  # of lists and sections within each other


def read_small_yaml_text(path: Path) -> str:
    """Return the text of a YAML file that is small enough to be read soon.

    Raises:
        ValueError: it is not.
    """
    try:
        text = read_bytes(path, MAX_BYTES).decode()
        _check_size(yaml.parse(text, Loader=LOADER), path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise make_file_error(path, error) from error
    return text


def make_file_error(path: Path, error: Exception) -> ValueError:
    """Return an error whose sentence names the file and what is wrong with it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return ValueError(f"{path}, line {error.problem_mark.line + 1}: {error.problem}")
    return ValueError(f"{path} can't be read: {str(error).strip().partition(chr(10))[0]}")


def _check_size(events: Iterable[Any], path: Path) -> None:
    """Add up a file's values from the parser's events, which build nothing."""
    sizes = dict[str | None, YamlSize | None]()  # of what has an anchor; None: it has not ended yet
    # That have not ended, each in the one before.
    parts: list[tuple[str | None, YamlSize]] = [(None, YamlSize(0))]
    for event in events:
        opens = isinstance(event, yaml.CollectionStartEvent)
        is_plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
        if is_plain and NON_DECIMAL_NUMBER.fullmatch(event.value):
            line = event.start_mark.line + 1
            yaml_value = yaml.safe_load(event.value)
            raise ValueError(
                f"{path}, line {line}: YAML reads {format_value(event.value)} in another base, as "
                f"{yaml_value}; put it in quotes if it is text, else write the number that it is to mean"
            )
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, part = parts.pop()
            sizes[anchor] = part
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, YamlSize())
            if size is None:
                line = event.start_mark.line + 1
                raise ValueError(f"{path}, line {line}: *{event.anchor} stands for a part that contains it")
            part = size
        elif opens or isinstance(event, yaml.ScalarEvent):
            part = YamlSize(0, 1) if opens else YamlSize()
            sizes[event.anchor] = None if opens else part
        else:
            continue
        above, whole = parts[-1]
        whole = YamlSize(whole.num_values + part.num_values, max(whole.depth, 1 + part.depth))
        parts[-1] = above, whole
        if whole.num_values > MAX_VALUES:
            raise ValueError(f"{path} comes to more than {MAX_VALUES} values, aliases replaced: split it")
        if len(parts) - 1 + part.depth > MAX_DEPTH:
            raise ValueError(f"{path} has lists or sections within each other more than {MAX_DEPTH} deep")
        if opens:
            parts.append((event.anchor, YamlSize(1, 1)))


def check_number_of_references(tree: Any) -> None:
    """Check that resolving a composed tree ends soon: each ${...} may double what another one comes to.

    Raises:
        ValueError: there are too many.
    """
    count = str(tree).count("${")
    if count > MAX_REFERENCES:
        raise ValueError(
            f"the files of conf/ refer {count} times to others as ${{...}}, of at most {MAX_REFERENCES}"
        )
