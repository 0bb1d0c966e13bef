"""A run that is asked for in, its resolved config out; and back.

Hydra composes the files of conf/; no other file sees a DictConfig.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra import __version__ as hydra_version
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from analysis.records.columns import IMPLIED_SETTINGS
from analysis.records.configs import find_unmeasured_leaves, flatten, measured_config, run_key
from experiments.config.choices import (
    GROUPS,
    KEYS_SET_BY_CHOICE,
    REGISTRIES,
    conf_folders,
    drop_unsettable_keys,
    files_by_option,
    is_task_file,
    option_names,
)
from experiments.config.conf_files import check_number_of_references, make_file_error, read_small_yaml_text
from experiments.config.config import (
    Config,
    VariantConfig,
    check_compatibility,
    check_variants,
    setting_type_by_key,
    setting_type_by_key_for,
)
from experiments.config.machines import AnyCluster, AnyContainer, SlurmCluster
from experiments.config.run import Run, RunOrWords
from sparsify.core.spec import REQUIRED
from sparsify.ranges import check_value, describe_unknown, format_value, is_allowed

KEYS_SET_BY_ALTERNATION = ("train.steps", "train.epochs")  # by `alternate`, in a run of variants
VARIANTS_ADVICE = "give two or more, as variants={dense:'method=dense',sparse:'method=topk'}"
# Hydra 1.3 behaves as 1.1 where it is not told otherwise, and 1.4 warns where it is told anything.
VERSION_BASE = {"version_base": "1.3"} if hydra_version.startswith("1.3.") else {}


@dataclass(frozen=True)
class ComposedConfig:
    """The config that choices of groups come to, before any setting is given."""

    config: Config
    type_by_key: Mapping[str, Any]  # of every leaf
    gpu_settings: Mapping[str, Any]  # settings of the recipe where device=cuda
    required_keys: tuple[str, ...]  # leaves without a default


class ComposedTree(NamedTuple):
    """The values that Hydra composes from choices."""

    tree: dict[str, Any]
    has_references: bool  # do some of them to others, as in ${task.name}?


def resolve(request: RunOrWords) -> Config:
    """Return the configuration of one run.

    Raises:
        ValueError: an unknown group, option, key or value; the message lists what there is.
    """
    run = Run.coerce(request)
    if run.variants:
        return _resolve_variants(run)
    unused_key = next((key for key in run.settings if key.startswith("alternate.")), None)
    if unused_key:
        raise ValueError(
            f"{unused_key} is of runs whose variants take turns, and there are no variants; {VARIANTS_ADVICE}"
        )
    return _resolve_settings(run.settings)


def _resolve_variants(run: Run) -> Config:
    """Return the configuration of the first variant, with all that take turns in it."""
    unused_key = next((key for key in KEYS_SET_BY_ALTERNATION if key in run.settings), None)
    if unused_key:
        raise ValueError(
            f"{unused_key}: how long variants take turns is said by alternate.blocks, .until and .limit_min; "
            "leave it out"
        )
    configs = dict[str, Config]()
    for name, variant_settings in run.variants.items():
        try:
            configs[name] = _resolve_settings({**run.settings, **variant_settings})
        except ValueError as error:
            raise ValueError(f"variant {name}: {error}") from error
    check_variants(configs)
    variants = [
        VariantConfig(name, config.with_setting("train.steps", None)) for name, config in configs.items()
    ]
    return replace(variants[0].config, variants=tuple(variants))


def _resolve_settings(settings: Mapping[str, Any]) -> Config:
    for key in settings:
        check_settable(key)
    choices = {key: str(value) for key, value in settings.items() if key in GROUPS}
    composed = _compose_choices(tuple(choices.items()), *conf_folders())
    values = {key: value for key, value in settings.items() if key not in GROUPS}
    config = composed.config
    for key, value in values.items():
        if key not in composed.type_by_key:
            part, _, name = key.partition(".")
            if part == "cluster" and name in SlurmCluster.__dataclass_fields__:
                raise ValueError(
                    f"{key} is of SLURM clusters, and cluster={config.cluster.name} is none; add cluster=NAME"
                )
            raise ValueError(
                describe_unknown(
                    "key", key, keys_to_suggest(key, [*GROUPS, *drop_unsettable_keys(composed.type_by_key)])
                )
            )
        check_setting(key, value, composed.type_by_key[key], "in the shell, as KEY=\"'010'\"")
        config = config.with_setting(key, value)
    if config.device == "cuda":
        for key, value in composed.gpu_settings.items():
            config = config if key in values else config.with_setting(key, value)
    missing_key = next((key for key in composed.required_keys if key not in values), None)
    if missing_key:
        raise ValueError(f"{missing_key} has no default: give it a value")
    check_compatibility(config)
    return _apply_momentum_once(config, "task.momentum" in values)


def check_settable(key: str) -> None:
    """Refuse a key that only a choice may set."""
    if key in KEYS_SET_BY_CHOICE:
        group = next((name for name in ("link", "inside") if key.startswith(f"cluster.{name}")), None)
        group = group or key.partition(".")[0]
        raise ValueError(f"{key!r} comes with the choice of {group}=, it can't be set")


def check_setting(key: str, value: Any, allowed: Any, quoting_hint: str) -> None:
    """Check a value as `ranges.check_value` does; say how to quote text that was read as something else."""
    try:
        check_value(key, value, allowed)
    except ValueError as error:
        is_list = isinstance(value, list | tuple)
        parts = value if is_list else [value]
        as_text = [str(part) for part in parts]
        was_read = any(isinstance(part, bool | int | float) for part in parts)
        if was_read and is_allowed(as_text if is_list else as_text[0], allowed):
            name = key.rpartition(".")[2]
            advice = quoting_hint.replace("KEY", name)
            raise ValueError(
                f"{error}; what looks like a number or yes and no is text in quotes: {advice}"
            ) from None
        raise


def check_choice(group: str, option: str) -> None:
    """Refuse an option that a group does not have, and one whose file is broken."""
    if option not in option_names(group):
        raise ValueError(describe_unknown(group, option, option_names(group)))
    if group in REGISTRIES and option in REGISTRIES[group].names():
        reason = REGISTRIES[group].reason_unreadable(option)
        if reason:
            raise ValueError(reason)


def settable_type_by_key(config: Config) -> dict[str, Any]:
    """Return the type of every setting that a word can set, by its dotted key."""
    return drop_unsettable_keys(setting_type_by_key(config))


def config_as_yaml(config: Config) -> str:
    """Return every setting of a run as nested YAML, in the way of Hydra's `--cfg job`."""
    tree = OmegaConf.create({"method": {}, "task": {}})  # which come first
    for key in setting_type_by_key(config):
        OmegaConf.update(tree, key, config.get_setting(key))
    return OmegaConf.to_yaml(tree)


def keys_to_suggest(unknown_key: str, keys: list[str]) -> list[str]:
    """Return the known keys of the part that a key names, or all known keys if there is no such part."""
    part = unknown_key.partition(".")[0]
    return [key for key in keys if key.partition(".")[0] == part] or keys


def _apply_momentum_once(config: Config, is_given: bool) -> Config:
    """Momentum is applied once: by the method, where it has some (DGC), else by the optimiser."""
    # That of an outer step, after local ones, is of the drift.
    momentum = None if config.method.get_setting("every") else config.method.get_setting("momentum")
    optimiser = config.task.get_setting("optimiser")
    if momentum and optimiser in ("adamw", "muon"):
        raise ValueError(
            f"method={config.method.name} applies momentum itself (method.momentum={momentum}), and so does "
            f"task.optimiser={optimiser}; take task.optimiser=sgd, or set method.momentum=0"
        )
    if not momentum or not config.task.get_setting("momentum"):
        return config
    if is_given:
        raise ValueError(
            f"method={config.method.name} applies momentum itself (method.momentum={momentum}); leave "
            "task.momentum out, or set method.momentum=0"
        )
    return config.with_setting("task.momentum", 0)


@cache
def _compose_choices(choices: tuple[tuple[str, str], ...], *folders: Path) -> ComposedConfig:
    """Return the configuration of these choices: values of conf/, else defaults of fields and signatures."""
    for group, option in choices:
        check_choice(group, option)
    tree = _compose_tree({key: value for key, value in choices if key != "inside"}, folders)
    on_gpu = tree.pop("on_gpu", {})
    of_methods = tree.pop("method_defaults", {})
    tree["cluster"] = _add_link_inside_nodes(tree["cluster"], dict(choices).get("inside"), folders)
    needed = list[str]()
    for noun, registry in REGISTRIES.items():
        defaults = registry.defaults(tree[noun]["name"])
        tree[noun] = {**defaults, **tree[noun]}
        if noun == "method":
            tree[noun] |= {key: value for key, value in of_methods.items() if key in defaults}
        needed += [f"{noun}.{key}" for key, value in tree[noun].items() if value == REQUIRED]
    allowed = setting_type_by_key_for(
        tree["method"]["name"],
        tree["task"]["name"],
        AnyCluster.subclass_for(tree["cluster"]),
        AnyContainer.subclass_for(tree["container"]),
        has_inside_link=bool(tree["cluster"].get("inside")),
    )
    leaf_values = dict(_leaves(tree))
    for dotted, value in [*leaf_values.items(), *on_gpu.items()]:
        if dotted not in allowed:
            why = describe_unknown("key", dotted, keys_to_suggest(dotted, list(allowed)))
            raise ValueError(f"{why} (a file of conf/ sets it)")
        if dotted not in needed:
            check_setting(dotted, value, allowed[dotted], "in its file of conf/, as KEY: '010'")
    for dotted in ("cluster.where", "container.image"):
        if dotted in allowed and dotted not in leaf_values:
            raise ValueError(
                f"{dotted} is missing: a file of conf/ leaves it out, or sets what it belongs to"
            )
    return ComposedConfig(Config.from_dict(tree), allowed, on_gpu, tuple(needed))


def _compose_tree(choices: Mapping[str, str], folders: tuple[Path, ...]) -> dict[str, Any]:
    """Return the tree that Hydra composes from choices.

    Methods and tasks without a preset differ in their name alone, if nothing refers to it. So Hydra composes
    one of them for all, and the name is put in afterwards.
    """
    names = {
        noun: choices[noun] for noun in REGISTRIES if choices.get(noun, "") in _names_without_preset(noun)
    }
    firsts = {noun: _names_without_preset(noun)[0] for noun in names}
    with contextlib.suppress(ValueError):  # which names what was asked for
        values = _compose_with_hydra(_format_overrides({**choices, **firsts}), *folders)
        tree = values.tree
        if not values.has_references and all(tree[noun]["name"] == first for noun, first in firsts.items()):
            return {**tree, **{noun: {**tree[noun], "name": name} for noun, name in names.items()}}
    return dict(_compose_with_hydra(_format_overrides(choices), *folders).tree)


def _format_overrides(choices: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in choices.items())


def _names_without_preset(noun: str) -> list[str]:
    """Return the entries of a registry that Hydra knows by their names alone."""
    presets = {name for name, path in files_by_option(noun).items() if not is_task_file(path)}
    return sorted({*REGISTRIES[noun].names()} - presets)


def _add_link_inside_nodes(
    cluster: dict[str, Any], inside: str | None, folders: tuple[Path, ...]
) -> dict[str, Any]:
    """Return the cluster with the link that joins virtual ranks of one node, read from the link's file."""
    if inside and cluster.get("where") != "virtual":
        raise ValueError(
            f"inside={inside} joins virtual ranks of one node, and cluster={cluster['name']} has nodes "
            "of its own; leave it out, or take cluster=virtual"
        )
    name = inside or cluster.get("inside")
    if name is None or cluster.get("where") != "virtual":
        return cluster
    check_choice("inside", str(name))
    return {**cluster, "inside": _compose_with_hydra((f"link={name}",), *folders).tree["cluster"]["link"]}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted key; an empty mapping is one."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class SizeLimitedConfigSource(FileConfigSource):
    """Hydra's source of configuration files, which refuses files beyond the bounds of `conf_files`."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a file.

        Raises a ValueError where the file can't be used.
        """
        path = Path(self.path, self._normalize_file_name(config_path))
        read_small_yaml_text(path)
        try:
            loaded = super().load_config(config_path)
        except (YAMLError, ValueError) as error:  # a key twice, a set, a number of 5,000 digits
            raise make_file_error(path, error) from error
        if is_task_file(path):  # its values are defaults, which the registry of tasks knows
            loaded.config = OmegaConf.create({"name": path.stem})
        return loaded


@cache
def _compose_with_hydra(choices: tuple[str, ...], *folders: Path) -> ComposedTree:
    """Return the values that Hydra composes from these choices of groups, in a sixth of a second."""
    store = ConfigStore.instance()
    for noun, registry in REGISTRIES.items():
        for name in {*registry.names()} - {*files_by_option(noun)}:
            # Hydra 1.4 warns of a name that is stored again, and 1.3 has no `replace=` to say that it may be.
            if store.get_type(f"{noun}/{name}.yaml") == ObjectType.NOT_FOUND:
                store.store(group=noun, name=name, node={"name": name})
    Plugins.instance()  # its own, of which ours replaces one
    SourcesRegistry.instance().types["file"] = SizeLimitedConfigSource
    GlobalHydra.instance().clear()
    paths = ",".join(QuotedString(f"file://{folder}", Quote.single).with_quotes() for folder in folders[1:])
    try:
        with initialize_config_dir(str(folders[0]), **VERSION_BASE):
            words = [*choices, f"hydra.searchpath=[{paths}]"]
            composed = compose("config", overrides=words, return_hydra_config=True)
        runtime_choices = composed.hydra.runtime.choices
        names = {
            group: str(runtime_choices[group])
            for group in ("cluster", "link", "container", "profile", "recipe")
        }
        with open_dict(composed):
            del composed["hydra"]
        raw = OmegaConf.to_container(composed, resolve=False)
        check_number_of_references(raw)
        plain = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        why = next(filter(None, map(str.strip, str(error).splitlines())), "")
        raise ValueError(f"{' '.join(choices)}: {why}") from error
    except RecursionError:
        raise ValueError(
            f"{' '.join(choices)}: files of conf/ include each other without end; look at their `defaults`"
        ) from None
    assert isinstance(plain, dict)  # the root of a composed config is a mapping
    return ComposedTree(
        _add_option_names({str(key): value for key, value in plain.items()}, names), "${" in str(raw)
    )


def _add_option_names(config: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the tree with the names of chosen files, so that a copied file has keys of runs of its own."""
    config = {"cluster": {}, "container": {}, **config}
    for dotted in ("cluster", "cluster.link", "container"):
        above, _, name = dotted.rpartition(".")
        part = (config[above] if above else config).get(name)
        if not isinstance(part, dict):
            raise ValueError(
                f"{dotted} is {format_value(part)}: the file of conf/ that sets it must give it fields"
            )
        part["name"] = names[name]
    return {**config, "profile": names["profile"], "recipe": names["recipe"]}


def rebuild_recorded_run(config_by_variant: Mapping[str, Mapping[str, Any]], expected_key: str) -> Run:
    """Return the run that asks for a recorded one again.

    Its settings are the recorded choices, and every value that some profile would change.

    Args:
        config_by_variant: of an ordinary run one, whose name is empty.
        expected_key: `run_key` of the whole, which the result must have.

    Raises:
        ValueError: it was measured with settings that are no more; or its record, which may be anybody's,
            says where and how to start it.
    """
    strangers = sorted(
        {name for config in config_by_variant.values() for name in find_unmeasured_leaves(config)}
    )
    if strangers:
        raise ValueError(
            f"the configuration of this run holds {format_value(', '.join(strangers))}, which no record "
            "of a run does: where and how a run is started is for you to say, not for its record; ask for "
            "the run in words of your own, as `list` and `why` show it"
        )
    settings_by_variant = {name: _recover_settings(config) for name, config in config_by_variant.items()}
    run = (
        Run(settings_by_variant[""])
        if set(settings_by_variant) == {""}
        else _combine_variants(settings_by_variant, next(iter(config_by_variant.values())))
    )
    profiles = [
        name for name in option_names("profile") if _resolves_to_key(run | {"profile": name}, expected_key)
    ]
    if not profiles:
        raise ValueError(
            f"no words mean this run any more: {format_value(' '.join(run.to_words()))} mean another one"
        )
    return run if len(profiles) == len(option_names("profile")) else run | {"profile": profiles[0]}


def _combine_variants(settings_by_variant: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]) -> Run:
    """Return the run whose variants have these settings, and take turns as a recorded configuration says."""
    shared = {
        leaf: value
        for leaf, value in next(iter(settings_by_variant.values())).items()
        if leaf not in KEYS_SET_BY_ALTERNATION
        and all(leaf in settings and settings[leaf] == value for settings in settings_by_variant.values())
    }
    turns = flatten(config.get("alternate", {}), "alternate.")
    variants = {
        name: {
            leaf: value for leaf, value in settings.items() if leaf not in (*shared, *KEYS_SET_BY_ALTERNATION)
        }
        for name, settings in settings_by_variant.items()
    }
    return Run({**shared, **turns}, variants)


def _recover_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that ask for a recorded configuration again, whatever the profile."""
    choices = {
        "method": config["method"]["name"], "task": config["task"]["name"],
        "cluster": config["cluster"]["name"], "link": config["cluster"]["link"]["name"],
    }  # fmt: skip
    recorded = flatten(
        {name: value for name, value in measured_config(config).items() if name != "alternate"}
    )
    settings = dict[str, Any]()
    for profile in option_names("profile"):
        try:
            resolved = flatten(measured_config(resolve(choices | {"profile": profile}).as_dict()))
        except ValueError:  # not in this profile: paper's device emulates no link
            continue
        for name in recorded | resolved:
            value = recorded.get(name, IMPLIED_SETTINGS.get(name))
            if value != resolved.get(name, IMPLIED_SETTINGS.get(name)):
                is_list = str(value).startswith("[")
                settings[name] = json.loads(str(value)) if is_list else value
    return choices | settings


def _resolves_to_key(run: Run, key: str) -> bool:
    try:
        return run_key(resolve(run).as_dict()) == key
    except ValueError:
        return False
