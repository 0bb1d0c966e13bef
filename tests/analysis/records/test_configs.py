"""Labels tell runs apart, and by as little as that takes."""

from __future__ import annotations

from itertools import product

from analysis.records.configs import label_configs, select_distinguishing_leaves
from tests.analysis import synthetic


def topk(density: float, **changes: object) -> dict[str, object]:
    config = synthetic.config("topk", **changes)
    return config | {"method": config["method"] | {"density": density}}


def test_a_grid_is_told_apart_by_its_axes_and_nothing_else() -> None:
    axes = [*product((0.01, 0.1), range(3))]
    grid = [topk(density, seed=seed) for density, seed in axes]
    assert select_distinguishing_leaves(grid) == ["method.density", "seed"]
    assert label_configs(grid) == [f"topk density={density} seed={seed}" for density, seed in axes]


def test_labels_show_what_tells_runs_apart_and_not_what_follows_from_it() -> None:
    one = topk(0.01)
    other_task = topk(0.01, task={"name": "other", "batch_size": 16, "lr": 0.3})
    turns = synthetic.config("dense") | {"variants": [{"name": "a"}, {"name": "b"}]}
    for runs, expected in (
        ([one], ["topk density=0.01 task=vgg16_cifar10 seed=0"]),
        ([one, other_task], ["topk task=vgg16_cifar10", "topk task=other"]),
        (
            [synthetic.config("dense"), one, synthetic.config("randomk")],  # the first has no density
            ["dense", "topk density=0.01", "randomk density=0.001"],
        ),
        # A field that an older record lacks does not vary from what that means.
        ([topk(0.01, seed=1, select="torch"), one], ["topk seed=1", "topk seed=0"]),
        ([topk(0.01, select="fused"), one], ["topk select=fused", "topk select=torch"]),
        ([turns, turns | {"seed": 1}], ["a, b in turns seed=0", "a, b in turns seed=1"]),
    ):
        assert label_configs(runs) == expected
