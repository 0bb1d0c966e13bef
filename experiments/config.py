"""Override words in, one resolved plain dict out. Hydra composes; nothing below this file sees a
DictConfig.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.tasks import REGISTRY as TASKS
from sparsify.methods import REGISTRY as METHODS
from sparsify.registry import Registry, did_you_mean

CONF = Path(__file__).parent.parent / "conf"
GROUPS = ("method", "task", "cluster", "link", "container", "profile", "recipe")
# Set by choosing a group's option, not by hand.
FIXED = ("method.name", "task.name", "cluster.name", "cluster.where", "container.name")
CHOICES = {
    "device": ("cpu", "cuda"),
    "comm": ("torch", "horovod"),
    "precision": ("fp32", "fp64", "tf32"),
    "select": ("auto", "torch", "fused"),
    "overlap": (False, True),
    "train.validate": ("epoch", "never"),
    "timing.mode": ("serialised", "production", "as_published"),
    "data.fallback": ("digits", "refuse"),
    "launch.on_mismatch": ("stop", "label"),
}


def options(group: str) -> list[str]:
    """What can stand behind `group=`: the files of conf/<group>/, and for methods and tasks every registered
    one.
    """
    registry: dict[str, Registry] = {"method": METHODS, "task": TASKS}
    registered = registry[group].names() if group in registry else []
    return sorted({*registered, *(path.stem for path in (CONF / group).glob("*.yaml"))})


def resolve(overrides: Sequence[str]) -> dict[str, Any]:
    """The config of one run.

    Raises:
        ValueError: an unknown group, option, key or value; the message lists what there is.
    """
    pairs = [_pair(word) for word in overrides]
    for key, value in pairs:
        if key in GROUPS and value not in options(key):
            hint = did_you_mean(value, options(key))
            raise ValueError(f"no {key} {value!r}{hint}; there are: {', '.join(options(key))}")
    for key, _ in pairs:
        if key in FIXED:
            raise ValueError(f"{key!r} comes with the choice of {key.partition('.')[0]}=, it can't be set")
    try:
        config = _compose(overrides)
    except ValueError:
        _check_keys(pairs)  # Hydra's own message on a misspelt key lists nothing
        raise
    given = {key for key, _ in pairs}
    for key, value in config.pop("method_defaults").items():
        if key in config["method"] and f"method.{key}" not in given:
            config["method"][key] = value
    _give_momentum_to_the_method(config, "task.momentum" in given)
    _check(config)
    return config


def _give_momentum_to_the_method(config: dict[str, Any], given: bool) -> None:
    """Momentum is applied once: by the method, where it has some (DGC), else by the optimiser."""
    if config["method"].get("momentum") and config["task"].get("momentum"):
        if given:
            raise ValueError(
                f"method={config['method']['name']} applies momentum itself (method.momentum="
                f"{config['method']['momentum']}); leave task.momentum out, or set method.momentum=0"
            )
        config["task"]["momentum"] = 0


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ValueError(f"{word!r} is not of the form key=value; for example method=topk or workers=4")
    return key, value


def _check_keys(pairs: Sequence[tuple[str, str]]) -> None:
    """The groups decide which leaves there are; refuse a key that is none of them."""
    known = [*GROUPS, *leaves(_compose([f"{key}={value}" for key, value in pairs if key in GROUPS]))]
    for key, _ in pairs:
        if key not in known:
            # Of a long list, show the part that the key belongs to.
            same = [name for name in known if name.partition(".")[0] == key.partition(".")[0]] or known
            raise ValueError(f"no key {key!r}{did_you_mean(key, known)}; there are: {', '.join(same)}")


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    """What Hydra composes from these words. Hydra takes a sixth of a second, so it composes each choice of
    groups once; plain values, which it would put in last as well, are put into a copy of that."""
    plain = [word for word in overrides if _is_plain(word)]
    composed = copy.deepcopy(_composed(tuple(word for word in overrides if word not in plain)))
    try:
        parsed = OverridesParser.create().parse_overrides(plain)
    except HydraException as error:
        raise ValueError(f"{' '.join(overrides)}: {_first_line(error)}") from error
    for override in parsed:
        _put(composed, override.key_or_group, override.value())
    return composed


def _is_plain(word: str) -> bool:
    """Is it KEY=VALUE for one existing leaf, with nothing in it that only Hydra can resolve?"""
    key, _, value = word.partition("=")
    return key not in GROUPS and key.replace(".", "").isidentifier() and "{" not in value


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *above, name = dotted.split(".")
    for part in above:
        tree = tree[part] if isinstance(tree.get(part), dict) else {}
    if name not in tree or isinstance(tree[name], dict):
        raise ValueError(f"no key {dotted!r}")
    tree[name] = value


@cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    store = ConfigStore.instance()
    for registry in (METHODS, TASKS):
        for name in registry.names():
            store.store(group=registry.noun, name=name, node={"name": name, **registry.defaults(name)})
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
        plain = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(plain, dict)  # the root of a composed config is a mapping
        return {str(key): value for key, value in plain.items()}
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(overrides)}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Every key that can stand on the left of an override, dotted."""
    names: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            names += leaves(value, f"{prefix}{key}.")
        else:
            names.append(prefix + key)
    return [
        name for name in names if name not in (*FIXED, *GROUPS) and not name.startswith("method_defaults.")
    ]


def leaf(config: dict[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value[part]
    return value


def _check(config: dict[str, Any]) -> None:
    """Refuse values that no run could use. What needs a model or data to be judged is judged in the run."""
    for dotted, choices in CHOICES.items():
        if leaf(config, dotted) not in choices:
            value = leaf(config, dotted)
            hint = did_you_mean(str(value), [*map(str, choices)])
            raise ValueError(f"no {dotted} {value!r}{hint}; there are: {', '.join(map(str, choices))}")
    for dotted, least in (
        ("workers", 1),
        ("threads", 1),
        ("train.epochs", 1),
        ("timing.span_steps", 0),
        ("seed", 0),
    ):
        _check_whole(dotted, leaf(config, dotted), least)
    _check_whole("timing.warmup_steps", config["timing"]["warmup_steps"], 0)
    if config["train"]["steps"] is not None:
        _check_whole("train.steps", config["train"]["steps"], 1)
    _check_whole("task.batch_size", config["task"]["batch_size"], 1)
    densities = [config["method"].get("density", 1.0), *config["method"].get("density_warmup", [])]
    for density in densities:
        if not _is_number(density) or not 0 < density <= 1:
            raise ValueError(
                f"density={density} is out of range: the share of gradients to send must lie in (0, 1]"
            )
    for name in ("lr", "momentum", "weight_decay"):
        value = config["task"].get(name, 0.0)
        if not _is_number(value) or not math.isfinite(value) or value < 0:
            raise ValueError(f"task.{name}={value} is out of range: it must be a finite number, 0 or more")
    if config["cluster"]["where"] == "virtual" and config["comm"] == "horovod":
        raise ValueError(
            "comm=horovod joins processes, and cluster=virtual runs all workers in one; take cluster=local"
        )
    in_turns = config["cluster"]["where"] == "virtual" or config["timing"]["mode"] != "production"
    if config["overlap"] and in_turns:
        raise ValueError(
            "overlap=true needs processes (cluster=local or a SLURM cluster) and timing.mode=production: "
            "virtual ranks work in turns, and the other modes take the phases apart that should overlap"
        )
    if config["cluster"]["where"] == "virtual" and config["cluster"]["link"]["alpha_s"] is None:
        raise ValueError(
            "virtual ranks need a link with alpha and beta; choose link=nvlink, pcie or ethernet"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_whole(dotted: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{dotted}={value} must be a whole number, {least} or more")
