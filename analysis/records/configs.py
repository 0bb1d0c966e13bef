"""Configurations: what of one is measured and names its run; its flat leaves; labels of what varies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.records.columns import IMPLIED_SETTINGS

# Where and how a run is started. They change neither the mathematics nor the meaning of a record.
LAUNCH_FIELDS = ("data", "launch", "profile", "recipe")
# The part of a cluster's description that affects measurements; partitions, accounts and limits do not.
CLUSTER_FIELDS = ("name", "where", "gpu", "link", "inside", "workers_per_node", "windows")
# In what variants may differ, and what records leave out where it is implied: one that does not have it does
# not have the first variant's instead, which the run has as a whole.
FIELDS_OF_VARIANT = ("collectives",)
# What tells runs apart is looked for in this order, then among the method's own leaves and the others.
LEAF_ORDER = (
    "method.name", "method.density", "task.name", "workers", "cluster.name", "cluster.link.name",
    "timing.mode", "seed",
)  # fmt: skip
# A choice of one of these brings leaves of its own, which are compared only where the choice is the same.
CHOICES = ("method", "task", "cluster", "cluster.link")
# The method and the density are shown wherever they vary, also where other leaves tell the same runs apart.
ALWAYS_SHOWN = LEAF_ORDER[:2]
# It follows from the cluster's name, or is about turns, whose variants are named.
HIDDEN_PREFIXES = ("cluster.where", "variants", "alternate")
# Alone or among equals, a run is told by these.
DEFAULT_LEAVES = ("method.name", "method.density", "task.name", "seed")
# What records mean that lack a leaf added later.
IMPLIED_LEAVES = {name: value for name, value in IMPLIED_SETTINGS.items() if name != "variants"}


def measured_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved config that determines what is measured."""
    measured = {name: value for name, value in config.items() if name not in LAUNCH_FIELDS}
    cluster = {name: measured["cluster"][name] for name in CLUSTER_FIELDS if name in measured["cluster"]}
    if cluster["where"] == "virtual" and not cluster.get("inside"):
        for name in ("inside", "workers_per_node"):  # one link joins all
            cluster.pop(name, None)
    measured["cluster"] = cluster
    if isinstance(measured.get("container"), Mapping):
        measured["container"] = measured["container"]["name"]  # which image file was used is provenance
    if not measured.get("variants"):
        measured.pop("alternate", None)  # how variants take turns
    return _without_implied(measured)


def _without_implied(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without_implied(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not (prefix + name in IMPLIED_SETTINGS and IMPLIED_SETTINGS[prefix + name] == value)
    }


def find_unmeasured_leaves(config: Mapping[str, Any]) -> list[str]:
    """Return dotted leaves of a config that say where and how to start a run; no record has any."""
    names = [name for name in LAUNCH_FIELDS if name in config]
    cluster = config.get("cluster")
    if isinstance(cluster, Mapping):
        names += [f"cluster.{name}" for name in cluster if name not in CLUSTER_FIELDS]
    container = config.get("container")
    if isinstance(container, Mapping):
        names += [f"container.{name}" for name in container]
    return names


def configs_by_variant(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the config of each variant that takes turns in a run, by name; {} for an ordinary run."""
    shared = {name: value for name, value in config.items() if name not in ("variants", *FIELDS_OF_VARIANT)}
    return {parts["name"]: _config_of_variant(shared, parts) for parts in config.get("variants") or []}


def _config_of_variant(config: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with these parts of a variant: a method as a whole, of other mappings single values."""
    changed = {}
    for name, part in parts.items():
        is_merged = isinstance(part, Mapping) and name != "method"
        changed[name] = {**config[name], **part} if is_merged else part
    del changed["name"]
    return {**config, **changed}


def run_key(config: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of `measured_config`."""
    canonical = json.dumps(measured_config(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def run_id(config: Mapping[str, Any]) -> str:
    """Return the readable name of a run, which is unique because it ends in the key."""
    method = "alternating" if config.get("variants") else config["method"]["name"]
    task = config["task"]["name"]
    return f"{method}-{task}-{config['workers']}w-{config['cluster']['where']}-{run_key(config)}"


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one: {"a": {"b": 1}} -> {"a.b": 1}; lists become JSON text."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return flat


def differing_leaves(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted leaves in which these configurations differ, most telling first.

    A method's hyperparameter differs where runs of this method differ in it; the density, by which methods
    are compared, also where methods do.
    """
    return _differing_leaves_of_rows([{**IMPLIED_LEAVES, **flatten(config)} for config in configs])


def _differing_leaves_of_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `differing_leaves` of configurations that are flat already."""
    names = dict.fromkeys(name for row in rows for name in row if not name.startswith(HIDDEN_PREFIXES))
    of_methods = [name for name in names if name.startswith("method.")]
    telling_first = dict.fromkeys([*LEAF_ORDER, *of_methods, *names])
    return [name for name in telling_first if name in names and _does_vary(name, rows)]


def select_distinguishing_leaves(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return differing leaves that suffice to tell these configurations apart, in the order of a label."""
    rows = [{**IMPLIED_LEAVES, **flatten(config)} for config in configs]
    labels: list[tuple[str, ...]] = [()] * len(rows)
    leaves = list[str]()
    for name in _differing_leaves_of_rows(rows):
        finer = [(*label, _comparable(row.get(name))) for label, row in zip(labels, rows, strict=True)]
        if name in ALWAYS_SHOWN or len(set(finer)) > len(set(labels)):
            labels = finer
            leaves.append(name)
    return sorted(
        leaves, key=lambda name: (name not in ALWAYS_SHOWN, name == "seed", not name.startswith("method."))
    )


def label_configs(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each configuration that shows what varies: `topk density=0.01 seed=2`.

    The method always comes first. Where nothing varies, they are told by method, density, task and seed.
    """
    leaves = select_distinguishing_leaves(configs) or DEFAULT_LEAVES
    return [label_config(config, leaves) for config in configs]


def label_config(config: Mapping[str, Any], leaves: Iterable[str]) -> str:
    """Return the label of one configuration with these leaves; variants that take turns name theirs."""
    flat = {**IMPLIED_LEAVES, **flatten(config)}
    variants = [part["name"] for part in config.get("variants") or []]
    words = [", ".join(variants) + " in turns" if variants else str(flat["method.name"])]
    for name in leaves:
        is_of_variants = variants and name.startswith("method.")
        if name != "method.name" and flat.get(name) is not None and not is_of_variants:
            words.append(f"{short_leaf_name(name)}={format_setting(flat[name])}")
    return " ".join(words)


def short_leaf_name(name: str) -> str:
    """Return the short name of a dotted leaf, as labels have it."""
    if name.endswith(".name"):
        return name.removesuffix(".name").rpartition(".")[2]
    return name.removeprefix("method.")


def format_setting(value: Any) -> str:
    """Return a value as the command line takes it: 0.01, fused, true."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "").removesuffix(".0")


def _does_vary(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    choice = next((choice for choice in reversed(CHOICES) if name.startswith(f"{choice}.")), None)
    if choice is None or name == f"{choice}.name":
        return len({_comparable(row.get(name)) for row in rows}) > 1
    if name == "method.density":
        return len({_comparable(row[name]) for row in rows if name in row}) > 1
    values_by_choice: dict[Any, set[str]] = {}
    for row in rows:
        if name in row:
            values_by_choice.setdefault(row.get(f"{choice}.name"), set()).add(_comparable(row[name]))
    return any(len(values) > 1 for values in values_by_choice.values())


def _comparable(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(float(value) if is_number else value)
