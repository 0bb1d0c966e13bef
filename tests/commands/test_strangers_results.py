"""A results folder may come from anybody: nothing in it is carried out.

docs/records.md has the list of ways from a results folder to code, and names these tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.records.configs import flatten, measured_config, run_key, variant_configs
from analysis.records.store import Attempt
from experiments.commands._again import asked
from experiments.config import compose
from experiments.config.folders import Folders
from tests.analysis import synthetic
from tests.conftest import Command, refused

ON_SLURM = ["method=topk", "task=cnn_digits", "profile=smoke", "cluster=devcluster"]
IN_TURNS = [
    "variants={dense:'method=dense',sparse:'method=topk'}", "task=cnn_digits", "profile=smoke",
    "timing.mode=production",
]  # fmt: skip
EVIL = {"cluster.setup": ["touch owned"], "cluster.python": "/tmp/evil"}
FULL = compose.resolve(ON_SLURM).as_dict()
STARTING = [  # leaves that say where and how a run is started, of a cluster that has all of them
    name
    for name in flatten(FULL)
    if name.startswith(("cluster.", "container.", "data.", "launch.", "profile", "recipe"))
    and name not in (*flatten(measured_config(FULL)), "container.name")
]


def forged(folders: Folders, words: list[str], leaves: dict[str, Any]) -> Attempt:
    """A record to whose configuration leaves were added that its key does not cover."""
    attempt = synthetic.made(folders.store, compose.resolve(words).as_dict())
    path = attempt.path / "config.json"
    config = json.loads(path.read_text())
    key = run_key(config)
    for dotted, value in leaves.items():
        *above, name = dotted.split(".")
        part = config
        for each in above:
            if isinstance(part.get(each), str):  # of a container, records have the name
                part[each] = {"name": part[each]}
            part = part.setdefault(each, {})
        part[name] = value
    assert run_key(config) == key
    path.write_text(json.dumps(config))
    return attempt


# --- words: run again=, compare --save
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", STARTING)
def test_no_record_says_where_and_how_a_run_is_started(leaf: str, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    attempt = forged(folders, ON_SLURM, {leaf: "/tmp/evil"})
    with pytest.raises(ValueError, match="where and how a run is started is for you to say"):
        asked([f"again={attempt.run_id}"], folders)


def test_what_a_record_adds_to_its_settings_is_refused_in_a_sentence(here: Command, tmp_path: Path) -> None:
    attempt = forged(Folders(tmp_path / "results"), ON_SLURM, EVIL)
    refused(
        here("run", f"again={attempt.run_id}"), "cluster.python, cluster.setup", "no record of a run does"
    )
    where = ("compare", "cluster=devcluster", "x=method.density", "y=step_s", "--save", "thesis_owned")
    refused(here(*where), "cluster.python, cluster.setup", "no record of a run does")


def test_a_variant_adds_nothing_either(tmp_path: Path) -> None:
    config = measured_config(compose.resolve(IN_TURNS).as_dict())
    config["variants"][1]["cluster"] = {"setup": ["touch owned"]}
    with pytest.raises(ValueError, match=r"holds cluster\.setup"):
        compose.asked_again(variant_configs(config), run_key(config))


def test_words_of_a_record_set_what_is_measured_alone() -> None:
    config = measured_config(compose.resolve(ON_SLURM).as_dict())
    words = compose.asked_again({"": config}, run_key(config)).words()
    assert {word.partition("=")[0] for word in words} & {*STARTING} == set()
