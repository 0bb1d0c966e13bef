"""Override words in, one resolved plain dict out. Hydra composes; no other file sees a DictConfig."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from experiments.config import schema, variants
from experiments.config.choices import FIXED, GROUPS, REGISTRIES, folders, options
from sparsify.ranges import check, quoted, shown, unknown

VARIANTS = "give two or more, as variants={dense:'method=dense',sparse:'method=topk'}"
WORKERS_PER_NODE = 8  # of virtual ranks, where a cluster's file does not say
LONGEST = 4000  # characters of a word, and of a path; Hydra's grammar takes half a second to read them


def resolve(overrides: Sequence[str]) -> dict[str, Any]:
    """The config of one run.

    Raises:
        ValueError: an unknown group, option, key or value; the message lists what there is.
    """
    pairs = [pair(word) for word in overrides]
    given = dict(pairs)
    named = _parsed("variants", given.get("variants", "{}"))
    if named == {}:
        if idle := next((key for key in given if key.startswith("alternate.")), None):
            raise ValueError(
                f"{idle} is of runs whose variants take turns, and there are no variants; {VARIANTS}"
            )
        return _resolve_one(pairs)
    if idle := next((key for key in variants.DECIDED if key in given), None):
        raise ValueError(
            f"{idle}: how long variants take turns is said by alternate.blocks, .until and .limit_min; "
            "leave it out"
        )
    check("variants", named, schema.Variants)
    shared = [f"{key}={word}" for key, word in pairs if key != "variants"]
    return variants.resolved(shared, named, lambda words: _resolve_one([pair(word) for word in words]))


def _resolve_one(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The config of a run without variants."""
    for key, value in pairs:
        check_choice(key, value)
    choices = {key: value for key, value in pairs if key in GROUPS}  # of several the last counts
    inside = choices.pop("inside", None)
    words = tuple(f"{key}={value}" for key, value in choices.items())
    config = copy.deepcopy(_composed(words, *folders()))
    _join_in_nodes(config, inside)
    defaults, on_gpu = config.pop("method_defaults", {}), config.pop("on_gpu", {})
    for key, value in defaults.items():
        if key in config["method"]:
            config["method"][key] = value
    given, known = {key: value for key, value in pairs if key not in GROUPS}, leaves(config)
    for key, text in given.items():
        if key not in known:
            raise ValueError(unknown("key", key, schema.related(key, [*GROUPS, *known])))
        check(key, value := _parsed(key, text), known[key])
        *above, name = key.split(".")
        (schema.leaf(config, ".".join(above)) if above else config)[name] = value
    if config["device"] == "cuda":
        config |= {key: value for key, value in on_gpu.items() if key not in given}
    schema.check(config)
    _give_momentum_to_the_method(config, "task.momentum" in given)
    return config


def pair(word: str) -> tuple[str, str]:
    """key=value as its two parts."""
    key, equals, value = word.partition("=")
    if len(word) > LONGEST:
        raise ValueError(f"{shown(word)} has {len(word)} characters, and {LONGEST} is the most")
    if not equals or not key:
        raise ValueError(f"{quoted(word)} is not of the form key=value; for example method=topk or workers=4")
    return key, value


def check_choice(key: str, value: str) -> None:
    """Refuse an option that a group does not have, and a key that only a choice may set."""
    if key in FIXED:
        group = next((name for name in ("link", "inside") if key.startswith(f"cluster.{name}")), None)
        group = group or key.partition(".")[0]
        raise ValueError(f"{key!r} comes with the choice of {group}=, it can't be set")
    if key in GROUPS and value not in options(key):
        raise ValueError(unknown(key, value, options(key)))
    if key in REGISTRIES and value in REGISTRIES[key].names() and (why := REGISTRIES[key].why_broken(value)):
        raise ValueError(why)


def _join_in_nodes(config: dict[str, Any], inside: str | None) -> None:
    """Put the link that joins virtual ranks of one node into the config, by the name of its file."""
    cluster = config["cluster"]
    if cluster.get("where") != "virtual":
        if inside:
            raise ValueError(
                f"inside={inside} joins virtual ranks of one node, and cluster={cluster['name']} has nodes "
                "of its own; leave it out, or take cluster=virtual"
            )
        return
    name = inside or cluster.get("inside")
    if name is not None:
        check_choice("inside", str(name))
    link = _composed((f"link={name}",), *folders())["cluster"]["link"] if name else None
    config["cluster"] = {"workers_per_node": WORKERS_PER_NODE, **cluster, "inside": copy.deepcopy(link)}


def _give_momentum_to_the_method(config: dict[str, Any], given: bool) -> None:
    """Momentum is applied once: by the method, where it has some (DGC), else by the optimiser."""
    if config["method"].get("momentum") and config["task"].get("momentum"):
        if given:
            raise ValueError(
                f"method={config['method']['name']} applies momentum itself (method.momentum="
                f"{config['method']['momentum']}); leave task.momentum out, or set method.momentum=0"
            )
        config["task"]["momentum"] = 0


def _parsed(key: str, text: str) -> Any:
    """The value that a word gives a leaf, in Hydra's grammar."""
    override = parse(f"{key}={text}")
    if override.is_sweep_override():
        raise ValueError(
            f"{key}={shown(text)} is several values, and this is about one run; "
            "`run`, `plan` and `submit` take several"
        )
    return override.value()


def parse(word: str) -> Override:
    """A word as Hydra reads it.

    Raises:
        ValueError: it is not of Hydra's grammar.
    """
    key, value = pair(word)
    if "${" in value:
        raise ValueError(
            f"{key}={shown(value)} refers to something else, which only the files of conf/ may do"
        )
    try:
        return OverridesParser.create().parse_override(word)
    except Exception as error:  # its functions, such as int() and sort(), raise whatever Python does
        raise ValueError(
            f"{shown(key)}={shown(value)} can't be read ({shown(_first_line(error))}); text with other signs "
            f"than letters, digits and -_./:+%@~ stands in quotes, as in '{shown(key)}=\"a b\"'"
        ) from error


@cache
def _composed(choices: tuple[str, ...], *folders: Path) -> dict[str, Any]:
    """What Hydra composes from these choices of groups, which takes it a sixth of a second."""
    store = ConfigStore.instance()
    for registry in REGISTRIES.values():
        for name in registry.sound():
            store.store(group=registry.noun, name=name, node={"name": name, **registry.defaults(name)})
    GlobalHydra.instance().clear()
    paths = ",".join(QuotedString(f"file://{folder}", Quote.single).with_quotes() for folder in folders[1:])
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            words = [*choices, f"hydra.searchpath=[{paths}]"]
            composed = compose("config", overrides=words, return_hydra_config=True)
        chosen = composed.hydra.runtime.choices
        names = {group: str(chosen[group]) for group in ("cluster", "link", "container", "profile", "recipe")}
        with open_dict(composed):
            del composed["hydra"]
        plain = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{' '.join(choices)}: {_first_line(error)}") from error
    assert isinstance(plain, dict)  # the root of a composed config is a mapping
    return _named({str(key): value for key, value in plain.items()}, names)


def _named(config: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """What is chosen has the name of its file, so that a copy of a file shares no keys of runs with it."""
    config = {"cluster": {}, "container": {}, **config}
    for dotted in ("cluster", "cluster.link", "container"):
        part = schema.leaf(config, dotted)
        if not isinstance(part, dict):
            raise ValueError(f"{dotted} is {shown(part)}: the file of conf/ that sets it must give it fields")
        part["name"] = names[dotted.rpartition(".")[2]]
    return {**config, "profile": names["profile"], "recipe": names["recipe"]}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every key that an override can set, dotted, and its type; groups are chosen, not set."""
    return {name: kind for name, kind in schema.types(config).items() if name not in (*FIXED, *GROUPS)}
