"""The size of a file of conf/ is known before the file is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.config import conf_files

SHARING = settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


def values(tree: Any) -> int:
    """Count lists, sections, keys and the values that they lead to, wherever they stand."""
    parts = [*tree, *tree.values()] if isinstance(tree, dict) else tree
    return 1 + sum(map(values, parts)) if isinstance(tree, dict | list) else 1


def height(tree: Any) -> int:
    parts = tree.values() if isinstance(tree, dict) else tree
    return 1 + max(map(height, parts), default=0) if isinstance(tree, dict | list) else 0


def larger(trees: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw lists and sections, some of which hold one object several times, like an alias in YAML."""
    several = st.builds(lambda tree, number: [tree] * number, trees, st.integers(1, 4))
    return st.one_of(
        st.lists(trees, max_size=3),
        several,
        several.map(lambda parts: {f"k{at}": part for at, part in enumerate(parts)}),
    )


@SHARING
@given(tree=st.recursive(st.integers(), larger, max_leaves=8))
def test_a_file_is_within_bounds_exactly_if_what_its_aliases_stand_for_is(
    tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(tree))
    number, depth = values(tree), height(tree)
    with monkeypatch.context() as patch:
        patch.setattr(conf_files, "MAX_VALUES", number)
        patch.setattr(conf_files, "MAX_DEPTH", depth)
        assert yaml.safe_load(conf_files.read_small_yaml_text(path)) == tree
        patch.setattr(conf_files, "MAX_DEPTH", depth - 1)
        if depth:
            with pytest.raises(ValueError, match=rf"{path} has .* more than {depth - 1} deep"):
                conf_files.read_small_yaml_text(path)
        patch.setattr(conf_files, "MAX_DEPTH", depth)
        patch.setattr(conf_files, "MAX_VALUES", number - 1)
        with pytest.raises(ValueError, match=rf"{path} comes to more than {number - 1} values"):
            conf_files.read_small_yaml_text(path)
