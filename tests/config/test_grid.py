"""Words with commas -> the configurations of a grid; and the quick way to compose each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.config import choices, compose
from experiments.config.grid import expand_grid
from experiments.figures.runs import requested_runs
from tests.config.refusals import check_refusals, read_answers


def test_a_grid_is_every_combination_and_lists_stay_lists() -> None:
    points = expand_grid(
        ["method=topk,randomk", "method.density=0.1,0.2", "seed=range(0,3)", "task.lr_milestones=[1,2]"]
    )
    assert len(points) == 2 * 2 * 3
    assert all(point.settings["task.lr_milestones"] == [1, 2] for point in points)
    assert len({repr(point) for point in points}) == len(points)


def test_a_hyperparameter_is_left_out_where_a_method_lacks_it() -> None:
    _, found = requested_runs(["method=dense,topk", "method.density=0.01,0.1", "profile=smoke"])
    methods = [config["method"]["name"] for config in found]
    assert methods.count("dense") == 1
    assert methods.count("topk") == 2
    with pytest.raises(ValueError, match="no key"):
        requested_runs(["method=dense", "method.density=0.01"])


def test_one_method_stands_for_all_where_nothing_refers_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("defaults:\n- generic_slurm\n- _self_\npartition: of ${method.name}\n")
    monkeypatch.setenv("SPARSIFY_CONF", str(tmp_path))
    for method in ("dgc", "topk", "sparseloco"):
        assert compose.resolve(["cluster=mine", f"method={method}"])["cluster"]["partition"] == f"of {method}"


def test_words_say_more_than_conf_and_conf_more_than_defaults() -> None:
    words = ("task=vgg16_digits", "method=topk_layerwise", "profile=smoke")
    config = compose.resolve(words)
    assert (config.train.steps, config.method.get_setting("scope")) == (8, "layer")
    given = compose.resolve([*words, "train.steps=null", "method.scope=global"])
    assert (given.train.steps, given.method.get_setting("scope")) == (None, "global")


def test_nothing_in_conf_refers_to_what_a_word_can_change() -> None:
    """Else the quick way would compose something else: it puts words in after references are resolved."""
    for path in choices.CONF.rglob("*.yaml"):
        assert "${" not in path.read_text(), path


def test_a_list_without_end_or_without_values_is_refused() -> None:
    def expand_and_resolve(words: Sequence[str]) -> None:
        for point in expand_grid(words):
            compose.resolve(point)

    answers = read_answers("""
seed=range(0,1000000000000) -> more than 10000 runs ... seed=range(0,1000000000000)
seed=shuffle(range(0,1000000000000)) -> more than 10000 runs
task.lr=range(0.1,1e300) -> more than 10000 runs
seed=range(0,200) workers=range(1,100) -> more than 10000 runs ... seed=range(0,200)
seed=range(5,0) -> seed=range(5,0) lists nothing
seed=range(0,5,0) -> seed=range(0,5,0) lists no values ... range(0,5)
seed=range(0,nan) -> seed=range(0,nan) lists
task.lr=interval(0,1) -> task.lr=interval(0,1) lists no values
method.density=glob(*) -> method.density=glob(*) lists no values
method=glob(x*) -> method=glob(x*) lists nothing
method=topk,topq -> no method 'topq' ... did you mean 'topk'
method.index=int32,int16 -> no method.index 'int16'
seed -> not of the form key=value
""")
    check_refusals(answers, act=expand_and_resolve)


def test_a_group_takes_a_pattern() -> None:
    assert expand_grid(["method=glob(topk*)"]) == expand_grid(["method=topk,topk_layerwise"])
