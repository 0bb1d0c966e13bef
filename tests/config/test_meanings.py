"""Help has a meaning for every setting, from one place each."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from experiments.config import choices, machines
from experiments.config import config as fields
from experiments.config.choices import meaning_by_parameter
from experiments.tasks import FILES
from experiments.training.settings import setting_meaning as meaning_of
from sparsify.core.spec import Registry
from tests.analysis.tracked_files import tracked_modules


def test_docstrings_say_what_each_parameter_means_and_of_no_other() -> None:
    for noun, registry in choices.REGISTRIES.items():
        task_files = FILES if noun == "task" else ()
        for name in {*tracked_modules(registry.folder), *task_files}:
            said = meaning_by_parameter(registry, name)
            assert set(said) == set(registry.parameters(name)), name
            for key, meaning in said.items():
                assert len(meaning) > 10, (name, key)
                assert not meaning.startswith(("see ", "as in ")), (name, key)  # help shows it alone


def test_every_other_setting_has_a_meaning_beside_its_type() -> None:
    for cluster, container in product(
        machines.CLUSTERS.values(), (machines.AnyContainer, machines.Container)
    ):
        for key, allowed in fields._common_setting_types(
            cluster, container, has_inside_link=cluster is machines.VirtualCluster
        ):
            assert meaning_of(allowed), key


def test_each_option_of_a_group_says_what_it_is() -> None:
    for group in choices.GROUPS:
        for option in choices.option_names(group):
            assert len(choices.describe_option(group, option)) > 10, (group, option)


def test_defaults_may_be_computed_and_parameters_explained_together(tmp_path: Path) -> None:
    (tmp_path / "comb.py").write_text(
        "HALF = 1 / 2\n\n\ndef comb(density: float = 1/1000, a: float = HALF, b: int = 2) -> None:\n"
        '    """Comb.\n\n    Args:\n        density: k/n: at\n            most.\n'
        '        a, b: both.\n    """\n'
    )
    registry = Registry("method", "none", tmp_path)
    assert registry.defaults("comb") == {"density": 0.001, "a": 0.5, "b": 2}
    assert meaning_by_parameter(registry, "comb") == {"density": "k/n: at most.", "a": "both.", "b": "both."}
