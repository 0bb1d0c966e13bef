"""Labels tell runs apart, and by as little as that takes."""

from __future__ import annotations

from itertools import product

from analysis.records.configs import labels, varying
from tests.analysis import synthetic


def topk(density: float, **changes: object) -> dict[str, object]:
    config = synthetic.config("topk", **changes)
    return config | {"method": config["method"] | {"density": density}}


def test_a_grid_is_told_apart_by_its_axes_and_nothing_else() -> None:
    grid = [topk(density, seed=seed) for density, seed in product((0.01, 0.1), range(3))]
    assert varying(grid) == ["method.density", "seed"]
    assert labels(grid)[:2] == ["topk density=0.01 seed=0", "topk density=0.01 seed=1"]
    assert len(set(labels(grid))) == len(grid)


def test_what_follows_from_another_leaf_is_not_shown() -> None:
    slow = topk(0.01, task={"name": "other", "batch_size": 16, "lr": 0.3})
    assert labels([topk(0.01), slow]) == ["topk task=vgg16_cifar10", "topk task=other"]


def test_the_density_is_shown_wherever_it_varies_and_not_of_methods_without_one() -> None:
    runs = [synthetic.config("dense"), topk(0.01), synthetic.config("randomk")]
    assert labels(runs) == ["dense", "topk density=0.01", "randomk density=0.001"]


def test_a_field_that_an_older_record_lacks_does_not_vary_from_what_that_means() -> None:
    assert labels([topk(0.01, seed=1, select="torch"), topk(0.01)]) == ["topk seed=1", "topk seed=0"]
    assert labels([topk(0.01, select="fused"), topk(0.01)]) == ["topk select=fused", "topk select=torch"]


def test_a_single_run_is_told_by_method_density_task_and_seed() -> None:
    assert labels([topk(0.01)]) == ["topk density=0.01 task=vgg16_cifar10 seed=0"]


def test_runs_whose_variants_take_turns_are_named_by_them() -> None:
    turns = synthetic.config("dense") | {"variants": [{"name": "a"}, {"name": "b"}]}
    assert labels([turns, turns | {"seed": 1}]) == ["a, b in turns seed=0", "a, b in turns seed=1"]
